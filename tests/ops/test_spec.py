"""The specification: what it accepts, what it refuses, and how it says so."""

from __future__ import annotations

import pytest

from softmax_rnn import AttentionSpec, variants


@pytest.mark.parametrize("spec", variants().values(), ids=variants())
def test_round_trip(spec: AttentionSpec) -> None:
    assert AttentionSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feature_map": "elu_1"}, "feature_map 'elu_1'. Did you mean 'elu1'"),
        ({"series": "exponential"}, "Allowed: exp, taylor, power"),
        ({"denominator": "lenght"}, "Did you mean 'length'"),
        ({"norm": "l1"}, "Did you mean 'l2'"),
        ({"output_gate": True}, "output_gate True"),
        ({"series": "taylor"}, "needs an order"),
        ({"series": "power"}, "needs an order"),
        ({"series": "taylor", "order": -1}, "not -1"),
        ({"series": "taylor", "order": 1.5}, "not 1.5"),
        ({"series": "taylor", "order": True}, "not True"),
        ({"order": 2}, "series 'exp' has every power"),
        ({"series": "taylor", "order": 2001}, "at most 2000, not 2001"),
        ({"clamp": float("inf")}, "clamp must be a finite number"),
        ({"clamp": 10**400}, "clamp must be a finite number"),
        ({"scale": 0}, "scale must be a finite number other than 0"),
        ({"scale": "big"}, "or None, not 'big'"),
        ({"epsilon": -1.0}, "epsilon must be a finite number >= 0"),
        ({"floor": 1.0, "denominator": "length"}, "not to 'length'"),
        ({"series": "polynomial", "coefficients": (0.0, 1e-308)}, "at least 1e-30 in size, not"),
        ({"series": "polynomial", "coefficients": (5e-324, 1.0)}, "not 4.94066e-324"),
        ({"window": 2**63}, "window must be at most 2\\*\\*62"),
        ({"input_gate": "yes"}, "input_gate must be True or False"),
    ],
)
def test_mistakes_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        AttentionSpec(**fields)  # type: ignore[arg-type]


def test_unknown_field_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'denominator'"):
        AttentionSpec.from_dict({"denominater": "sum"})


@pytest.mark.parametrize("data", [None, [], "softmax", ["norm"]])
def test_fields_are_a_mapping(data: object) -> None:
    with pytest.raises(ValueError, match="must be a mapping, not"):
        AttentionSpec.from_dict(data)  # type: ignore[arg-type]


def test_scale_defaults() -> None:
    assert AttentionSpec().score_scale(64) == 1 / 8
    assert AttentionSpec(feature_map="relu").score_scale(64) == 1.0
    assert AttentionSpec(scale=0.3).score_scale(64) == 0.3
    assert AttentionSpec(feature_map="relu", scale="1/sqrt(d)").score_scale(64) == 1 / 8
