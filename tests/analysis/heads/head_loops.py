"""The statistics of one head in loops, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import softmax_rnn as sr

ORDER, TOLERANCE, MAX_ORDER = 5, 0.03, 40
ORDERS = ("order_needed", "order_shifted", "effective_order")

Call = tuple[Tensor, Tensor, Tensor, Tensor | None]  # q, k, v, log decay of a layer


def feature(spec: sr.AttentionSpec, x: Tensor) -> Tensor:
    return {
        "identity": lambda: x,
        "elu1": lambda: torch.where(x > 0, x + 1, x.exp()),
        "relu": lambda: x.clamp(min=0),
        "cosine": lambda: x / x.norm(),
    }[spec.feature_map]()


def taylor(s: np.ndarray) -> np.ndarray:
    """The Taylor polynomials of every order at the scores ``s`` [S]: [MAX_ORDER + 1, S]."""
    return np.cumsum([s**n / math.factorial(n) for n in range(MAX_ORDER + 1)], axis=0)


def shifted(s: np.ndarray) -> np.ndarray:
    """The same about the middle of the scores, in other units."""
    return taylor(s - (s.max() + s.min()) / 2)


def chebyshev(s: np.ndarray) -> np.ndarray:
    """exp's Chebyshev series of every order on the range of the scores, in other units.

    The coefficients are those of an interpolation of much higher order.
    """
    center, radius = (s.max() + s.min()) / 2, (s.max() - s.min()) / 2
    coefficients = np.polynomial.chebyshev.chebinterpolate(lambda t: np.exp(radius * (t - 1)), 90)
    basis = np.polynomial.chebyshev.chebvander((s - center) / (radius or 1.0), MAX_ORDER)
    return np.cumsum(coefficients[: MAX_ORDER + 1] * basis, axis=1).T


def rows_of(
    call: Call,
    spec: sr.AttentionSpec,
    head: int,
    shown: Tensor,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The scores [S], decays [S] and values [S, E] that each query of a head sees."""
    q, k, v, decays = call
    kv_head = head * k.shape[1] // q.shape[1]
    for b in range(len(q)):
        tokens = [t for t in range(q.shape[2]) if shown[b, t]]
        for t in tokens:
            row = []
            for s in (s for s in tokens if s <= t):
                far = spec.outside == "hidden" and t - s >= (spec.window or 99)
                if far and s not in tokens[: spec.global_keys]:
                    continue
                faded = torch.ones((), dtype=q.dtype)
                if decays is not None:
                    between = [u for u in tokens if s < u <= t]
                    per_head = decays.ndim == 1
                    faded = sum(
                        decays[kv_head] if per_head else decays[b, kv_head, u] for u in between
                    ) + torch.zeros(())
                    faded = faded.exp()
                query, key = feature(spec, q[b, head, t]), feature(spec, k[b, kv_head, s])
                score = (query * key * (faded if faded.ndim else 1)).sum()
                score = float(score) * spec.score_scale(q.shape[-1])
                score = score if spec.clamp is None else min(score, spec.clamp)
                row.append((score, 1.0 if faded.ndim else float(faded), v[b, kv_head, s].numpy()))
            yield tuple(map(np.array, zip(*row, strict=True)))


def by_loops(
    call: Call,
    spec: sr.AttentionSpec,
    head: int,
    shown: Tensor,
) -> dict[str, Any]:
    """The statistics of one head."""
    numerators, errors, scores, decays, radii = [], [], [], [], []
    kv_head = head * call[1].shape[1] // call[0].shape[1]
    largest = max(
        float(call[2][b, kv_head][shown[b].bool()].abs().max()) for b in range(len(call[2]))
    )
    for s, decay, values in rows_of(call, spec, head, shown):
        scores.append(s)
        decays.append(decay)
        radii.append((s.max() - s.min()) / 2)
        full = (decay * np.exp(s)) @ values
        exact = full / (decay * np.exp(s)).sum()
        terms = [(decay * s**n / math.factorial(n)) @ values for n in range(ORDER + 1)]
        numerators.append([np.linalg.norm(term) / np.linalg.norm(full) for term in terms])
        misses = []
        for series in (taylor, shifted, chebyshev):
            weights = decay * series(s)
            out, total = weights @ values, weights.sum(1)
            least = 1e-6 * np.abs(out).max(1) / largest
            total = np.copysign(np.maximum(np.abs(total), least), total)
            misses.append(np.linalg.norm(out / total[:, None] - exact, axis=1))
        errors.append(np.array(misses) / np.linalg.norm(exact))
    error = np.mean(errors, axis=0)
    lowest = [
        found[0] if len(found := np.flatnonzero(row <= TOLERANCE)) else pd.NA for row in error
    ]
    every, decay = np.concatenate(scores), np.concatenate(decays)
    size = np.abs(every)
    terms = [size**n / math.factorial(n) for n in range(ORDER + 1)]
    whole = np.average(np.exp(size), weights=decay)
    return {
        "max_score": size.max(),
        "p99_score": np.percentile(size, 99),
        "mean_score": np.mean(every),
        "max_radius": max(radii),
        **dict(zip(ORDERS, lowest, strict=True)),
        "order_bound": sr.order_for(TOLERANCE, size.max()),
        "term": [np.average(term, weights=decay) for term in terms],
        "share": [np.average(term, weights=decay) / whole for term in terms],
        "pair_share": [np.average(term / np.exp(size), weights=decay) for term in terms],
        "numerator": np.mean(numerators, axis=0),
        "error": error[0, : ORDER + 1],
    }
