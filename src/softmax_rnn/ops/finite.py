"""The range of numbers: powers scaled to fit it, and errors that name the cause of an overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from softmax_rnn.ops.decay import FLOOR
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype, no_data, visible, without_hidden
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State

Inputs = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


def scaled_for_powers(
    q: Tensor,
    k: Tensor,
    spec: AttentionSpec,
    causal: bool,
    mask: Tensor | None,
    log_decay: Tensor | None,
    stateful: bool,
) -> tuple[Tensor, Tensor | None]:
    """Scale the queries of each row; return them and the log of the factor missing in the sums.

    Powers of small scores would underflow and powers of large scores would overflow, although the
    quotient is in range. So each row is scaled: sums of powers of its largest possible score are
    just in range, which leaves the largest range for smaller scores. Factors are powers of two, so
    that nothing is rounded. A state stores unscaled keys, also earlier ones: with a state, queries
    are scaled to length 1.

    Raises:
        FloatingPointError: if the longest keys are hidden from a row, or have faded, and powers of
            all others underflow beside them.
    """
    if not q.numel() or not k.numel():
        return q, None
    dtype, phi, order = compute_dtype(q.dtype), FEATURE_MAPS[spec.feature_map], spec.order
    assert order is not None
    exponent = _log2_length(phi(q.detach()).to(dtype))
    if not stateful:
        lengths = _log2_length(phi(k.detach()).to(dtype))
        if causal:  # a row sees no later keys
            longest = lengths.cummax(-1).values[..., k.shape[2] - q.shape[2] :]
        else:
            longest = lengths.amax(-1, keepdim=True)
        longest = longest.repeat_interleave(q.shape[1] // k.shape[1], 1)
        _check_hidden_keys(k, lengths, longest, spec, causal, mask, log_decay, q.shape[2])
        longest = longest + math.log2(abs(spec.score_scale(q.shape[-1])))
        # If all scores are zero, any factor works.
        longest = longest.masked_fill(longest == -torch.inf, 0.0)
        exponent = exponent + longest.clamp(-_HEADROOM, _HEADROOM) - _HEADROOM / order
    exponent = exponent.round().masked_fill(~exponent.isfinite(), 0.0)
    if q.dtype == torch.float16:  # float16 has a small range
        q = q.to(dtype)
    half = (exponent / 2).round()  # the full factor may overflow float32
    for part in (half, exponent - half):
        q = q * (-part).exp2().unsqueeze(-1).to(q.dtype)
    return q, order * math.log(2) * exponent


# Powers of scores may use this many bits above 1; sums, values and D^order need the rest.
_HEADROOM = 80.0


_ROWS = 128  # of which _check_hidden_keys compares all keys at once


def _check_hidden_keys(
    k: Tensor,
    lengths: Tensor,
    longest: Tensor,
    spec: AttentionSpec,
    causal: bool,
    mask: Tensor | None,
    log_decay: Tensor | None,
    queries: int,
) -> None:
    """Raise if a row sees only keys whose powers underflow beside the keys it is scaled by.

    ``lengths`` are the base-2 logarithms of those of all keys, [B, Hkv, S]; ``longest`` that of the
    keys up to each query, [B, H, T or 1].
    """
    dtype, order = lengths.dtype, spec.order or 1
    limits = torch.finfo(dtype)
    allowed = (_HEADROOM - math.log2(limits.tiny) + math.log2(limits.eps)) / order
    all_seen = mask is None and log_decay is None and spec.hiding_window is None
    if all_seen or no_data(lengths):
        return
    shortest = lengths.masked_fill(lengths == -torch.inf, torch.inf).amin()
    if not float(lengths.amax() - shortest) > allowed:
        return
    keys, group = k.shape[2], longest.shape[1] // k.shape[1]
    window = spec.hiding_window, spec.global_keys
    shown = visible(queries, keys, causal, mask, k.device, *window)
    if spec.decay == "channel":  # which multiplies the channels of a key, not its power
        sizes = FEATURE_MAPS[spec.feature_map](k.detach()).to(dtype).abs().log2().unbind(-1)
        bits = 1.0
    else:
        sizes, bits = (lengths,), 1.0 / order
    totals: Sequence[Tensor | None] = [None] * len(sizes)
    if log_decay is not None:
        sums = log_decay.detach().cumsum(2)
        totals = sums.unbind(-1) if spec.decay == "channel" else [sums]
    for start in range(0, queries, _ROWS):
        rows = slice(start, min(start + _ROWS, queries))
        seen: Tensor | None = None  # one channel at a time: all of them would take much memory
        for size, total in zip(sizes, totals, strict=True):
            left = size.unsqueeze(2).expand(-1, -1, rows.stop - rows.start, -1)
            if total is not None:
                at = slice(keys - queries + rows.start, keys - queries + rows.stop)
                faded = total[:, :, at, None] - total[:, :, None]
                left = left + faded * (bits / math.log(2))
                left = left.masked_fill(faded < FLOOR[dtype], -torch.inf)
            seen = left if seen is None else seen.maximum(left)
        assert seen is not None
        seen = seen.repeat_interleave(group, 1)
        if shown is not None:
            part = shown[..., rows, :] if shown.shape[-2] > 1 else shown
            seen = seen.masked_fill(~part, -torch.inf)
        most = seen.amax(-1)
        gap = longest[..., rows if longest.shape[-1] > 1 else slice(None)] - most
        bad = ((gap > allowed) & most.isfinite()).flatten(0, 1).any(0).nonzero()
        if len(bad):
            raise FloatingPointError(
                f"Power {spec.order} of the keys that query {start + int(bad[0])} sees underflows "
                f"{dtype}: earlier or hidden keys are {float(gap.max().exp2()):.1g} times longer. "
                "Use keys of similar length or float64."
            )


def _log2_length(x: Tensor) -> Tensor:
    """An upper bound of log2 of the rows' lengths, without squares, which may be out of range."""
    largest = x.abs().amax(-1)
    return largest.log2() + 0.5 * math.log2(x.shape[-1])


