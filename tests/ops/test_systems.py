"""Layers of related systems against their papers' formulas, written out.

Each formula takes the layer's own weights, and queries, keys and values of every head,
[B, H, T, D]. It returns the heads' outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.ops import formula
from softmax_rnn.ops.layer import core as layer_module
from softmax_rnn.ops.systems import SYSTEMS

HEADS, KV_HEADS, TOKENS = 4, 2, 11
System = Callable[[sr.Attention, Tensor, Tensor, Tensor, Tensor], Tensor]


def per_head(x: Tensor) -> Tensor:
    """Every key/value head, for each of its query heads: [B, Hkv, ...] or [Hkv, ...]."""
    return x.repeat_interleave(HEADS // KV_HEADS, dim=min(1, x.ndim - 1))


def recurrence(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """``S_t = keep_t S_{t-1} + k_t v_t``, ``o_t = q_t S_t``; keep [B, H, T, 1 or D]."""
    state, outputs = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1]).double(), []
    keep = keep.expand(*k.shape[:3], keep.shape[-1])
    for q_t, k_t, v_t, keep_t in zip(*(x.unbind(2) for x in (q, k, v, keep)), strict=True):
        state = keep_t[..., None] * state + k_t[..., None] * v_t[..., None, :]
        outputs.append((q_t[..., None, :] @ state).squeeze(-2))
    return torch.stack(outputs, dim=2)


def quotient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention with a denominator, of features."""
    keep = torch.ones(1, 1, 1, 1).double()
    return recurrence(q, k, v, keep) / recurrence(q, k, torch.ones_like(v[..., :1]), keep)


def masked(scores: Tensor) -> Tensor:
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf)


