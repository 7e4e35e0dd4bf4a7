"""The terms of exp's series in the heads of one layer, summed over rows."""

from __future__ import annotations

import math
from itertools import chain, islice

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from softmax_rnn.analysis.heads.inputs import HeadInputs
from softmax_rnn.analysis.heads.orders import Rows, add_errors, chebyshev, summed, taylor
from softmax_rnn.analysis.heads.weights import WeightSums
from softmax_rnn.ops import MAX_RADIUS, fade_, order_for

PERCENTILE = 99
ORDERS = ("order_needed", "order_shifted", "effective_order")  # about 0; shifted; Chebyshev
_ROWS, _SCORES = 128, 2**19  # limits per step: queries, and scores of all heads


class LayerTerms:
    """The sums of one layer over all sequences; kept as logarithms if they could overflow.

    Args:
        layer: its number.
        like: a tensor [H, ...] on the layer's device.
        order: the highest power to report.
        max_order: the highest order to try.
        most_pairs: at least the number of pairs of tokens that a head sees in all sequences.
    """

    def __init__(self, layer: int, like: Tensor, order: int, max_order: int, most_pairs: int):
        self.layer, self.order = layer, order
        # How many of the largest |s| to keep: up to the two between which the percentile is.
        self.kept = _below_percentile(most_pairs)
        self.pairs = 0
        zeros = like.new_zeros((len(like), max_order + 1), dtype=torch.float64)
        self.log_terms = torch.full_like(zeros[:, : order + 1], -math.inf)
        self.log_numerators = self.log_terms.clone()
        self.log_total = self.log_terms[:, 0].clone()
        self.pair_shares = torch.zeros_like(self.log_terms)
        self.errors = {name: torch.zeros_like(zeros) for name in ORDERS}
        self.sum, self.mass, self.radius = (torch.zeros_like(self.log_total) for _ in range(3))
        self.largest = zeros[:, :0]
        self.weights = WeightSums(zeros[:, 0])

    def add(self, inputs: HeadInputs) -> None:
        """Add a sequence."""
        q, k, v, fading = inputs[:4]
        # A channel of ones sums the weights.
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1).double()
        largest = v[:, inputs.shown].abs().amax((1, 2)).double()
        per_channel = fading is not None and fading.ndim == 3
        channels = q.shape[-1] if per_channel else 1
        size = max(1, min(_ROWS, _SCORES // (len(q) * q.shape[1] * channels)))
        tokens = inputs.shown.nonzero()[:, 0]
        for chunk in tokens.split(size):
            keys = int(chunk[-1]) + 1
            decay = None
            if fading is not None:
                decay = fading[:, chunk, None] - fading[:, None, :keys]
                decay = fade_(decay.clamp_(max=0).to(q.dtype))
            scores = _scores(q[:, chunk], k[:, :keys], decay)
            if inputs.clamp is not None:
                scores = scores.clamp(max=inputs.clamp)
            if not scores.isfinite().all():
                raise FloatingPointError(f"A score of layer {self.layer} is not finite.")
            seen = inputs.seen[chunk, :keys]
            factor = seen.expand_as(scores).double()
            if decay is not None and not per_channel:
                factor = decay.double().masked_fill_(~seen, 0)
            scores = scores.double().masked_fill_(~seen, 0)
            rows = Rows(scores, factor, values[:, :keys], largest)
            self.weights.add(rows, seen, int(tokens[0]), inputs.sink)
            self._add_rows(rows, seen)

    def _add_rows(self, rows: Rows, seen: Tensor) -> None:
        """Add rows, whose queries see the keys ``seen`` [R, S]."""
        size = rows.scores.abs()
        self.pairs += int(seen.sum())
        self.sum += rows.scores.sum((1, 2))
        self.mass += rows.factor.sum((1, 2))
        sizes = size.masked_fill(~seen, -1.0).flatten(1)  # -1: below every visible pair
        sizes = torch.cat([self.largest, sizes], 1)
        self.largest, _ = sizes.topk(min(self.kept, sizes.shape[1]), dim=1)

        radius = size.amax(-1)
        total = ((size - radius[..., None]).exp_() * rows.factor).sum(-1).log() + radius
        self.log_total = torch.logaddexp(self.log_total, total.logsumexp(1))

        exact, top = rows.exact()
        log_exact = exact[..., :-1].norm(dim=-1).clamp(min=torch.finfo(exact.dtype).tiny).log()
        unit = radius.clamp(max=MAX_RADIUS)
        inverse = (unit[..., None] - size).exp_()  # 1 / exp(|s|), in the row's unit
        about_0 = taylor(rows, torch.zeros_like(radius), radius)
        first = []
        for n, (coefficient, basis) in enumerate(islice(about_0, self.order + 1)):
            sums = basis @ rows.v
            first.append((coefficient, sums))
            shares = (basis.abs() * inverse).sum(-1)
            self.pair_shares[:, n] += (coefficient * shares).sum(1)
            scale = coefficient.log() + unit
            added = (torch.linalg.vector_norm(basis, 1, -1).log() + scale).logsumexp(1)
            self.log_terms[:, n] = torch.logaddexp(self.log_terms[:, n], added)
            ratios = sums[..., :-1].norm(dim=-1).log() + scale - log_exact - top
            self.log_numerators[:, n] = torch.logaddexp(
                self.log_numerators[:, n], ratios.logsumexp(1)
            )
        all_sums = chain(first, summed(about_0, rows))
        add_errors(self.errors["order_needed"], rows, all_sums, unit)

        center, radius = rows.range()
        self.radius = self.radius.maximum(radius.amax(1))
        for name, terms, unit in (
            ("order_shifted", taylor(rows, center, radius), radius.clamp(max=MAX_RADIUS)),
            ("effective_order", chebyshev(rows, center, radius), radius),
        ):
            add_errors(self.errors[name], rows, summed(terms, rows), center + unit)

    def frames(self, tokens: int, tolerance: float) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The layer's rows of ``Analysis.heads`` and ``Analysis.powers``."""
        heads, powers = len(self.sum), self.order + 1
        mass = self.mass[:, None]
        errors = {name: (sums / tokens).cpu().numpy() for name, sums in self.errors.items()}
        top = self.largest.cpu().numpy()
        # The percentile is between the two smallest |s| that were kept.
        fraction = PERCENTILE / 100 * (self.pairs - 1) % 1
        last = _below_percentile(self.pairs) - 1
        lower, upper = top[:, last], top[:, max(last - 1, 0)]
        log_share = (self.log_terms - self.log_total[:, None]).cpu().numpy()
        bounds = [order_for(tolerance, r) if r <= MAX_RADIUS else None for r in top[:, 0].tolist()]
        by_head = pd.DataFrame(
            {
                "layer": self.layer,
                "head": range(heads),
                "max_score": top[:, 0],
                "p99_score": lower + fraction * (upper - lower),
                "mean_score": (self.sum / self.pairs).cpu().numpy(),
                "max_radius": self.radius.cpu().numpy(),
                **{name: _lowest(within <= tolerance) for name, within in errors.items()},
                "order_bound": pd.array(bounds, dtype="Int64"),
                **self.weights.columns(),
            }
        )
        by_power = pd.DataFrame(
            {
                "layer": self.layer,
                "head": np.repeat(np.arange(heads), powers),
                "power": np.tile(np.arange(powers), heads),
                "term": (self.log_terms - mass.log()).exp().flatten().cpu().numpy(),
                "share": np.exp(log_share).ravel(),
                "log10_share": log_share.ravel() / math.log(10),
                "pair_share": (self.pair_shares / mass).flatten().cpu().numpy(),
                "numerator": (self.log_numerators - math.log(tokens)).exp().flatten().cpu().numpy(),
                "error": errors["order_needed"][:, :powers].ravel(),
            }
        )
        return by_head, by_power


def _scores(q: Tensor, k: Tensor, decay: Tensor | None) -> Tensor:
    """The scores [H, R, S] of scaled queries; a decay per channel is part of them."""
    if decay is None or decay.ndim == 3:
        return q @ k.mT
    return ((decay * k[:, None]) @ q[..., None]).squeeze(-1)


def _below_percentile(pairs: int) -> int:
    """How many of the largest of so many numbers reach to the next one below the percentile."""
    return pairs - math.floor(PERCENTILE / 100 * (pairs - 1))


def _lowest(within: np.ndarray) -> pd.api.extensions.ExtensionArray:
    """The lowest order of each head [H, N + 1] that is within the tolerance, or missing."""
    found = [int(row.argmax()) if row.any() else None for row in within]
    return pd.array(found, dtype="Int64")