def check_sums(
    sums: RowSums,
    spec: AttentionSpec,
    state: State | None,
    inputs: Inputs,
    features: Tensor,
    log_decay: Tensor | None,
) -> None:
    """Raise if the sums of a finite series, or its state, overflow.

    NaN or infinity propagates to every output that depends on it, so the outputs are checked. The
    last keys may affect no output, so the size of their powers is checked as well. Without a state,
    NaN or infinity in the inputs propagates to the outputs, as in softmax. ``state`` is the initial
    state; ``features`` are the keys as a state stores them; hidden
    keys and values are zero; log decays are [B, Hkv, S] or
    [B, Hkv, S, D].

    Raises:
        OverflowError: if sums or a state overflow; the message gives the size of the inputs, or
            the key that overflows the state.
        FloatingPointError: for NaN or infinity in a state or in the tokens added to it (the message
            gives the index of the token, counted from the start of the state), or if powers of
            small keys underflow in a state.
    """
    if no_data(sums.numerator):
        return
    stateful = sums.state is not None
    if sums.finite is None:
        finite = all_finite(sums.numerator) and all_finite(sums.weight_sum)
    else:
        finite = bool(sums.finite)
    if finite and not stateful:
        return
    q, k, v = (x.detach() for x in inputs)
    shown = q.shape[2] > 0  # without a query, no output shows a NaN of the state
    if finite and shown and not _out_of_range(sums, spec, features, v):
        return
    if stateful or state is not None:
        _check_state(sums, spec, state, features, v, log_decay)
    if not finite and all(all_finite(x) for x in (q, k, v, log_decay)):
        raise OverflowError(
            f"The sums of power {spec.order} overflow {sums.numerator.dtype}: {_sizes((q, k, v))}, "
            f"the score scale is {spec.score_scale(q.shape[-1]):.3g}. Use smaller inputs, a lower "
            "order or float64."
        )


