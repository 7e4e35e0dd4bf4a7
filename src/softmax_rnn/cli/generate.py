"""Generate text with a trained model, and report the size of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TextStreamer, set_seed
from transformers.cache_utils import Cache, DynamicCache

from softmax_rnn._utils.errors import require_choice
from softmax_rnn._utils.units import bytes_text
from softmax_rnn.cli.command import CACHES
from softmax_rnn.data import load_tokenizer
from softmax_rnn.models import SoftmaxRNNForCausalLM
from softmax_rnn.models.cache import RecurrentCache, key_value_bytes, recurrent_bytes
from softmax_rnn.training.checkpoint import load_trained, model_folder


@dataclass(frozen=True)
class Generation:
    """Generated text and the cache that was used.

    Attributes:
        text: the new text, without the prompt.
        tokens: number of tokens of the prompt and the new text.
        cache: ``recurrent``, ``key-value`` or ``none``.
        recurrent_bytes: size of a recurrent cache; ``None`` if the attention has no recurrent form.
        key_value_bytes: size of a key/value cache after ``tokens`` tokens.
        smaller_from: number of tokens from which the recurrent cache is smaller than the key/value
            cache; ``None`` if the attention has no recurrent form.
    """

    text: str
    tokens: int
    cache: str
    recurrent_bytes: int | None
    key_value_bytes: int
    smaller_from: int | None

    def __str__(self) -> str:
        """The cache used and both sizes, in one line."""
        sizes = f"key/value cache {bytes_text(self.key_value_bytes)} after {self.tokens} tokens"
        if self.recurrent_bytes is None:
            return f"cache: {self.cache}; {sizes}; this attention has no recurrent form"
        return (
            f"cache: {self.cache}; recurrent cache {bytes_text(self.recurrent_bytes)} at any "
            f"length, {sizes}; the recurrent cache is smaller from {self.smaller_from:,} tokens on"
        )


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
        checkpoint: folder of a run (its newest intact checkpoint is used) or of a saved model.
        prompt: the text to continue, for a model of a task the ids of tokens (``3 77 5``); it must
            give at least one token.
        max_new_tokens: generate at most this many tokens; an end-of-text token stops earlier.
        temperature: sampling temperature; 0 always chooses the likeliest token.
        top_k: sample among this many likeliest tokens only.
        seed: random seed of sampling.
        cache: ``auto`` (recurrent for a finite series, unless its states are larger than the
            model), ``recurrent``, ``key-value`` or ``none``.
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
    folder = model_folder(checkpoint)
    model = load_trained(folder).eval()
    tokenizer = load_tokenizer(str(folder), local=True, ends=False)
    if not isinstance(model, SoftmaxRNNForCausalLM):
        raise ValueError(
            f"{folder} contains a {type(model).__name__}, not a model of this package. A converted "
            "model continues a prompt by generate() of transformers' AutoModelForCausalLM."
        )
    # No special tokens, as in training: a document starts with its text.
    try:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    except Exception as error:  # of the tokenizer, which says no more
        raise ValueError(
            f"The prompt {prompt!r} has a word that is no token of {folder}: {error}"
        ) from error
    if not inputs["input_ids"].shape[1]:
        raise ValueError(f"The prompt {prompt!r} gives no token; give some text.")
    used = _new_cache(model, cache)
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k or 0}
    set_seed(seed)
    eos = tokenizer.eos_token_id
    ids = model.generate(
        **inputs,
        **options,
        max_new_tokens=max_new_tokens,
        past_key_values=used,
        use_cache=used is not None,
        pad_token_id=eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if streamed else None,
    )
    prompted, tokens = inputs["input_ids"].shape[1], ids.shape[1]
    states = recurrent_bytes(model.config, model.dtype)
    per_token = key_value_bytes(model.config, model.dtype, 1)
    return Generation(
        text=tokenizer.decode(ids[0, prompted:], skip_special_tokens=True),
        tokens=tokens,
        cache={RecurrentCache: "recurrent", DynamicCache: "key-value"}.get(type(used), "none"),
        recurrent_bytes=states,
        key_value_bytes=per_token * tokens,
        smaller_from=None if states is None else states // per_token + 1,
    )


def _new_cache(model: SoftmaxRNNForCausalLM, name: str) -> Cache | None:
    if name == "auto":
        return model.new_cache()
    if name == "recurrent":
        if not model.config.spec.has_state:
            raise ValueError(
                "cache='recurrent' needs a finite series without a clamp; this model's attention "
                f"is {model.config.spec}."
            )
        return RecurrentCache()
    return DynamicCache(config=model.config) if name == "key-value" else None
