"""Initial values of a converted attention, measured on text before any training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from transformers import PreTrainedModel

from softmax_rnn.models.converted_layer import (
    Attending,
    ConvertedLayer,
    converted_layers,
    substituted,
)
from softmax_rnn.ops.forms.row_sums import visible
from softmax_rnn.training.objectives import relative_errors

# Logarithms of the factors that are tried for the weights outside a window.
_OUTSIDE_LOGITS = tuple(range(-12, 7))
_ROWS = 64  # queries per step
_LOWEST = -12.0  # logarithm of the smallest learned coefficient, relative to exp's


@torch.no_grad()
def fit_initial_values(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Set what each head of a converted model can start with, in place.

    - ``outside_logit``: of whole numbers from -12 to 6, the one with the least error of the head's
      output.
    - ``coefficient_logit``: the coefficients >= 0 with the least squared error of softmax's
      weights, by non-negative least squares (only without feature maps and decays).

    The errors are those on the source's inputs of each layer, against the source's attention.

    Args:
        model: a converted model with its source's weights.
        rows: rows of token ids [T], of equal lengths.
        progress: called with the number of rows that are done.

    Raises:
        FloatingPointError: if a score is not finite.
    """
    fits: dict[ConvertedLayer, list[_Outside | _Coefficients]] = {
        layer: [kind(layer) for kind in (_Outside, _Coefficients) if kind.applies(layer)]
        for layer in converted_layers(model)
    }
    if not any(fits.values()):
        return

    def compare(what: Attending) -> Tensor:
        expected = what.source()
        for fit in fits[what.layer]:
            fit.add(what, expected)
        return expected

    with substituted(model, compare):
        for done, ids in enumerate(rows, start=1):
            model.base_model(input_ids=ids.unsqueeze(0).to(model.device), use_cache=False)
            progress(done)
    for fit in (fit for layer in fits.values() for fit in layer):
        fit.apply()


class _Outside:
    """The factor of the weights outside a window."""

    def __init__(self, layer: ConvertedLayer) -> None:
        self.layer, self.errors = layer, torch.zeros(1)

    @staticmethod
    def applies(layer: ConvertedLayer) -> bool:
        """Whether a layer has this parameter."""
        return layer.outside_logit is not None

    def add(self, what: Attending, expected: Tensor) -> None:
        """Add the errors of a row, by which ``expected`` is missed with each factor."""
        like = what.query.new_ones(expected.shape[2])
        found = [
            relative_errors(what.converted(outside_scale=math.exp(logit) * like), expected)[0]
            for logit in _OUTSIDE_LOGITS
        ]
        self.errors = self.errors + torch.stack(found).cpu()

    def apply(self) -> None:
        """Take the best factor of each head."""
        logits = torch.tensor(_OUTSIDE_LOGITS)[self.errors.argmin(0)]
        assert self.layer.outside_logit is not None
        self.layer.outside_logit.copy_(logits)


class _Coefficients:
    """The coefficients of a learned polynomial.

    With ``Z_t`` the sum of softmax's weights, ``sum_n a_n s^n / Z_t`` is to be ``exp(s) / Z_t``,
    for every pair that the series weighs. Sums of products over pairs are all that this needs.
    """

    def __init__(self, layer: ConvertedLayer) -> None:
        self.layer = layer
        heads, terms = layer.record.num_heads, 1 + (layer.spec.order or 0)
        self.products = np.zeros((heads, terms + 1, terms + 1))

    @staticmethod
    def applies(layer: ConvertedLayer) -> bool:
        """Whether a layer has these parameters, and its series is of the source's scores."""
        plain = layer.options.feature_map == "none" and layer.spec.feature_map == "identity"
        return layer.coefficient_logit is not None and plain and layer.spec.decay == "none"

    def add(self, what: Attending, expected: Tensor) -> None:
        """Add the pairs of a row of tokens."""
        spec = self.layer.spec
        scale = spec.score_scale(what.query.shape[-1])
        groups = what.query.shape[1] // what.key.shape[1]
        q, k = what.query[0].double() * scale, what.key[0].double().repeat_interleave(groups, 0)
        seen = _pairs(what)
        near = _pairs(what, spec.window, spec.global_keys)
        weighed = seen & ~near if spec.outside == "series" else near
        powers = torch.arange(1 + (spec.order or 0), device=q.device)
        for rows in torch.arange(k.shape[1], device=q.device).split(_ROWS):
            scores = q[:, rows] @ k.mT
            if not scores.isfinite().all():
                raise FloatingPointError(f"A score of {self.layer.record.module} is not finite.")
            shown = scores.masked_fill(~seen[rows], -math.inf)
            log_total = shown.logsumexp(-1, keepdim=True)
            # Of logarithms, since powers and exponentials may be out of range.
            terms = scores.abs().log().unsqueeze(-1) * powers - log_total.unsqueeze(-1)
            terms = terms.where(powers > 0, -log_total.unsqueeze(-1)).exp()
            terms = terms * scores.sign().unsqueeze(-1).where(powers % 2 == 1, 1.0)
            target = (scores - log_total).exp().unsqueeze(-1)
            columns = torch.cat((terms, target), -1) * weighed[rows, :, None]
            flat = columns.flatten(1, 2)
            self.products += (flat.mT @ flat).cpu().numpy()

    def apply(self) -> None:
        """Solve for the coefficients of each head."""
        assert self.layer.coefficient_logit is not None
        for head, products in enumerate(self.products):
            size = np.sqrt(products.diagonal()).clip(1e-300)  # columns of length 1
            scaled = products / size / size[:, None]
            # Any matrix with these products has the same least squares.
            values, vectors = np.linalg.eigh(scaled)
            root = np.sqrt(values.clip(0))[:, None] * vectors.T
            found = nnls(root[:, :-1], root[:, -1])[0] * size[-1] / size[:-1]
            if not found.any():
                continue  # no pair is outside the window
            powers = torch.arange(len(found), dtype=torch.float64)
            logits = torch.from_numpy(found).log() + torch.lgamma(powers + 1)
            self.layer.coefficient_logit[head] = logits.clamp(min=_LOWEST)


def _pairs(what: Attending, *window: Any) -> Tensor:
    """Which keys each query of a row sees, [T, T], also with a window."""
    keys = what.key.shape[2]
    mask, causal = what.visible["mask"], what.visible["causal"]
    seen = visible(keys, keys, causal, mask, what.key.device, *window)
    if seen is None:
        return torch.ones(keys, keys, dtype=torch.bool, device=what.key.device)
    return seen.expand(1, 1, keys, keys)[0, 0]
