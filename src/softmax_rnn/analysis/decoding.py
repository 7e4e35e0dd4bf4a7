"""What decoding costs after a prompt: the bytes of the cache and the time of a token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from softmax_rnn.models.cache import cache_bytes

_TOKENS = 8  # that are decoded after each prompt


@torch.no_grad()
def decoding_costs(
    model: PreTrainedModel,
    ids: Tensor,
    lengths: Sequence[int],
    progress: Callable[[float], None] = lambda share: None,
) -> pd.DataFrame:
    """The cache and the speed of a model after prompts of several lengths.

    Args:
        model: any causal language model.
        ids: token ids [T], at least as many as the longest prompt.
        lengths: numbers of tokens of the prompts.
        progress: called with the share of all prompts' tokens that are done.

    Returns:
        One row per length: ``tokens``, ``cache_bytes``, ``tokens_per_second`` (the median of 8
        single tokens).
    """
    model.eval()
    rows: list[dict[str, float]] = []
    for length in lengths:
        new_cache = getattr(model, "new_cache", lambda: DynamicCache(config=model.config))
        cache, prompt = new_cache(), ids[None, :length].to(model.device)
        model.base_model(input_ids=prompt, past_key_values=cache, use_cache=True)
        size = cache_bytes(cache)
        seconds = []
        for _ in range(_TOKENS):
            started = time.perf_counter()
            model(input_ids=prompt[:, -1:], past_key_values=cache, use_cache=True)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            seconds.append(time.perf_counter() - started)
        rate = 1 / float(np.median(seconds))
        rows.append({"tokens": length, "cache_bytes": size, "tokens_per_second": rate})
        progress(sum(row["tokens"] for row in rows) / sum(lengths))
    return pd.DataFrame(rows)
