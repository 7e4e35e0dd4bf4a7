"""The paper's variants by name: a table, and the look-up."""

from __future__ import annotations

import dataclasses

from softmax_rnn._utils.errors import unknown
from softmax_rnn.ops.spec import INVERSE_SQRT, MAX_ORDER
from softmax_rnn.ops.spec import AttentionSpec as Spec

# The authors clamp the score at 5 before the exponential in every ablation marked c5.
_C5 = 5.0

# An odd polynomial of the score is negative below -1 or so, its row sum crosses zero, and the plain
# quotient does not train. It is kept where the paper's other sums are: max(sum, 1).
_ODD_FLOOR = 1.0

# Families take an order: `variant("taylor", order=4)` or "taylor:4"; the table shows order 2.
FAMILIES = ("taylor", "taylor_elu", "taylor_relu", "taylor_cosine", "power")

_TABLE: dict[str, Spec] = {
    # Section 4.1: softmax (eq. 1) and its two replacements (eqs. 6 and 5).
    "softmax": Spec(),
    "norm": Spec(denominator="none", norm="l2"),
    "gate": Spec(clamp=_C5, denominator="length", output_gate="before_norm"),
    # Section 4.3: linear attention.
    "linear_elu": Spec(series="power", order=1, feature_map="elu1"),
    "linear_relu": Spec(series="power", order=1, feature_map="relu", epsilon=1e-8),
    "linear_cosine": Spec(
        series="power", order=1, feature_map="cosine", denominator="learned_length"
    ),
    # Section 4.4 and appendix F: powers 0 to `order` of exp's series.
    "taylor": Spec(series="taylor", order=2),
    "taylor_elu": Spec(series="taylor", order=2, feature_map="elu1"),
    "taylor_relu": Spec(series="taylor", order=2, feature_map="relu", epsilon=1e-8),
    "taylor_cosine": Spec(
        series="taylor", order=2, feature_map="cosine", denominator="learned_length"
    ),
    # Appendix B: a single power.
    "power": Spec(series="power", order=2),
    "quadratic": Spec(series="power", order=2, denominator="none"),
    # Figure 6, left: the denominator.
    "detached": Spec(clamp=_C5, denominator="detached_sum", floor=1.0),
    "clamped": Spec(clamp=_C5, denominator="clamped_sum"),
    "length": Spec(clamp=_C5, denominator="length"),
    "detached_gate": Spec(
        clamp=_C5, denominator="detached_sum", epsilon=1e-4, output_gate="before_norm"
    ),
    "gate_only": Spec(clamp=_C5, denominator="none", output_gate="before_norm"),
    # Figure 6, middle: the gate.
    "input_gate": Spec(clamp=_C5, denominator="length", input_gate=True),
    "both_gates": Spec(clamp=_C5, denominator="length", input_gate=True, output_gate="before_norm"),
    "relu_gate": Spec(
        series="power",
        order=1,
        feature_map="relu",
        scale=INVERSE_SQRT,
        clamp=_C5,
        denominator="length",
        output_gate="before_norm",
    ),
    # Figure 6, right: the norm.
    "norm_rms": Spec(clamp=_C5, denominator="none", norm="rms"),
    "norm_rms_length": Spec(clamp=_C5, denominator="length", norm="rms"),
    "norm_layer_length": Spec(clamp=_C5, denominator="length", norm="layer"),
    "norm_l2_clamped": Spec(clamp=_C5, denominator="none", norm="l2"),
    "norm_l2_length": Spec(clamp=_C5, denominator="length", norm="l2"),
    "norm_relu": Spec(
        series="power",
        order=1,
        feature_map="relu",
        scale=INVERSE_SQRT,
        denominator="none",
        norm="l2",
    ),
    # In the authors' code alone.
    "norm_gate_before": Spec(denominator="none", norm="l2", output_gate="before_norm"),
    "norm_gate_after": Spec(denominator="none", norm="l2", output_gate="after_norm"),
    "layer_input_gate": Spec(clamp=_C5, denominator="length", norm="layer", input_gate=True),
    "layer_output_gate": Spec(
        clamp=_C5, denominator="length", norm="layer", output_gate="before_norm"
    ),
    "layer_both_gates": Spec(
        clamp=_C5,
        denominator="length",
        norm="layer",
        input_gate=True,
        output_gate="before_norm",
    ),
    # Related work named by the paper: one is added to the denominator (Miller, 2023).
    "softmax_plus_one": Spec(denominator="sum_plus_one"),
}
_ALIASES = {"softmax_l2": "norm"}


def variants() -> dict[str, Spec]:
    """Every named variant and its spec; the families (``taylor``, ``power``) at order 2."""
    return dict(_TABLE)


def variant(name: str, *, order: int | None = None) -> Spec:
    """The spec of a named variant of the paper.

    Args:
        name: a key of :func:`variants`, an alias (``softmax_l2``), or a family with its order
            after a colon (``"taylor:4"``).
        order: highest power of a family; 2 unless given.

    Raises:
        ValueError: for an unknown name (the nearest is named), a bad order, or an order given
            to a variant that has none.
    """
    family, colon, suffix = name.partition(":")
    family = _ALIASES.get(family, family)
    if family not in _TABLE:
        raise unknown("variant", name, [*_TABLE, *_ALIASES])
    if colon:
        if order is not None:
            raise ValueError(f"variant {name!r} names its order; order={order!r} came on top.")
        if not suffix.isdecimal() or len(suffix) > len(str(MAX_ORDER)):
            raise ValueError(
                f"variant {name!r}: the order after ':' must be an integer >= 0, at most "
                f"{MAX_ORDER}."
            )
        order = int(suffix)
    if order is None:
        return _TABLE[family]
    if family not in FAMILIES:
        raise ValueError(
            f"variant {family!r} has no order (given: {order!r}); "
            f"those with one: {', '.join(FAMILIES)}."
        )
    spec = dataclasses.replace(_TABLE[family], order=order)
    if spec.series == "taylor" and spec.row_sum and not spec.sign_definite:
        return dataclasses.replace(spec, floor=_ODD_FLOOR)
    return spec


def resolve(spec: Spec | str) -> Spec:
    """``spec`` itself, or the variant of that name."""
    if isinstance(spec, Spec):
        return spec
    if isinstance(spec, str):
        return variant(spec)
    raise ValueError(f"spec must be an AttentionSpec or a variant's name, not {spec!r}.")
