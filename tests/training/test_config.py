"""A run's configuration."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from softmax_rnn.training import PRESETS, RunConfig
from softmax_rnn.training.config import load_config


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    config = RunConfig.preset(name, attention="taylor:3", seed=7)
    config.save(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_the_papers_settings() -> None:
    config = RunConfig.preset("small")
    assert config.tokens_per_step == 36 * 1024
    assert (config.steps, config.warmup, config.learning_rate) == (100_000, 10_000, 1e-4)
    # The authors' schedule runs to a million steps: at the end it stands at 91% of its peak.
    assert config.learning_rate_factor(100_000) == pytest.approx(0.909, abs=1e-3)


def test_schedule() -> None:
    config = RunConfig(steps=100, warmup_steps=9)
    factors = [config.learning_rate_factor(step) for step in range(100)]
    assert min(factors) > 0
    assert factors[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert factors[9:] == pytest.approx([(100 - i) / 91 for i in range(9, 100)])


def test_clipping_is_the_papers_unless_given() -> None:
    assert RunConfig(attention="gate", gradient_clip=None).clip == 1.0
    assert RunConfig(attention="input_gate", gradient_clip=None).clip == 1.0
    assert RunConfig(attention="norm", gradient_clip=None).clip == 0.0
    assert RunConfig(attention="gate", gradient_clip=0.0).clip == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "norn"}, "Did you mean 'norm'"),
        ({"attention": {"nrm": "l2"}}, "Did you mean 'norm'"),
        ({"stepz": 3}, "Unknown config key 'stepz'. Did you mean 'steps'"),
        ({"steps": 0}, "steps must be greater than or equal to 1, not 0"),
        ({"steps": "many"}, "steps must be a valid integer, not 'many'"),
        ({"num_kv_heads": "4\n4"}, r"num_kv_heads must be a valid integer, not '4\\n4'\.$"),
        (
            {"attention": [None]},
            "attention must be a variant.s name or a mapping .*, not .None.\\.$",
        ),
        ({"learning_rate": 10**400}, "learning_rate must be a valid number, not 1000"),
        ({"block_size": 1}, "block_size must be greater than or equal to 2, not 1"),
        ({"num_heads": 3}, "num_heads=3 must divide hidden_size=128"),
        ({"hidden_size": 33, "num_heads": 3}, "heads of width 11; rotary positions need an even"),
        ({"num_kv_heads": 0}, "num_kv_heads must be greater than or equal to 1, not 0"),
        ({"seed": -1}, "seed must be greater than or equal to 0, not -1"),
        ({"vocab_size": 0}, "vocab_size must be greater than or equal to 1, not 0"),
        ({"schedule_steps": 0}, "schedule_steps must be greater than or equal to 1, not 0"),
        ({"schedule_steps": 9, "steps": 10}, "schedule_steps=9 must be at least steps=10"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"batch_size": 8, "accumulation": 3}, "accumulation=3 must divide batch_size=8"),
        ({"log_every": 10, "save_every": 15}, "log_every=10 must divide save_every=15"),
        (
            {"warmup_steps": 900, "steps": 800},
            "warmup_steps=900 must be less than the",
        ),
        ({"precision": "fp8"}, "Unknown precision 'fp8'. Did you mean 'fp32'"),
        ({"packing": "rows"}, "Unknown packing 'rows'. Allowed: blocks, seg"),
        ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1, not 0"),
        (
            {"max_tokens": 2**53},
            "max_tokens must be less than 9007199254740992, not 9007199254740992",
        ),
        ({"attention": None}, "attention must be a variant.s name or a mapping .*, not None"),
        ({"learning_rate": None}, "learning_rate must be a valid number, not None"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number, not nan"),
        ({"gradient_clip": -1.0}, "gradient_clip must be greater than or equal to 0, not -1.0"),
        ({"beta2": 1.0}, "beta2 must be less than 1, not 1.0"),
        ({"test_fraction": 1.5}, "test_fraction must be less than 1, not 1.5"),
        ({"split_seed": -1}, "split_seed must be greater than or equal to 0, not -1"),
    ],
)
def test_mistakes_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        RunConfig.from_dict(fields)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown preset 'dmo'. Did you mean 'demo'"):
        RunConfig.preset("dmo")
    for text, message in (
        ("- a list", "a mapping of config keys"),
        ("steps: [1", "is not YAML"),
        ("plain", "a mapping of config keys"),
        ("steps: 5\nsteps: 6\n", "a key is duplicated"),
        ("corpus: &a [b]\ntokenizer: *a\n", "aliases are not allowed"),
        ("seed: !!bool x", "is not YAML"),
        ("stepz: 5", "Did you mean .steps"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.yaml(.|\n)*{message}"):
            load_config(tmp_path / "config.yaml")
