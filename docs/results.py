"""Make the tables and figures of results/ from runs: ``python docs/results.py RUNS``.

RUNS is the ``--out`` folder of ``softmax-rnn reproduce``, by default ``runs``. A figure of runs
with one learning rate for all has the part ``figure4`` of a page, and one of each variant's best
rate the part ``figure4-best``. The checks of the claims go to results/claims.md, the verdicts
alone to results.md, and the measured knee of recall to capacity.md. A figure is drawn at the
longest scale at which all its runs are finished, if possible with three seeds. A figure against
states may lack variants, which its page then names. A claim is judged at the longest scale with
three seeds for each of its checks. Other figures and claims are left on the pages as they are.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import SOURCES, Found, longer, part, short, verdicts
from PIL import Image

from softmax_rnn._utils.files import write_text
from softmax_rnn.data import is_task
from softmax_rnn.experiments.figures import FIGURES, Experiment
from softmax_rnn.experiments.reproduce import draw, ended, finished_runs
from softmax_rnn.experiments.scales import SCALES, Scale
from softmax_rnn.experiments.verdicts import Runs
from softmax_rnn.report import markdown
from softmax_rnn.report.curves import MIN_SEEDS, seed_interval
from softmax_rnn.report.gaps import gap_table
from softmax_rnn.report.grid import Column
from softmax_rnn.report.laws import PAPER_TOKENS, gaps, law_of_ends
from softmax_rnn.report.recall import recall_table
from softmax_rnn.report.stability import stability_table
from softmax_rnn.report.table import difference_text, memory_text, results
from softmax_rnn.training.folder import RunFolder

HERE = Path(__file__).parent

# capacity.md's prediction for the recall task: the least width at which recall is near 1.
LEAST_WIDTH, NEAR = {1: 8, 2: 4, 3: 4, 4: 4}, 0.95


def losses(experiment: Experiment, scale: Scale, found: Found) -> str:
    """The tables of a figure's variants, one for each condition and corpus.

    They have the losses, and the paired difference to softmax. For a figure against states, also
    the state of a layer and the number of parameters.
    """
    parts, missing = [], []
    places = places_of(experiment, scale)
    for place, names in places.items():
        runs = found[place]
        missing += [f"`{name}`" for name in names if name not in runs]
        table = results([run for name in names for run in runs.get(name, {}).values()])
        rows = [
            {
                "variant": f"`{row['variant']}`",
                "seeds": str(row["seeds"]),
                "train loss": f"{row['train_loss']:.4f}",
                "test loss": f"{row['test_loss']:.4f}",
                **({} if math.isnan(right) else {"accuracy": f"{right:.3f}"}),
                "minus softmax [95% interval]": difference_text(row),
                "state per layer": memory_text(row),
                "parameters": f"{row['parameters']:,}",
            }
            for row in table.to_dict("records")
            for right in [row["test_accuracy"]]
        ]
        shown = list(rows[0])[: None if experiment.kind == "states" else -2]
        cells = ([row[name] for name in shown] for row in rows)
        title = "{} settings, corpus `{}`:".format(*place).capitalize()
        parts += [title] if len(places) > 1 else []
        parts.append(markdown.table(shown, cells, left=len(shown)))
    parts += [f"Not run yet: {', '.join(missing)}."] if missing else []
    return "\n\n".join([*parts, conditions(scale, [found[place] for place in places])])


def recall(experiment: Experiment, scale: Scale, found: Found) -> str:
    """The tables of a recall task: accuracies by width and order, and what a layer keeps."""
    places = places_of(experiment, scale)
    table = recall_table([run for place in places for run in all_of(found[place])]).sort_values(
        ["series", "decay", "width", "order"]
    )
    table["cell"] = [accuracy(row) for row in table.to_dict("records")]
    table["family"] = "`" + table.series + table.decay + "`"
    series = table[table.order.notna() & (table.series != "window")]
    others = table.drop(series.index)
    rates = series.drop_duplicates("family").set_index("family").learning_rate
    grid = series.pivot(index=["family", "width"], columns="order", values="cell").fillna("")
    sizes = series[series.family == "`taylor`"].pivot(
        index="width", columns="order", values="bytes"
    )
    header = ("series", "learning rate", "width", *(f"order {order}" for order in grid))
    parts = [
        markdown.table(
            header,
            ((name, f"{rates[name]:g}", str(width), *row) for (name, width), *row in
             grid.itertuples()),
            left=2,
        ),
        "Bytes of state per layer, of `taylor:N`; the others have one column of 65 less without a "
        "row sum:",
        markdown.table(
            ("width", *(f"order {order}" for order in sizes)),
            ((str(width), *(f"{size:,}" for size in row)) for width, *row in sizes.itertuples()),
            left=1,
        ),
        "Softmax and windows:",
        markdown.table(
            ("variant", "learning rate", "width", "bytes per layer", "accuracy"),
            (
                (f"`{row['variant']}`", f"{row['learning_rate']:g}", str(row["width"]),
                 f"{row['bytes']:,}", row["cell"])
                for row in others.to_dict("records")
            ),
            left=2,
        ),
        conditions(scale, [found[place] for place in places_of(experiment, scale)]),
    ]  # fmt: skip
    return "\n\n".join(parts)


def knee(experiment: Experiment, scale: Scale, found: Found) -> str:
    """The accuracy of `taylor:N` by order and width, beside the prediction of capacity.md."""
    runs = [
        run
        for place in places_of(experiment, scale)
        for name, seeds in found[place].items()
        for run in seeds.values()
        if re.fullmatch(r"taylor:\d+", name)
    ]
    table = recall_table(runs)
    grid = table.pivot(index="order", columns="width", values="accuracy")
    rows = []
    for order, row in grid.iterrows():
        cells = (f"{share:.3f} (M = {math.comb(d + order, order)})" for d, share in row.items())
        near = row.index[row >= NEAR]
        measured = str(near.min()) if len(near) else f"above {grid.columns.max()}"
        rows.append((str(order), *cells, str(LEAST_WIDTH[order]), measured))
    header = ("N", *(f"d = {d}" for d in grid), "least d, predicted", "least d, measured")
    return markdown.table(header, rows, left=1)


def accuracy(row: Mapping[Any, Any]) -> str:
    """A mean over seeds and half of its interval."""
    half = f" ± {row['high'] - row['accuracy']:.3f}" if row["seeds"] >= MIN_SEEDS else ""
    return f"{row['accuracy']:.3f}{half}"


def places_of(experiment: Experiment, scale: Scale) -> dict[tuple[str, str], list[str]]:
    """The variants of a figure by condition and corpus, each once."""
    places: dict[tuple[str, str], list[str]] = {}
    for panel in experiment.panels:
        names = places.setdefault(scale.place(panel), [])
        names += [name for name in panel.variants if name not in names]
    return places


def finished_seeds(experiment: Experiment, scale: Scale, found: Found, root: Path) -> list[int]:
    """The seeds of a figure's runs; none unless every variant has the same seeds.

    Of a figure against states, every variant that was run at all, if softmax and others were.
    """
    if experiment.kind == "stability":  # some of whose runs end without results
        wanted = sum(len(panel.variants) for panel in experiment.panels)
        return [
            seed
            for seed in sorted(
                {run.new_model.seed for runs in found.values() for run in all_of(runs)}
            )
            if sum(len(column.runs) for column in ended(experiment, scale, root, [seed])) == wanted
        ]
    seeds = [
        frozenset(found.get(place, {}).get(name, {}))
        for place, names in places_of(experiment, scale).items()
        for name in ("softmax", *names)
    ]
    if experiment.kind == "states" and len(run := [each for each in seeds[1:] if each]) > 1:
        seeds = [seeds[0], *run]
    return sorted(seeds[0]) if len({*seeds}) == 1 else []


def stability(scale: Scale, columns: Sequence[Column]) -> str:
    """Loss, spikes, and what was skipped or diverged, by settings, variant and learning rate."""
    table = stability_table(columns)
    parts = []
    for panel, rows in table.groupby("panel", sort=False):
        rates = sorted(set(rows.learning_rate))
        cells = (
            (f"`{name}`", *(steadiness(own[own.learning_rate == rate]) for rate in rates))
            for name, own in rows.groupby("variant", sort=False)
        )
        header = ("variant", *(f"{rate:g}" for rate in rates))
        parts += [f"With {panel}, by learning rate:", markdown.table(header, cells, left=1)]
    runs = [run for column in columns for run in column.runs]
    commits = sorted({run.environment["commit"][:10] for run in runs})
    seeds = table.seeds.min()
    about = f"{seeds} seed{'s' if seeds > 1 else ''}, commits {', '.join(commits)}"
    return "\n\n".join([*parts, f"Scale {scale.name}, {about}."])


def steadiness(cell: Any) -> str:
    """The loss of a variant at a rate, and what happened to its runs."""
    row = cell.iloc[0]
    loss = "-" if math.isnan(row.loss) else f"{row.loss:.3f}"
    spikes = round(row.spikes * row.seeds)
    told = {
        f"{spikes} spike{'s' if spikes > 1 else ''}": spikes,
        f"{row.skipped} skipped": row.skipped,
        f"{row.diverged} of {row.seeds} diverged": row.diverged,
    }
    return ", ".join([loss, *(words for words, count in told.items() if count)])


def laws(scale: Scale, everything: Mapping[str, Found]) -> str:
    """The table of the gaps to softmax, of their laws, and of the laws of the ends of runs."""
    experiment = FIGURES["gaps"]
    ((place, names),) = places_of(experiment, scale).items()
    sets = {
        name: [run for variant in names for run in found[place].get(variant, {}).values()]
        for name, found in everything.items()
        if place in found
    }
    rows = []
    for row in gap_table(gaps(sets[scale.name])).to_dict("records"):
        ends = None if row["reason"] else law_of_ends(list(sets.values()), row["variant"])
        off = ", levels off" if row["levels_off"] else ""
        rows.append(
            (
                f"`{row['variant']}`",
                f"{row['gap']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]",
                row["reason"] or columns_of(row, "exponent") + off,
                "" if row["reason"] else columns_of(row, "extrapolated"),
                interval(*map(float, seed_interval(ends.exponent))) if ends else "",
                interval(*map(float, ends.gap(PAPER_TOKENS))) if ends else "",
            )
        )
    header = (
        *("variant", "gap at the end [95% interval]", "exponent", "extrapolated"),
        *(f"exponent, ends of {' and '.join(sets)}", "extrapolated, ends"),
    )
    return markdown.table(header, rows, left=len(header))


def columns_of(row: Mapping[Any, Any], name: str) -> str:
    """The interval in a row's columns."""
    return interval(row[name], row[f"{name}_low"], row[f"{name}_high"])


