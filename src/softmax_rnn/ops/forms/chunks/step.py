"""One chunk of the chunked form: functions of tensors.

They compute one step of ``reference.exp_sum_by_chunks`` (section 3.1) for all powers together.
Each token is a column; the query heads of one key head are adjacent. Shapes: queries
[X, D, R * L], keys [X, D, L], value channels [X, C, L], sums [X, C, R * L], state [X, C, rows].
``fading.py`` has the factors of decays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.forms.chunks.channel_scores import channel_gradients, channel_scores
from softmax_rnn.ops.forms.chunks.fading import NO_FADING, Fading, fading, times
from softmax_rnn.ops.forms.chunks.tables import Tables
from softmax_rnn.ops.monomials import monomials, monomials_backward
from softmax_rnn.ops.series import PowerSeries


class Queries(NamedTuple):
    """The queries of a chunk."""

    q: Tensor
    coefficients: Tensor | None  # learned ones of each head, [X, R, order + 1]
    dsums: Tensor | None = None  # the gradient of their sums


class Keys(NamedTuple):
    """The keys of a chunk."""

    k: Tensor
    v: Tensor  # value channels
    log_decay: Tensor | None  # [X, 1, L], or [X, D, L] per channel


def forward(
    tables: Tables,
    queries: Queries | None,
    keys: Keys | None,
    state: Tensor | None,
    new_state: Tensor | None,
) -> Tensor | None:
    """The sums of queries over a state and over the keys of their own chunk.

    If ``new_state`` is given, the state after the keys is written to it.
    """
    fade, series = _factors(tables, queries, keys)
    reads = [] if queries is None or state is None else [times(queries.q, fade.queries)]
    adds = [] if keys is None or new_state is None else [times(keys.k, fade.keys)]
    features = _features(tables, reads + adds)[1] if reads or adds else ()
    sums = None
    if queries is not None and keys is not None:
        weights = series(_scores(tables, fade, keys.k, queries.q))
        sums = keys.v @ _hide_future(tables, fade, weights)
    if queries is not None and state is not None:
        read = times(features[0], _row_coefficients(tables, queries))
        if len(tables.future) == 1:  # one token: features are smaller than the state
            sums = _plus(sums, state, tables.weights.unsqueeze(-1) * read, fade.sums)
        else:
            sums = _plus(sums, tables.weights * state, read, fade.sums)
    if keys is not None and new_state is not None:
        added = times(keys.v, fade.values), features[-1].mT
        if state is None:
            torch.bmm(*added, out=new_state)
        elif fade.state is None:
            torch.baddbmm(state, *added, out=new_state)
        else:
            torch.mul(state, fade.state, out=new_state).baddbmm_(*added)
    return sums


class Grads(NamedTuple):
    """The gradients of a chunk's inputs, and of the state before the chunk."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    state: Tensor | None = None
    coefficients: Tensor | None = None


def backward(
    tables: Tables,
    queries: Queries | None,
    keys: Keys | None,
    state: Tensor | None,
    dnew_state: Tensor | None,
) -> Grads:
    """The gradients; ``dnew_state`` is that of the state after the chunk.

    That of log decays follows from the others (``fading.decay_grad``).
    """
    fade, series = _factors(tables, queries, keys)
    reads = [] if queries is None or state is None else [times(queries.q, fade.queries)]
    adds = [] if keys is None or dnew_state is None else [times(keys.k, fade.keys)]
    dq = dk = dv = dstate = dcoefficients = None
    if reads or adds:
        all_features, features = _features(tables, reads + adds)
    dfeatures = []
    if queries is not None and state is not None:
        assert queries.dsums is not None
        coefficients = _row_coefficients(tables, queries)
        dsums = times(queries.dsums, fade.sums)
        dread = (tables.weights * state).mT @ dsums
        dstate = tables.weights * (dsums @ times(features[0], coefficients).mT)
        if coefficients is not None:
            dcoefficients = _by_power(tables, queries, dread * features[0])
        dfeatures.append(times(dread, coefficients))
    if dnew_state is not None and (dstate is not None or fade.state is not None):
        if dstate is None or fade.state is None:
            kept = times(dnew_state, fade.state)
            dstate = kept if dstate is None else dstate + kept
        else:
            dstate = torch.addcmul(dstate, dnew_state, fade.state)
    if keys is not None and dnew_state is not None:
        dfeatures.append(dnew_state.mT @ times(keys.v, fade.values))
        dv = times(dnew_state @ features[-1], fade.values)
    if dfeatures:
        dcolumns = _columns_grad(tables, reads + adds, all_features, dfeatures)
        dq = times(dcolumns[0], fade.queries) if reads else None
        dk = times(dcolumns[-1], fade.keys) if adds else None
    if queries is not None and keys is not None:
        (q, coefficients, grad), (k, v, _) = queries, keys
        assert grad is not None
        scores = _scores(tables, fade, k, q)
        dv = _plus(dv, grad, _hide_future(tables, fade, series(scores)).mT)
        dweights = v.mT @ grad
        if coefficients is not None:
            found = _power_sums(queries, scores, _hide_future(tables, fade, dweights.clone()))
            dcoefficients = found if dcoefficients is None else dcoefficients + found
        dscores = _hide_future(tables, fade, series.derivative()(scores)).mul_(dweights)
        if fade.total is None:
            dk, dq = _plus(dk, q, dscores.mT), _plus(dq, k, dscores)
        else:
            by_position = _by_position(q, k, fade.total)
            dx = dscores.unflatten(2, (-1, k.shape[2])).movedim(1, 3)
            dq_own, dk_own = channel_gradients(dx, *by_position)
            within = dq_own.movedim(3, 1).flatten(2), dk_own.mT
            dq, dk = (x if y is None else x + y for x, y in zip(within, (dq, dk), strict=True))
    return Grads(dq, dk, dv, dstate, dcoefficients)


