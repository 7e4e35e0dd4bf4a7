"""The sizes of caches, in bytes: of one at hand, and of those that a configuration would have."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from softmax_rnn.models.cache_layers import LAYERS
from softmax_rnn.ops import (
    FEATURE_MAPS,
    AttentionSpec,
    LayerOptions,
    compute_dtype,
    key_widths,
    powers,
    state_size,
)

# Where layers of transformers' caches have their tensors, or lists of them.
_TENSORS = ("keys", "values", "conv_states", "recurrent_states")


def cache_bytes(cache: Cache) -> int:
    """The size of a cache's tensors, of any kind."""
    return sum(_layer_bytes(layer) for layer in cache.layers)


def _layer_bytes(layer: Any) -> int:
    if type(layer) in LAYERS.values():
        return int(layer.nbytes)
    found: list[Any] = [getattr(layer, name, None) for name in _TENSORS]
    lists: list[list[Any]] = [list(x) if isinstance(x, list | tuple) else [x] for x in found]
    return sum(x.nbytes for x in itertools.chain(*lists) if isinstance(x, Tensor))


def recurrent_bytes(config: Any, dtype: torch.dtype, batch: int = 1) -> int | None:
    """Bytes of a recurrent cache for a model of ``config``; ``None`` if it can have none."""
    spec = config.spec
    if not spec.has_state:
        return None
    options, kv_heads = config.options, config.num_key_value_heads
    size = state_bytes(spec, options, kv_heads, config.head_dim, config.head_dim, dtype)
    if options.short_convolution:  # of queries, keys and values
        qk_dim = options.qk_dim or config.head_dim
        channels = (config.num_attention_heads + kv_heads) * qk_dim + kv_heads * config.head_dim
        size += (options.short_convolution - 1) * channels * dtype.itemsize
    return batch * config.num_hidden_layers * size


def state_bytes(
    spec: AttentionSpec,
    options: LayerOptions,
    kv_heads: int,
    head_dim: int,
    value_width: int,
    dtype: torch.dtype,
) -> int:
    """Bytes of a layer's sums and of the keys that it keeps besides, for one row of a batch."""
    width, outside = key_widths(spec, options, head_dim)
    numbers = state_size(spec, outside or width, value_width)
    if spec.sums_can_cancel:  # and the magnitudes, and the largest value
        numbers += len(powers(spec)) * (outside or width) + 1
    size = kv_heads * numbers * compute_dtype(dtype).itemsize
    decays = _decays(spec, width) or int(spec.decay == "head")
    kept = FEATURE_MAPS[spec.feature_map](torch.empty(1, dtype=dtype)).dtype.itemsize
    first = (width + value_width) * kept + decays * 8  # float64
    recent = first + (outside or 0) * kept
    for keys, each in ((spec.window or 0, recent), (spec.global_keys, first)):
        size += keys * (kv_heads * each + 1)  # and whether it is visible
    return size


def key_value_bytes(config: Any, dtype: torch.dtype, tokens: int, batch: int = 1) -> int:
    """Bytes of a key/value cache for a model of ``config`` after ``tokens`` tokens."""
    heads = batch * config.num_hidden_layers * config.num_key_value_heads
    keys, outside = key_widths(config.spec, config.options, config.head_dim)
    numbers = keys + (outside or 0) + _decays(config.spec, keys) + config.head_dim
    return heads * numbers * tokens * dtype.itemsize


def _decays(spec: AttentionSpec, width: int) -> int:
    """Number of log decays of a key of ``width``."""
    return {"token": 1, "channel": width}.get(spec.decay, 0)
