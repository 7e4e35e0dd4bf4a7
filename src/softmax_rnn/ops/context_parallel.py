"""Context parallelism: one sequence over several processes, each with a block of its positions.

The state of a finite series before a block is the sum of the earlier blocks' own states, each faded
by the decays since: a scan over processes passes states, whose size does not depend on the length.
Of other attentions processes gather keys and values: all of them, or the last ones for a window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from softmax_rnn._utils.errors import unknown
from softmax_rnn.ops.attention import attention
from softmax_rnn.ops.decay import FLOOR, per_key_decay
from softmax_rnn.ops.forms.chunks.magnitudes import fading
from softmax_rnn.ops.inputs import check_per_key, checked_mask
from softmax_rnn.ops.monomials import degrees, monomials, state_rows, state_size
from softmax_rnn.ops.plan import FORMS
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State
from softmax_rnn.ops.variants import resolve


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | str,
    *,
    group: Any = None,
    causal: bool = True,
    mask: Tensor | None = None,
    form: str = "auto",
    **options: Any,
) -> Tensor:
    """:func:`softmax_rnn.attention` of a sequence that is spread over processes.

    The process of rank r in ``group`` has the r-th of equal blocks of positions, T of queries, keys
    and values alike. All processes call this together, and each calls ``backward`` on a result of
    it, since gradients are exchanged as well.

    Args:
        q: its queries [B, H, T, D].
        k: its keys [B, Hkv, T, D].
        v: its values [B, Hkv, T, E].
        spec: an :class:`AttentionSpec` or a variant's name.
        group: a process group of torch.distributed, by default all processes.
        causal: whether a query sees no later keys.
        mask: of its keys, broadcastable to [B, 1, 1, T], True = visible.
        form: ``auto``, or one of :func:`forms`. ``chunked`` and ``recurrent`` pass states between
            processes, the others keys and values; ``auto`` passes what is smaller.
        options: those of :func:`softmax_rnn.attention` for its positions, and parameters. A state
            is none of them.

    Returns:
        The output of its queries [B, H, T, E].

    Raises:
        ValueError: without a process group; for keys that are not at the queries' positions, blocks
            of different lengths, a mask per query, or a state.
        Exception: as :func:`softmax_rnn.attention`.
    """
    spec = resolve(spec)
    if form != "auto" and form not in FORMS:
        raise unknown("form", form, ["auto", *FORMS])
    masked, padded = _agree(q, k, mask, options, group)
    mask = checked_mask(mask, q, k)
    check_per_key(mask)
    given = {name: x for name, x in options.items() if x is not None} | {"padding": padded}
    if distributed.get_world_size(group) == 1:
        return attention(q, k, v, spec, causal=causal, mask=mask, form=form, **given)
    if options.get("segments") is not None:  # the first process alone has as many keys as queries
        raise ValueError(
            "Several processes share one sequence: leave segments out, or use one process."
        )
    if not causal and spec.positional:
        raise ValueError(
            "Several processes share a decay or a window of causal attention only: their blocks of "
            "queries have other keys. Use causal=True or one process."
        )
    if causal and _passes_states(spec, form, k, v):
        given["state"] = _state_before(q, k, v, spec, mask, form, given, group)
        return attention(q, k, v, spec, mask=mask, form=form, **given)
    per_key = ["input_gate", "outside_k", *([] if spec.decay == "head" else ["log_decay"])]
    tensors = {"k": k, "v": v, **{name: given[name] for name in per_key if name in given}}
    if masked:
        shown = k.new_ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
        tensors["mask"] = shown.expand(len(k), 1, 1, k.shape[2]).mT
    window = None if spec.global_keys or spec.outside == "series" else spec.hiding_window
    if masked and padded:  # hidden keys count in no window, which may reach back to any process
        window = None
    given |= {name: _with_others(x, window, causal, group) for name, x in tensors.items()}
    if masked:
        given["mask"] = given["mask"].mT
    return attention(q, spec=spec, causal=causal, form=form, **given)


def previous_tail(x: Tensor, count: int, group: Any = None) -> Tensor:
    """The last ``count`` of the previous process's tokens x [B, T, C]; zeros for the first process.

    Raises:
        ValueError: if T is less than ``count``.
    """
    if x.shape[1] < count:
        raise ValueError(
            f"The next process needs the last {count} of {x.shape[1]} tokens: use fewer processes."
        )
    rank = distributed.get_rank(group)
    # A sum of none is zero, with a gradient: every process takes part in the backward pass.
    return gathered(x[:, x.shape[1] - count :], group)[max(0, rank - 1) : rank].sum(0)


def gathered(x: Tensor, group: Any = None) -> Tensor:
    """The tensors of all processes, stacked by rank; gradients go back to their processes."""
    found: Tensor = _Gather.apply(x, group)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, x = group, x.contiguous()
        found = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(found, x, group=group)
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = list(grad.contiguous())
        own = torch.empty_like(parts[0])
        distributed.reduce_scatter(own, parts, group=ctx.group)
        return own, None


def _agree(
    q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any], group: Any
) -> tuple[bool, bool]:
    """Whether any process has a mask, and padding.

    Raises ``ValueError`` for input that cannot be shared.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "Context parallelism needs the processes of torch.distributed: start them with "
            "torchrun, and call torch.distributed.init_process_group()."
        )
    if options.get("state") is not None or options.get("return_state"):
        raise ValueError("Context parallelism takes and returns no state.")
    sizes = [q.shape[2], k.shape[2], mask is not None, bool(options.get("padding"))]
    own = torch.tensor(sizes, device=q.device)
    queries, keys, masks, paddings = gathered(own, group).T.tolist()
    if len({*queries, *keys}) > 1:
        raise ValueError(
            "Every process has as many queries as keys, and as many as the others, not "
            f"{queries} queries and {keys} keys."
        )
    return any(masks), any(paddings)


