"""Inputs for a spec, its output and every gradient, and how to compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.plan import FORMS, reason
from softmax_rnn.ops.signature import signature

MASKS = ("none", "padding", "heads", "full")

# The same numbers in other places of memory; those of "expanded" are the first head's.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "unbound": lambda x: torch.stack([x, x + 1, -x], dim=-1).unbind(-1)[0],
    "heads_second": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: F.pad(x, (3, 2))[..., 3:-2],
    "every_other": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
    "negated": lambda x: torch._neg_view(-x),  # the sign is applied when it is read
}

Tensors = dict[str, Tensor]


def _dominating(x: Tensors) -> None:
    keys = x["k"].shape[2]
    x["q"].mul_(0.1).add_(3.0)
    x["k"].mul_(0.1).sub_(6.0)[:, :, : keys // 8 + 1].add_(12.0)


def _still(x: Tensors) -> None:
    _dominating(x)
    x["q"].sub_(3.0).mul_(0.1)
    x["k"].mul_(6.0)


def _opposite(x: Tensors) -> None:
    half = x["k"].shape[2] // 2
    x["k"][:, :, half : 2 * half] = -x["k"][:, :, :half]


def _equal(x: Tensors) -> None:
    for name in "qk":
        x[name].copy_(x[name][:, :, :1].clone().expand_as(x[name]))


def _fading(x: Tensors) -> None:
    x["k"][:, :, : x["k"].shape[2] // 3].mul_(1e3)
    x["k"][:, :, x["k"].shape[2] // 3 :].mul_(1e-3)


def _resets(x: Tensors) -> None:
    _fading(x)
    if "log_decay" in x and x["log_decay"].ndim > 1:
        x["log_decay"].zero_()[:, :, x["k"].shape[2] // 3 :: 50] = -1e4


def _sparse(x: Tensors) -> None:
    for place, name in enumerate("qkv"):
        x[name].mul_((torch.arange(x[name].numel()).view_as(x[name]) * 7 + place) % 3 > 0)
        x[name][:, :, place::3].mul_(torch.arange(x[name].shape[3]) % 2 == place % 2)


# Inputs that try to make a bound lie: bounds of scores by which keys are skipped, scales chosen
# from the largest key, sums in which keys cancel. Each changes random tensors, [B, H, S, ...].
INPUTS: dict[str, Callable[[Tensors], object]] = {
    "normal": lambda x: None,
    "dominating": _dominating,  # the first keys decide, however far they have faded
    "still": _still,  # so do these, but only a feature map makes the queries large
    "opposite": _opposite,
    "equal": _equal,
    "one_huge": lambda x: x["k"][:, :, x["k"].shape[2] // 4].mul_(100.0),
    "fading": _fading,  # large keys, then small ones
    "resets": _resets,  # and nothing is left of the large ones
    "uneven": lambda x: (x["q"][:, ::2].mul_(30.0), x["q"][:, 1::2].mul_(1e-3)),  # query heads
    "sparse": _sparse,  # scores and values are often exactly 0
    "small": lambda x: x["k"].mul_(1e-8),
    "large": lambda x: x["q"].mul_(20.0),
}

# One spec or more for each field beyond the paper's: decays, polynomials, windows and sinks.
WIDENED: dict[str, sr.AttentionSpec] = {
    "forgetting": sr.AttentionSpec(decay="token"),
    "forgetting_head": sr.AttentionSpec(decay="head"),
    "forgetting_norm": sr.AttentionSpec(decay="token", denominator="none", norm="l2"),
    "forgetting_gate": sr.AttentionSpec(
        decay="token", clamp=5.0, denominator="length", output_gate="before_norm"
    ),
    "exp_channel": sr.AttentionSpec(decay="channel"),
    "retention": sr.AttentionSpec(series="power", order=1, decay="head", denominator="none"),
    "gla": sr.AttentionSpec(series="power", order=1, decay="channel", denominator="none"),
    "taylor_token": sr.AttentionSpec(series="taylor", order=2, decay="token"),
    "taylor_channel": sr.AttentionSpec(series="taylor", order=4, decay="channel"),
    "power_token": sr.AttentionSpec(series="power", order=2, decay="token"),
    "power_channel": sr.AttentionSpec(series="power", order=2, decay="channel"),
    "elu_token": sr.AttentionSpec(series="power", order=1, feature_map="elu1", decay="token"),
    "cosine_token": sr.AttentionSpec(
        series="power", order=1, feature_map="cosine", decay="token", denominator="learned_length"
    ),
    "clamped_channel": sr.AttentionSpec(
        series="taylor", order=2, clamp=1.0, decay="channel", denominator="length"
    ),
    "fixed_polynomial": sr.AttentionSpec(series="polynomial", coefficients=(1.0, 0.7, 0.5)),
    "learned_polynomial": sr.AttentionSpec(
        series="polynomial", order=3, denominator="none", norm="l2"
    ),
    "learned_polynomial_token": sr.AttentionSpec(
        series="polynomial", order=2, decay="token", floor=1.0
    ),
    "learned_polynomial_channel": sr.AttentionSpec(
        series="polynomial", order=2, decay="channel", feature_map="elu1"
    ),
    "sink": sr.AttentionSpec(denominator="sum_plus_sink"),
    "taylor_sink": sr.AttentionSpec(series="taylor", order=2, denominator="sum_plus_sink"),
    "window": sr.AttentionSpec(window=7),
    "window_global": sr.AttentionSpec(window=7, global_keys=3),
    "window_one": sr.AttentionSpec(window=1, global_keys=1, denominator="length"),
    "window_decay": sr.AttentionSpec(window=9, global_keys=2, decay="token"),
    "window_taylor": sr.AttentionSpec(series="taylor", order=2, window=6, outside="series"),
    "window_taylor_token": sr.AttentionSpec(
        series="taylor", order=3, window=6, outside="series", decay="token", floor=1.0
    ),
    "window_polynomial_channel": sr.AttentionSpec(
        **{"series": "polynomial", "order": 2, "window": 3, "outside": "series"},
        **{"decay": "channel", "denominator": "length", "feature_map": "elu1"},
    ),
    "window_power": sr.AttentionSpec(series="power", order=3, window=5, norm="l2"),
    "window_taylor_first": sr.AttentionSpec(
        series="taylor", order=2, window=6, global_keys=3, outside="series"
    ),
    "window_linear_first_token": sr.AttentionSpec(
        **{"series": "power", "order": 1, "window": 4, "global_keys": 9, "outside": "series"},
        **{"decay": "token", "denominator": "sum_plus_sink", "feature_map": "elu1"},
    ),
    "window_polynomial_first_channel": sr.AttentionSpec(
        **{"series": "polynomial", "order": 2, "window": 1, "global_keys": 2, "outside": "series"},
        **{"decay": "channel", "denominator": "learned_length", "norm": "rms"},
    ),
    "window_square_first_head": sr.AttentionSpec(
        **{"series": "power", "order": 2, "window": 5, "global_keys": 1, "outside": "series"},
        **{"decay": "head", "norm": "l2"},
    ),
}


# The names that the operation takes. The others are of a layer (test_systems.py).
VARIANTS = tuple(name for name in sr.variants() if not sr.layer_options(name).beside_operation)


def with_directions(names: Iterable[str]) -> list[tuple[str, bool]]:
    """Each name with ``causal`` True and False."""
    return [(name, causal) for name in names for causal in (True, False)]


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: odd, with grouped queries, S != T and E != D unless told otherwise."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 37
    keys: int = 41
    width: int = 8
    value_width: int = 6
    outside_width: int | None = None  # of queries and keys outside a window; None for the same ones


@dataclass(frozen=True)
class Case:
    """A spec's inputs in float64 and what to visit them with.

    ``layouts``: of q, k, v and the gradient (``upstream``), by name; contiguous unless named.
    """

    spec: sr.AttentionSpec
    tensors: dict[str, Tensor] = field(repr=False)
    mask: Tensor | None = field(repr=False)
    causal: bool
    upstream: Tensor = field(repr=False)
    layouts: Mapping[str, str] = field(default_factory=dict)

    def laid_out(self, name: str, x: Tensor) -> Tensor:
        """The tensor of a name in its layout."""
        return LAYOUTS[self.layouts.get(name, "contiguous")](x)

    def run(
        self, attend: Callable[..., Tensor], dtype: torch.dtype = torch.float64, **options: object
    ) -> dict[str, Tensor]:
        """The output of ``attend`` under ``out``, and the gradient of every input by its name."""
        inputs = {name: x.to(dtype).requires_grad_() for name, x in self.tensors.items()}
        q, k, v = (self.laid_out(name, inputs[name]) for name in "qkv")
        extras = {name: x for name, x in inputs.items() if name not in ("q", "k", "v")}
        out = attend(q, k, v, self.spec, causal=self.causal, mask=self.mask, **extras, **options)
        assert out.dtype == dtype
        upstream = self.laid_out("upstream", self.upstream.to(dtype))
        if not out.requires_grad:  # of loops over keys that are all hidden
            out = out + 0.0 * sum(x.sum() for x in inputs.values())
        grads = torch.autograd.grad(out, list(inputs.values()), upstream, materialize_grads=True)
        return {"out": out.detach(), **dict(zip(inputs, grads, strict=True))}

    def in_units(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of queries and keys times the size of each, so that all compare."""
        sizes = {name: self.tensors[name].abs().amax(-1, keepdim=True) for name in "qk"}
        return {name: x.double() * sizes.get(name, 1.0) for name, x in results.items()}

    @property
    def forms(self) -> list[str]:
        """The forms that can compute it in float32 (and in float64)."""
        return self.forms_of(torch.float32)

    def forms_of(self, dtype: torch.dtype) -> list[str]:
        """The forms that can compute it in a type: those with a state take masks of keys alone."""
        q, k, v = (self.tensors[name].to(dtype) for name in "qkv")
        of_call = signature(Call(q, k, v, self.spec, mask=self.mask))
        return [name for name in sr.forms(self.spec) if not reason(FORMS[name], of_call)]


