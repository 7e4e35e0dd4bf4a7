"""Make the tables and figures of convert.md from conversions: ``python docs/convert.py RUNS``.

The conversions are RUNS/convert/NAME, by default below ``runs``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from results import HERE, copy, fill
from softmax_rnn.report import markdown
from softmax_rnn.report.statistics import paired_difference
from softmax_rnn.training.config import ConversionConfig
from softmax_rnn.training.folder import RunFolder


def conversions(files: Sequence[Path]) -> str:
    """The losses of conversions, the size and speed of their caches, and how they were trained."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        settings, where = found["settings"], found["environment"]
        title = f"`{Path(settings['source']).name}` with `{settings['attention']}`"
        rows = (
            (
                row["model"],
                f"{row['loss']:.3f}",
                interval(row["difference_trained"], row["low_trained"], row["high_trained"]),
                "" if row.get("gap_closed") is None else f"{row['gap_closed']:.0%}",
            )
            for row in found["losses"]
        )
        brings = found["state_brings"]
        decoding = {(row["tokens"], row["stage"]): row for row in found["decoding"]}
        stages = list(dict.fromkeys(stage for _, stage in decoding))
        columns = [
            (unit, name, factor, stage)
            for unit, name, factor in (
                ("MiB", "cache_bytes", 2**-20),
                ("tokens/s", "tokens_per_second", 1),
            )
            for stage in stages
        ]
        costs = (
            (f"{n:,}", *(f"{factor * decoding[n, s][name]:,.1f}" for _, name, factor, s in columns))
            for n in dict.fromkeys(n for n, _ in decoding)
        )
        runs = "; ".join(
            f"{name}: {run['tokens']:,} tokens in {run['seconds'] / 60:.0f} min"
            for name, run in found["runs"].items()
        )
        packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
        header = ("model", "loss", "minus trained source [95% interval]", "gap closed")
        parts += [
            f"{title}, {found['rows']} blocks of {settings['block_size']} held-out tokens of "
            f"`{settings['corpus']}`:",
            markdown.table(header, rows, left=1),
            f"The state brings {interval(*brings.values())} nats beyond the window alone.",
            f"![losses, heads, decoding](images/results_convert_{file.parent.name}.png)",
            "Decoding after a prompt:",
            markdown.table(
                ("tokens", *(f"{unit}, {stage}" for unit, _, _, stage in columns)), costs, left=0
            ),
            f"Steps only: {runs}. Run on {where['processor']}, {where['cores']} cores, {packages}, "
            f"commit {where['commit'][:10]}.",
        ]
    return "\n\n".join(parts)


def interval(*found: float) -> str:
    """A difference with its interval."""
    mean, low, high = (f"{x:+z.3f}" for x in found)
    return f"{mean} [{low}, {high}]"


def hybrids(runs: Sequence[RunFolder]) -> str:
    """The losses of conversions of some layers, on all held-out blocks, each minus the first's."""
    rows = []
    for run in runs:
        config, losses, summary = run.config, run.test_losses[None], run.summary
        assert isinstance(config, ConversionConfig)
        assert config.layers is not None
        model = json.loads((run.path.parent / "model" / "config.json").read_text(encoding="utf-8"))
        kept = [str(x) for x in range(model["num_hidden_layers"]) if x not in config.layers]
        found = paired_difference(losses, runs[0].test_losses[None])
        rows.append(
            (
                f"`{run.path.parent.name}`",
                ", ".join(kept),
                f"{summary['tokens']:,}",
                f"{summary['seconds'] / 60:.0f}",
                f"{losses.mean():.3f}",
                "-" if run is runs[0] else interval(found.mean, found.low, found.high),
            )
        )
    header = ("conversion", "softmax in the layers", "tokens", "minutes", "loss")
    count = len(runs[0].test_losses)
    return markdown.table((*header, f"minus the first [95%, {count} blocks]"), rows, left=2)


def main(root: Path) -> None:
    """Fill the page from the finished conversions below ``root``."""
    files = sorted(root.glob("convert/*/conversion.json"))
    files = [x for x in files if json.loads(x.read_text(encoding="utf-8"))["state_brings"]]
    runs = [RunFolder(path.parent) for path in sorted(root.glob("convert/*/finetune/summary.json"))]
    some = [x for x in runs if isinstance(x.config, ConversionConfig) and x.config.layers]
    parts = {"conversions": (conversions, files), "hybrids": (hybrids, some)}
    made = {name: make(found) for name, (make, found) in parts.items() if found}
    if not made:
        raise SystemExit(f"No finished conversion with its controls in {root / 'convert'}.")
    fill(HERE / "convert.md", made)
    for file in files:
        figure = file.with_suffix(".png")
        copy(figure, HERE / "images" / f"results_convert_{file.parent.name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
