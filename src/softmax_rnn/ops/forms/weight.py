"""The weight of a key for a query, for the forms that compute scores (``reference.weight``)."""

from __future__ import annotations

from typing import NamedTuple

from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec

# Above this bound exp(score) may overflow.
_SAFE_SCORE = 50.0


class Weight(NamedTuple):
    """The weight as a function of ``q . k``, and which keys a row sees."""

    series: PowerSeries
    scale: float
    clamp: float | None
    causal: bool
    shifted: bool  # whether the row maximum is subtracted in the exponent

    @classmethod
    def from_spec(cls, spec: AttentionSpec, width: int, causal: bool) -> Weight:
        """The weight of a spec for keys of a width."""
        unsafe = spec.clamp is None or spec.clamp > _SAFE_SCORE or spec.is_quotient
        shifted = spec.series == "exp" and unsafe
        return cls(
            PowerSeries.from_spec(spec), spec.score_scale(width), spec.clamp, causal, shifted
        )
