"""The variants by name: the paper's, related systems, and those of programs and packages."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from softmax_rnn._utils.errors import differences, unknown
from softmax_rnn.ops.compiler import constant_when_compiled
from softmax_rnn.ops.options import LayerOptions
from softmax_rnn.ops.spec import INVERSE_SQRT
from softmax_rnn.ops.spec import AttentionSpec as Spec
from softmax_rnn.ops.systems import SYSTEMS, Variant

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

# Families take a number, the value of a field: variant("taylor", order=4) or "taylor:4". The names
# of some of them alone are systems with a number of their own, which is part of the system.
FAMILIES = dict.fromkeys(
    (
        *("taylor", "taylor_elu", "taylor_relu", "taylor_cosine", "power"),
        *("power_retention", "based", "rebased", "taylorshift"),
        *("window_taylor", "taylor_norm", "polynomial"),
    ),
    "order",
) | dict.fromkeys(("window", "lolcats", "window_state"), "window")

WHOLE = ("based", "rebased", "taylorshift")

# Related systems of even powers alone: a row sum of odd ones crosses zero.
_EVEN = ("power_retention", "rebased")

# "softmax+decay" is softmax with a forget gate: one log decay per head and token.
DECAY_SUFFIX = "+decay"

_PAPER: dict[str, Spec] = {
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
_TABLE = {name: Variant(spec) for name, spec in _PAPER.items()} | SYSTEMS
ALIASES = {"softmax_l2": "norm"}
_REGISTERED: dict[str, Variant] = {}  # by register_variant, in this process

GROUP = "softmax_rnn.variants"  # of the entry points that packages declare


def variants() -> dict[str, Spec]:
    """Every named variant and its spec; families as ``taylor:2``, ``window:64``.

    In this order: the paper's variants, related systems, those of installed packages (entry
    points), and those of :func:`register_variant`. :func:`layer_options` tells what their layers
    add. An entry point that cannot be loaded causes a warning.
    """
    found = {_with_number(name): known for name, known in _TABLE.items()}
    for name in _entry_points():
        try:
            found.setdefault(name, _load(name))
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    return {name: known.spec for name, known in (found | _REGISTERED).items()}


def register_variant(
    name: str, spec: Spec, options: LayerOptions | Mapping[str, Any] | None = None
) -> None:
    """Add a named variant in this process.

    A package adds variants for every process by entry points of the group
    ``softmax_rnn.variants``: the entry point has the variant's name and refers to an
    :class:`AttentionSpec`, a dict of its fields, a pair of a spec and :class:`LayerOptions`, a dict
    of two dicts ``spec`` and ``options``, or a function that returns any of these.

    Args:
        name: ASCII letters, digits, ``_`` and ``-``.
        spec: the spec with this name.
        options: what the layer of this name adds to the operation, or a mapping of some of its
            fields; by default nothing.

    Raises:
        ValueError: for an invalid name, spec or options, or a name that already has others.
    """
    if options is None or isinstance(options, Mapping):
        options = LayerOptions.from_dict(options or {})
    new = Variant(spec, options)
    _check(name, new)
    known = _find(name)
    if known is None:
        _REGISTERED[name] = new
    elif known != new:
        raise ValueError(f"variant {name!r} already exists with {_differing(known, new)}.")


def variant(name: str, *, order: int | None = None) -> Spec:
    """The spec of a named variant.

    Args:
        name: a key of :func:`variants`, an alias (``softmax_l2``), or a family with its order
            after a colon (``"taylor:4"``), with its window for ``window``, ``lolcats`` and
            ``window_state``. ``+decay`` at the end adds a decay per head and token
            (``"softmax+decay"``, ``"taylor:4+decay"``).
        order: highest power of a family, or its window, in place of a number in the name. Without
            either, ``based``, ``rebased`` and ``taylorshift`` have order 2, as published; the
            others have order 2 or window 64 and cause a ``FutureWarning``: the next version asks
            for the number.

    Raises:
        ValueError: for an unknown name (with the nearest one), an invalid order, an order for a
            variant that has none, a second decay, or an entry point that cannot be loaded.
    """
    return _named(name, order).spec


def layer_options(name: str) -> LayerOptions:
    """What the layer of a named variant adds to the operation.

    Args:
        name: as for :func:`variant`.

    Raises:
        ValueError: for an unknown name, as :func:`variant`.

    Example:
        >>> layer_options("based").qk_dim
        16
    """
    return _named(name).options


def resolve(spec: Spec | str) -> Spec:
    """``spec`` itself, or the variant of that name, for the operation.

    Raises:
        ValueError: for an unknown name, and for one whose layer has parts that the operation has
            not: of plain queries and keys its spec alone would be another attention.
    """
    if isinstance(spec, Spec):
        return spec
    kept = isinstance(spec, str) and not torch.compiler.is_compiling()
    if kept and spec in _OPERATIONS:
        return _OPERATIONS[spec]
    found = resolve_layer(spec)
    if beside := found.options.beside_operation:
        parts = ", ".join(f"{name}={x!r}" for name, x in beside.items())
        raise ValueError(
            f"The operation alone is not {spec!r}: the layer of that name adds {parts}. Use "
            f"softmax_rnn.Attention(hidden_size, num_heads, {spec!r}). If that is computed "
            f"elsewhere, give the operation the spec, softmax_rnn.variant({spec!r})."
        )
    plain = spec.removesuffix(DECAY_SUFFIX) if isinstance(spec, str) else ""
    if kept and _with_number(plain) == plain:  # others are told each time what to write
        _OPERATIONS[spec] = found.spec
    return found.spec


# The names that calls have used: finding what one means takes as long as a small call.
_OPERATIONS: dict[str, Spec] = {}


def resolve_layer(
    spec: Spec | str, options: LayerOptions | Mapping[str, Any] | None = None
) -> Variant:
    """The spec and options of a layer; a mapping of options replaces some of a variant's."""
    if isinstance(spec, Spec):
        found = Variant(spec)
    elif isinstance(spec, str):
        found = _named(spec)
    else:
        raise ValueError(f"spec must be an AttentionSpec or a variant's name, not {spec!r}.")
    if options is None:
        return found
    if not isinstance(options, LayerOptions):
        options = found.options.replaced(options)
    return Variant(found.spec, options)