def _passes_states(spec: AttentionSpec, form: str, k: Tensor, v: Tensor) -> bool:
    """Whether processes pass states, rather than keys."""
    finite = spec.order is not None and spec.clamp is None and spec.window is None
    if form != "auto":
        return finite and FORMS[form].stateful
    per_key = k.shape[3] + v.shape[3]
    return finite and state_size(spec, k.shape[3], v.shape[3]) <= k.shape[2] * per_key


def _state_before(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
    form: str,
    options: dict[str, Any],
    group: Any,
) -> State:
    """The state after the keys of all earlier processes."""
    given = dict(options)
    if "output_gate" in given:
        given["output_gate"] = given["output_gate"][:, :, :0]
    given |= {"mask": mask, "form": form, "return_state": True}
    _, own = attention(q[:, :, :0], k, v, spec, **given)
    decays = per_key_decay(options.get("log_decay"), k, mask)
    factor = None if decays is None else _faded(spec, decays.sum(2)).to(own.sums.dtype)
    rank = distributed.get_rank(group)
    visible = gathered(own.visible, group)[:rank].sum(0)
    sums = _Before.apply(own.sums, factor, group)
    magnitudes = largest = None
    if own.magnitudes is not None and own.largest is not None:
        faded = None
        if decays is not None:
            total = decays.detach().sum(2)
            total = total if spec.decay == "channel" else total.unsqueeze(-1)
            faded = fading(spec, total).to(own.magnitudes.dtype)
        magnitudes = _scan(own.magnitudes, faded, group, 1)
        earlier = gathered(own.largest, group)
        earlier[rank:] = 0.0
        largest = earlier.amax(0)
    return State(spec, sums, visible, rank * own.tokens, magnitudes, largest)


def _faded(spec: AttentionSpec, total: Tensor) -> Tensor:
    """How far a state fades over a process's keys, [B, Hkv, 1, rows or 1].

    ``total`` is the sum of their log decays, [B, Hkv] or [B, Hkv, D].
    """
    factor = total.exp().masked_fill(total < FLOOR[torch.float64], 0.0)
    if spec.decay != "channel":
        return factor[..., None, None]
    features = monomials(factor.flatten(0, 1).unsqueeze(-1), degrees(spec)[1])
    rows = features[:, features.shape[1] - state_rows(spec, total.shape[-1]) :]
    return rows.mT.unflatten(0, total.shape[:2])


class _Before(torch.autograd.Function):
    """What earlier processes add up to: ``H_0 = 0``, ``H_{r + 1} = S_r + f_r H_r``.

    ``f`` is 1 if it is ``None``. The gradient of ``S`` is the same sum over later processes, of the
    gradients of ``H``; that of ``f_r`` is ``H_r`` times the gradient of ``S_r``.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, factor: Tensor | None, group: Any) -> Tensor:
        ctx.group = group
        found = _scan(own, factor, group, 1)
        ctx.save_for_backward(*((None, None) if factor is None else (found, factor)))
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        before, factor = ctx.saved_tensors
        own = _scan(grad, factor, ctx.group, -1)
        return own, None if factor is None else (before * own).sum_to_size(factor.shape), None


def _scan(x: Tensor, factor: Tensor | None, group: Any, step: int) -> Tensor:
    """The recurrence of :class:`_Before` over ranks in ascending (``step`` 1) or descending order.

    In every round a process adds what another one, at twice the distance of the round before, has
    added up so far (Hillis and Steele 1986).
    """
    distance, total = 1, x
    while distance < distributed.get_world_size(group):
        earlier = _from_process(total, distance * step, group)
        total = total + (earlier if factor is None else factor * earlier)
        if factor is not None:
            factor = factor * _from_process(factor, distance * step, group)
        distance *= 2
    return _from_process(total, step, group)  # without its own


def _from_process(x: Tensor, distance: int, group: Any) -> Tensor:
    """The tensor of the process that is so many ranks before this one; zeros if there is none."""
    rank, count = distributed.get_rank(group), distributed.get_world_size(group)
    x, messages = x.contiguous(), []
    found = torch.zeros_like(x)
    for peer, send, tensor in (
        (rank + distance, distributed.isend, x),
        (rank - distance, distributed.irecv, found),
    ):
        if 0 <= peer < count:
            messages.append(distributed.P2POp(send, tensor, group=group, group_peer=peer))
    for message in distributed.batch_isend_irecv(messages) if messages else ():
        message.wait()
    return found


def _with_others(x: Tensor, window: int | None, causal: bool, group: Any) -> Tensor:
    """Keys [B, H, T, ...] of this process, and before them those of others that its queries see."""
    rank, keys = distributed.get_rank(group), x.shape[2]
    if window is not None and window - 1 <= keys:
        tails = gathered(x[:, :, keys - window + 1 :], group)[max(0, rank - 1) : rank]
        return torch.cat([tails.movedim(0, 2).flatten(2, 3), x], dim=2)
    last = rank + 1 if causal else None  # its own from there, too: all processes need a gradient
    return gathered(x, group)[:last].movedim(0, 2).flatten(2, 3)
