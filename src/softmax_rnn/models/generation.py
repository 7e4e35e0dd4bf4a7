"""Generation and forward passes with a cache of the model's own choice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from softmax_rnn.models.cache import RecurrentCache


def chosen_by(undo: bool) -> tuple[str, ...]:
    """Settings of ``generate`` with which transformers chooses the cache.

    Without ``undo`` also those of assisted decoding: older versions of transformers ask no cache to
    record tokens that may be taken back, and crop to a length, as keys and values allow.
    """
    named = ("past_key_values", "cache_implementation")
    assisted = ("is_assistant", "assistant_model", "assistant_early_exit")
    return named if undo else (*named, *assisted, "prompt_lookup_num_tokens")


_CHOOSE_A_CACHE = chosen_by(undo=hasattr(Cache, "activate_past_recording"))


def with_own_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's ``forward`` whose ``use_cache=True`` means the model's ``new_cache()``.

    Only where no cache is given, and the argument itself is: ``use_cache`` of the configuration
    would make training compute states.
    """
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("use_cache") and given.get("past_key_values") is None:
            cache = args[0].new_cache()
            if cache is not None:
                return forward(**{**given, "past_key_values": cache})
        return forward(*args, **kwargs)

    return run


class OwnCacheGeneration(GenerationMixin):
    """A base class, before the model's: ``generate`` takes the model's ``new_cache()``.

    The model's class defines it: an empty cache, or ``None`` to generate without one.
    """

    new_cache: Callable[[], Cache | None]

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ``GenerationMixin.generate``, with :meth:`new_cache` if no cache is requested."""
        given = inspect.signature(super().generate).bind(inputs, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        configs = (given.get("generation_config"), self.generation_config)

        def setting(name: str) -> Any:  # a configuration's None stands for the model's own
            found = (given.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in found if value is not None), None)

        chosen = any(setting(name) not in (None, False) for name in _CHOOSE_A_CACHE)
        if setting("use_cache") is not False and not chosen:
            cache = self.new_cache()
            kwargs |= {"use_cache": False} if cache is None else {"past_key_values": cache}
            if cache is not None and setting("is_assistant"):
                cache.activate_past_recording()
        cache = kwargs.get("past_key_values")
        recorded = isinstance(cache, RecurrentCache) and cache.record_past
        out = super().generate(inputs, *args, **kwargs)
        if isinstance(cache, RecurrentCache) and not recorded and not setting("is_assistant"):
            cache.end_past_recording()  # else it would grow with every later token
        return out
