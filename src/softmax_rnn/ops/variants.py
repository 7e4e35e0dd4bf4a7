"""The paper's variants by name, and those that a program or an installed package adds."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from softmax_rnn._utils.errors import unknown
from softmax_rnn.ops.spec import INVERSE_SQRT, MAX_ORDER
from softmax_rnn.ops.spec import AttentionSpec as Spec

# The authors clamp the score at 5 before the exponential in every ablation marked c5.
_C5 = Spec(clamp=5.0, denominator="none")
_C5_LENGTH = Spec(clamp=5.0, denominator="length")
_LAYER = replace(_C5_LENGTH, norm="layer")
_LINEAR = Spec(series="power", order=1)
_LINEAR_RELU = replace(_LINEAR, feature_map="relu", scale=INVERSE_SQRT)
_TAYLOR = Spec(series="taylor", order=2)
_L2 = Spec(denominator="none", norm="l2")

# An odd Taylor polynomial is negative for scores below about -1. Its row sum then crosses zero, and
# the plain quotient does not train. The floor is that of the paper's clamped sum: max(sum, 1).
_ODD_FLOOR = 1.0

# Families take an order: variant("taylor", order=4) or "taylor:4"; the table has order 2.
FAMILIES = ("taylor", "taylor_elu", "taylor_relu", "taylor_cosine", "power")

_TABLE: dict[str, Spec] = {
    # Section 4.1: softmax (equation 1) and its two replacements (equations 6 and 5).
    "softmax": Spec(),
    "norm": _L2,
    "gate": replace(_C5_LENGTH, output_gate="before_norm"),
    # Section 4.3: linear attention (equation 2 with a denominator).
    "linear_elu": replace(_LINEAR, feature_map="elu1"),
    "linear_relu": replace(_LINEAR, feature_map="relu", epsilon=1e-8),
    "linear_cosine": replace(_LINEAR, feature_map="cosine", denominator="learned_length"),
    # Section 4.4 and appendix F: powers 0 to `order` of exp's series.
    "taylor": _TAYLOR,
    "taylor_elu": replace(_TAYLOR, feature_map="elu1"),
    "taylor_relu": replace(_TAYLOR, feature_map="relu", epsilon=1e-8),
    "taylor_cosine": replace(_TAYLOR, feature_map="cosine", denominator="learned_length"),
    # Appendix B: a single power.
    "power": Spec(series="power", order=2),
    "quadratic": Spec(series="power", order=2, denominator="none"),
    # Figure 6, left: the denominator.
    "detached": replace(_C5, denominator="detached_sum", floor=1.0),
    "clamped": replace(_C5, denominator="clamped_sum"),
    "length": _C5_LENGTH,
    "detached_gate": replace(
        _C5, denominator="detached_sum", epsilon=1e-4, output_gate="before_norm"
    ),
    "gate_only": replace(_C5, output_gate="before_norm"),
    # Figure 6, middle: the gate.
    "input_gate": replace(_C5_LENGTH, input_gate=True),
    "both_gates": replace(_C5_LENGTH, input_gate=True, output_gate="before_norm"),
    "relu_gate": replace(_LINEAR_RELU, clamp=5.0, denominator="length", output_gate="before_norm"),
    # Figure 6, right: the norm.
    "norm_rms": replace(_C5, norm="rms"),
    "norm_rms_length": replace(_C5_LENGTH, norm="rms"),
    "norm_layer_length": _LAYER,
    "norm_l2_clamped": replace(_C5, norm="l2"),
    "norm_l2_length": replace(_C5_LENGTH, norm="l2"),
    "norm_relu": replace(_LINEAR_RELU, denominator="none", norm="l2"),
    # In the authors' code only.
    "norm_gate_before": replace(_L2, output_gate="before_norm"),
    "norm_gate_after": replace(_L2, output_gate="after_norm"),
    "layer_input_gate": replace(_LAYER, input_gate=True),
    "layer_output_gate": replace(_LAYER, output_gate="before_norm"),
    "layer_both_gates": replace(_LAYER, input_gate=True, output_gate="before_norm"),
    # Related work that the paper names (Miller, 2023).
    "softmax_plus_one": Spec(denominator="sum_plus_one"),
}
ALIASES = {"softmax_l2": "norm"}
_REGISTERED: dict[str, Spec] = {}  # by register_variant, in this process

GROUP = "softmax_rnn.variants"  # of the entry points that packages declare


def variants() -> dict[str, Spec]:
    """Every named variant and its spec; the families (``taylor``, ``power``) at order 2.

    In this order: the paper's variants, those of installed packages (entry points), and those of
    :func:`register_variant`. An entry point that cannot be loaded causes a warning.
    """
    found = dict(_TABLE)
    for name in _entry_points():
        try:
            found.setdefault(name, _load(name))
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    return found | _REGISTERED


def register_variant(name: str, spec: Spec) -> None:
    """Add a named variant in this process.

    A package adds variants for every process by entry points of the group
    ``softmax_rnn.variants``: the entry point has the variant's name and refers to an
    :class:`AttentionSpec`, a dict of its fields, or a function that returns either.

    Args:
        name: ASCII letters, digits, ``_`` and ``-``.
        spec: the spec with this name.

    Raises:
        ValueError: for an invalid name or spec, or a name that already has another spec.
    """
    _check(name, spec)
    known = _find(name)
    if known not in (None, spec):
        raise ValueError(f"variant {name!r} already exists with another spec: {known}.")
    if known is None:
        _REGISTERED[name] = spec


def variant(name: str, *, order: int | None = None) -> Spec:
    """The spec of a named variant.

    Args:
        name: a key of :func:`variants`, an alias (``softmax_l2``), or a family with its order
            after a colon (``"taylor:4"``).
        order: highest power of a family; by default 2.

    Raises:
        ValueError: for an unknown name (with the nearest one), an invalid order, an order for a
            variant that has none, or an entry point that cannot be loaded.
    """
    family, colon, suffix = name.partition(":")
    spec = _find(family)
    if spec is None:
        raise unknown("variant", name, [*_TABLE, *ALIASES, *_entry_points(), *_REGISTERED])
    if colon:
        if order is not None:
            raise ValueError(
                f"variant {name!r} contains its order; order={order!r} was given as well."
            )
        if not suffix.isdecimal() or len(suffix) > len(str(MAX_ORDER)):
            raise ValueError(
                f"variant {name!r}: the order after ':' must be an integer >= 0, at most "
                f"{MAX_ORDER}."
            )
        order = int(suffix)
    if order is None:
        return spec
    if family not in FAMILIES:
        raise ValueError(
            f"variant {family!r} has no order (given: {order!r}); "
            f"variants with an order: {', '.join(FAMILIES)}."
        )
    spec = replace(spec, order=order)
    if spec.series == "taylor" and spec.row_sum and not spec.sign_definite:
        return replace(spec, floor=_ODD_FLOOR)
    return spec


def resolve(spec: Spec | str) -> Spec:
    """``spec`` itself, or the variant of that name."""
    if isinstance(spec, Spec):
        return spec
    if isinstance(spec, str):
        return variant(spec)
    raise ValueError(f"spec must be an AttentionSpec or a variant's name, not {spec!r}.")


def _find(name: str) -> Spec | None:
    """The spec of a name without an order; packages are searched last."""
    name = ALIASES.get(name, name)
    for known in (_TABLE, _REGISTERED):
        if name in known:
            return known[name]
    return _load(name) if name in _entry_points() else None


def _check(name: object, spec: object) -> None:
    if not isinstance(name, str) or not re.fullmatch("[A-Za-z0-9_-]+", name):
        raise ValueError(f"A variant's name has letters, digits, '_' and '-' only, not {name!r}.")
    if not isinstance(spec, Spec):
        raise ValueError(f"variant {name!r} must be an AttentionSpec, not {spec!r}.")


@functools.cache
def _entry_points() -> dict[str, list[EntryPoint]]:
    """The entry points of all installed packages, by the variant's name."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


@functools.cache
def _load(name: str) -> Spec:
    """The spec of a name in packages; ``ValueError`` names a package whose spec is invalid."""
    taken = _TABLE.get(ALIASES.get(name, name))
    for point in _entry_points()[name]:
        package = point.dist.name if point.dist else "unknown"
        try:
            spec = point.load()
            if callable(spec):
                spec = spec()
            if isinstance(spec, Mapping):
                spec = Spec.from_dict(spec)
            _check(name, spec)
            if taken not in (None, spec):
                raise ValueError(f"the name already exists with another spec: {taken}")
        except Exception as error:  # the package's code may raise anything
            raise ValueError(
                f"variant {name!r} of the package {package!r} ({point.value}) cannot be used: "
                f"{type(error).__name__}: {error}"
            ) from error
        taken = spec
    assert taken is not None
    return taken
