"""The forms of computing an attention: one file a form, one signature, one result.

Every form maps feature-mapped queries and keys and (gated) values to :class:`RowSums`. They agree
to rounding; ``attention.py`` chooses.
"""
