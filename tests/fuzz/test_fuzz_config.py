"""Configurations of runs, as plain data and as YAML: right, or refused in words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fuzzing import mutated, outcome, snapshot
from softmax_rnn import AttentionSpec
from softmax_rnn.training import PRESETS, RunConfig
from softmax_rnn.training.config import load_config

CONFIGS = [
    RunConfig.preset(name, attention=attention).to_dict()
    for name, attention in zip(PRESETS, ("softmax", "taylor:4", "gate", "norm"), strict=True)
]
CONFIGS.append({**CONFIGS[0], "attention": AttentionSpec(clamp=5.0, norm="l2").to_dict()})
CONFIGS.append(
    {**CONFIGS[0], "corpus": "task:mqar", "intermediate_size": 0, "stop_at_accuracy": 0.99}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


def _check(config: RunConfig, folder: Path) -> None:
    assert RunConfig.from_dict(config.to_dict()) == config
    config.save(folder / "saved.yaml")
    assert load_config(folder / "saved.yaml") == config
    assert isinstance(config.spec, AttentionSpec)
    for step in (0, config.warmup, config.steps - 1):
        assert 0 < config.learning_rate_factor(step) <= 1
    assert config.clip >= 0
    assert 0 < config.test_fraction < 1
    numbers = [value for value in config.to_dict().values() if isinstance(value, float)]
    assert all(math.isfinite(number) for number in numbers)


@given(st.sampled_from(CONFIGS).flatmap(mutated))
def test_configurations(folder: Path, data: Any) -> None:
    if not isinstance(data, dict):
        data = {"attention": data}
    found = outcome(lambda: RunConfig.from_dict(data))
    if found.error is None:
        _check(found.value, folder)
        made = found.value.to_dict()
        for key, value in data.items():
            assert made[key] == value or isinstance(value, str) or float(value) == made[key]


# Words that mean something to YAML, and some that should mean nothing to us.
_WORDS = [
    *(
        "&a",
        "*a",
        "!!python/object/apply:os.system [echo]",
        "!!python/name:os.system",
        "!!binary x",
    ),
    *(
        "!!timestamp x",
        "!!bool x",
        "!!int ''",
        "!!float ''",
        "!!set {a}",
        "2001-99-99",
        "2020-01-01",
    ),
    *(
        "0b_",
        "0x_",
        "1:60:90",
        "? [a]",
        "? {a: b}",
        "---\n",
        "...\n",
        "%YAML 9.9\n",
        "<<: *a",
        "\t",
    ),
    *(
        "[" * 2000,
        "{" * 500,
        "'",
        '"',
        ": ",
        "- ",
        "|\n ",
        "#",
        "\0",
        "\ufeff",
        "\u2028",
        "steps: 3\n",
    ),
    *("a: &a [b, b]\n", "null", ".nan", ".inf", "1e-3", "9" * 5000, "~", "=", "\n", "no", "@", "`"),
]
_TEXTS = [yaml.safe_dump(config, sort_keys=False) for config in CONFIGS]
# A value of 2^40 words in forty lines.
LAUGHS = "corpus:\n  a0: &a0 [x, x]\n" + "".join(
    f"  a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)
)


@st.composite
def _yaml(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(_TEXTS))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        lines = text.split("\n")
        line = draw(st.integers(0, len(lines) - 1))
        word = draw(st.sampled_from(_WORDS) | st.text(max_size=6))
        key, colon, value = lines[line].partition(": ")
        place = draw(st.integers(0, len(lines[line])))
        changes = [
            f"{key}{colon}{word}",
            f"{key}{colon}{word} {value}",
            f"{word}{lines[line]}",
            lines[line][:place] + word + lines[line][place:],
            lines[line][:place],
            f"{lines[line]}\n{lines[line]}",
        ]
        harmless = [
            f"{lines[line]}  # {key}",
            f"'{key}'{colon}{value}",
            f"{lines[line]}\n\n# {value}",
            "",
            f"{key}{colon}{draw(st.sampled_from(['8', '16', '0.25', 'norm', 'null']))}",
        ]
        lines[line] = draw(st.sampled_from(changes) | st.sampled_from(harmless))
        text = "\n".join(lines)
    return text


yaml_texts = _yaml().map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(
    max_size=40
)


@given(yaml_texts)
@example(b"corpus: " + b"[" * 20_000)
@example(b"corpus: &a [*a]\n")
@example(LAUGHS.encode())
@example(b"steps: 5\nsteps: 6\n")
@example(b"\xff\xfe")
def test_configuration_files(folder: Path, text: bytes) -> None:
    path = folder / "config.yaml"
    path.write_bytes(text)
    found = outcome(lambda: load_config(path), names=str(path))
    assert set(snapshot(folder)) <= {"config.yaml", "saved.yaml"}
    if found.error is None:
        _check(found.value, folder)