def _factors(
    tables: Tables, queries: Queries | None, keys: Keys | None
) -> tuple[Fading, PowerSeries]:
    """The factors of decays, and the series of weights [X, L, R * L]."""
    groups = 1
    if queries is not None and keys is not None:
        groups = queries.q.shape[2] // keys.k.shape[2]
    fade = fading(tables, keys and keys.log_decay, groups)
    if queries is None or queries.coefficients is None:
        return fade, tables.series
    length = queries.q.shape[2] // queries.coefficients.shape[1]
    columns = queries.coefficients.repeat_interleave(length, dim=1).mT
    return fade, PowerSeries(columns.unsqueeze(2).unbind(1))


def _row_coefficients(tables: Tables, queries: Queries) -> Tensor | None:
    """The learned coefficient of each state row and query, [X, rows, R * L]."""
    if queries.coefficients is None:
        return None
    length = queries.q.shape[2] // queries.coefficients.shape[1]
    rows = queries.coefficients.index_select(2, tables.powers)
    return rows.repeat_interleave(length, dim=1).mT


def _by_power(tables: Tables, queries: Queries, terms: Tensor) -> Tensor:
    """The sums [X, R, order + 1] of ``terms`` [X, rows, R * L], a power each."""
    assert queries.coefficients is not None
    each = terms.unflatten(2, (queries.coefficients.shape[1], -1)).sum(-1).mT
    return torch.zeros_like(queries.coefficients).index_add_(2, tables.powers, each)


def _power_sums(queries: Queries, scores: Tensor, dweights: Tensor) -> Tensor:
    """``sum dw x^n`` for each head and power, [X, R, order + 1]; overwrites ``dweights``."""
    assert queries.coefficients is not None
    _, groups, terms = queries.coefficients.shape
    sums = []
    for n in range(terms):
        dweights = dweights.mul_(scores) if n else dweights
        sums.append(dweights.sum(1).unflatten(1, (groups, -1)).sum(-1))
    return torch.stack(sums, dim=-1)


def _features(tables: Tables, columns: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All monomials of the joined columns; for each tensor of columns, those kept in the state."""
    features = monomials(_joined(columns), tables.degree)
    return features, features[:, tables.unused :].split([x.shape[2] for x in columns], dim=2)


def _columns_grad(
    tables: Tables, columns: list[Tensor], all_features: Tensor, grads: list[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of columns, from the gradients of their monomials kept in the state."""
    grad = _joined(grads)
    if tables.unused:
        grad = torch.cat([grad.new_zeros(len(grad), tables.unused, grad.shape[2]), grad], dim=1)
    joined = monomials_backward(_joined(columns), tables.degree, all_features, grad)
    return joined.split([x.shape[2] for x in columns], dim=2)


def _joined(columns: list[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=2)


def _scores(tables: Tables, fade: Fading, k: Tensor, q: Tensor) -> Tensor:
    """The scores of a chunk, [X, L, R * L]: a row per key."""
    if fade.total is not None:
        scores = channel_scores(*_by_position(q, k, fade.total))
        return scores.movedim(3, 1).flatten(2).contiguous()
    scores = k.mT @ q
    # Scores of later keys may overflow in the series, and infinity times the factor 0 is NaN.
    return scores if fade.pairs is None else _hide_future(tables, NO_FADING, scores)


def _by_position(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [X, R, L, D], keys [X, L, D] and sums [X, L, D], a row per position."""
    return q.unflatten(2, (-1, k.shape[2])).movedim(1, 3), k.mT.contiguous(), total.mT.contiguous()


def _hide_future(tables: Tables, fade: Fading, weights: Tensor) -> Tensor:
    """Zero the weights of later keys [X, L, R * L], and fade those of others, in place."""
    size = weights.shape[1]
    each = weights.unflatten(2, (-1, size))
    if fade.pairs is not None:
        each.mul_(fade.pairs.unsqueeze(2))
    elif size > 1:
        each.masked_fill_(tables.future[:size, None, :size], 0.0)
    return weights


def _plus(x: Tensor | None, a: Tensor, b: Tensor, factor: Tensor | None = None) -> Tensor:
    """``x + a @ b * factor``."""
    if factor is not None:
        product = a @ b
        return product.mul_(factor) if x is None else torch.addcmul(x, product, factor)
    return a @ b if x is None else torch.baddbmm(x, a, b)
