"""The forms: ways to compute an attention, with the same signature and the same result.

Every form computes :class:`RowSums` from feature-mapped queries and keys and (gated) values. The
forms agree up to rounding errors. Tests compare each form with ``formula.attention``;
``plan.py`` chooses a form.
"""
