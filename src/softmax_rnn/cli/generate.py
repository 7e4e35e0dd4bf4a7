"""Generate text with a trained model, and report the size of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TextStreamer, set_seed
from transformers.cache_utils import Cache, DynamicCache

from softmax_rnn._utils.errors import require_choice
from softmax_rnn._utils.units import bytes_text
from softmax_rnn.cli.command import CACHES
from softmax_rnn.conversion.model import ConvertedModel
from softmax_rnn.models import SoftmaxRNNForCausalLM
from softmax_rnn.models.cache import RecurrentCache
from softmax_rnn.models.cache_layers import RecurrentLayer
from softmax_rnn.models.cache_sizes import cache_bytes, key_value_bytes, recurrent_bytes
from softmax_rnn.training.opening import open_model


@dataclass(frozen=True)
class Generation:
    """Generated text and the cache that was used.

    Attributes:
        text: the new text, without the prompt.
        tokens: number of tokens of the prompt and the new text.
        cache: ``recurrent``, ``key-value`` or ``none``.
        cache_bytes: size of the cache that was used.
        sizes: of a model of this package, what either kind of cache would take; else nothing.
    """

    text: str
    tokens: int
    cache: str
    cache_bytes: int
    sizes: str

    def __str__(self) -> str:
        """The cache used and the sizes, in one line."""
        size = f", {bytes_text(self.cache_bytes)} after {self.tokens} tokens"
        return f"cache: {self.cache}{self.sizes or size}"


def generate(
    checkpoint: Path,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    cache: str = "auto",
    streamed: bool = False,
) -> Generation:
    """Continue a prompt.

    Args:
        checkpoint: folder of a run (its newest intact checkpoint is used) or of a saved model, also
            a converted one or any other causal language model.
        prompt: the text to continue, for a model of a task the ids of tokens (``3 77 5``); it must
            give at least one token.
        max_new_tokens: generate at most this many tokens; an end-of-text token stops earlier.
        temperature: sampling temperature; 0 always chooses the likeliest token.
        top_k: sample among this many likeliest tokens only.
        seed: random seed of sampling.
        cache: ``auto`` (recurrent for a finite series, unless its states are larger than the
            model, else the model's usual one), ``recurrent``, ``key-value`` or ``none``.
        streamed: whether to print the text while it is generated.

    Raises:
        FileNotFoundError: if there is no model in the folder.
        ValueError: for an option outside its range, a recurrent cache for an attention without a
            recurrent form, or a damaged checkpoint.
    """
    require_choice("cache", cache, CACHES)
    if temperature < 0:
        raise ValueError(f"temperature must be >= 0, not {temperature!r}.")
    if top_k is not None and (top_k < 1 or not temperature):
        raise ValueError(
            f"top_k={top_k!r} must be at least 1, and needs a temperature above 0 (given: "
            f"{temperature!r})."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, not {max_new_tokens!r}.")
    model, tokenizer, _, folder = open_model(str(checkpoint))
    # No special tokens, as in training: a document starts with its text.
    try:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    except Exception as error:  # of the tokenizer, which says no more
        raise ValueError(
            f"The prompt {prompt!r} has a word that is no token of {folder}: {error}"
        ) from error
    if not inputs["input_ids"].shape[1]:
        raise ValueError(f"The prompt {prompt!r} gives no token; give some text.")
    options = _cache_options(model, cache) | {"do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k or 0}
    set_seed(seed)
    eos = tokenizer.eos_token_id
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        **options,
        max_new_tokens=max_new_tokens,
        pad_token_id=eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if streamed else None,
        return_dict_in_generate=True,
    )
    ids, used = out.sequences, out.past_key_values if cache != "none" else None
    prompted, tokens = inputs["input_ids"].shape[1], ids.shape[1]
    return Generation(
        text=tokenizer.decode(ids[0, prompted:], skip_special_tokens=True),
        tokens=tokens,
        cache=_kind(used),
        cache_bytes=0 if used is None else cache_bytes(used),
        sizes=_sizes(model, tokens) if isinstance(model, SoftmaxRNNForCausalLM) else "",
    )


def _kind(cache: Cache | None) -> str:
    if cache is None:
        return "none"
    states = isinstance(cache, RecurrentCache) and any(
        isinstance(layer, RecurrentLayer) for layer in cache.layers
    )
    return "recurrent" if states else "key-value"


def _cache_options(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """The settings of ``generate`` for a cache; none for the model's own choice."""
    if name == "none":
        return {"use_cache": False}
    if name == "key-value":
        return {"past_key_values": DynamicCache(config=model.config)}
    if name == "auto":
        return {}
    if isinstance(model, SoftmaxRNNForCausalLM):
        if not model.config.spec.has_state:
            raise ValueError(
                "cache='recurrent' needs a finite series without a clamp; this model's attention "
                f"is {model.config.spec}."
            )
        return {"past_key_values": RecurrentCache()}
    cache = model.new_cache() if isinstance(model, ConvertedModel) else None
    if _kind(cache) != "recurrent":
        raise ValueError(
            f"cache='recurrent' needs an attention with a state: this {type(model).__name__} has "
            "none, or its states are larger than the model."
        )
    return {"past_key_values": cache}


def _sizes(model: SoftmaxRNNForCausalLM, tokens: int) -> str:
    """What either cache takes."""
    states = recurrent_bytes(model.config, model.dtype)
    per_token = key_value_bytes(model.config, model.dtype, 1)
    sizes = f"key/value cache {bytes_text(per_token * tokens)} after {tokens} tokens"
    if states is None:
        return f"; {sizes}; this attention has no recurrent form"
    return (
        f"; recurrent cache {bytes_text(states)} at any length, {sizes}; the recurrent cache is "
        f"smaller from {states // per_token + 1:,} tokens on"
    )
