"""Specifications and variants' names: right, or refused in words."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from fuzzing import mutated, outcome, time_limit
from softmax_rnn import AttentionSpec, forms, variant, variants
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.variants import DECAY_SUFFIX, FAMILIES

SPECS = [spec.to_dict() for spec in variants().values()]


def _check(spec: AttentionSpec) -> None:
    data = spec.to_dict()
    assert AttentionSpec.from_dict(data) == spec
    assert AttentionSpec.from_dict(json.loads(json.dumps(data, allow_nan=False))) == spec
    assert hash(spec) == hash(AttentionSpec.from_dict(data))
    with time_limit():
        assert (PowerSeries.known_part(spec).coefficients is None) == (spec.series == "exp")
    assert math.isfinite(spec.score_scale(64))
    assert spec.score_scale(64) != 0
    assert "dense" in forms(spec)
    assert isinstance(spec.sign_definite, bool)
    assert isinstance(spec.is_quotient, bool)


@given(st.sampled_from(SPECS).flatmap(mutated))
@example({"epsilon": 10**400})
@example({"series": "power", "order": 10**9})
def test_specs(data: Any) -> None:
    found = outcome(lambda: AttentionSpec.from_dict(data))
    if found.error is None:
        _check(found.value)
        # What was given is what it says: nothing was dropped or turned into something else.
        assert {key: found.value.to_dict()[key] for key in data} == dict(data)


_NAMES = st.one_of(
    st.sampled_from([*variants(), *(f"{family}:3" for family in FAMILIES), "gate+decay"]),
    st.tuples(
        st.sampled_from([*FAMILIES, "softmax", "softmax_l2", ""]),
        st.sampled_from([":", "::", " :", ""]),
        st.one_of(
            st.integers().map(str), st.text(max_size=5), st.sampled_from(["9" * 5000, "٣", "²"])
        ),
    ).map("".join),
    st.text(max_size=30),
)


@given(_NAMES, st.one_of(st.none(), st.integers(), st.booleans(), st.floats()))
@example("taylor:" + "9" * 5000, None)
def test_names_of_variants(name: str, order: Any) -> None:
    found = outcome(lambda: variant(name, order=order))
    if found.error is None:
        _check(found.value)
        family, colon, suffix = name.removesuffix(DECAY_SUFFIX).partition(":")
        if colon or order is not None:
            number = getattr(found.value, FAMILIES[family])
            assert number == (int(suffix) if colon else order)
