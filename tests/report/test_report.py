"""The table, the figure and the page of made-up runs."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from made_up import made_up
from softmax_rnn.experiments.figures import FAMILY, FIGURES
from softmax_rnn.ops.variants import variant, variants
from softmax_rnn.report.curves import curves
from softmax_rnn.report.figure import log_limits
from softmax_rnn.report.grid import Column, draw_orders
from softmax_rnn.report.html import Section, page
from softmax_rnn.report.outputs import find_runs, report
from softmax_rnn.report.states import _shifts
from softmax_rnn.report.style import style, styles
from softmax_rnn.report.table import cells, conclusion, results, rich_table
from softmax_rnn.training.folder import RunFolder


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


def test_an_interval_of_one_seed_says_that_it_covers_test_blocks_only(tmp_path: Path) -> None:
    """Also where a variant has more seeds, of which softmax shares one."""
    seeds = {"softmax": (0, 1), "norm": (0, 1), "gate": (1, 2)}
    runs = [made_up(tmp_path, name, seed, 1.5) for name in seeds for seed in seeds[name]]
    table, paths = report(runs, tmp_path)
    covered = dict(zip(table.variant, table.interval_over, strict=True))
    assert covered == {
        "softmax": "",
        "norm": "seeds and test blocks",
        "gate": "test blocks only",
    }
    assert "test blocks only" in paths[0].read_text()
    differences = {row[0]: row[5] for row in cells(table)}
    assert re.fullmatch(r".0\.\d{4} \[.0\.\d{4}, .0\.\d{4}\]", differences["norm"])
    assert differences["gate"].endswith("] (test blocks only)")
    page = (tmp_path / "report.html").read_text()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rich_table(table))
    for shown in (page, console.export_text()):
        assert differences["gate"] in shown
        assert "comes from a single seed" in shown
    assert rich_table(results(runs[:4])).caption is None


def test_where_all_intervals_are_of_one_seed_the_note_says_so_once(tmp_path: Path) -> None:
    table = results([made_up(tmp_path, name, 0, 1.5) for name in ("softmax", "norm", "gate")])
    assert all("test blocks" not in row[5] for row in cells(table))
    assert "cover test blocks only" in str(rich_table(table).caption)


def test_the_sentence_is_above_every_table(runs: list[RunFolder], tmp_path: Path) -> None:
    table, _ = report(runs, tmp_path)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rich_table(table))
    for shown in (console.export_text(), (tmp_path / "report.html").read_text()):
        words = " ".join(shown.split())
        assert words.index(conclusion(table)) < words.index("minus softmax [95%")


def test_orders_stand_by_number(tmp_path: Path) -> None:
    runs = [made_up(tmp_path, f"taylor:{order}", 0, 1.5) for order in (10, 2, 4)]
    assert list(results(runs).variant) == ["taylor:2", "taylor:4", "taylor:10"]


def test_what_is_kept_of_earlier_tokens_is_a_column(runs: list[RunFolder], tmp_path: Path) -> None:
    table, paths = report(runs, tmp_path)
    assert list(table.state_kind) == ["cache", "cache", "state"]
    assert table.state_bytes[0] == table.state_bytes[1] == 256 * 1024
    assert "state per layer" in rich_table(table).columns[-2].header
    assert "256.0 KiB cache" in cells(table)[1]
    assert "256.0 KiB cache" in (tmp_path / "report.html").read_text()
    assert "state_bytes,state_kind" in paths[0].read_text()


def test_without_softmax_there_is_no_difference(runs: list[RunFolder]) -> None:
    assert results(runs[2:]).difference.isna().all()


def test_two_runs_of_one_variant_and_seed_are_refused(
    runs: list[RunFolder], tmp_path: Path
) -> None:
    twin = made_up(tmp_path / "other", "norm", 0, 1.5)
    with pytest.raises(ValueError, match="are runs of one variant and seed"):
        results([*runs, twin])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 500, "block_size": 128}, "block_size: 256 there, 128 here; steps: 1000 there"),
        ({"split": "b"}, "test split: '9 tokens a.* there, '9 tokens b.* here"),
    ],
)
def test_runs_under_other_conditions_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    runs = [made_up(tmp_path, "softmax", 0, 1.5), made_up(tmp_path, "norm", 0, 1.5, **fields)]
    with pytest.raises(ValueError, match=f"softmax-0 .*norm-0 .*cannot be compared: .*{message}"):
        results(runs)


def test_a_variant_that_was_another_one_is_refused(tmp_path: Path) -> None:
    """Its name alone would pass; a folder that does not say what it meant does."""
    run = made_up(tmp_path, "taylor:3", 0, 1.5)
    results([run])
    record = run.environment
    for then, same in ((variant("taylor:3"), True), (variant("taylor:4"), False)):
        run.environment_file.write_text(json.dumps({**record, "attention": then.to_dict()}))
        if same:
            results([run])
        else:
            told = r"'taylor:3' as it was defined then \(order: 4 there, 3 now; floor: 0.0 there"
            with pytest.raises(ValueError, match=told):
                results([run])


def test_other_numbers_of_test_blocks_are_refused(tmp_path: Path) -> None:
    runs = [made_up(tmp_path, name, 0, 1.5) for name in ("softmax", "norm")]
    np.save(runs[1].path / "test_losses.npy", runs[1].test_losses[1:])
    with pytest.raises(ValueError, match="test blocks: 30 there, 29 here"):
        results(runs)


def test_where_text_lies_and_what_is_kept_may_differ(tmp_path: Path) -> None:
    other = {"corpus": "elsewhere", "keep_checkpoints": 9, "save_every": 50}
    runs = [made_up(tmp_path, "softmax", 0, 1.5), made_up(tmp_path, "norm", 0, 1.5, **other)]
    assert results(runs).difference.notna().sum() == 1


def test_training_curves_are_means_over_full_windows(tmp_path: Path) -> None:
    run = made_up(tmp_path, "softmax", 0, 1.5)
    (row, *_) = run.metrics.to_dict("records")
    rows = [{**row, "step": i, "tokens": i, "loss": float(i)} for i in range(1, 83)]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (curve,) = curves([run], "train")  # 82 rows are 27 windows of 3, and one row at the start
    assert curve.tokens.tolist() == list(range(4, 83, 3))
    assert curve.mean.tolist() == list(range(3, 82, 3))


def test_seeds_may_have_tokens_of_their_own(tmp_path: Path) -> None:
    """As they have where documents of any length are drawn."""
    runs = [made_up(tmp_path, "softmax", seed, 1.5) for seed in (0, 1)]
    for path in (runs[1].metrics_file, runs[1].evaluations_file):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [json.dumps({**row, "tokens": row["tokens"] - 100}) + "\n" for row in rows]
        path.write_text("".join(lines))
    report(runs, tmp_path)
    for split, last in (("test", 200 * 2048 - 50), ("train", 200 * 2048 - 50)):
        (curve,) = curves(runs, split)
        assert curve.tokens[-1] == last
        assert np.isfinite(curve.mean).all()


def test_steps_without_update_are_gaps_and_are_counted(tmp_path: Path) -> None:
    runs = [made_up(tmp_path, name, seed, 1.5) for name in ("softmax", "norm") for seed in range(3)]
    header, *_ = cells(results(runs))
    assert header[-1] == "peak memory"
    rows = [json.loads(line) for line in runs[4].metrics_file.read_text().splitlines()]
    for place, row in enumerate(rows):
        row["loss"] = None if place in (4, 5, 6, 19) else row["loss"] + 0.03
    runs[4].metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {**runs[4].summary, "skipped_steps": 1234}
    runs[4].summary_file.write_text(json.dumps(summary))
    table, _ = report(find_runs(tmp_path), tmp_path)
    header, softmax, norm = cells(table)
    assert (header[-1], softmax[-1], norm[-1]) == ("steps skipped", "0", "1,234")
    _, curve = curves(runs, "train")
    assert np.flatnonzero(np.isnan(curve.mean)).tolist() == [4, 5, 6, 19]
    assert curve.last == pytest.approx(1.51 + 5 / 190)
    page = (tmp_path / "report.html").read_text()
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    norm_curve = json.loads(data, parse_constant=pytest.fail)["train"][0][1]
    assert [norm_curve[name].count(None) for name in ("mean", "low", "high")] == [4] * 3


@pytest.mark.parametrize(
    ("seeds", "note"),
    [
        (1, "One seed per variant."),
        (2, "Lines are means over seeds. Thin lines are single seeds."),
        (3, "Lines are means over seeds. Bands are 95% intervals over seeds."),
    ],
)
def test_bands_take_three_seeds_and_no_limits_follow_them(
    seeds: int, note: str, tmp_path: Path
) -> None:
    runs = [made_up(tmp_path, "softmax", seed, 1.5 + 0.1 * seed) for seed in range(seeds)]
    (line,) = curves(runs, "test")
    assert line.has_band == (seeds == 3)
    assert len(line.single) == (2 if seeds == 2 else 0)
    assert (line.high > line.low).all() == (seeds == 3)
    assert log_limits([line])[1] < 1.03 * (1.5 + 0.1 * seeds + 0.12)
    report(runs, tmp_path)
    draw_orders([Column("softmax", runs)], "orders", tmp_path / "orders")
    for name, words in {"figure": note, "orders": note.replace("Thin lines", "Dots")}.items():
        text = " ".join(ElementTree.parse(tmp_path / f"{name}.svg").getroot().itertext())
        assert words.replace("Bands", "Bars" if name == "orders" else "Bands") in text


def test_runs_with_other_rows_are_refused(tmp_path: Path) -> None:
    runs = [made_up(tmp_path, "softmax", seed, 1.5) for seed in (0, 1)]
    lines = runs[1].metrics_file.read_text().splitlines(keepends=True)
    runs[1].metrics_file.write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"rows of metrics.jsonl: 20 there, 19 here"):
        results(runs)


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
    text = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "&lt;b&gt;3" in text
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)=["']?http""", text)