def check_output(out: Tensor, dtype: torch.dtype, inputs: Inputs, mask: Tensor | None) -> None:
    """Raise ``OverflowError`` if outputs of finite inputs exceed the range of ``dtype``.

    What hidden keys and values hold does not matter.
    """
    if no_data(out) or not out.numel():
        return
    largest = out.detach().abs().amax().item()
    if not largest > torch.finfo(dtype).max:
        return
    q, k, v = inputs
    if mask is not None:
        k, v = without_hidden(mask, k, v)
    if all(all_finite(x) for x in (q, k, v)):
        raise OverflowError(
            f"The largest output, {largest:.3g}, overflows {dtype}, whose largest number is "
            f"{torch.finfo(dtype).max:.3g}: {_sizes(inputs)}. Use a wider type, a denominator or a "
            "norm."
        )


def _sizes(inputs: Inputs) -> str:
    longest = (x.detach().double().norm(dim=-1).amax().item() for x in inputs)
    query, key, value = (f"{length:.3g}" for length in longest)
    return f"the longest query has norm {query}, the longest key {key}, the longest value {value}"


def _check_state(
    sums: RowSums,
    spec: AttentionSpec,
    state: State | None,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
) -> None:
    before = 0 if state is None else int(state.tokens)
    if state is not None and not state.sums.isfinite().all():
        raise FloatingPointError(
            f"The given state contains NaN or infinity, after {before} tokens."
        )
    for name, x in (("key", k), ("value", v), ("log decay", log_decay)):
        if x is None:
            continue
        each = x if x.ndim == 4 else x.unsqueeze(-1)
        bad = (~each.isfinite()).any(-1).flatten(0, 1).any(0).nonzero()
        if len(bad):
            token = before + int(bad[0])
            raise FloatingPointError(f"The {name} of token {token} contains NaN or infinity.")
    if sums.state is not None and not sums.state.isfinite().all():
        largest = k.detach().abs().amax(-1).flatten(0, 1).amax(0)
        token = before + int(largest.argmax())
        raise OverflowError(
            f"The state overflows {sums.state.dtype} between tokens {before} and "
            f"{before + k.shape[2] - 1}; the longest key, of token {token}, has entries of "
            f"{largest.max().item():.3g}. Use a lower order, shorter keys or float64."
        )
    longest = float(k.abs().max()) if k.numel() else 0.0
    if sums.state is not None and _vanishes(spec, longest, torch.finfo(sums.state.dtype).tiny):
        raise FloatingPointError(
            f"Power {spec.order} of keys of at most {longest:.3g} underflows in a state of "
            f"{sums.state.dtype}. Use larger keys or float64."
        )


def _out_of_range(sums: RowSums, spec: AttentionSpec, k: Tensor, v: Tensor) -> bool:
    """Whether a key's powers times its value may be out of range for the state."""
    if sums.state is None or not k.numel() or not v.numel():
        return False
    key, value = (float(x.detach().abs().max()) for x in (k, v))
    return not within_range(spec, key, value, k.shape[2], sums.state.dtype)


def within_range(
    spec: AttentionSpec, key: float, value: float, keys: int, dtype: torch.dtype
) -> bool:
    """Whether powers of the largest key times the largest value are in range for a state."""
    if not (key < math.inf and value < math.inf):  # max() below would ignore NaN
        return False
    limits, order = torch.finfo(dtype), spec.order or 0
    size = order * math.log(max(1.0, key)) + math.log(max(1.0, value) * keys)
    return size < math.log(limits.max) and not _vanishes(spec, key, limits.tiny)


def _vanishes(spec: AttentionSpec, longest: float, tiny: float) -> bool:
    """Whether powers of small keys underflow in a spec in which a factor of scores cancels."""
    return spec.scale_free and 0 < longest ** (spec.order or 0) < tiny


def all_finite(x: Tensor | None) -> bool:
    """Whether no number of a tensor is infinite or NaN; ``None`` has none."""
    if x is None:
        return True
    x = x.detach()
    # One pass; every number is checked only if the sum itself is not finite.
    return math.isfinite(x.sum().item()) or bool(x.isfinite().all())
