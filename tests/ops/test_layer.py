"""The attention layer by itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import softmax_rnn as sr
from softmax_rnn import Attention, LayerOptions
from softmax_rnn.ops.layer.attention import rotate


@pytest.mark.parametrize("name", sr.variants())
def test_only_what_a_spec_needs_is_learned(name: str) -> None:
    spec = sr.variant(name)
    softmax = {key for key, _ in Attention(32, 4).named_parameters()}
    extra = {key for key, _ in Attention(32, 4, spec).named_parameters()} - softmax
    expected = set()
    if spec.input_gate:
        expected |= {"input_gate.weight", "input_gate.bias"}
    if spec.output_gate != "none":
        expected |= {"output_gate.weight", "output_gate.bias"}
    if spec.denominator == "learned_length":
        expected.add("length_logit")
    if spec.norm in ("rms", "layer"):
        expected.add("norm_weight")
    if spec.norm == "layer":
        expected.add("norm_bias")
    if spec.learned_coefficients:
        expected.add("coefficient_logit")
    if spec.denominator == "sum_plus_sink":
        expected.add("sink")
    if spec.outside == "series":
        expected.add("outside_logit")
    expected |= DECAYS[spec.decay]
    assert extra == expected


DECAYS = {
    "none": set(),
    "head": set(),
    "token": {"decay.proj.weight", "decay.bias"},
    "channel": {"decay.down.weight", "decay.up.weight", "decay.up.bias"},
}
# What each option adds to softmax, beside the values that differ.
OPTIONS: dict[str, tuple[dict[str, object], set[str]]] = {
    "narrow": ({"qk_dim": 4}, set()),
    "unrotated": ({"rotary": False}, set()),
    "cosine": ({"feature_map": "cosine"}, set()),
    "hedgehog": ({"feature_map": "hedgehog"}, {"feature_map.q_matrix", "feature_map.k_matrix"}),
    "rebased": (
        {"feature_map": "rebased"},
        {f"feature_map.{x}_{part}" for x in "qk" for part in ("scale", "shift")},
    ),
    "performer": ({"feature_map": "performer", "num_features": 5}, set()),
    "rfa": ({"feature_map": "rfa", "num_features": 5}, set()),
    "cosformer": ({"feature_map": "cosformer", "cosine_length": 9}, set()),
    "temperature": ({"temperature": True}, {"temperature_logit"}),
    "convolution": ({"short_convolution": 3}, {"short_convolution.kernel"}),
    "swish_convolution": (
        {"short_convolution": 2, "convolution_activation": "swish"},
        {"short_convolution.kernel"},
    ),
    "convolution_bias": (
        {"short_convolution": 2, "convolution_bias": True},
        {"short_convolution.kernel", "short_convolution.bias"},
    ),
    "skip": ({"skip": True}, {"skip_weight"}),
    "skip_per_channel": ({"skip": True, "skip_per_channel": True}, {"skip_weight"}),
    "merged_norm": ({"merged_norm": True}, {"merged_norm_weight"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_adds_its_parameters_and_changes_the_output(name: str) -> None:
    options, added = OPTIONS[name]
    plain = Attention(32, 4, num_kv_heads=2)
    torch.manual_seed(0)
    layer = Attention(32, 4, num_kv_heads=2, options=options)
    softmax = {key for key, _ in plain.named_parameters()}
    assert {key for key, _ in layer.named_parameters()} - softmax == added
    x, angles = 3 * torch.randn(2, 9, 32), torch.randn(1, 9, 4).repeat(1, 1, 2)
    out = layer(x, position_embeddings=(angles.cos(), angles.sin()))
    out.square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key
    if options.get("qk_dim"):
        return
    weights = {key: x for key, x in layer.state_dict().items() if key in softmax}
    plain.load_state_dict(weights)
    same = plain(x, position_embeddings=(angles.cos(), angles.sin()))
    # A convolution, a temperature start as if they were not there.
    neutral = name in ("temperature", "convolution", "convolution_bias")
    assert torch.allclose(out, same, atol=1e-5) == neutral


HYBRID = sr.AttentionSpec(series="power", order=1, window=3, global_keys=1, outside="series")


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("feature_map", ["cosine", "hedgehog", "rebased", "performer", "cosformer"])
def test_a_feature_map_beside_a_window(feature_map: str, temperature: bool) -> None:
    """It maps the queries and keys of the series; a temperature multiplies all queries."""
    torch.manual_seed(0)
    options = {"feature_map": feature_map, "temperature": temperature}
    mapped = Attention(32, 4, HYBRID, num_kv_heads=2, options=options).double()
    plain = Attention(32, 4, HYBRID, num_kv_heads=2).double()
    weights = mapped.state_dict()
    plain.load_state_dict({key: weights[key] for key in plain.state_dict()})
    if temperature:
        torch.nn.init.constant_(mapped.temperature_logit, math.log(2))
        with torch.no_grad():
            plain.q_proj.weight.mul_(2)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    given, inside = mapped.project(x), plain.project(x)
    torch.testing.assert_close(given[:3], inside[:3])
    assert inside.outside_q is inside.outside_k is None
    q, k = plain.project(x)[:2] if not temperature else (given.q / 2, given.k)
    features = mapped.feature_map(q, k, torch.arange(9)[None])
    torch.testing.assert_close(given.outside_q, features[0] * (2 if temperature else 1))
    torch.testing.assert_close(given.outside_k, features[1])
    found, same = mapped(x), plain(x)
    torch.testing.assert_close(found[:, :4], same[:, :4])  # nothing is outside
    assert not torch.allclose(found[:, 4:], same[:, 4:])
    first, state = mapped(x[:, :5], return_state=True)
    rest = mapped(x[:, 5:], state=state)
    torch.testing.assert_close(torch.cat((first, rest), 1), found)


def test_decays_per_channel_beside_a_window_need_features_of_the_same_width() -> None:
    spec = dataclasses.replace(HYBRID, decay="channel")
    options = {"feature_map": "hedgehog"}
    with pytest.raises(ValueError, match="'hedgehog' makes keys of width 16 outside the window"):
        Attention(32, 4, spec, options=options)
    layer = Attention(32, 4, spec, options={"feature_map": "rebased"})
    assert layer(torch.randn(2, 9, 32)).isfinite().all()


def test_options_of_a_name_and_in_its_place() -> None:
    based = Attention(64, 2, "based")
    assert based.q_proj.out_features == 2 * 16
    assert based.options == sr.layer_options("based") == LayerOptions(qk_dim=16)
    assert Attention(32, 2, sr.variant("based")).options == LayerOptions()
    wide = Attention(32, 2, "retnet", options={"qk_dim": 24})
    assert wide.options == dataclasses.replace(sr.layer_options("retnet"), qk_dim=24)
    assert Attention(32, 2, "retnet", options=LayerOptions()).options == LayerOptions()
    assert "qk_dim=16" in str(based)
    assert "LayerOptions" not in str(Attention(32, 2))


def test_options_are_data() -> None:
    for name in sr.variants():
        options = sr.layer_options(name)
        assert LayerOptions.from_dict(options.to_dict()) == options
    assert LayerOptions.from_dict({}) == LayerOptions()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_dim": 0}, "qk_dim must be an integer >= 1, not 0"),
        ({"qk_dim": True}, "qk_dim must be an integer >= 1, not True"),
        ({"short_convolution": -1}, "short_convolution must be an integer >= 0"),
        ({"short_convolution": None}, "short_convolution must be an integer >= 0, not None"),
        ({"rotary": 1}, "rotary must be True or False, not 1"),
        ({"feature_map": "hedgehogs"}, "Did you mean 'hedgehog'"),
        ({"qk_dims": 3}, "Unknown layer option 'qk_dims'. Did you mean 'qk_dim'"),
        (3, "must be a mapping, not 3"),
    ],
)
def test_invalid_options_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerOptions.from_dict(fields)


@pytest.mark.parametrize("name", sr.variants())
def test_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    layer = Attention(32, 4, name, num_kv_heads=2)
    tokens = 9 if layer.spec.window is None else layer.spec.window + 9
    out = layer(torch.randn(2, tokens, 32))
    out.square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        gate_under_l2 = name == "norm_gate_before" and key.startswith("output_gate")
        assert gate_under_l2 or parameter.grad.abs().sum() > 0, key


def test_an_input_gate_is_the_operations_own() -> None:
    """Gating the values before a cache is what the op's ``input_gate`` does."""
    torch.manual_seed(0)
    layer = Attention(32, 4, "input_gate", num_kv_heads=2)
    x = torch.randn(2, 9, 32)

    def heads(projected: torch.Tensor) -> torch.Tensor:
        return projected.view(2, 9, -1, 8).transpose(1, 2)

    assert layer.input_gate is not None
    out = sr.attention(
        heads(layer.q_proj(x)),
        heads(layer.k_proj(x)),
        heads(layer.v_proj(x)),
        layer.spec,
        input_gate=layer.input_gate(x).sigmoid().mT,
    )
    torch.testing.assert_close(layer(x), layer.o_proj(out.transpose(1, 2).flatten(2)))


