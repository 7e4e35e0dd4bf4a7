"""What users of transformers do with a saved conversion: pipelines, streams, batches, chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

import softmax_rnn as sr
from sources import save_source

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = save_source(tmp_path_factory.mktemp("models") / "llama")
    torch.manual_seed(0)
    model = sr.convert(AutoModelForCausalLM.from_pretrained(source), "window_state:4")
    converted = source.parent / "converted"
    model.save_pretrained(converted)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(converted)
    return converted


def test_a_pipeline_of_one_prompt_and_of_a_padded_batch(folder: Path) -> None:
    pipe: Any = pipeline("text-generation", model=str(folder))
    prompts = ["hello world", "a much longer prompt than that"]
    alone = [pipe(prompt, **GREEDY) for prompt in prompts]
    assert pipe(prompts, batch_size=2, **GREEDY) == alone
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, found in zip(prompts, alone, strict=True):
        ids = pipe.tokenizer(prompt, return_tensors="pt")
        out = plain.generate(**ids, use_cache=False, **GREEDY)[0]
        assert pipe.tokenizer.decode(out, skip_special_tokens=True) == found[0]["generated_text"]


def test_streams_and_chats(folder: Path) -> None:
    pipe: Any = pipeline("text-generation", model=str(folder))
    streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = pipe.tokenizer("hello world", return_tensors="pt")
    pipe.model.generate(**ids, streamer=streamer, **GREEDY)
    whole = pipe("hello world", return_full_text=False, **GREEDY)[0]["generated_text"]
    assert "".join(streamer) == whole
    chat = [{"role": "user", "content": "hi"}]
    told = pipe(chat, **GREEDY)[0]["generated_text"]
    assert told[0] == chat[0]
    assert told[1]["role"] == "assistant"
    expected = pipe("user: hi\n", return_full_text=False, **GREEDY)[0]["generated_text"]
    assert told[1]["content"] == expected