EVIL = "</pre></script><script>alert(1)</script>\"' onclick='alert(2)' <img src=x onerror=alert(3)>"


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: Counter[tuple[str, ...]] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found[tag, *(name for name, _ in attributes)] += 1


def test_no_words_become_elements(tmp_path: Path) -> None:
    """Whatever words stand in runs, titles and claims, the page has the same elements."""
    found = []
    for word in ("word", EVIL):
        root = tmp_path / str(len(found))
        words = dict.fromkeys(("corpus", "text_column", "tokenizer"), word)
        run = made_up(root, "softmax", 0, 1.5, **words)
        run.path.rename(root / word.replace("/", "_"))
        run = RunFolder(root / word.replace("/", "_"))
        environment = json.loads(run.environment_file.read_text())
        run.environment_file.write_text(json.dumps({**environment, word: {word: [word]}}))
        claim = dict.fromkeys(
            ("source", "claim", "text", "verdict", "check", "where", "outcome"), word
        )
        row = {**claim, "seeds": 1, "reason": word, "found": word}
        sections = [Section(word, [run], results([run]))] * 2
        found.append(Elements(page(sections, root, word, [row])).found)
    assert found[0] == found[1]
    assert found[0]["script",] == 2  # plotly's, and the page's own
    assert found[0]["script", "type"] == 2  # the numbers of each place


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No finished run in"):
        find_runs(tmp_path)
    with pytest.raises(ValueError, match="There is no folder .*nothere"):
        find_runs(tmp_path / "nothere")