def make_case(
    spec: sr.AttentionSpec,
    *,
    causal: bool = True,
    mask: str = "none",
    shape: Shape = Shape(),
    seed: int = 0,
    spread: float = 1.0,
    decay: float = 0.1,
    gate_per_channel: bool = False,
    inputs: str = "normal",
    backward: bool = False,
) -> Case:
    """Random inputs; ``spread`` scales queries and keys, ``decay`` the log decays.

    ``inputs`` names a change of them, one of ``INPUTS``. If it is not ``causal``, the spec of a
    decay or a window gets as many queries as keys, and with ``backward`` decays of later keys.
    """
    generator = torch.Generator().manual_seed(seed)
    if not causal and spec.positional:
        shape = replace(shape, queries=shape.keys)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    b, h, g, t, s = shape.batch, shape.heads, shape.kv_heads, shape.queries, shape.keys
    tensors: Tensors = {
        "q": spread * normal(b, h, t, shape.width),
        "k": spread * normal(b, g, s, shape.width),
        "v": normal(b, g, s, shape.value_width),
    }
    if spec.input_gate:
        tensors["input_gate"] = normal(b, g, s).sigmoid()
    if spec.output_gate != "none":
        size = (shape.value_width,) if gate_per_channel else ()
        tensors["output_gate"] = normal(b, h, t, *size).sigmoid()
    if spec.denominator == "learned_length":
        tensors["length_power"] = normal(h).sigmoid()
    decays = {"head": (g,), "token": (b, g, s), "channel": (b, g, s, shape.width)}
    if spec.decay != "none":
        tensors["log_decay"] = -decay * normal(*decays[spec.decay]).exp()
        if backward and not causal:
            tensors["backward_log_decay"] = -decay * normal(*decays[spec.decay]).exp()
    if spec.learned_coefficients:
        assert spec.order is not None
        tensors["coefficients"] = (0.5 * normal(h, spec.order + 1)).exp()
    if spec.denominator == "sum_plus_sink":
        tensors["sink"] = normal(h)
    if spec.outside == "series":
        tensors["outside_scale"] = normal(h).exp()
        if (width := shape.outside_width) is not None:
            width = shape.width if spec.decay == "channel" else width
            tensors["outside_q"] = spread * normal(b, h, t, width)
            tensors["outside_k"] = spread * normal(b, g, s, width)
    if spec.norm in ("rms", "layer"):
        tensors["norm_weight"] = 1 + 0.3 * normal(shape.value_width)
    if spec.norm == "layer":
        tensors["norm_bias"] = normal(shape.value_width)
    INPUTS[inputs](tensors)
    upstream = normal(b, h, t, shape.value_width)
    shown = None
    if mask == "padding":
        shown = torch.ones(b, 1, 1, s, dtype=torch.bool)
        shown[-1, ..., : s // 4] = False
    elif mask == "gaps":  # more than a window may be hidden
        shown = torch.rand(b, 1, 1, s, generator=generator) > 0.5
        shown[0, ..., s // 4 : s // 2] = False
    elif mask == "heads":  # each head sees some keys
        shown = torch.rand(b, h, 1, s, generator=generator) > 0.4
    elif mask == "full":
        shown = torch.rand(b, h, t, s, generator=generator) > 0.4
        shown[0, 0, t // 2] = False
    return Case(spec, tensors, shown, causal, upstream)


def assert_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, note: str = ""
) -> None:
    """Every tensor agrees, relative to its size, and to what it is made of where it cancels."""
    assert found.keys() == expected.keys()
    floor = max(float(x.norm()) / x.numel() ** 0.5 for x in expected.values())
    for name, x in expected.items():
        y = found[name].double()
        assert y.isfinite().all(), f"{note} {name}: not finite"
        size = float(x.norm()) + max(0.05 * floor, 1e-12) * x.numel() ** 0.5
        error = float((y - x).norm()) / size
        assert error <= tolerance, f"{note} {name}: relative error {error:.2e} > {tolerance:.0e}"
