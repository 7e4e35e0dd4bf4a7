"""One token after a state, without gradients: the recurrence of section 3.1 in few operations.

In decoding, calling operations takes longer than computing them. The token's key is added to the
state first, so that one product gives the sums over all keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softmax_rnn.ops.decay import fade_
from softmax_rnn.ops.forms.chunks.columns import Columns
from softmax_rnn.ops.forms.chunks.tables import make_tables
from softmax_rnn.ops.monomials import monomials
from softmax_rnn.ops.spec import AttentionSpec


def one_token(inputs: Columns, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """The sums [X, C, R, 1] and the state after the token."""
    q, k, values, state, log_decay, coefficients = inputs
    assert state is not None
    tables = make_tables(spec, k.shape[1], 1, q.dtype, q.device)
    columns = [q.squeeze(-1), k]
    if log_decay is not None:
        kept = fade_(log_decay.to(q.dtype, copy=True))
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
    return torch.bmm(new_state, read).unsqueeze(-1), new_state
