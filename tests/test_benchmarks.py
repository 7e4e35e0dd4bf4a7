"""The benchmarks run, check, and write what performance.md is made of; nothing is timed here."""

from __future__ import annotations

import gc
import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
SMALL = {
    "op": ["--lengths", "64", "130", "--heads", "1"],
    "forgetting": ["--lengths", "64", "130", "--heads", "1"],
    "recurrence": [],
    "choice": [],
    "step": ["--batch", "1"],
    "prepare": ["--megabytes", "0.3", "--workers", "1", "--kills", "0"],
    "decode": ["--lengths", "16", "40", "--new-tokens", "2"],
    "prefix": ["--tokens", "60", "--piece", "20", "--variants", "softmax", "taylor:2"],
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny result of every benchmark."""
    monkeypatch.syspath_prepend(str(ROOT))
    for name, value in {
        "measure.CEILING": {"cpu": (64, 2**12)},
        "op.CHECKED": {"cpu": 130},
        "forgetting.CHECKED": 130,
        "decode.CHECKED": (8, 3),
        "decode.BACKEND": "eager",  # inductor takes a quarter of a minute
        "recurrence.AGAINST_RUNNING_STATES": ((1, 40, 4, 2, 1.0),),
        "recurrence.GROWTH": (32, 64, 4.5),
        "choice.SHORT": ((16,), (4,)),
        "choice.LONG": ((64, 300), (4,), (1, 2)),
        "decode.BATCHES": {1: 100, 2: 20},
        "prefix.QUESTIONS": 2,
        "prefix.DRAFTS": 1,
        "recurrence.STREAM": {"heads": 1, "width": 4, "order": 2, "tokens": 600, "piece": 10},
        "recurrence.TOKENS": 3,
    }.items():
        module, _, attribute = name.partition(".")
        monkeypatch.setattr(importlib.import_module(f"benchmarks.{module}"), attribute, value)
    gc.freeze()  # collections before each measurement of memory would take most of the time
    for name, words in SMALL.items():
        main = importlib.import_module(f"benchmarks.{name}").main
        assert main([*words, "--rounds", "2", "--out", str(tmp_path / f"{name}-cpu.json")]) == 0
    return tmp_path


@pytest.mark.slow
def test_results_are_whole_and_fill_the_page(results: Path, tmp_path: Path) -> None:
    found = {name: json.loads((results / f"{name}-cpu.json").read_text()) for name in SMALL}
    for name, result in found.items():
        assert result["benchmark"] == name
        assert result["device"] == "cpu"
        assert result["environment"]["packages"]["torch"]
        assert result["ceiling"]["flop_per_second"] > 0
        for row in result.get("rows", []) if name != "choice" else []:
            assert len(row["rounds"]) == 2
            assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
            assert row["peak_extra_bytes"] >= 0
    names = {row["name"] for row in found["op"]["rows"]}
    assert names >= {"sdpa", "softmax", "norm", "gate", "taylor:10", "linear_elu"}
    assert names >= {"materialised norm", "materialised gate"}
    names = {row["name"] for row in found["forgetting"]["rows"]}
    assert names >= {"sdpa", "token decay", "slow token decay", "window 256"}
    assert {row["name"] for row in found["step"]["rows"]} >= {"llama", "llama materialised"}
    assert isinstance(found["op"]["not_installed"], list)
    caches = {row["name"]: row for row in found["decode"]["rows"] if row["length"] == 40}
    assert {(row["batch"], row["length"]) for row in found["decode"]["rows"]} == {
        *((1, 16), (1, 40), (2, 16))
    }
    assert caches["softmax"]["cache_bytes"] == caches["llama"]["cache_bytes"]
    assert caches["taylor:2 compiled"]["cache_bytes"] == caches["taylor:2"]["cache_bytes"]
    assert caches["llama compiled"]["cache_bytes"] > caches["llama"]["cache_bytes"]

    prefixes = {row["name"]: row for row in found["prefix"]["prefixes"]}
    assert prefixes["softmax"]["cache_bytes"] == 60 * 2 * 2 * 64 * 4  # keys and values, two layers
    assert prefixes["softmax"]["batch_bytes"] == 2 * 60 * 2 * 2 * 64 * 4
    assert prefixes["taylor:2"]["batch_bytes"] == 2 * prefixes["taylor:2"]["cache_bytes"]
    assert [row["name"] for row in found["prefix"]["undo"]] == ["taylor:2"]

    page = runpy.run_path(str(ROOT / "docs" / "performance.py"))
    loaded = page["load"](results)
    text = page["fill"]((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), loaded)
    assert text.count("| `norm` |") == 3  # two lengths of the op, and a step
    assert text.count("not measured") > 0  # on a GPU
    page["figures"](loaded, tmp_path)
    assert (tmp_path / "performance_op_cpu.png").stat().st_size > 0
    assert (tmp_path / "performance_decode_cpu.png").stat().st_size > 0


def test_peers_are_asked_for_what_they_are_held_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins with the peers' names, layout and arguments, for machines without a GPU."""
    for name, body in {
        "fla/__init__.py": "",
        "fla/ops/__init__.py": "",
        "fla/ops/linear_attn.py": (
            "def chunk_linear_attn(q, k, v, scale=None, normalize=True):\n"
            "    w = scale * torch.einsum('bthd,bshd->bhts', q, k).tril()\n"
            "    out = torch.einsum('bhts,bshd->bthd', w / w.sum(-1, keepdim=True), v)\n"
            "    return out, None\n"
        ),
        "retention.py": (
            "def power_retention(Q, K, V, log_G=None, *, deg, chunk_size):\n"
            "    w = torch.einsum('bthd,bshd->bhts', Q, K).pow(deg).tril()\n"
            "    return torch.einsum('bhts,bshd->bthd', w / w.sum(-1, keepdim=True), V)\n"
        ),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import torch\n\n\n{body}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    op = importlib.import_module("benchmarks.op")
    data = op.inputs(40, batch=2, heads=2, width=8, device="cpu", dtype=torch.float64)
    peers = [one for one in op.contestants("cuda") if not one.heads_first]
    assert [one.name for one in peers] == [
        "flash-linear-attention",
        *(f"power-attention {size}" for size in (128, 512, 1024)),
    ]
    for one in peers:
        assert op.error(one, data) < 1e-10, one.name
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fla", "retention")]:
        del sys.modules[name]


def test_the_page_is_as_its_script_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    page = runpy.run_path(str(ROOT / "docs" / "performance.py"))
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page["fill"](text, page["load"](page["RESULTS"])) == text


def test_targets_are_judged_by_their_worst_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    targets = importlib.import_module("benchmarks.targets")

    def row(name: str, length: int, *rounds: float) -> dict[str, Any]:
        median = sorted(rounds)[len(rounds) // 2]
        return {"name": name, "length": length, "rounds": rounds, "seconds": {"median": median}}

    rows = [
        row("a", 1, 1.0, 1.0, 1.0),
        row("b fast", 1, 2.0, 2.0, 9.0),
        row("b slow", 1, 4.0, 4.0, 4.0),
        row("a", 2, 3.0, 3.0, 3.0),
        row("b fast", 2, 2.0, 2.0, 2.0),
    ]
    cells = [{"length": 1}, {"length": 2}]
    slow = targets.Target("op", "cpu", "a", "b*", 1.2, cells=cells)
    fast = targets.Target("op", "cpu", "a", "b*", 1.9, "speed", cells[:1])
    unknown = targets.Target("op", "cpu", "a", "c", 1.0, cells=cells)
    answers = targets.judge({"rows": rows}, [slow, fast, unknown])
    assert [answer["holds"] for answer in answers] == [False, True, None]
    assert [answer["found"] for answer in answers] == [1.5, 2.0, None]
    assert answers[0]["where"] == "T=2"
