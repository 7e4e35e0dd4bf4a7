"""One token after a state, without gradients: the recurrence of section 3.1 in few operations.

In decoding, calling operations takes longer than computing them. The token's key is added to the
state first, so that one product gives the sums over all keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softmax_rnn.ops.decay import fade_
from softmax_rnn.ops.forms.chunk_step import ROUNDING
from softmax_rnn.ops.forms.chunk_tables import make_tables
from softmax_rnn.ops.forms.columns import Columns
from softmax_rnn.ops.monomials import monomials
from softmax_rnn.ops.spec import AttentionSpec


def one_token(
    inputs: Columns, spec: AttentionSpec, noisy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The sums [N, C, G, 1], the state after the token, and the noise [N, G, 1] if it is wanted.

    ``noisy`` is whether the last channel is a sum of weights whose terms can cancel.
    """
    q, k, values, state, log_decay, coefficients = inputs
    assert state is not None
    tables = make_tables(spec, k.shape[1], 1, q.dtype, q.device, False)
    columns = [q.squeeze(-1), k]
    if log_decay is not None:
        kept = fade_(log_decay.to(q.dtype))
        if spec.decay == "channel":
            columns.append(kept)
        else:
            state = state * kept
    features = monomials(torch.cat(columns, dim=2), tables.degree)[:, tables.unused :]
    groups = q.shape[2]
    if spec.decay == "channel":
        state = state * features[..., -1:].mT
    new_state = torch.addcmul(state, values, features[..., groups : groups + 1].mT)
    read = features[..., :groups] * tables.weights.unsqueeze(-1)
    if coefficients is not None:
        read = read * coefficients.index_select(2, tables.powers).mT
    sums, noise = torch.bmm(new_state, read), None
    if noisy:
        wide = torch.float32 if q.device.type == "mps" else torch.float64  # for squares of powers
        products = (read * new_state[:, -1:].mT).to(wide)
        noise = (ROUNDING * torch.finfo(q.dtype).eps * products.norm(dim=1)).to(q.dtype)
        noise = noise.unsqueeze(-1)
    return sums.unsqueeze(-1), new_state, noise
