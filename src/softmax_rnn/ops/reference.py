"""The paper's equations in plain PyTorch. Start here.

Each equation is one function. All are causal and for one head: row ``t`` of ``q``
[T, d] sees the rows ``1..t`` of ``k`` [T, d] and ``v`` [T, e]; the result is [T, e]. As in the
paper, the score is ``Q_t . K_s`` without the factor ``1 / sqrt(d)``; multiply ``q`` by it
beforehand.

| here                      | in the paper                                                 |
|---------------------------|--------------------------------------------------------------|
| ``softmax_attention``     | equation 1                                                   |
| ``linear_attention``      | equation 2                                                   |
| ``kronecker_power``       | section 3.1, property 3                                      |
| ``power_rnn``             | section 3.1: ``Q_t^(x)n . H^n_t``, one recurrence per power  |
| ``recurrent_softmax``     | section 3.1: the sum of these recurrences, up to an order    |
| ``first_order_attention`` | equation 3: the power 1 alone                                |
| ``softmax_gate``          | equation 4: ``G_t``, one over softmax's denominator          |
| ``gate_attention``        | equation 5                                                   |
| ``norm_attention``        | equation 6                                                   |

These functions are slow and may overflow. All are differentiable. Use float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def identity(x: Tensor) -> Tensor:
    """The feature map of equations 1 and 3 to 6."""
    return x


def exp_sum(q: Tensor, k: Tensor, v: Tensor, clamp: float = math.inf) -> Tensor:
    """The numerator of softmax: ``sum_{s <= t} exp(Q_t . K_s) V_s``; scores at most ``clamp``."""
    return (q @ k.T).clamp(max=clamp).exp().tril() @ v


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 1: the numerator divided by ``sum_{n <= t} exp(Q_t . K_n)``."""
    return exp_sum(q, k, v) / exp_sum(q, k, torch.ones_like(v[:, :1]))


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Callable[[Tensor], Tensor] = identity,
    psi: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """Equation 2: ``O_t = phi(Q_t) . H_t`` with ``H_t = psi(K_t)^T V_t + H_{t-1}``."""
    hidden = v.new_zeros(k.shape[1], v.shape[1])
    outputs = []
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        hidden = torch.outer(psi(k_t), v_t) + hidden
        outputs.append(phi(q_t) @ hidden)
    return torch.stack(outputs)


def kronecker_power(x: Tensor, n: int) -> Tensor:
    """``x^(x)n``: all products of ``n`` entries of ``x``; [..., d] -> [..., d^n].

    ``(a . b)^n = a^(x)n . b^(x)n`` (equations 7 and 8).
    """
    power = x.new_ones(*x.shape[:-1], 1)
    for _ in range(n):
        power = (power.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
    return power


def power_rnn(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
    """Section 3.1: ``Q_t^(x)n . H^n_t`` with ``H^n_t = (K_t^(x)n)^T V_t + H^n_{t-1}``, [d^n, e].

    It equals ``sum_{s <= t} (Q_t . K_s)^n V_s``.
    """
    return linear_attention(kronecker_power(q, n), kronecker_power(k, n), v)


def exp_sum_by_rnns(q: Tensor, k: Tensor, v: Tensor, order: int) -> Tensor:
    """Section 3.1: ``sum_{n <= order} 1/n! Q_t^(x)n . H^n_t``, which tends to ``exp_sum``."""
    rnns = [power_rnn(q, k, v, n) / math.factorial(n) for n in range(order + 1)]
    return torch.stack(rnns).sum(0)


def recurrent_softmax(q: Tensor, k: Tensor, v: Tensor, order: int) -> Tensor:
    """Section 3.1: ``G_t`` times the sum of the RNNs, up to ``order`` (in the paper, infinity).

    ``G_t`` is the inverse of the same sum with values 1, so that every order is a weighted mean.
    """
    return exp_sum_by_rnns(q, k, v, order) / exp_sum_by_rnns(q, k, torch.ones_like(v[:, :1]), order)


def first_order_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 3: linear attention is the RNN of power 1, with its factor ``1 / 1!``."""
    return power_rnn(q, k, v, 1) / math.factorial(1)


def softmax_gate(q: Tensor, k: Tensor) -> Tensor:
    """Equation 4: ``G_t = 1 / sum_{s <= t} exp(Q_t . K_s)``, [T]."""
    return 1 / exp_sum(q, k, torch.ones_like(k[:, :1])).squeeze(-1)


def gate_attention(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, clamp: float = math.inf
) -> Tensor:
    """Equation 5: ``G_t / t`` times the numerator, for any gate [T].

    The authors clamp the scores at 5 (section 3.3) and learn the gate from the token (appendix E).
    """
    t = torch.arange(1, len(q) + 1, dtype=q.dtype)
    return (gate / t).unsqueeze(-1) * exp_sum(q, k, v, clamp)


def norm_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 6: the numerator divided by its L2 norm."""
    numerator = exp_sum(q, k, v)
    return numerator / numerator.norm(dim=-1, keepdim=True)
