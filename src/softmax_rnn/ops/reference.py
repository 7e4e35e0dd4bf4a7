"""The paper's equations 1 to 8 and section 3.1 as code. Start here, and read from top to bottom.

Each equation is a function. All of them are causal: query ``t`` sees the keys ``1..t``. They are
slow and may overflow, so use float64. They are differentiable. A state of power n has D^n rows, so
give small widths for many powers:

    >>> q, k, v = torch.rand(3, 8, 2, dtype=torch.float64).unbind(0)
    >>> torch.allclose(recurrent_softmax(q, k, v, order=14), softmax_attention(q, k, v))
    True

The letters of sizes:

| letter | what                                                                         |
|--------|------------------------------------------------------------------------------|
| B      | batch                                                                        |
| H      | query heads                                                                  |
| Hkv    | key/value heads; each of them serves ``H / Hkv`` query heads                 |
| T      | queries                                                                      |
| S      | keys; in this file as many as queries, ``S = T``                             |
| D      | width of queries and keys                                                    |
| E      | width of values                                                              |
| M      | monomials: the products of a vector's entries that make up powers of a score |
| N      | order: the highest power of a finite series                                  |

Queries are ``q`` [..., T, D], keys ``k`` [..., S, D], values ``v`` [..., S, E], and the result is
[..., T, E]. The dots are B and H, or nothing for a single head. For grouped queries, give ``q`` as
[B, Hkv, H / Hkv, T, D], and ``k`` and ``v`` with a 1 in that third place.

| here                      | in the paper                                                        |
|---------------------------|---------------------------------------------------------------------|
| ``softmax_attention``     | equation 1                                                          |
| ``linear_attention``      | equation 2; ``state`` is the paper's ``H_t``                        |
| ``kronecker_power``       | section 3.1, property 3; equations 7 and 8                          |
| ``power_rnn``             | section 3.1: ``Q_t^(x)n . H^n_t``, one recurrence per power         |
| ``exp_sum_by_rnns``       | section 3.1: the sum of these recurrences, up to an order           |
| ``exp_sum_by_chunks``     | the same sum; the states change after each chunk, not each token    |
| ``recurrent_softmax``     | section 3.1: the sum times ``G_t``                                  |
| ``first_order_attention`` | equation 3: the power 1 alone                                       |
| ``softmax_gate``          | equation 4: ``G_t``, one over softmax's denominator                 |
| ``gate_attention``        | equation 5; ``gate`` is the paper's ``G_t``                         |
| ``norm_attention``        | equation 6                                                          |

As in the paper, a score is ``Q_t . K_s`` without the factor ``1 / sqrt(D)``; multiply ``q`` by it
beforehand. ``formula.py`` has the formula that joins all of these and every option.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Equations 1 and 2: softmax attention, and a linear one that is an RNN.


def exp_sum(q: Tensor, k: Tensor, v: Tensor, clamp: float = math.inf) -> Tensor:
    """The numerator of softmax: ``sum_{s <= t} exp(Q_t . K_s) V_s``; scores at most ``clamp``."""
    return (q @ k.mT).clamp(max=clamp).exp().tril() @ v


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 1: the numerator divided by ``sum_{n <= t} exp(Q_t . K_n)``."""
    return exp_sum(q, k, v) / exp_sum(q, k, torch.ones_like(v[..., :1]))


def identity(x: Tensor) -> Tensor:
    """The feature map of equations 1 and 3 to 6."""
    return x


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Callable[[Tensor], Tensor] = identity,
    psi: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """Equation 2: ``O_t = phi(Q_t) . H_t`` with ``H_t = psi(K_t)^T V_t + H_{t-1}``."""
    state = v.new_zeros(())  # H_0; H_t is [M, E], with a row for every feature
    outputs = []
    for q_t, k_t, v_t in zip(q.unbind(-2), k.unbind(-2), v.unbind(-2), strict=True):
        state = torch.einsum("...M,...E->...ME", psi(k_t), v_t) + state
        outputs.append(torch.einsum("...M,...ME->...E", phi(q_t), state))
    return torch.stack(outputs, dim=-2)


# Section 3.1: softmax is a sum of such RNNs, one for each power of the score.


