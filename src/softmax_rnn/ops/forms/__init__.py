"""The forms: ways to compute an attention, with one signature and one result.

Every form turns feature-mapped queries and keys and (gated) values into :class:`RowSums`. The forms
agree to rounding, and each is held to ``reference.attention``; ``dispatch.py`` chooses.
"""
