"""What decoding costs after a prompt: the bytes of the cache and the time of a token."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    models: Mapping[str, PreTrainedModel],
    ids: Tensor,
    lengths: Sequence[int],
    progress: Callable[[float], None] = lambda share: None,
) -> pd.DataFrame:
    """The cache and the speed of models after prompts of several lengths.

    The models decode a token each in turn, so that what else the machine does slows all of them.

    Args:
        models: causal language models by their names.
        ids: token ids [T], at least as many as the longest prompt.
        lengths: numbers of tokens of the prompts.
        progress: called with the share of all prompts' tokens that are done.

    Returns:
        One row per model and length: ``stage`` (the name), ``tokens``, ``cache_bytes``,
        ``tokens_per_second`` (the median of 8 single tokens).
    """
    rows: list[dict[str, Any]] = []
    done, every = 0, sum(lengths) * len(models)
    for length in lengths:
        prompt, caches, sizes = ids[None, :length], {}, {}
        for name, model in models.items():
            model.eval()
            new_cache = getattr(model, "new_cache", functools.partial(_usual_cache, model))
            caches[name] = new_cache()
            model.base_model(
                input_ids=prompt.to(model.device), past_key_values=caches[name], use_cache=True
            )
            sizes[name] = cache_bytes(caches[name])
            done += length
            progress(done / every)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(_TOKENS):
            for name, model in models.items():
                token = prompt[:, -1:].to(model.device)
                started = time.perf_counter()
                model(input_ids=token, past_key_values=caches[name], use_cache=True)
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)
                seconds[name].append(time.perf_counter() - started)
        for name in models:
            rate = 1 / float(np.median(seconds[name]))
            found = {"tokens": length, "cache_bytes": sizes[name], "tokens_per_second": rate}
            rows.append({"stage": name, **found})
    return pd.DataFrame(rows)


def _usual_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)