def _named(name: str, order: int | None = None) -> Variant:
    plain = name.removesuffix(DECAY_SUFFIX)
    family, colon, suffix = plain.partition(":")
    found = _find(family)
    if found is None:
        known = [*map(_with_number, _TABLE), *ALIASES, *_entry_points(), *_REGISTERED]
        raise unknown("variant", name, known)
    if colon:
        if order is not None:
            raise ValueError(
                f"variant {name!r} contains its order; order={order!r} was given as well."
            )
        if not suffix.isdecimal() or len(suffix) > _DIGITS:
            raise ValueError(
                f"variant {name!r}: the order after ':' must be an integer >= 0 of at most "
                f"{_DIGITS} digits."
            )
        order = int(suffix)
    if order is None and _with_number(family) != family:
        _ask_for_number(name, family)
    spec = found.spec if order is None else _of_order(family, found.spec, order)
    if plain != name:
        if spec.decay != "none":
            raise ValueError(f"variant {name!r}: {plain!r} already has a decay.")
        spec = replace(spec, decay="token")
    return found._replace(spec=spec)


_DIGITS = 9


@constant_when_compiled
def _ask_for_number(name: str, family: str) -> None:
    meant = name.replace(family, _with_number(family), 1)
    warnings.warn(
        f"variant {name!r} means {meant!r}: write that. The next version asks for the "
        f"{FAMILIES[family]}.",
        FutureWarning,
        stacklevel=2,
    )


def _with_number(name: str) -> str:
    """A name of the table; that of a family with its default number."""
    if name not in FAMILIES or name in WHOLE:
        return name
    return f"{name}:{getattr(_TABLE[name].spec, FAMILIES[name])}"


def _of_order(family: str, spec: Spec, order: int) -> Spec:
    if family not in FAMILIES:
        raise ValueError(
            f"variant {family!r} has no order (given: {order!r}); "
            f"variants with an order: {', '.join(FAMILIES)}."
        )
    changed: dict[str, Any] = {FAMILIES[family]: order}
    spec = replace(spec, **changed)
    if family in _EVEN and order % 2:
        raise ValueError(f"variant {family!r} needs an even order, not {order}.")
    if spec.series == "taylor" and spec.row_sum and not spec.sign_definite:
        return replace(spec, floor=_ODD_FLOOR)
    return spec


def _find(name: str) -> Variant | None:
    """The meaning of a name without an order; packages are searched last."""
    name = ALIASES.get(name, name)
    for known in (_TABLE, _REGISTERED):
        if name in known:
            return known[name]
    return _load(name) if name in _entry_points() else None


def _check(name: object, found: Variant) -> None:
    if not isinstance(name, str) or not re.fullmatch("[A-Za-z0-9_-]+", name):
        raise ValueError(f"A variant's name has letters, digits, '_' and '-' only, not {name!r}.")
    if not isinstance(found.spec, Spec):
        raise ValueError(f"variant {name!r} must be an AttentionSpec, not {found.spec!r}.")
    if not isinstance(found.options, LayerOptions):
        raise ValueError(f"variant {name!r}: options must be LayerOptions, not {found.options!r}.")


def _differing(known: Variant, new: Variant) -> str:
    texts = {
        "fields": differences(known.spec.to_dict(), new.spec.to_dict(), "here"),
        "options": differences(known.options.to_dict(), new.options.to_dict(), "here"),
    }
    return " and ".join(f"other {name} ({text})" for name, text in texts.items() if text)


def _read(given: Any) -> Variant:
    """The variant that an entry point refers to."""
    if callable(given):
        given = given()
    if isinstance(given, tuple):
        return Variant(*given)
    if not isinstance(given, Mapping):
        return Variant(given)
    if "spec" not in given:
        return Variant(Spec.from_dict(given))
    fields = dict(given)
    spec = Spec.from_dict(fields.pop("spec"))
    options = LayerOptions.from_dict(fields.pop("options", {}))
    for key in fields:
        raise unknown("field of a variant", key, Variant._fields)
    return Variant(spec, options)


@functools.cache
def _entry_points() -> dict[str, list[EntryPoint]]:
    """The entry points of all installed packages, by the variant's name."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


@functools.cache
def _load(name: str) -> Variant:
    """The meaning of a name in packages; ``ValueError`` names a package where it is invalid."""
    taken = _TABLE.get(ALIASES.get(name, name))
    for point in _entry_points()[name]:
        package = point.dist.name if point.dist else "unknown"
        try:
            found = _read(point.load())
            _check(name, found)
            if taken is not None and taken != found:
                raise ValueError(f"the name already exists with {_differing(taken, found)}")
        except Exception as error:  # the package's code may raise anything
            raise ValueError(
                f"variant {name!r} of the package {package!r} ({point.value}) cannot be used: "
                f"{type(error).__name__}: {error}"
            ) from error
        taken = found
    assert taken is not None
    return taken
