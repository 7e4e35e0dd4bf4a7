"""The table, the figure and the page of made-up runs."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from softmax_rnn.report import find_runs, report
from softmax_rnn.report.style import style
from softmax_rnn.report.table import cells, results
from softmax_rnn.training import RunConfig
from softmax_rnn.training.folder import RunFolder, append_row
from softmax_rnn.variants import variants

BLOCKS = 30


def made_up(
    root: Path, attention: str, seed: int, loss: float, corpus: str = "stdlib"
) -> RunFolder:
    """A finished run's folder whose losses end near ``loss``."""
    folder = RunFolder(root / f"{attention}-{seed}")
    folder.path.mkdir(parents=True)
    RunConfig(attention=attention, seed=seed, corpus=corpus).save(folder.config_file)
    draw = np.random.default_rng(seed)
    blocks = draw.normal(0, 0.2, BLOCKS)  # the same for every variant: pairing removes it
    losses = loss + blocks + np.random.default_rng([seed, len(attention)]).normal(0, 0.01, BLOCKS)
    np.save(folder.path / "test_losses.npy", losses)
    for step in range(10, 201, 10):
        row = {"step": step, "tokens": step * 2048, "loss": loss + 5 / step}
        append_row(
            folder.metrics_file,
            {**row, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1e4},
        )
        if step % 50 == 0:
            append_row(
                folder.evaluations_file,
                {"step": step, "tokens": step * 2048, "test_loss": loss + 6 / step},
            )
    summary = {
        "parameters": 1000 + len(attention),
        "train_loss": loss,
        "test_loss": float(losses.mean()),
        "tokens_per_second": 12345.0,
        "peak_memory_bytes": 2**30,
        "seconds": 60.0,
    }
    (folder.path / "summary.json").write_text(json.dumps(summary))
    (folder.path / "environment.json").write_text(json.dumps({"python": "<b>3</b>"}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[RunFolder]:
    losses = {"softmax": 1.5, "norm": 1.503, "taylor:4": 1.9}
    return [made_up(tmp_path, name, seed, loss) for name, loss in losses.items() for seed in (0, 1)]


def test_table(runs: list[RunFolder]) -> None:
    table = results(runs).set_index("variant")
    assert list(table.index) == ["softmax", "norm", "taylor:4"]
    assert np.isnan(table.difference["softmax"])
    assert table.difference["norm"] == pytest.approx(0.003, abs=0.005)
    # Unpaired, blocks that differ by 0.2 would give an interval of +-0.07.
    assert table.high["norm"] - table.low["norm"] < 0.05
    assert table.low["taylor:4"] > 0.3
    assert (table.seeds == 2).all()
    text = cells(results(runs))
    assert text[1][0] == "softmax"
    assert text[1][5] == "-"
    assert re.fullmatch(r"\+0\.\d{4} \[\+0\.\d{4}, \+0\.\d{4}\]", text[3][5])


def test_without_softmax_there_is_no_difference(runs: list[RunFolder]) -> None:
    assert results(runs[2:]).difference.isna().all()


def test_two_runs_of_one_variant_and_seed_are_refused(
    runs: list[RunFolder], tmp_path: Path
) -> None:
    twin = made_up(tmp_path / "other", "norm", 0, 1.5)
    with pytest.raises(ValueError, match="are runs of one variant and seed"):
        results([*runs, twin])


def test_files(runs: list[RunFolder], tmp_path: Path) -> None:
    assert len(find_runs(tmp_path)) == 6
    _, paths = report(runs, tmp_path)
    assert [path.name for path in paths] == [
        "results.csv",
        "figure.png",
        "figure.svg",
        "report.html",
    ]
    assert all(path.stat().st_size > 0 for path in paths)
    svg = ElementTree.parse(paths[2]).getroot()
    text = " ".join(svg.itertext())
    for words in ("softmax  1.530", "taylor:4  1.930", "Train loss", "nats per token"):
        assert words in text
    before = paths[2].read_bytes()
    report(runs, tmp_path)
    assert paths[2].read_bytes() == before


def test_the_page_is_whole_and_escaped(tmp_path: Path) -> None:
    evil = made_up(tmp_path, "softmax", 0, 1.5, corpus="</pre><script>alert(1)</script>")
    report([evil], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "&lt;b&gt;3" in page
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)=["']?http""", page)


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No finished run in"):
        find_runs(tmp_path)


def test_a_variants_style_is_its_own() -> None:
    main = ["softmax", "norm", "gate", "linear_elu", "linear_relu", "linear_cosine"]
    assert len({style(name) for name in main}) == len(main)
    for name in variants():
        assert style(name) == style(name)
        assert style(name).plotly_dash
