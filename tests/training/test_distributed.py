"""One run on one process and on two, whole and sharded, and each going on from the other."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from processes import Case, ended
from quick import first_quick
from softmax_rnn._utils.errors import ExitCode
from softmax_rnn.training.checkpoint import load_trained
from softmax_rnn.training.folder import RunFolder
from test_together import two

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="two processes would want two GPUs"
)
STEPS, HALF = 26, 12
# float32 sums in another order, over 26 steps.
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def make(calm: Case, path: Path, processes: int, **fields: object) -> Case:
    """A finished run; ``fields`` are of its configuration."""
    config = replace(
        calm.config,
        steps=STEPS,
        save_every=HALF,
        evaluate_every=HALF,
        keep_checkpoints=3,
        **fields,  # type: ignore[arg-type]
    )
    case = replace(calm, folder=RunFolder(path / "run"), config=config)
    path.mkdir(exist_ok=True)
    go_on(case, processes)
    return case


def go_on(case: Case, processes: int) -> None:
    codes = two(case) if processes == 2 else [ended(case.session())]
    assert codes == [ExitCode.FINISHED] * processes, case.log.read_text()


def cut(case: Case, path: Path, **fields: object) -> Case:
    """The same run, stopped in its middle."""
    path.mkdir()
    folder = RunFolder(path / "run")
    shutil.copytree(case.folder.path, folder.path)
    for late in (*folder.checkpoints[1:], folder.path / "summary.json"):
        shutil.rmtree(late) if late.is_dir() else late.unlink()
    return replace(case, folder=folder, config=replace(case.config, **fields))  # type: ignore[arg-type]


def same(here: RunFolder, there: RunFolder) -> None:
    for name in ("step", "tokens", "loss", "grad_norm"):
        np.testing.assert_allclose(here.metrics[name], there.metrics[name], **CLOSE)
    np.testing.assert_allclose(here.test_losses, there.test_losses, **CLOSE)
    weights = [load_file(run.checkpoints[-1] / "model.safetensors") for run in (here, there)]
    torch.testing.assert_close(*weights, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("attention", "fields"),
    first_quick(
        [
            ("softmax", {}),
            ("gate", {"fsdp": True}),
            ("linear_elu", {"packing": "documents"}),
            ("norm_rms", {"fsdp": True, "accumulation": 2}),
            ("taylor:2", {"context_parallel": 2, "layer": {"short_convolution": 3}}),
            ("forgetting", {"context_parallel": 2, "packing": "documents", "fsdp": True}),
        ]
    ),
)
def test_two_processes_are_as_good_as_one(
    calm: Case, tmp_path: Path, attention: str, fields: dict[str, object]
) -> None:
    alone = {**fields, "context_parallel": 1}
    one = make(calm, tmp_path / "one", 1, attention=attention, **alone)
    pair = make(calm, tmp_path / "two", 2, attention=attention, **fields)
    same(one.folder, pair.folder)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(calm: Case, tmp_path: Path) -> None:
    one = make(calm, tmp_path / "one", 1, attention="gate")
    for name, processes, sharded in (("two", 2, False), ("shards", 2, True)):
        more = cut(one, tmp_path / name, fsdp=sharded)
        go_on(more, processes)
        same(one.folder, more.folder)
        middle = f"checkpoint-{2 * HALF}"
        whole = (more.folder.path / middle / "model.safetensors").exists()
        assert whole != sharded  # a process that held all of it would be the largest of them
        weights = [load_trained(run.folder.path / middle).state_dict() for run in (one, more)]
        torch.testing.assert_close(*weights, rtol=0.0, atol=1e-4)
        back = cut(more, tmp_path / f"{name}-back", fsdp=False)
        assert back.folder.checkpoints[-1].name == f"checkpoint-{HALF}"
        go_on(back, 1)
        same(one.folder, back.folder)


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_is_named(calm: Case, tmp_path: Path) -> None:
    config = replace(calm.config, batch_size=3)
    case = replace(calm, folder=RunFolder(tmp_path / "run"), config=config)
    assert two(case) == [ExitCode.WRONG_INPUT] * 2
    assert "--batch-size 3 must be a multiple of --accumulation 1 times the 2 processes" in (
        case.log.read_text()
    )