FINITE = [name for name in sr.variants() if sr.variant(name).has_state]


@pytest.mark.parametrize("options", [{}, {"short_convolution": 3}], ids=["", "convolution"])
@pytest.mark.parametrize("name", FINITE)
def test_a_sequence_may_be_cut_anywhere(name: str, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    layer, x = Attention(32, 4, name, options=options).double(), torch.randn(2, 9, 32).double()
    _move(layer)
    state, parts = None, []
    for part in x.split([5, 1, 3], dim=1):
        out, state = layer(part, state=state, return_state=True)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x))
    assert (state.inputs is None) == (not layer.options.short_convolution)


def _move(layer: Attention) -> None:
    """Leave the initial values, at which a convolution is the identity."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def test_a_short_convolution_skips_hidden_tokens() -> None:
    """Each channel is convolved by itself, in pairs of an explicit sum."""
    layer = Attention(16, 2, options={"short_convolution": 3}).double()
    _move(layer)
    x = torch.randn(2, 7, 16).double()
    shown = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    shown[1, ..., :3] = False
    q, k, v = layer.project(x, mask=shown)[:3]
    raw = torch.cat([proj(x) for proj in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
    raw = raw * shown[:, 0, 0, :, None]
    kernel = layer.short_convolution.kernel
    expected = torch.zeros_like(raw)
    for t in range(7):
        for i in range(3):
            if t >= i:
                expected[:, t] += kernel[:, 2 - i] * raw[:, t - i]
    found = torch.cat([y.transpose(1, 2).flatten(2) for y in (q, k, v)], -1)
    torch.testing.assert_close(found, expected)
    alone = layer(x[1:, 3:])
    torch.testing.assert_close(layer(x, shown)[1:, 3:], alone)
    with pytest.raises(ValueError, match=r"the mask must be broadcastable to \[B, 1, 1, T\]"):
        layer(x, torch.ones(7, 7, dtype=torch.bool))


def test_rotary_positions_are_those_of_transformers() -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 5, 8)
    expected, _ = apply_rotary_pos_emb(x, x, angles.cos(), angles.sin())
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin()), expected)


def test_rotary_positions_of_other_widths() -> None:
    """A width that divides the angles' has the angles of an embedding of that width."""
    positions = torch.arange(5.0)[None, :, None]

    def angles(width: int) -> torch.Tensor:
        frequencies = 10_000 ** (-torch.arange(0, width, 2) / width)
        return (positions * frequencies).repeat(1, 1, 2)

    x, wide = torch.randn(2, 3, 5, 4), angles(16)
    own = angles(4)
    found = rotate(x, wide.cos(), wide.sin())
    torch.testing.assert_close(found, rotate(x, own.cos(), own.sin()))
    x = torch.randn(2, 3, 5, 7)
    found = rotate(x, own.cos(), own.sin())
    torch.testing.assert_close(found[..., :4], rotate(x[..., :4], own.cos(), own.sin()))
    assert torch.equal(found[..., 4:], x[..., 4:])


