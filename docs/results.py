"""Make the tables and figures of results.md from runs: ``python docs/results.py RUNS``.

RUNS is the ``--out`` folder of ``softmax-rnn reproduce``, by default ``runs``. Unfinished figures
and the claims on them are not changed on the page.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pandas as pd

from softmax_rnn._utils.files import write_text
from softmax_rnn.experiments.claims import judge, verdict_table
from softmax_rnn.experiments.figures import FIGURES, Experiment
from softmax_rnn.experiments.reproduce import draw, finished_runs
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.report import markdown
from softmax_rnn.report.table import difference_text, results
from softmax_rnn.training.folder import RunFolder

HERE, SCALE = Path(__file__).parent, SCALES["demo"]


def losses(experiment: Experiment, runs: dict[str, dict[int, RunFolder]]) -> str:
    """The table of a figure's variants: losses, and the paired difference to softmax."""
    names = dict.fromkeys(name for panel in experiment.panels for name in panel.variants)
    table = results([run for name in names for run in runs.get(name, {}).values()])
    lines = [
        "| variant | seeds | train loss | test loss | minus softmax [95% interval] |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row['variant']}` | {row['seeds']} | {row['train_loss']:.4f} | "
        f"{row['test_loss']:.4f} | {difference_text(row)} |"
        for row in table.to_dict("records")
    ]
    return "\n".join([*lines, "", conditions({name: runs[name] for name in names})])


def verdicts(found: dict[tuple[str, str], dict[str, dict[int, RunFolder]]], before: str) -> str:
    """Every claim with its checks; claims that were not run are copied from ``before``."""
    rows = pd.DataFrame(verdict_table(judge(found)))
    lines = ["| claim | verdict | found |", "|---|---|---|"]
    for (number, text, verdict), checks in rows.groupby(["claim", "text", "verdict"], sort=False):
        old = re.search(rf"^\| \*\*{number}\. .*\n(?:\| [^*\n].*\n)*", before, flags=re.MULTILINE)
        if old and (checks.outcome == "not run").all():
            lines += old[0].splitlines()
            continue
        lines.append(f"| **{number}. {text}** | **{verdict}** | |")
        for row in checks[checks.outcome != "not run"].to_dict("records"):
            outcome = ": ".join(filter(None, (row["outcome"], row["reason"])))
            lines.append(f"| {row['check']} | {outcome} | {row['found']} |")
    return "\n".join(lines)


def conditions(runs: dict[str, dict[int, RunFolder]]) -> str:
    """The machine, versions and corpus of the runs."""
    where = next(iter(runs["softmax"].values())).environment
    each = (run.environment["commit"][:10] for seeds in runs.values() for run in seeds.values())
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    corpus = where["corpus"]["train"]
    return (
        f"Run on {where['processor']}, {where['cores']} cores, {packages}, Python "
        f"{where['python']}, commits {', '.join(sorted(set(each)))}; {corpus['tokens']:,} tokens "
        f"to train on (SHA-256 {corpus['sha256'][:16]}...)."
    )


def main(root: Path) -> None:
    """Fill the page from the finished runs below ``root``."""
    found = finished_runs(SCALE.name, root)
    runs = found["base", "stdlib"]
    page = HERE / "results.md"
    text = page.read_text(encoding="utf-8")
    parts = {"verdicts": verdicts(found, text)}
    for name, experiment in FIGURES.items():
        wanted = {variant for panel in experiment.panels for variant in panel.variants}
        finished = all(set(runs.get(variant, {})) == set(runs["softmax"]) for variant in wanted)
        if f"<!-- {name} -->" not in text or not finished:
            continue
        parts[name] = losses(experiment, runs)
        seeds = sorted(set.intersection(*(set(runs[variant]) for variant in wanted)))
        for path in draw(experiment, SCALE, root, seeds):
            if path.suffix == ".png":
                shutil.copy(path, HERE / "images" / f"results_{name}.png")
    write_text(page, markdown.fill(text, parts))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