def test_no_two_curves_of_a_figure_look_alike() -> None:
    names = ["softmax", "norm", "gate", *(f"mine{number}" for number in range(10))]
    assert len(set(styles(names).values())) == len(names)
    assert styles(names)["norm"] == style("norm")


def test_a_variant_with_a_decay_has_the_colour_of_the_one_without() -> None:
    for name in ("taylor:2", "linear_elu", "mine"):
        assert style(f"{name}+decay").color == style(name).color
        assert style(f"{name}+decay") != style(name)
    assert len(set(styles(FAMILY).values())) == len(FAMILY)


def test_a_variants_style_is_its_own() -> None:
    for figure in ("figure4", "figure5", "figure6"):
        names = {name for panel in FIGURES[figure].panels for name in panel.variants}
        assert len({style(name) for name in names}) == len(names)
    for name in (*variants(), "taylor:7"):
        assert style(name) == style(name)
        assert style(name).plotly_dash


def test_names_beside_points_do_not_overlap() -> None:
    losses = {"a": (16.0, 1.5), "b": (16.5, 1.501), "c": (17.0, 1.502), "d": (256.0, 1.501)}
    shifts = _shifts({**losses, "e": (16.0, 2.0)})
    assert (shifts["a"], shifts["d"], shifts["e"]) == (0, 0, 0)
    assert 0 < shifts["b"] < 9 < shifts["c"] < 18
    assert _shifts({"alone": (1.0, 2.0)}) == {"alone": 0}


@pytest.mark.parametrize("kept", [1, 7, 40])
def test_a_run_that_ended_early_has_the_windows_of_the_others(tmp_path: Path, kept: int) -> None:
    """Its losses stand at the tokens at which they were measured, then its last one is kept."""
    runs = [made_up(tmp_path, "softmax", seed, 1.5) for seed in (0, 1)]
    rows = [
        json.dumps(
            {"step": step, "tokens": step, "loss": float(step), "learning_rate": 1e-3}
            | {"grad_norm": 1.0, "tokens_per_second": 1e4}
        )
        for step in range(1, 84)
    ]
    for run, count in zip(runs, (83, kept), strict=True):
        run.metrics_file.write_text("\n".join(rows[:count]) + "\n")
    (curve,) = curves(runs, "train")
    assert curve.tokens.tolist() == list(range(5, 84, 3))  # 27 windows of 3, after two rows
    long, short = curve.seeds
    assert long.tolist() == [tokens - 1 for tokens in curve.tokens]
    whole = max(1, (kept - 2) // 3)
    if kept > 2:
        assert short[:whole].tolist() == long[:whole].tolist()
    assert set(short[whole - 1 :]) == {short[whole - 1]}
