"""Names that mean more than the operation: it refuses them, the layer computes them."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import Shape, make_case
from softmax_rnn.analysis.capacity import effective_features, largest_rank
from softmax_rnn.ops.layer import core as layer_core
from softmax_rnn.ops.options import LayerFeatureMap
from softmax_rnn.ops.variants import FAMILIES, WHOLE

# What the layer of a name adds, for which the operation has no argument.
BESIDE = {
    "mamba2": "skip=True, merged_norm=True",
    "2mamba": "short_convolution=2",
    "2mamba_e": "short_convolution=2",
    "based": "qk_dim=16",
    "rebased": "feature_map='rebased'",
    "taylorshift": "feature_map='cosine', temperature=True",
    "performer": "feature_map='performer'",
    "rfa": "feature_map='rfa'",
    "cosformer": "feature_map='cosformer'",
    "hedgehog": "feature_map='hedgehog'",
    "lolcats:64": "feature_map='hedgehog'",
    "window_state:64": "feature_map='squared_relu'",
}


def test_names_of_more_than_the_operation() -> None:
    found = {name for name in sr.variants() if sr.layer_options(name).beside_operation}
    assert found == set(BESIDE)


@pytest.mark.parametrize("name", [*BESIDE, "hedgehog+decay", "lolcats:3", "based:4"])
def test_the_operation_is_no_layer(name: str) -> None:
    """Of plain queries and keys it would be another attention, without an error."""
    spec = sr.variant(name)
    case = make_case(spec, shape=Shape(1, 2, 2, 5, 5, 4, 4))
    tensors = case.tensors
    takers: dict[str, Callable[[Any], Any]] = {
        "attention": lambda given: sr.attention(spec=given, **tensors),
        "Stream": sr.Stream,
        "state_size": lambda given: sr.state_size(given, 4, 4),
        "forms": sr.forms,
        "crossover": lambda given: sr.crossover(given, 4, 4),
        "context_parallel_attention": lambda given: sr.context_parallel_attention(
            tensors["q"], tensors["k"], tensors["v"], given
        ),
        "effective_features": lambda given: effective_features(given, 4),
        "largest_rank": lambda given: largest_rank(given, 4),
    }
    said = re.escape(BESIDE.get(name, "=")) + ".*Attention.*{0}.*variant.'{0}'"
    for taker in takers.values():
        with pytest.raises(ValueError, match=said.format(re.escape(name))):
            taker(name)
    # A spec says that what it is given was mapped before.
    assert takers["attention"](spec).isfinite().all()
    assert sr.Attention(16, 2, name).spec == spec


# Values of every option, by which a layer of its own differs from the plain one, or does not.
CHANGED: dict[str, tuple[object, ...]] = {
    "feature_map": tuple(x for x in get_args(LayerFeatureMap) if x != "none"),
    **{"qk_dim": (3, 8), "num_features": (3,), "cosine_length": (9,)},
    **{"short_convolution": (3,), "convolution_activation": ("swish",)},
    **{"decay_rule": ("time_step", "softplus"), "gate_activation": ("swish",)},
    **{"input_activation": ("softplus",)},
    **dict.fromkeys(
        ("map_before_rotary", "temperature", "gate_per_channel", "skip", "merged_norm"), (True,)
    ),
    **dict.fromkeys(("convolution_bias", "skip_per_channel"), (True,)),
    **dict.fromkeys(("rotary", "norm_weight"), (False,)),
}


def test_every_option_is_tried() -> None:
    assert set(CHANGED) == {field.name for field in dataclasses.fields(sr.LayerOptions)}


@pytest.mark.parametrize(
    ("option", "value"), [(name, x) for name, values in CHANGED.items() for x in values]
)
def test_which_options_are_beside_the_operation(
    option: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with which the layer is not the operation between its projections."""
    options = sr.LayerOptions(**{option: value})  # type: ignore[arg-type]
    spec = sr.AttentionSpec(norm="rms", decay="token", output_gate="after_norm")
    torch.manual_seed(0)
    layer = sr.Attention(16, 2, spec, options=options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    called: list[tuple[Tensor, ...]] = []

    def observed(*inputs: Tensor, **arguments: Any) -> Any:
        out = sr.attention(*inputs, **arguments)
        called.append((*inputs[:3], out if isinstance(out, Tensor) else out[0]))
        return out

    monkeypatch.setattr(layer_core, "attention", observed)
    x = torch.randn(1, 6, 16).double()
    found = layer(x)
    ((*inputs, out),) = called
    projected = (layer.q_proj, layer.k_proj, layer.v_proj)
    same = all(
        given.shape[-1] == 8 and torch.equal(given, made(x).unflatten(-1, (2, -1)).transpose(1, 2))
        for given, made in zip(inputs, projected, strict=True)
    )
    same = same and torch.allclose(found, layer.o_proj(out.transpose(1, 2).flatten(2)))
    assert same == (not options.beside_operation or value == 8)  # the values' width


@pytest.mark.parametrize("name", [*FAMILIES, "taylor+decay"])
def test_a_family_without_its_number_says_which(name: str) -> None:
    family, _, decay = name.partition("+")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec = sr.variant(name)
    if name in WHOLE:  # a system with a number of its own
        assert not caught
        return
    number = getattr(spec, FAMILIES[family])
    written = f"{family}:{number}" + decay.join(["+", ""] if decay else ["", ""])
    assert f"'{name}' means '{written}': write that" in str(caught[0].message)
    assert caught[0].category is FutureWarning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sr.variant(written) == sr.variant(family, order=number) or decay
        assert sr.variant(written) == spec
        assert f"{family}:{number}" in sr.variants()
