"""What a layer keeps of earlier tokens: a state of fixed size, or their keys and values."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from softmax_rnn._utils.units import bytes_text
from softmax_rnn.ops import state_size
from softmax_rnn.training.config import RunConfig

_BYTES = 4  # of a float32 number


class LayerMemory(NamedTuple):
    """What one layer keeps of one sequence to predict its next token.

    Attributes:
        size: bytes in float32, after ``block_size`` tokens.
        kind: ``state`` (of a finite series), ``cache`` (every key and value), ``window`` (the last
            keys and values, and any global ones) or ``state and window``.
    """

    size: int
    kind: str

    @property
    def grows(self) -> bool:
        """Whether the size grows with the sequence."""
        return self.kind == "cache"

    def __str__(self) -> str:
        """The size and the kind."""
        return f"{bytes_text(self.size)} {self.kind}"


def layer_memory(config: RunConfig) -> LayerMemory:
    """What a layer of a run keeps.

    With each key a cache holds its log decays: one number, or one per channel.
    """
    # Runs of one model share it, whatever they are trained on.
    return _layer_memory(json.dumps(replace(config, seed=0, corpus="").to_dict()))


@lru_cache(maxsize=256)
def _layer_memory(fields: str) -> LayerMemory:
    from softmax_rnn.training.run import new_model  # slow to import

    config = RunConfig.from_dict(json.loads(fields))
    one_layer = replace(config, num_layers=1, vocab_size=1)
    try:
        with torch.device("meta"):
            model = new_model(one_layer, 1, 0)
            layer = model.model.layers[0].self_attn
            # After any feature map of the layer's own: as they are cached.
            given = layer.project(torch.empty(1, 1, config.hidden_size))
    except RuntimeError as error:  # torch's, of sizes that overflow
        raise ValueError(f"No layer can have these sizes: {error}") from error
    spec, (_, heads, _, d_k), d_v = config.spec, given.k.shape, given.v.shape[3]
    outside = 0 if given.outside_k is None else given.outside_k.shape[3]
    per_key = d_k + d_v + {"token": 1, "channel": d_k}.get(spec.decay, 0)
    keys, kinds, numbers = config.block_size, [], 0
    if spec.has_state:
        kinds.append("state")
        numbers += state_size(spec, outside or d_k, d_v)
    if spec.window is not None:
        kinds.append("window")
        recent = min(keys, spec.window)
        numbers += recent * (per_key + outside) + min(keys - recent, spec.global_keys) * per_key
    elif not spec.has_state:
        kinds.append("cache")
        numbers += keys * per_key
    return LayerMemory(_BYTES * heads * numbers, " and ".join(kinds))