def test_positions_may_be_left_to_a_decay() -> None:
    x, angles = torch.randn(1, 6, 16), torch.randn(1, 6, 8)
    rotary = {"position_embeddings": (angles.cos(), angles.sin())}
    for options, same in (({}, False), ({"rotary": False}, True)):
        layer = Attention(16, 2, "softmax+decay", options=options)
        assert torch.equal(layer(x), layer(x, **rotary)) == same


def test_the_spec_is_shown() -> None:
    layer = Attention(32, 4, dataclasses.replace(sr.variant("norm"), clamp=3.0))
    assert "clamp=3.0" in str(layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be an integer of at least 1, not 0"),
        ({"num_heads": "4"}, "num_heads must be an integer of at least 1, not '4'"),
        ({"num_heads": 4, "num_kv_heads": 2.0}, "num_kv_heads must be an integer .* not 2.0"),
        ({"num_heads": 4, "head_dim": 0}, "head_dim must be an integer of at least 1, not 0"),
        ({"num_heads": 5}, "The 5 heads must divide the hidden size 32"),
        ({"num_heads": 4, "num_kv_heads": 3}, "The 3 key/value heads must divide the 4"),
        ({"num_heads": 4, "spec": "gates"}, "Did you mean 'gate'"),
        ({"num_heads": 4, "options": {"map": 1}}, "Unknown layer option 'map'"),
        (
            {"num_heads": 4, "spec": "gate", "options": {"skip": True}},
            "needs output_gate='after_norm' or 'none', not 'before_norm'",
        ),
        (
            {"num_heads": 4, "spec": "retnet", "options": {"decay_rule": "time_step"}},
            "decay_rule='time_step' needs the decay 'token', not 'head'",
        ),
        (
            {"num_heads": 4, "options": {"decay_rule": "time_step"}},
            "decay_rule='time_step' needs the decay 'token', not 'none'",
        ),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(32, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sr.variants())
def test_gradients_of_each_sample(name: str) -> None:
    """Those of torch.func, with the parameters as arguments, are autograd's."""
    torch.manual_seed(0)
    layer, x = Attention(16, 2, name).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    weights = {key: p.detach() for key, p in layer.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, weights, (row[None],)).square().sum()

    found = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for i, row in enumerate(x):
        total = layer(row[None]).square().sum()
        expected = torch.autograd.grad(total, list(layer.parameters()))
        torch.testing.assert_close([found[key][i] for key in weights], list(expected))


def test_wrong_inputs_are_named() -> None:
    layer, x = Attention(32, 4, "norm"), torch.randn(2, 9, 32)
    angles = torch.randn(1, 9, 8)
    for wrong, message in (
        (x[0], r"\[B, T, 32\], not \[9, 32\]"),
        (x[..., :16], r"\[B, T, 32\], not \[2, 9, 16\]"),
        ("x", r"\[B, T, 32\], not str"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(wrong)
    for pair, message in (
        ((angles,), "must be a pair, cosines and sines, not 1"),
        (5, "must be a pair, cosines and sines, not 5"),
        ((angles[0], angles), r"cosines .* must be \[2 or 1, 9, head_dim\], .* not \[9, 8\]"),
        ((angles, angles[:, :7]), r"sines .* must be \[2 or 1, 9, head_dim\], .* not \[1, 7, 8\]"),
        ((angles, angles[..., :6]), r"sines .* both of one shape, not \[1, 9, 6\]"),
        ((angles, None), "sines .* not NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, position_embeddings=pair)
    shown = torch.ones(2, 9, dtype=torch.bool)
    for options in ({}, {"short_convolution": 3}):
        with pytest.raises(ValueError, match=r"as mask\[:, None, None\]"):
            Attention(32, 4, "norm", options=options)(x, shown)
    assert torch.equal(layer(x, shown[:, None, None]), layer(x))
    assert layer(x[:, :0]).shape == (2, 0, 32)
    assert Attention(32, 4, options={"short_convolution": 3})(x[:, :0]).shape == (2, 0, 32)
    assert Attention(32, 4, options={"rotary": False})(x, position_embeddings=5).shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.bfloat16()).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fixed_decays_of_retnet_are_not_rounded(dtype: torch.dtype) -> None:
    """The slowest of 24 heads fades by 2^-28 per token: less than float16's smallest number."""
    layer = Attention(96, 24, "retnet").to(dtype)
    found = layer.project(torch.zeros(1, 2, 96, dtype=dtype)).log_decay
    kept = 1 - 2.0 ** (-5 - torch.arange(24, dtype=torch.float64))
    assert found is not None
    torch.testing.assert_close(found.double(), kept.log(), atol=0.0, rtol=1e-6)
