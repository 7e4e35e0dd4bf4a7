"""Tasks of lm_eval, against log-likelihoods computed by hand."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import softmax_rnn as sr
from softmax_rnn.data.tokenizer import byte_tokenizer

pytest.importorskip("lm_eval", reason="the extra 'evaluate' is not installed")

from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from softmax_rnn.analysis import harness

LENGTH = 32  # the longest context
QUESTIONS = [
    ("The sky is", [" blue", " dark green"], 0),
    ("Grass:", [" red", " green"], 1),
    ("Snow is very", [" white", " black"], 0),
]
STORIES = ["state query key value", "a naïve café, and words to fill more than one window " * 2]
COMMON = "dataset_path: json\ntest_split: test\ndataset_kwargs:\n  data_files:\n    test: {}\n"
TASKS = {
    "colours": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: brier_score
""",
    "endings": """output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
target_delimiter: ""
metric_list:
  - metric: perplexity
""",
    "stories": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
  - metric: word_perplexity
""",
    "answers": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{expected}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tasks whose data are files; no index of lm_eval's own, which takes long."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    manager = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr(harness, "TaskManager", manager)
    monkeypatch.setattr(evaluator, "add_env_info", lambda storage: None)  # takes long, too
    path = tmp_path / "tasks"
    path.mkdir()
    for name, task in TASKS.items():
        data = path / f"{name}.jsonl"
        (path / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.format(data)}{task}")
        rows: list[dict[str, Any]] = [
            {"question": question, "choices": choices, "answer": answer, "expected": ""}
            for question, choices, answer in QUESTIONS
        ]
        _write(data, [{"text": text} for text in STORIES] if name == "stories" else rows)
    return path


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _ours(attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = sr.SoftmaxRNNConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        attention=attention,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=256,
    )
    return sr.SoftmaxRNNForCausalLM(config).eval()


def _converted() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
    )
    return sr.convert(LlamaForCausalLM(config), "taylor:2", layers=[1]).eval()


MODELS = {
    "norm": functools.partial(_ours, "norm"),
    "taylor:2+decay": functools.partial(_ours, "taylor:2+decay"),
    "converted": _converted,
}


@torch.no_grad()
def _likelihood(model: PreTrainedModel, context: list[int], tokens: list[int]) -> float:
    logits = model(torch.tensor([[*context, *tokens]])).logits[0].double()
    chances = logits.log_softmax(-1)
    first = len(context) - 1
    return sum(float(chances[first + place, token]) for place, token in enumerate(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_task_by_hand(name: str, folder: Path) -> None:
    model, tokenizer = MODELS[name](), byte_tokenizer()

    def ids(text: str) -> list[int]:
        return list(text.encode())

    texts = []
    for question, _, _ in QUESTIONS:
        prompt = torch.tensor([ids(question)])
        made = model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=False)
        text = tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)
        texts.append(text.split("\n")[0])
    wrong = [*texts[:2], "something else"]
    rows = [{"question": q, "expected": t} for (q, _, _), t in zip(QUESTIONS, wrong, strict=True)]
    _write(folder / "answers.jsonl", rows)

    found = harness.run_tasks(model, tokenizer, list(TASKS), include_path=folder, batch_size=2)
    values = {(row["task"], row["metric"]): row for row in found}

    scores = [
        [_likelihood(model, ids(question), ids(choice)) for choice in choices]
        for question, choices, _ in QUESTIONS
    ]
    answers = [answer for _, _, answer in QUESTIONS]
    right = [
        max(range(2), key=each.__getitem__) == a for each, a in zip(scores, answers, strict=True)
    ]
    assert values["colours", "acc"]["value"] == pytest.approx(sum(right) / 3)
    shares = torch.tensor(scores, dtype=torch.float64).softmax(-1)
    brier = float((shares - torch.eye(2)[answers]).square().sum(-1).mean())
    assert values["colours", "brier_score"]["value"] == pytest.approx(brier, abs=1e-4)

    log = sum(each[answer] for each, answer in zip(scores, answers, strict=True)) / 3
    assert math.log(values["endings", "perplexity"]["value"]) == pytest.approx(-log, abs=1e-4)

    total, words, size = 0.0, 0, 0
    for text in STORIES:
        tokens = ids(text)
        # The last window sees as many tokens before it as fit.
        total += _likelihood(model, [256], tokens[:LENGTH])
        for start in range(LENGTH, len(tokens), LENGTH):
            window = tokens[start : start + LENGTH]
            total += _likelihood(model, tokens[start + len(window) - LENGTH - 1 : start], window)
        words += len(text.split())
        size += len(tokens)
    bits = values["stories", "bits_per_byte"]["value"]
    assert bits == pytest.approx(-total / math.log(2) / size, abs=1e-4)

    assert values["answers", "exact_match"]["value"] == pytest.approx(2 / 3)
    assert values["answers", "exact_match"]["questions"] == 3
    assert values["answers", "exact_match"]["shots"] == 0
    shown = harness.table(found)
    assert shown.row_count == len(found) == 6


def test_examples_and_limits(folder: Path) -> None:
    found = harness.run_tasks(
        _ours("norm"), byte_tokenizer(), ["endings"], include_path=folder, limit=1
    )
    question, choices, answer = QUESTIONS[0]
    one = _likelihood(_ours("norm"), list(question.encode()), list(choices[answer].encode()))
    assert found[0]["questions"] == 1
    assert math.log(found[0]["value"]) == pytest.approx(-one, abs=1e-4)
    assert found[0]["standard_error"] is None
    shown = harness.run_tasks(
        _ours("norm"),
        byte_tokenizer(),
        ["endings"],
        include_path=folder,
        num_fewshot=1,
        max_length=64,
    )
    assert shown[0]["shots"] == 1
    assert shown[0]["value"] != found[0]["value"]


def test_what_cannot_be_run(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = _ours("norm"), byte_tokenizer()
    with pytest.raises(ValueError, match="Unknown task 'colour'. Did you mean 'colours'?"):
        harness.run_tasks(model, tokenizer, ["colour"], include_path=folder)
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder with tasks"):
        harness.run_tasks(model, tokenizer, ["colours"], include_path=tmp_path / "nowhere")
    path = folder / "answers.yaml"
    path.write_text(path.read_text().replace("max_gen_toks: 6", "max_gen_toks: 32"))
    with pytest.raises(ValueError, match=r"lm_eval cannot run answers: .*\(32\)"):
        harness.run_tasks(model, tokenizer, ["answers"], include_path=folder)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-text token, .* end_of_text"):
        harness.run_tasks(model, tokenizer, ["colours"], include_path=folder)
