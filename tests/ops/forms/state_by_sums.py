"""The gradients of a state from its definition, by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

import softmax_rnn as sr
from cases import Case
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.monomials import monomial_factors, state_rows


def products(x: Tensor, degree: int) -> Tensor:
    """The monomials of each row, which autograd can differentiate."""
    rows = [torch.ones_like(x[..., 0])]
    for parent, factor in monomial_factors(x.shape[-1], degree).T.tolist()[1:]:
        rows.append(rows[parent] * x[..., factor])
    return torch.stack(rows, -1)


def state_by_sums(case: Case) -> dict[str, Tensor]:
    """The gradients of the outputs, from dense, and of the state, from its definition."""
    inputs = {key: x.clone().requires_grad_() for key, x in case.tensors.items()}
    spec, given = case.spec, dict(inputs)
    total = sr.attention(*(given.pop(x) for x in "qkv"), spec, **given, form="dense").sum()
    k, v = FEATURE_MAPS[spec.feature_map](inputs["k"]), inputs["v"]
    if spec.row_sum is not None:
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    count = state_rows(spec, k.shape[3])
    rows = products(k, spec.order)[..., -count:]
    if spec.decay != "none":
        each = inputs["log_decay"]
        each = each[:, None].expand(k.shape[:3]) if each.ndim == 1 else each
        faded = (each.flip(2).cumsum(2).flip(2) - each).exp()  # of the decays of later keys
        if spec.decay == "channel":
            rows = products(k * faded, spec.order)[..., -count:]
        else:
            rows = rows * faded.unsqueeze(-1)
    state = v.mT @ rows
    weights = torch.linspace(-1, 1, state.numel(), dtype=torch.float64)
    total = total + weights @ state.flatten()
    found = torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
    return dict(zip(inputs, found, strict=True))
