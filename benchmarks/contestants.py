"""What the benchmark of the op compares: our forms, SDPA, N x N weights, installed peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import softmax_rnn as sr

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Our variants with the form to use.
VARIANTS = {"softmax": "auto", "norm": "auto", "gate": "auto", "taylor:10": "auto"}
VARIANTS |= {"linear_elu": "auto"}
GPU_VARIANTS = {**VARIANTS, "power:2": "chunked"}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Peers with the names of their distributions; power-attention was later renamed `retention`.
PEERS = {
    "flash-linear-attention": ("flash-linear-attention", "fla-core"),
    "power-attention": ("retention", "power-attention"),
}
# The order-2 peer is timed with each of these, since the best one depends on the GPU.
CHUNKS = (128, 512, 1024)


@dataclass(frozen=True)
class Contestant:
    """An implementation of a variant.

    Attributes:
        name: its name in the results.
        variant: the variant that it computes and is checked against.
        attend: the function of q, k, v and a gate per query.
        ours: whether a wrong result ends the benchmark (a wrong peer is listed and not timed).
        heads_first: whether it takes [B, H, T, D]; else [B, T, H, D].
        materialises: whether it computes all T x T weights.
        form: the requested form, for our implementations.
    """

    name: str
    variant: str
    attend: Attend
    ours: bool = True
    heads_first: bool = True
    materialises: bool = False
    form: str | None = None


def contestants(device: str) -> list[Contestant]:
    """All that are installed and can run on the device; plain SDPA is first."""
    found = [Contestant("sdpa", "softmax", _sdpa(None), ours=False)]
    if device == "cuda":
        for name, backend in BACKENDS.items():
            found.append(Contestant(f"sdpa {name}", "softmax", _sdpa(backend), ours=False))
    for name, form in (GPU_VARIANTS if device == "cuda" else VARIANTS).items():
        found.append(Contestant(name, name, _ours(name, form), form=form))
    found += [
        Contestant(f"materialised {name}", name, _materialised(name), materialises=True)
        for name in ("norm", "gate")
    ]
    if device == "cuda":
        found += _peers()
    return found


def installed() -> dict[str, str | None]:
    """Distribution and version of every peer; ``None`` for one that is not installed."""
    return {
        name: next((found for one in names if (found := _version(one))), None)
        for name, names in PEERS.items()
    }


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return None


def _sdpa(backend: SDPBackend | None) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def _ours(name: str, form: str) -> Attend:
    spec = sr.variant(name)
    gated = spec.output_gate != "none"
    return lambda q, k, v, gate: sr.attention(
        q, k, v, spec, output_gate=gate if gated else None, form=form
    )


def _materialised(name: str) -> Attend:
    """The paper's method: all N x N weights, recomputed in the backward pass (checkpointed)."""

    # Products are in the inputs' dtype and weights in float32, as under autocast.
    def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        scores = (q @ k.mT).float() / q.shape[-1] ** 0.5
        if name == "norm":
            return F.normalize(scores.exp().tril().to(v.dtype) @ v, dim=-1)
        length = torch.arange(1, q.shape[-2] + 1, device=q.device)[:, None]
        weights = scores.clamp(max=5).exp().tril() / length
        return gate[..., None] * (weights.to(v.dtype) @ v)

    return lambda q, k, v, gate: checkpoint(attend, q, k, v, gate, use_reentrant=False)


def _peers() -> Iterator[Contestant]:
    """The installed peers; they take [B, T, H, D] and choose their own kernels."""
    if find_spec("fla"):
        chunk = import_module("fla.ops.linear_attn").chunk_linear_attn

        def linear(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
            out: Tensor = chunk(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)[0]
            return out

        yield Contestant("flash-linear-attention", "linear_elu", linear, False, False)
    for module, function in (("retention", "power_retention"), ("power_attention", "power_full")):
        if not find_spec(module):
            continue
        power = getattr(import_module(module), function)
        for size in CHUNKS:
            yield Contestant(
                f"power-attention {size}", "power:2", _power(power, size), False, False
            )
        return


def _power(power: Callable[..., Tensor], size: int) -> Attend:
    return lambda q, k, v, gate: power(q, k, v, deg=2, chunk_size=size)
