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
from softmax_rnn.experiments.claims import OWN, PAPER, judge, verdict_table
from softmax_rnn.experiments.figures import FIGURES, Experiment
from softmax_rnn.experiments.reproduce import draw, finished_runs
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.report import markdown
from softmax_rnn.report.table import difference_text, memory_text, results
from softmax_rnn.training.folder import RunFolder

HERE, SCALE = Path(__file__).parent, SCALES["demo"]


Runs = dict[str, dict[int, RunFolder]]


def losses(experiment: Experiment, runs: Runs) -> str:
    """The table of a figure's variants: losses, and the paired difference to softmax.

    For a figure against states, also the state of a layer and the number of parameters.
    """
    names = dict.fromkeys(name for panel in experiment.panels for name in panel.variants)
    table = results([run for name in names for run in runs.get(name, {}).values()])
    rows = [
        {
            "variant": f"`{row['variant']}`",
            "seeds": str(row["seeds"]),
            "train loss": f"{row['train_loss']:.4f}",
            "test loss": f"{row['test_loss']:.4f}",
            "minus softmax [95% interval]": difference_text(row),
            "state per layer": memory_text(row),
            "parameters": f"{row['parameters']:,}",
        }
        for row in table.to_dict("records")
    ]
    shown = list(rows[0])[: None if experiment.kind == "states" else -2]
    lines = markdown.table(shown, ([row[name] for name in shown] for row in rows), left=len(shown))
    return f"{lines}\n\n{conditions({name: runs[name] for name in names})}"


def verdicts(found: dict[tuple[str, str], Runs], before: str, source: str) -> str:
    """The claims of a source with their checks; those not run are copied from ``before``."""
    rows = pd.DataFrame(
        row for row in verdict_table(judge(found, SCALE)) if row["source"] == source
    )
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


def conditions(runs: Runs) -> str:
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
    page = HERE / "results.md"
    text = page.read_text(encoding="utf-8")
    parts = {}
    for name, source in (("verdicts", PAPER), ("own-verdicts", OWN)):
        before = text.partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0]
        parts[name] = verdicts(found, before, source)
    for name, experiment in FIGURES.items():
        wanted = {variant for panel in experiment.panels for variant in panel.variants}
        runs = found.get((experiment.panels[0].condition, "stdlib"), {})
        seeds_of = {frozenset(runs.get(variant, {})) for variant in ("softmax", *wanted)}
        finished = len(seeds_of) == 1 and frozenset() not in seeds_of
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