def swish_gate(layer: sr.Attention, x: Tensor) -> Tensor:
    return F.silu(layer.output_gate(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps=2.0**-23)


def forget(layer: sr.Attention, x: Tensor) -> Tensor:
    """``log f`` of every token and query head, [B, H, T]."""
    return per_head(F.logsigmoid(layer.decay.proj(x) + layer.decay.bias).transpose(1, 2))


def fading(log_forget: Tensor) -> Tensor:
    """``sum_{s < l <= t} log f_l`` of every pair, [B, H, T, T]."""
    rows = [[log_forget[..., s + 1 : t + 1].sum(-1) for s in range(TOKENS)] for t in range(TOKENS)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def retnet(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gamma = per_head(torch.tensor([1 - 1 / 32, 1 - 1 / 64]).double())[:, None, None]
    out = recurrence(q, k / math.sqrt(8), v, gamma)
    return swish_gate(layer, x) * rms(out)


def mamba2(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dt = F.softplus(layer.decay.proj(x) + layer.decay.bias).mT[..., None]
    a = -layer.decay.log_rate.exp()[:, None, None]
    y = recurrence(q, k, per_head(dt) * v, per_head((a * dt).exp()))
    y = (y + layer.skip_weight[:, None, None] * v) * swish_gate(layer, x)
    y = rms(y.transpose(1, 2).flatten(2), layer.merged_norm_weight)
    return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def gla(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    alpha = layer.decay.up(layer.decay.down(x)).sigmoid() ** (1 / 16)
    alpha = per_head(alpha.unflatten(-1, (KV_HEADS, -1)).transpose(1, 2))
    return swish_gate(layer, x) * rms(recurrence(q, k / math.sqrt(8), v, alpha))


def convolved(layer: sr.Attention, x: Tensor, width: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every head after 2Mamba's convolution."""
    parts = []
    kernel, bias = layer.short_convolution.kernel, layer.short_convolution.bias
    flat = torch.cat([proj(x) for proj in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
    out = torch.zeros_like(flat) if bias is None else bias.expand_as(flat)
    for back in range(width):
        earlier = F.pad(flat, (0, 0, back, 0))[:, :TOKENS]
        out = out + kernel[:, -1 - back] * earlier
    for part, heads in zip(out.split((32, 16, 16), -1), (HEADS, KV_HEADS, KV_HEADS), strict=True):
        parts.append(part.unflatten(-1, (heads, -1)).transpose(1, 2))
    return parts[0], per_head(parts[1]), per_head(parts[2])


def softplus_decay(layer: sr.Attention, x: Tensor) -> Tensor:
    return fading(per_head(-F.softplus(layer.decay.proj(x)).transpose(1, 2)))


def two_mamba(layer: sr.Attention, x: Tensor, *_: Tensor) -> Tensor:
    q, k, v = convolved(layer, x)
    weights = ((q @ k.mT) ** 2 / 8 * softplus_decay(layer, x).exp()).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def two_mamba_e(layer: sr.Attention, x: Tensor, *_: Tensor) -> Tensor:
    q, k, v = convolved(layer, x)
    return masked(q @ k.mT / math.sqrt(8) + softplus_decay(layer, x)).softmax(-1) @ v


def forgetting(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(8) + fading(forget(layer, x))
    return masked(scores).softmax(-1) @ v


def gated_attention(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gate = layer.output_gate(x).sigmoid().unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return gate * F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_sink(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = masked(q @ k.mT / math.sqrt(8))
    sinks = layer.sink[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v


def power_retention(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    log_weights = 2 * (q @ k.mT / math.sqrt(8)).abs().log() + fading(forget(layer, x))
    return masked(log_weights).softmax(-1) @ v


def based(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def phi(x: Tensor) -> Tensor:
        squares = (x[..., None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
        width = x.shape[-1]
        return torch.cat((torch.ones_like(x[..., :1]), x / width**0.25, squares / width**0.5), -1)

    return quotient(phi(q), phi(k), v)


def rebased(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def phi(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        x = gamma[:, None] * F.layer_norm(x, (8,)) + beta[:, None]
        return (x[..., None] * x[..., None, :]).flatten(-2)

    own = layer.feature_map
    k_scale, k_shift = (x.repeat_interleave(2, 0) for x in (own.k_scale, own.k_shift))
    return quotient(phi(q, own.q_scale, own.q_shift), phi(k, k_scale, k_shift), v)


def taylorshift(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tau = layer.temperature_logit.exp()[:, None, None]
    scores = tau * F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    weights = (1 + scores + scores**2 / 2).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def performer(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def phi(x: Tensor) -> Tensor:
        x = x / 8**0.25
        return torch.exp(x @ layer.feature_map.directions.T - x.square().sum(-1, True) / 2)

    return quotient(phi(q), phi(k), v)


def rfa(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    angles = [F.normalize(y, dim=-1) @ layer.feature_map.directions.T for y in (q, k)]
    # sin sin + cos cos = cos of the difference
    weights = (angles[0][..., :, None, :] - angles[1][..., None, :, :]).cos().sum(-1).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def cosformer(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    t = torch.arange(TOKENS).double()
    weights = (q.relu() @ k.relu().mT) * (math.pi / 2 * (t[:, None] - t) / 2048).cos()
    weights = weights.tril()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6) @ v


def softmaxes(x: Tensor, matrix: Tensor) -> Tensor:
    """Hedgehog's features."""
    y = torch.einsum("bhti,hoi->bhto", x, matrix)
    return torch.cat((y.softmax(-1), (-y).softmax(-1)), -1)


def hedgehog(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    own = layer.feature_map
    matrix = own.k_matrix.repeat_interleave(2, 0)
    return quotient(softmaxes(q, own.q_matrix), softmaxes(k, matrix), v)


def window(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = []
    for t in range(TOKENS):
        near = slice(max(0, t - 2), t + 1)
        scores = q[:, :, t, None] @ k[:, :, near].mT / math.sqrt(8)
        rows.append(scores.softmax(-1) @ v[:, :, near])
    return torch.cat(rows, 2)


def window_taylor(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(8)
    near = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(-2)
    far = layer.outside_logit.exp()[:, None, None] * (1 + scores + scores**2 / 2)
    weights = torch.where(near, scores.exp(), far).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def lolcats(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    own = layer.feature_map
    features = softmaxes(q, own.q_matrix), softmaxes(k, own.k_matrix.repeat_interleave(2, 0))
    factor = layer.outside_logit.exp()[:, None, None] / math.sqrt(16)
    near = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(-2)
    far = factor * (features[0] @ features[1].mT)
    weights = torch.where(near, (q @ k.mT / math.sqrt(8)).exp(), far).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def window_state(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    own = layer.feature_map
    k_matrix, k_shift = (y.repeat_interleave(2, 0) for y in (own.k_matrix, own.k_shift))
    q_features = (8**-0.25 * q @ own.q_matrix.mT + own.q_shift[:, None]).relu() ** 2
    k_features = (8**-0.25 * k @ k_matrix.mT + k_shift[:, None]).relu() ** 2
    factor = layer.outside_logit.exp()[:, None, None] / math.sqrt(16)
    near = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(-2)
    near[:, 0] = True
    far = factor * (q_features @ k_features.mT)
    weights = torch.where(near, (q @ k.mT / math.sqrt(8)).exp(), far).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def taylor_norm(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(8)
    weights = 1 + scores + scores**2 / 2 + scores**3 / 6
    return F.normalize(weights.tril() @ v, dim=-1)


def polynomial(layer: sr.Attention, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(8)
    a = layer.coefficient_logit.exp() / torch.tensor([1.0, 1.0, 2.0, 6.0])
    powers = torch.stack([torch.ones_like(scores), scores, scores**2, scores**3], dim=-1)
    return F.normalize((powers @ a[:, None, :, None]).squeeze(-1).tril() @ v, dim=-1)


# A short window, an odd order: what the name alone does not show.
FORMULAS: dict[str, System] = {
    "retnet": retnet,
    "mamba2": mamba2,
    "gla": gla,
    "2mamba": two_mamba,
    "2mamba_e": two_mamba_e,
    "forgetting": forgetting,
    "gated_attention": gated_attention,
    "attention_sink": attention_sink,
    "power_retention:2": power_retention,
    "based": based,
    "rebased": rebased,
    "taylorshift": taylorshift,
    "performer": performer,
    "rfa": rfa,
    "cosformer": cosformer,
    "hedgehog": hedgehog,
    "window:3": window,
    "window_taylor:2": window_taylor,
    "lolcats:3": lolcats,
    "window_state:3": window_state,
    "taylor_norm:3": taylor_norm,
    "polynomial:3": polynomial,
}


def built(name: str | sr.AttentionSpec, options: dict[str, Any] | None = None) -> sr.Attention:
    """A layer with parameters of its own that are not at their initial values."""
    torch.manual_seed(0)
    spec = sr.variant(name) if isinstance(name, str) else name
    if name == "window_taylor:2":
        spec = sr.AttentionSpec.from_dict({**spec.to_dict(), "window": 3})
    given = options if isinstance(name, sr.AttentionSpec) else sr.layer_options(name)
    layer = sr.Attention(32, HEADS, spec, num_kv_heads=KV_HEADS, options=given).double()
    if name == "retnet":
        layer.decay.reset_parameters()  # in float64
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3) if parameter.ndim == 2 else parameter.add_(
                0.5 * torch.randn_like(parameter)
            )
    return layer


@pytest.mark.parametrize("computed", ["operation", "formula"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_layer_is_the_systems(name: str, computed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = built(name)
    x = torch.randn(2, TOKENS, 32).double()
    q, k, v = (
        proj(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        for proj, heads in (
            (layer.q_proj, HEADS),
            (layer.k_proj, KV_HEADS),
            (layer.v_proj, KV_HEADS),
        )
    )
    out = FORMULAS[name](layer, x, q, per_head(k), per_head(v))
    expected = layer.o_proj(out.transpose(1, 2).flatten(2))
    if computed == "formula":
        monkeypatch.setattr(layer_module, "attention", _by_formula)
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert found.std() > 1e-3


def _by_formula(*args: Tensor, state: None, return_state: bool, **options: Tensor) -> Tensor:
    return formula.attention(*args, **options)


def test_every_system_has_its_formula() -> None:
    assert {name.partition(":")[0] for name in FORMULAS} == set(SYSTEMS)


# The steps by which 2Mamba was built up: what each changes of its layer, and the weights, which it
# is given after the convolution. Options of its layer, of its spec, and the formula.
LINEAR = {"series": "power", "order": 1, "feature_map": "relu", "scale": 1.0}
SQUARE = {"series": "power", "order": 2}
CONVOLVED = {"short_convolution": 2, "convolution_bias": True, "rotary": False}
SOFTPLUS = {**CONVOLVED, "decay_rule": "softplus"}
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (LINEAR, {"rotary": False}),
    "linear, norm": ({**LINEAR, "denominator": "none"}, {"rotary": False, "merged_norm": True}),
    "convolution of 2": (LINEAR, CONVOLVED),
    "convolution of 3": (LINEAR, {**CONVOLVED, "short_convolution": 3}),
    "convolution of 4, silu": (
        LINEAR,
        {**CONVOLVED, "short_convolution": 4, "convolution_activation": "swish"},
    ),
    "softplus": ({**LINEAR, "decay": "token"}, SOFTPLUS),
    "Mamba-2's decay": (
        {**LINEAR, "decay": "token", "input_gate": True},
        {**CONVOLVED, "decay_rule": "time_step"},
    ),
    "D": ({**LINEAR, "decay": "token"}, {**SOFTPLUS, "skip": True, "skip_per_channel": True}),
    "Z": (
        {**LINEAR, "decay": "token", "output_gate": "after_norm"},
        {**SOFTPLUS, "gate_activation": "swish", "gate_per_channel": True},
    ),
    "dt": (
        {**LINEAR, "decay": "token", "input_gate": True},
        {**SOFTPLUS, "input_activation": "softplus"},
    ),
    "square": ({**SQUARE, "decay": "token"}, SOFTPLUS),
    "square, norm": (
        {**SQUARE, "decay": "token", "denominator": "none"},
        {**SOFTPLUS, "merged_norm": True},
    ),
    "exp": ({"decay": "token"}, SOFTPLUS),
}


def step_by_hand(layer: sr.Attention, x: Tensor) -> Tensor:
    """The outputs [B, T, hidden_size] of any of these layers, from its weights."""
    spec, options = layer.spec, layer.options
    if options.short_convolution:
        flat = convolved(layer, x, options.short_convolution)
        q, k, v = (F.silu(y) if options.convolution_activation == "swish" else y for y in flat)
    else:
        projected = ((layer.q_proj, HEADS), (layer.k_proj, KV_HEADS), (layer.v_proj, KV_HEADS))
        q, k, v = (f(x).unflatten(-1, (heads, -1)).transpose(1, 2) for f, heads in projected)
        k, v = per_head(k), per_head(v)
    if spec.series == "exp":
        weights = (q @ k.mT / math.sqrt(8)).exp()
    else:
        weights = q.relu() @ k.relu().mT if spec.order == 1 else (q @ k.mT) ** 2 / 8
    added = v
    if options.decay_rule == "softplus":
        weights = weights * softplus_decay(layer, x).exp()
    if options.decay_rule == "time_step":
        dt = F.softplus(layer.decay.proj(x) + layer.decay.bias).transpose(1, 2)
        rate = -layer.decay.log_rate.exp()[:, None]
        weights = weights * fading(per_head(rate * dt)).exp()
        added = per_head(dt)[..., None] * v
    if options.input_activation == "softplus":
        added = per_head(F.softplus(layer.input_gate(x)).transpose(1, 2))[..., None] * v
    weights = weights.tril()
    out = weights @ added
    if spec.denominator != "none":
        total = weights.sum(-1, keepdim=True)
        out = out / total.masked_fill(total == 0, 1.0)  # relu: a row may have no weight
    if options.skip:
        out = out + layer.skip_weight[:, None] * v
    if spec.output_gate != "none":
        out = out * F.silu(layer.output_gate(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    out = out.transpose(1, 2).flatten(2)
    if options.merged_norm:
        out = rms(out, layer.merged_norm_weight)
    found: Tensor = layer.o_proj(out)
    return found


@pytest.mark.parametrize("name", STEPS)
def test_every_step_of_2mamba_is_its_formula(name: str) -> None:
    """Also token by token, where there is a state."""
    spec, options = STEPS[name]
    layer = built(sr.AttentionSpec.from_dict(spec), options)
    x = torch.randn(2, TOKENS, 32).double()
    expected = step_by_hand(layer, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)
    assert expected.std() > 1e-3
    if not layer.spec.has_state:
        return
    state, outs = None, []
    for token in x.split((3, *[1] * (TOKENS - 3)), 1):
        out, state = layer(token, state=state, return_state=True)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("softmax+decay", torch.exp),
        ("taylor:2+decay", lambda s: 1 + s + s**2 / 2),
        ("power:4+decay", lambda s: s**4),
    ],
)
def test_decay_of_any_variant(name: str, weight: Callable[[Tensor], Tensor]) -> None:
    layer, x = built(name), torch.randn(2, TOKENS, 32).double()
    q, k, v = layer.project(x)[:3]
    weights = weight(q @ per_head(k).mT / math.sqrt(8)) * fading(forget(layer, x)).exp()
    weights = weights.tril()
    out = weights / weights.sum(-1, keepdim=True) @ per_head(v)
    expected = layer.o_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-11)


def test_performers_features_average_to_exp() -> None:
    """And those of random feature attention to ``exp(-|q - k|^2 / 2)`` of unit vectors."""
    torch.manual_seed(0)
    q, k = (0.5 * torch.randn(2, 1, 1, 1, 16).double()).unbind(0)
    positions = torch.zeros(1, 1)
    for name, expected in (
        ("performer", (q @ k.mT / 4).exp()),
        ("rfa", (-(F.normalize(q, dim=-1) - F.normalize(k, dim=-1)).square().sum() / 2).exp()),
    ):
        options = {"qk_dim": 16, "num_features": 40_000}
        layer = sr.Attention(16, 1, name, options=options).double()
        mapped = layer.feature_map(q, k, positions)
        found = (mapped[0] @ mapped[1].mT).squeeze()
        torch.testing.assert_close(found, expected.squeeze(), rtol=0.03, atol=0.0)


def test_random_features_are_orthogonal_in_groups() -> None:
    directions = sr.Attention(16, 2, "performer", options={"num_features": 13}).get_buffer(
        "feature_map.directions"
    )
    assert directions.shape == (13, 8)
    for group in directions.split(8):
        products = group @ group.T
        assert (products - products.diag().diag()).abs().max() < 1e-5 * products.abs().max()
    assert directions.norm(dim=-1).std() > 0.1  # their lengths are those of Gaussian vectors