def kronecker_power(x: Tensor, n: int) -> Tensor:
    """``x^(x)n``: all products of ``n`` entries of ``x``; [..., D] -> [..., D^n].

    ``(a . b)^n = a^(x)n . b^(x)n`` (equations 7 and 8).
    """
    power = x.new_ones(*x.shape[:-1], 1)
    for _ in range(n):
        power = (power.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
    return power


def power_rnn(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
    """Section 3.1: ``Q_t^(x)n . H^n_t`` with ``H^n_t = (K_t^(x)n)^T V_t + H^n_{t-1}``, [D^n, E].

    It equals ``sum_{s <= t} (Q_t . K_s)^n V_s``.
    """
    return linear_attention(kronecker_power(q, n), kronecker_power(k, n), v)


def exp_sum_by_rnns(q: Tensor, k: Tensor, v: Tensor, order: int) -> Tensor:
    """Section 3.1: ``sum_{n <= N} 1/n! Q_t^(x)n . H^n_t``, which tends to ``exp_sum``."""
    rnns = [power_rnn(q, k, v, n) / math.factorial(n) for n in range(order + 1)]
    return torch.stack(rnns).sum(0)


def taylor(score: Tensor, order: int) -> Tensor:
    """Exp's series up to an order: ``sum_{n <= N} score^n / n!``."""
    return torch.stack([score**n / math.factorial(n) for n in range(order + 1)]).sum(0)


def monomials(x: Tensor, order: int) -> Tensor:
    """``x^(x)n / sqrt(n!)`` for every ``n <= N`` in one vector: [..., D] -> [..., M].

    So ``monomials(a) . monomials(b) = taylor(a . b)``, and ``M = 1 + D + ... + D^N``. Products of
    the same entries in another order are equal; ``ops/monomials.py`` has each of them once.
    """
    powers = [kronecker_power(x, n) / math.sqrt(math.factorial(n)) for n in range(order + 1)]
    return torch.cat(powers, dim=-1)


def exp_sum_by_chunks(q: Tensor, k: Tensor, v: Tensor, order: int, chunk: int) -> Tensor:
    """Section 3.1 in chunks of tokens: the result of ``exp_sum_by_rnns`` with other products.

    The states of all powers are rows of one state [M, E]. A query reads the earlier chunks from it,
    and weighs the keys of its own chunk by their scores. The state changes once per chunk, by a
    product of matrices, where the recurrence adds an outer product per token. Time is linear in T:
    ``T * M * E`` for the state and ``T * chunk * (D + E)`` for the scores.

    With one chunk for the whole sequence, the quadratic formula ``taylor(Q K^T) V`` is left.
    """
    (T, D), E = q.shape[-2:], v.shape[-1]
    M = sum(D**n for n in range(order + 1))
    state = v.new_zeros(M, E)
    outputs = []
    for start in range(0, T, chunk):
        now = slice(start, start + chunk)
        q_now, k_now, v_now = q[..., now, :], k[..., now, :], v[..., now, :]
        # Keys of earlier chunks: every query of this chunk sees all of them.
        between = monomials(q_now, order) @ state
        # Keys of this chunk: a query sees those up to its own position.
        within = taylor(q_now @ k_now.mT, order).tril() @ v_now
        outputs.append(between + within)
        # This chunk's keys enter the state after its queries have read it: none is counted twice.
        state = state + monomials(k_now, order).mT @ v_now
    return torch.cat(outputs, dim=-2)


def recurrent_softmax(q: Tensor, k: Tensor, v: Tensor, order: int) -> Tensor:
    """Section 3.1: ``G_t`` times the sum of the RNNs, up to ``order`` (in the paper, infinity).

    ``G_t`` is the inverse of the same sum with values 1, so that every order is a weighted mean.
    """
    ones = torch.ones_like(v[..., :1])
    return exp_sum_by_rnns(q, k, v, order) / exp_sum_by_rnns(q, k, ones, order)


# Equation 3: linear attention is the second of these RNNs.


def first_order_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 3: linear attention is the RNN of power 1, with its factor ``1 / 1!``."""
    return power_rnn(q, k, v, 1) / math.factorial(1)


# Equations 4 to 6: what may take the place of the denominator.


def softmax_gate(q: Tensor, k: Tensor) -> Tensor:
    """Equation 4: ``G_t = 1 / sum_{s <= t} exp(Q_t . K_s)``, [..., T]."""
    return 1 / exp_sum(q, k, torch.ones_like(k[..., :1])).squeeze(-1)


def gate_attention(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, clamp: float = math.inf
) -> Tensor:
    """Equation 5: ``G_t / t`` times the numerator, for any gate [..., T].

    The authors clamp the scores at 5 (section 3.3) and learn the gate from the token (appendix E).
    """
    t = torch.arange(1, q.shape[-2] + 1, dtype=q.dtype, device=q.device)
    return (gate / t).unsqueeze(-1) * exp_sum(q, k, v, clamp)


def norm_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 6: the numerator divided by its L2 norm."""
    numerator = exp_sum(q, k, v)
    return numerator / numerator.norm(dim=-1, keepdim=True)
