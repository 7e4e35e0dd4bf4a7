"""The terms of exp's series in the heads of one layer, summed over rows."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.row_sums import compute_dtype
from softmax_rnn.ops.layer import Attention
from softmax_rnn.ops.series import MAX_RADIUS, order_for
from softmax_rnn.ops.spec import AttentionSpec

PERCENTILE = 99
_MIN_SUM = 1e-6  # smallest magnitude of a row sum that can cross zero
_ROWS, _SCORES = 128, 2**19  # limits per step: queries, and scores of all heads
_NEGLIGIBLE = 1e-17  # relative to a row's weight sum; adding it does not change a float64 sum


class LayerTerms:
    """The sums of one layer over all sequences; kept as logarithms if they could overflow."""

    def __init__(self, name: str, module: Attention, order: int, max_order: int, pairs: int):
        self.name, self.module, self.order, self.max_order = name, module, order, max_order
        self.pairs = pairs  # visible pairs of a head, over all sequences
        # How many of the largest |s| to keep: up to the two between which the percentile is.
        self.kept = pairs - math.floor(PERCENTILE / 100 * (pairs - 1))
        heads = module.q_proj.out_features // module.qk_dim
        zeros = module.q_proj.weight.new_zeros((heads, max_order + 1), dtype=torch.float64)
        self.log_terms = torch.full_like(zeros[:, : order + 1], -math.inf)
        self.log_numerators = self.log_terms.clone()
        self.log_total = self.log_terms[:, 0].clone()
        self.pair_shares = torch.zeros_like(self.log_terms)
        self.errors = zeros
        self.sum = torch.zeros_like(self.log_total)
        self.largest = zeros[:, :0]

    def add(self, hidden: Tensor, positions: tuple[Tensor, Tensor] | None, shown: Tensor) -> None:
        """Add a sequence: the layer's inputs [1, T, hidden]; ``shown`` [T] is false at padding."""
        spec = self.module.spec
        q, k, v = (x[0, :, shown] for x in self.module.project(hidden, positions)[:3])
        groups = len(q) // len(k)
        q, k = (FEATURE_MAPS[spec.feature_map](x) for x in (q, k))
        q, k = (x.to(compute_dtype(x.dtype)) for x in (q, k))
        k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
        # A channel of ones sums the weights.
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1).double()
        q = q * spec.score_scale(q.shape[-1])
        length = q.shape[1]
        rows = max(1, min(_ROWS, _SCORES // (len(q) * length)))
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            scores = q[:, start:stop] @ k[:, :stop].mT
            if spec.clamp is not None:
                scores = scores.clamp(max=spec.clamp)
            if not scores.isfinite().all():
                raise FloatingPointError(f"A score of {self.name} is not finite.")
            hidden_keys = torch.ones_like(scores[0], dtype=torch.bool).triu(start + 1)
            self._add_rows(scores.double(), values[:, :stop], hidden_keys)

    def _add_rows(self, s: Tensor, values: Tensor, hidden: Tensor) -> None:
        """Add scores [H, R, S] with values [H, S, E + 1], where ``hidden`` [R, S] is false."""
        peak = s.masked_fill(hidden, -math.inf).amax(-1)  # [H, R]
        exact = (s - peak[..., None]).exp_().masked_fill_(hidden, 0) @ values
        s = s.masked_fill_(hidden, 0)
        size = s.abs()
        self.sum += s.sum((1, 2))
        sizes = size.masked_fill(hidden, -1.0).flatten(1)  # -1: below every visible pair
        sizes = torch.cat([self.largest, sizes], 1)
        self.largest, _ = sizes.topk(min(self.kept, sizes.shape[1]), dim=1)

        radius = size.amax(-1)
        total = (size - radius[..., None]).exp_().masked_fill_(hidden, 0).sum(-1).log() + radius
        self.log_total = torch.logaddexp(self.log_total, total.logsumexp(1))

        # From here on each row is divided by exp(unit), so that no term overflows.
        unit = radius.clamp(max=MAX_RADIUS)
        term = (-unit).exp()[..., None].expand_as(s).masked_fill(hidden, 0)
        tiny = torch.finfo(s.dtype).tiny  # no division by zero: a row of zeros has the error 0
        inverse = (unit[..., None] - size).exp_()  # 1 / exp(|s|), in the row's unit
        log_exact = exact[..., :-1].norm(dim=-1).clamp(min=tiny).log() + peak - unit
        weight = exact[..., -1] * (peak - unit).exp()
        out = exact[..., :-1] / exact[..., -1:]
        out_size = out.norm(dim=-1).clamp(min=tiny)
        guard = _MIN_SUM * (-unit).exp()
        partial = torch.zeros_like(exact)
        largest, settled = float(radius.max()), False
        for n in range(self.max_order + 1):
            if n:
                term.mul_(s).div_(n)
            sums = term @ values
            partial += sums
            magnitude = torch.linalg.vector_norm(term, 1, -1)
            if n <= self.order:
                self.pair_shares[:, n] += (term * inverse).abs_().sum((1, 2))
                terms = (magnitude.log() + unit).logsumexp(1)
                self.log_terms[:, n] = torch.logaddexp(self.log_terms[:, n], terms)
                ratios = (sums[..., :-1].norm(dim=-1).log() - log_exact).logsumexp(1)
                self.log_numerators[:, n] = torch.logaddexp(self.log_numerators[:, n], ratios)
            error = (partial[..., :-1] / self._row_sum(partial[..., -1], guard, n)[..., None]) - out
            mean = (error.norm(dim=-1) / out_size).sum(-1)
            if settled:
                self.errors[:, n::2] += mean[:, None]
                return
            # Beyond the largest score, terms only shrink. Once they are negligible, errors depend
            # only on whether the order is odd (then the row sum is guarded). So this order's error
            # is used for all later orders of its parity, and that of the next one for the others.
            settled = n >= max(self.order, largest) and bool(
                (magnitude <= _NEGLIGIBLE * weight).all()
            )
            self.errors[:, n :: 2 if settled else self.max_order + 1] += mean[:, None]

    def _row_sum(self, total: Tensor, guard: Tensor, order: int) -> Tensor:
        """The denominator of Taylor attention, kept away from zero as in ``attention``."""
        spec = self.module.spec
        taylor = AttentionSpec(
            spec.feature_map, "taylor", order, clamp=spec.clamp, scale=spec.scale
        )
        if taylor.sign_definite:
            return total
        return torch.where(total.abs() < guard, guard.copysign(total), total)

    def frames(
        self, layer: int, tokens: int, tolerance: float
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The layer's rows of ``Analysis.heads`` and ``Analysis.powers``."""
        heads, powers = len(self.sum), self.order + 1
        errors = (self.errors / tokens).cpu().numpy()
        within = errors <= tolerance
        needed = [int(row.argmax()) if row.any() else None for row in within]
        top = self.largest.cpu().numpy()
        # The percentile is between the two smallest |s| that were kept.
        fraction = PERCENTILE / 100 * (self.pairs - 1) % 1
        lower, upper = top[:, -1], top[:, max(self.kept - 2, 0)]
        log_share = (self.log_terms - self.log_total[:, None]).cpu().numpy()
        bounds = [order_for(tolerance, r) if r <= MAX_RADIUS else None for r in top[:, 0].tolist()]
        by_head = pd.DataFrame(
            {
                "layer": layer,
                "head": range(heads),
                "max_score": top[:, 0],
                "p99_score": lower + fraction * (upper - lower),
                "mean_score": (self.sum / self.pairs).cpu().numpy(),
                "order_needed": pd.array(needed, dtype="Int64"),
                "order_bound": pd.array(bounds, dtype="Int64"),
            }
        )
        by_power = pd.DataFrame(
            {
                "layer": layer,
                "head": np.repeat(np.arange(heads), powers),
                "power": np.tile(np.arange(powers), heads),
                "term": (self.log_terms - math.log(self.pairs)).exp().flatten().cpu().numpy(),
                "share": np.exp(log_share).ravel(),
                "log10_share": log_share.ravel() / math.log(10),
                "pair_share": (self.pair_shares / self.pairs).flatten().cpu().numpy(),
                "numerator": (self.log_numerators - math.log(tokens)).exp().flatten().cpu().numpy(),
                "error": errors[:, :powers].ravel(),
            }
        )
        return by_head, by_power