def interval(mean: float, low: float, high: float) -> str:
    """A mean and its interval with two digits."""
    return f"{mean:.2g} [{low:.2g}, {high:.2g}]"


def conditions(scale: Scale, places: Sequence[Runs]) -> str:
    """The scale and the commits of the runs; results.md names machines, versions and corpora."""
    commits = {run.environment["commit"][:10] for runs in places for run in all_of(runs)}
    return f"Scale {scale.name}, commits {', '.join(sorted(commits))}."


def all_of(runs: Runs) -> list[RunFolder]:
    """Every run of a condition."""
    return [run for seeds in runs.values() for run in seeds.values()]


def machines(everything: Iterable[Found], before: str, pages: str) -> str:
    """The machine and versions of each commit's runs, and what their corpora are.

    Rows of ``before`` stay, except those of commits that ``pages`` no longer name.
    """
    rows: dict[str, dict[str, tuple[str, ...]]] = {"commit": {}, "corpus": {}}
    for line in before.splitlines():
        name, *more = line.strip("| ").split(" | ")
        kind = "corpus" if len(more) == 2 else "commit"
        if more and name not in rows and name != "---":
            rows[kind][name] = tuple(more)
    for run in (run for found in everything for runs in found.values() for run in all_of(runs)):
        where, corpus = run.environment, run.environment["corpus"]["train"]
        packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
        rows["commit"][where["commit"][:10]] = (
            f"{where['processor']}, {where['cores']} cores, {packages}, Python {where['python']}",
        )
        trained = "drawn" if is_task(run.new_model.corpus) else f"{corpus['tokens']:,} tokens"
        rows["corpus"][f"`{run.new_model.corpus}`"] = trained, corpus["sha256"][:16]
    named = {name: row for name, row in rows["commit"].items() if name in pages}
    return "\n\n".join(
        (
            markdown.table(("commit", "machine and versions"), cells(named), left=2),
            markdown.table(("corpus", "trained on", "SHA-256"), cells(rows["corpus"]), left=3),
        )
    )


