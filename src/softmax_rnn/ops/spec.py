"""The specification of an attention: validated data, converted to and from a plain dict."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, get_args

import numpy as np
import torch

from softmax_rnn._utils.errors import require_choice, unknown
from softmax_rnn.ops.compiler import fact, keep_facts

FeatureMap = Literal["identity", "elu1", "relu", "cosine"]
Series = Literal["exp", "taylor", "power", "polynomial"]
Denominator = Literal[
    "sum", "detached_sum", "clamped_sum", "sum_plus_one", "sum_plus_sink", "length",
    "learned_length", "none",
]  # fmt: skip
OutputGate = Literal["none", "before_norm", "after_norm"]
Norm = Literal["none", "l2", "rms", "layer"]
Decay = Literal["none", "head", "token", "channel"]
Outside = Literal["hidden", "series"]

INVERSE_SQRT = "1/sqrt(d)"

# Order 1915 of exp's series is exact to 1e-300 for |x| <= 700; exp overflows beyond.
MAX_ORDER = 2000

_MOST_KEYS = 2**62  # positions and their differences are 64-bit integers
# Of a polynomial's lowest power: weights of a smaller one would leave the range of float32.
_LEAST_COEFFICIENT = 1e-30

_SAFE_SCORE = 50.0  # above this bound exp(score) may overflow

_CHOICES = {
    "feature_map": get_args(FeatureMap),
    "series": get_args(Series),
    "denominator": get_args(Denominator),
    "output_gate": get_args(OutputGate),
    "norm": get_args(Norm),
    "decay": get_args(Decay),
    "outside": get_args(Outside),
}


@dataclass(frozen=True)
class RowSum:
    """A row-sum denominator ``max(Z + offset, floor)`` of ``Z = sum_s w_ts``.

    With ``sink`` the offset is ``exp(sink_h)`` of each head.
    """

    offset: float = 0.0
    floor: float = 0.0
    detached: bool = False
    sink: bool = False

    def __post_init__(self) -> None:
        keep_facts(self)

    @fact
    def plain(self) -> bool:
        """Whether nothing is added to the sum and it has no lower bound."""
        return not (self.offset or self.floor or self.sink)


_ROW_SUMS = {
    "sum": RowSum(),
    "detached_sum": RowSum(detached=True),
    "clamped_sum": RowSum(floor=1.0),
    "sum_plus_one": RowSum(offset=1.0),
    "sum_plus_sink": RowSum(sink=True),
}


@dataclass(frozen=True)
class AttentionSpec:
    """What an attention computes, as data: the paper's equations 1 to 6 and related systems.

    With the score ``x_ts = scale * phi(q_t) . phi(k_s)``, clamped from above at ``clamp``::

        w_ts = f(x_ts) * exp(G_t - G_s)                     f(x) = sum_n a_n x^n
        N_t  = sum_{s visible} w_ts * g_in[s] * v_s         D_t = sum_{s visible} w_ts, ...
        o_t  = norm(g_out[t] * N_t / D_t)   or   g_out[t] * norm(N_t / D_t)

    ``G_t`` is the sum of the log decays up to position ``t``, 0 without a decay.

    Attributes:
        feature_map: ``phi``: ``identity``, ``elu1`` (elu + 1), ``relu``, ``cosine`` (unit vector).
        series: ``f``: ``exp``, ``taylor`` (powers 0 to ``order`` of exp's series), ``power`` (the
            power ``order`` alone, coefficient 1; ``power`` 1 is linear attention) or
            ``polynomial`` (any coefficients).
        order: highest power of ``taylor`` and ``polynomial``, or the power of ``power``; ``None``
            for ``exp``.
        clamp: upper bound of the score, or ``None``.
        scale: factor of the score: a number, or ``"1/sqrt(d)"`` of the key width; ``None`` means
            ``"1/sqrt(d)"`` for the identity map, 1 for the others.
        denominator: ``D_t``: the row sum ``sum``, ``detached_sum`` (no gradient), ``clamped_sum``
            (at least 1), ``sum_plus_one``, ``sum_plus_sink`` (plus ``exp(sink)`` of each head);
            ``length`` (number of visible keys), ``learned_length`` (that number to a learned power
            per head) or ``none``.
        input_gate: whether a gate per key multiplies the values.
        output_gate: where a gate per query multiplies the output, if at all.
        norm: vector norm over the head dimension: ``none``, ``l2``, ``rms`` or ``layer``.
        epsilon: added to the row sum (``sum`` and ``detached_sum`` only).
        floor: lower bound of the row sum (``sum`` and ``detached_sum`` only).
        decay: how earlier keys fade: ``none``; ``head``: one log decay per head; ``token``: one per
            head and position; ``channel``: one per channel of the key, which multiplies the
            channel's part of the score by ``exp(G_tc - G_sc)``, so that ``w_ts = f(x_ts)``.
        coefficients: of ``polynomial``, from the constant term on; ``None`` if each head has its
            own, which are then an argument of the operation.
        window: number of keys that a query sees, itself included; ``None`` for all earlier ones.
        global_keys: number of first visible keys that belong to the window of every query.
        outside: keys outside the window are ``hidden``, or ``series``: then the weight is exp
            inside the window, and outside it ``f`` times a factor per head, of queries and keys
            that may be others.

    Raises:
        ValueError: for an invalid value; the message names the allowed values and the nearest
            match.
    """

    feature_map: FeatureMap = "identity"
    series: Series = "exp"
    order: int | None = None
    clamp: float | None = None
    scale: float | str | None = None
    denominator: Denominator = "sum"
    input_gate: bool = False
    output_gate: OutputGate = "none"
    norm: Norm = "none"
    epsilon: float = 0.0
    floor: float = 0.0
    decay: Decay = "none"
    coefficients: tuple[float, ...] | None = None
    window: int | None = None
    global_keys: int = 0
    outside: Outside = "hidden"

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            require_choice(field, getattr(self, field), allowed)
        self._check_coefficients()
        self._check_order()
        self._check_window()
        if self.clamp is not None and not _is_number(self.clamp):
            raise ValueError(f"clamp must be a finite number or None, not {self.clamp!r}.")
        if self.scale not in (None, INVERSE_SQRT) and not (_is_number(self.scale) and self.scale):
            raise ValueError(
                f"scale must be a finite number other than 0, {INVERSE_SQRT!r} or None, "
                f"not {self.scale!r}."
            )
        for field in ("epsilon", "floor"):
            value = getattr(self, field)
            if not _is_number(value) or value < 0:
                raise ValueError(f"{field} must be a finite number >= 0, not {value!r}.")
            if value and self.denominator not in ("sum", "detached_sum"):
                raise ValueError(
                    f"{field}={value!r} applies only to the denominators sum and detached_sum, "
                    f"not to {self.denominator!r}."
                )
        if not isinstance(self.input_gate, bool):
            raise ValueError(f"input_gate must be True or False, not {self.input_gate!r}.")
        keep_facts(self)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a later version may have other facts."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        names = {field.name for field in dataclasses.fields(self)}
        self.__dict__.update({name: x for name, x in fields.items() if name in names})
        keep_facts(self)

    def _check_coefficients(self) -> None:
        given: Any = self.coefficients
        if given is None:
            return
        if self.series != "polynomial":
            raise ValueError(
                f"coefficients apply only to the series 'polynomial', not to {self.series!r}."
            )
        listed = isinstance(given, list | tuple)
        if not listed or not given or not all(map(_is_number, given)) or not given[-1]:
            raise ValueError(
                "coefficients must be finite numbers, from the constant term on, the last one not "
                f"0; not {given!r}."
            )
        if self.order not in (None, len(given) - 1):
            raise ValueError(
                f"order={self.order!r} needs {self.order + 1} coefficients, not {len(given)}; the "
                "order may be left out."
            )
        lowest = next(abs(a) for a in given if a)  # the weights of small scores are its power's
        if lowest < _LEAST_COEFFICIENT:
            raise ValueError(
                f"The first coefficient that is not 0 must be at least {_LEAST_COEFFICIENT:g} in "
                f"size, not {lowest:g}: weights of small scores and their gradients would be out "
                "of range. Set it to 0, or multiply all by one factor, which cancels in a row sum."
            )
        object.__setattr__(self, "coefficients", tuple(map(float, given)))
        object.__setattr__(self, "order", len(given) - 1)

    def _check_window(self) -> None:
        for field, low in (("window", 1), ("global_keys", 0)):
            value = getattr(self, field)
            if value is None and field == "window":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{field} must be an integer >= {low}, not {value!r}.")
            if value > _MOST_KEYS:
                raise ValueError(f"{field} must be at most 2**62, not {value!r}.")
        if self.window is None and (self.global_keys or self.outside != "hidden"):
            raise ValueError(
                f"global_keys={self.global_keys} and outside={self.outside!r} need a window."
            )
        if self.outside == "series" and (self.series == "exp" or self.clamp is not None):
            raise ValueError(
                "outside='series' needs a finite series without a clamp (inside the window the "
                "weight is exp)."
            )

    def _check_order(self) -> None:
        if self.series == "exp":
            if self.order is not None:
                raise ValueError(
                    f"order={self.order!r} was given, but series 'exp' has every power; "
                    "use series='taylor' for the powers up to an order."
                )
        elif self.order is None:
            raise ValueError(f"series {self.series!r} needs an order: an integer >= 0, e.g. 2.")
        elif isinstance(self.order, bool) or not isinstance(self.order, int) or self.order < 0:
            raise ValueError(f"order must be an integer >= 0, not {self.order!r}.")
        elif self.order > MAX_ORDER:
            raise ValueError(f"order must be at most {MAX_ORDER}, not {self.order!r}.")

    @fact
    def is_softmax(self) -> bool:
        """Whether it is softmax alone, with any positive scale."""
        others = (getattr(self, name) == x for name, x in _DEFAULTS.items() if name != "scale")
        return all(others) and self.score_scale(1) > 0

    @fact
    def row_sum(self) -> RowSum | None:
        """How the denominator uses the row sum; ``None`` if it does not use it."""
        rule = _ROW_SUMS.get(self.denominator)
        if rule is None or not (self.epsilon or self.floor):
            return rule
        return dataclasses.replace(rule, offset=self.epsilon, floor=self.floor)

    @fact
    def has_state(self) -> bool:
        """Whether keys and values can be summed into a state of fixed size (section 3.1).

        True for a finite series of the score itself. The series exp has a state of infinite size;
        a clamped score is not an inner product, and its powers are not sums of monomials. Keys
        that a window hides cannot be taken out of a sum.
        """
        return self.powers is not None

    @fact
    def powers(self) -> tuple[int, int] | None:
        """The lowest and the highest power that a state holds; ``None`` for a spec without one."""
        if self.series == "exp" or self.clamp is not None or self.hiding_window is not None:
            return None
        order = index(
            self.order or 0
        )  # torch.compile may take that of a second spec for a variable
        return (order if self.series == "power" else 0), order

    @fact
    def hiding_window(self) -> int | None:
        """The window outside which keys are hidden; ``None`` if every earlier key is visible."""
        return self.window if self.outside == "hidden" else None

    @fact
    def positional(self) -> bool:
        """Whether it has a decay or a window, which depend on the distance of query and key."""
        return self.decay != "none" or self.window is not None

    @fact
    def learned_coefficients(self) -> bool:
        """Whether each head has its own coefficients, an argument of the operation."""
        return self.series == "polynomial" and self.coefficients is None

    @fact
    def sign_definite(self) -> bool:
        """Whether every weight is >= 0, so that the row sum cannot cross zero."""
        if self.series == "polynomial":
            if self.coefficients is None:
                return False
            once = not torch.compiler.is_compiling()
            return (_nonnegative_once if once else _nonnegative)(self.coefficients)
        if self.order is None or self.order % 2 == 0:  # exp and its even Taylor polynomials
            return True
        nonnegative_map = self.feature_map in ("elu1", "relu")
        return nonnegative_map and self.score_scale(1) > 0 and (self.clamp or 0) >= 0

    @fact
    def up_to_row_scale(self) -> bool:
        """Whether the output is the same for any positive multiple of a row's numerator.

        True for the plain row sum. Also true for the L2 norm with another positive denominator: the
        norm removes the denominator (and the effect of an output gate before the norm).
        """
        if self.norm == "l2" and self.row_sum is None:
            return True
        return self.row_sum == RowSum()

    @fact
    def any_row_scale(self) -> bool:
        """Whether sums of any size matter: there is a row sum, or a norm that ignores its scale."""
        return self.row_sum is not None or self.norm == "l2"

    @fact
    def is_quotient(self) -> bool:
        """Whether numerator and denominator scale together, so that small weights matter."""
        rule = self.row_sum
        return self.norm == "l2" or (rule is not None and rule.plain)

    @fact
    def shifted(self) -> bool:
        """Whether ``exp(score)`` may overflow, so that scores are taken relative to the largest."""
        unsafe = self.clamp is None or self.clamp > _SAFE_SCORE or self.is_quotient
        return self.series == "exp" and unsafe

    @fact
    def scale_free(self) -> bool:
        """Whether the output is the same for any factor of a row's scores: a single power."""
        alone = self.clamp is None and self.outside == "hidden"
        one_power = self.series == "power" and (self.order or 0) > 1 and alone
        return one_power and self.feature_map in ("identity", "relu") and self.is_quotient

    @fact
    def terms_can_cancel(self) -> bool:
        """Whether the terms of a weight (products of monomials) can have both signs."""
        signed = self.learned_coefficients or min(self.coefficients or (0.0,)) < 0
        return signed or self.feature_map in ("identity", "cosine") or self.score_scale(1) < 0

    @fact
    def sums_can_cancel(self) -> bool:
        """Whether a row sum that is read from a state may be a small difference of large terms."""
        return self.row_sum is not None and (self.terms_can_cancel or not self.sign_definite)

    @fact
    def bounded(self) -> bool:
        """Whether the outputs are bounded: by the values, or by a norm and its weight."""
        return self.norm != "none" or (self.row_sum is not None and self.sign_definite)

    def score_scale(self, head_dim: int) -> float:
        """The factor of ``phi(q) . phi(k)`` for keys of width ``head_dim``."""
        scale = self.scale
        if scale is None:
            scale = INVERSE_SQRT if self.feature_map == "identity" else 1.0
        return 1.0 / math.sqrt(head_dim) if scale == INVERSE_SQRT else float(scale)

    def __repr__(self) -> str:
        """The fields that are not the default."""
        fields = [(x.name, getattr(self, x.name)) for x in dataclasses.fields(self)]
        given = [f"{name}={value!r}" for name, value in fields if value != _DEFAULTS[name]]
        return f"AttentionSpec({', '.join(given)})"

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data; ``AttentionSpec.from_dict`` is its inverse."""
        fields = dataclasses.asdict(self)
        if self.coefficients is not None:
            fields["coefficients"] = list(self.coefficients)  # as YAML and JSON have it
        return fields

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """Build a spec from a mapping of field names; raises ``ValueError`` on unknown keys."""
        if not isinstance(data, Mapping):
            raise ValueError(f"An attention's fields must be a mapping, not {data!r}.")
        names = [field.name for field in dataclasses.fields(cls)]
        for key in data:
            if key not in names:
                raise unknown("attention field", key, names)
        return cls(**data)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(AttentionSpec)}


def _nonnegative(coefficients: tuple[float, ...]) -> bool:
    """Whether a polynomial is >= 0 for all numbers: no real root, except double ones."""
    if len(coefficients) == 1:
        return coefficients[0] >= 0
    if len(coefficients) % 2 == 0 or coefficients[-1] < 0:
        return False
    extremes = np.roots(np.polynomial.polynomial.polyder(coefficients)[::-1])
    real = extremes.real[abs(extremes.imag) <= 1e-6 * abs(extremes)]
    lowest = np.polynomial.polynomial.polyval(real, coefficients)
    terms = np.polynomial.polynomial.polyval(abs(real), np.abs(coefficients))
    return bool((lowest >= -1e-12 * terms).all())


_nonnegative_once = functools.lru_cache(maxsize=256)(_nonnegative)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be too large for math.isfinite