def cells(rows: Mapping[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows of a table, from those by their first cell."""
    return [(name, *row) for name, row in rows.items()]


def main(root: Path) -> None:
    """Fill the pages from the finished runs below ``root``."""
    pages = [HERE / "results.md", HERE / "capacity.md", *sorted((HERE / "results").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    parts: dict[str, str] = {}
    every: list[Found] = []
    for best in ("", "learning_rate"):
        scales = {name: scale.with_best(best) for name, scale in SCALES.items()}
        # The longest scale first.
        runs = {name: finished_runs(scales[name], root) for name in reversed(scales)}
        everything = {name: found for name, found in runs.items() if found}
        if everything:
            parts |= filled(root, scales, everything, text, "-best" if best else "")
            every += everything.values()
    if not every:
        raise SystemExit(f"No finished run in {root}.")
    for page in pages:
        fill(page, parts)
    claims = (HERE / "results" / "claims.md").read_text(encoding="utf-8")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages[1:])
    index = pages[0].read_text(encoding="utf-8")
    summary = {"summary": short(claims), "runs": machines(every, part(index, "runs"), text)}
    fill(pages[0], summary)


def filled(
    root: Path,
    scales: Mapping[str, Scale],
    everything: Mapping[str, Found],
    text: str,
    kind: str,
) -> dict[str, str]:
    """The parts that runs of one kind fill; ``text`` is that of all pages before."""
    parts = {
        name + kind: verdicts(everything, scales, part(text, name + kind), source, kind)
        for source, name in SOURCES.items()
    }
    for name, experiment in FIGURES.items():
        finished = [
            (scales[at], seeds)
            for at, found in everything.items()
            if (seeds := finished_seeds(experiment, scales[at], found, root))
        ]
        if f"<!-- {name}{kind} -->" not in text or not finished:
            continue
        scale, seeds = next((each for each in finished if len(each[1]) >= MIN_SEEDS), finished[0])
        if longer(part(text, name + kind), scale.name):
            continue
        found = everything[scale.name]
        if experiment.kind == "stability":
            parts[name + kind] = stability(scale, ended(experiment, scale, root, seeds))
        else:
            made = recall if experiment.kind == "recall" else losses
            parts[name + kind] = made(experiment, scale, found)
        if experiment.kind == "recall":
            parts["knee"] = knee(experiment, scale, found)
        if experiment.kind == "gaps":
            parts["laws" + kind] = laws(scale, everything)
        for path in draw(experiment, scale, root, seeds):
            if path.suffix == ".png":
                copy(path, HERE / "images" / f"results_{path.stem}{kind}.png")
    return parts


def copy(figure: Path, to: Path) -> None:
    """Copy a PNG, with 256 colours: a third of the bytes, and looks the same."""
    with Image.open(figure) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(to, optimize=True)


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Replace those of the named parts that a page has."""
    text = page.read_text(encoding="utf-8")
    there = {name: made for name, made in parts.items() if f"<!-- {name} -->" in text}
    write_text(page, markdown.fill(text, there))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
