"""The report on a conversion: losses, heads, decoding, samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from softmax_rnn._utils.files import write_json, write_text
from softmax_rnn._utils.progress import ProgressBar
from softmax_rnn.conversion.card import NAME as CARD
from softmax_rnn.conversion.card import card
from softmax_rnn.conversion.measures import (
    PROMPT,
    SAMPLES,
    STATE_OFF,
    WINDOW_OFF,
    Findings,
    measurements,
)
from softmax_rnn.conversion.trainable import weights_hash
from softmax_rnn.report.figure import save
from softmax_rnn.report.markdown import table as markdown_table
from softmax_rnn.report.style import LOOK
from softmax_rnn.report.terminal import terminal_table
from softmax_rnn.training.config import STAGES, ConversionConfig
from softmax_rnn.training.environment import environment
from softmax_rnn.training.matmul import widest_float32_products
from softmax_rnn.training.opening import open_model
from softmax_rnn.training.run import load_rows

BLOCKS = 16  # of the test split

_BLUE, _VERMILION, _GRAY = "#0072B2", "#D55E00", "#999999"


@widest_float32_products()
def report(
    models: Mapping[str, str], config: ConversionConfig, out: Path, source_hash: str | None = None
) -> tuple[Table, list[Path]]:
    """Measure the models of a conversion on the test split of its corpus, and write the report.

    Args:
        models: by the names of their stages, as :func:`softmax_rnn.training.opening.open_model`
            takes them: the pretrained one first, then the controls and those of the finished
            stages; the last one is the result.
        config: the settings of the conversion's runs.
        out: the folder to write to.
        source_hash: the hash of the pretrained model's weights when it was converted.

    Returns:
        The table of losses, and the paths of ``conversion.json`` (all figures), ``heads.csv``,
        ``conversion.png`` and ``.svg``, and ``conversion.md`` (tables and samples).

    Raises:
        ValueError: if a model cannot be loaded, or the pretrained one has changed.
    """
    _, _, split = load_rows(config)
    chosen = np.linspace(0, len(split) - 1, min(BLOCKS, len(split))).round().astype(int)
    rows = [split[number] for number in chosen.tolist()]
    found = Findings(len(split))
    for number, (name, place) in enumerate(models.items()):
        opened = open_model(place)
        model, last = opened.model, number == len(models) - 1
        if not number:
            source = model
        if not number and source_hash not in (None, weights_hash(model)):
            raise ValueError(f"The weights of {place} have changed since it was converted.")
        if number and opened.run is not None:
            kept = ("steps", "tokens", "seconds")
            found.runs[name] = {key: opened.run.summary[key] for key in kept}
        # That of the end of a text, or any other: generate() wants a token to pad with.
        padding = opened.tokenizer.eos_token_id or 0
        for label, measure in measurements(
            found, name, model, rows, padding, source=source, second=name == "fitted", last=last
        ):
            with ProgressBar(label, 1.0, transient=True) as bar:
                measure(bar.update)
    decoded = opened.tokenizer.batch_decode
    samples = {
        name: decoded(tokens, skip_special_tokens=True) for name, tokens in found.samples.items()
    }
    prompts = decoded([row["input_ids"][:PROMPT] for row in rows[:SAMPLES]])
    return _write(found, prompts, samples, config, out)


def _write(
    found: Findings,
    prompts: list[str],
    samples: dict[str, list[str]],
    config: ConversionConfig,
    out: Path,
) -> tuple[Table, list[Path]]:
    table, decoding = found.loss_table(), found.decoding
    heads = pd.concat(found.heads)
    count = len(next(iter(found.losses.values())))
    data = {
        "settings": config.to_dict(),
        "environment": environment(),
        "rows": count,
        "rows_of_split": found.blocks,
        "runs": found.runs,
        "losses": _plain(table),
        "state_brings": found.state_brings(),
        "decoding": _plain(decoding),
        "samples": {"prompts": prompts, **samples},
    }
    write_json(out / "conversion.json", data)
    write_text(out / "heads.csv", heads.to_csv(index=False))
    title = f"{Path(config.source).name} with {config.attention}"
    figures = _draw(table, heads, decoding, out, title)
    write_text(out / "conversion.md", _page(table, decoding, prompts, samples, found, config))
    if (out / "model").is_dir():
        runs = {name: run for name, run in found.runs.items() if name in STAGES}
        write_text(
            out / "model" / CARD, card(config, runs, _results(table, decoding, found, config))
        )
    shown = terminal_table(_header(table), _cells(table), left=_header(table)[:1])
    shown.caption = escape(_caption(config, found, table))
    return shown, [out / "conversion.json", out / "heads.csv", *figures, out / "conversion.md"]


def _header(table: pd.DataFrame) -> tuple[str, ...]:
    names = ["model", "loss", "minus source [95%]"]
    names += ["minus trained source [95%]"] if "difference_trained" in table else []
    return (*names, "gap closed")


def _cells(table: pd.DataFrame) -> list[list[str]]:
    rows = []
    for row in table.to_dict("records"):
        closed = row.get("gap_closed", math.nan)
        cells = [row["model"], f"{row['loss']:.4f}", _interval(row)]
        cells += [_interval(row, "_trained")] if "difference_trained" in row else []
        rows.append([*cells, "-" if math.isnan(closed) else f"{closed:.0%}"])
    return rows


def _interval(row: Mapping[Any, Any], kind: str = "") -> str:
    mean, low, high = (row[f"{name}{kind}"] for name in ("difference", "low", "high"))
    return f"{mean:+z.4f} [{low:+z.4f}, {high:+z.4f}]"  # z: no negative zero


def _caption(config: ConversionConfig, found: Findings, table: pd.DataFrame) -> str:
    count = len(next(iter(found.losses.values())))
    words = (
        f"Loss in nats per token on {count} of the {found.blocks} blocks of {config.block_size} "
        f"tokens of the test split of {config.corpus}. The intervals cover these blocks only."
    )
    trained = "difference_trained" in table
    if trained:
        words += " Trained: as the last stage, on the same tokens."
    if "gap_closed" in table:
        between = (
            "the source and the window alone, both trained"
            if trained
            else "the source and the fitted model with its state off, the window alone"
        )
        words += f" Gap closed: of the difference between {between}."
    if (brings := found.state_brings()) is not None:
        words += f" The state brings {_interval(brings)} nats beyond the window alone, trained."
    return words


def _training(found: Findings) -> str:
    """How long each stage trained."""
    return " ".join(
        f"{name}: {run['steps']:,} steps, {run['tokens']:,} tokens, {run['seconds'] / 60:.1f} min."
        for name, run in found.runs.items()
    )


def _results(
    table: pd.DataFrame, decoding: pd.DataFrame, found: Findings, config: ConversionConfig
) -> str:
    """The losses, and the costs of decoding."""
    wide = decoding.pivot_table(index="tokens", columns="stage")
    names = list(dict.fromkeys(decoding.stage))
    costs = [
        [
            f"{tokens:,}",
            *(f"{wide['cache_bytes'][name][tokens] / 2**20:,.2f}" for name in names),
            *(f"{wide['tokens_per_second'][name][tokens]:,.1f}" for name in names),
        ]
        for tokens in wide.index
    ]
    header = ["tokens", *(f"MiB, {x}" for x in names), *(f"tokens/s, {x}" for x in names)]
    return "\n\n".join(
        [
            markdown_table(_header(table), _cells(table)),
            _caption(config, found, table),
            _training(found),
            "## Decoding after a prompt",
            "The speeds are medians of single tokens. The models decoded them in turn, so that "
            "other work on the machine slows both.",
            markdown_table(header, costs, left=0),
        ]
    )


def _page(
    table: pd.DataFrame,
    decoding: pd.DataFrame,
    prompts: list[str],
    samples: dict[str, list[str]],
    found: Findings,
    config: ConversionConfig,
) -> str:
    texts = []
    for number, prompt in enumerate(prompts):
        quoted = {"prompt": prompt}
        quoted |= {name: continued[number] for name, continued in samples.items()}
        texts += [f"**{name}**\n\n    " + x.replace("\n", "\n    ") for name, x in quoted.items()]
    return (
        "\n\n".join(
            [
                f"# {config.source} with {config.attention}",
                "![losses, heads, decoding](conversion.png)",
                _results(table, decoding, found, config),
                "## Continuations",
                *texts,
            ]
        )
        + "\n"
    )


def _draw(
    table: pd.DataFrame, heads: pd.DataFrame, decoding: pd.DataFrame, out: Path, title: str
) -> list[Path]:
    """Losses, heads and decoding, side by side."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(13.5, 4.2), layout="constrained")
        axes = figure.subplots(1, 4, width_ratios=(1.3, 1.2, 1, 1))
        figure.suptitle(title, parse_math=False)
        _draw_losses(axes[0], table)
        _draw_heads(figure, axes[1], heads)
        for ax, column, label, unit in (
            (axes[2], "cache_bytes", "cache, MiB", 2**20),
            (axes[3], "tokens_per_second", "tokens per second", 1),
        ):
            for (name, costs), color in zip(
                decoding.groupby("stage", sort=False), (_GRAY, _BLUE), strict=False
            ):
                ax.plot(costs.tokens, costs[column] / unit, "o-", color=color, label=name)
            ax.set_xscale("log", base=2)
            ax.set_ylim(bottom=0)
            ax.set_xlabel("tokens of the prompt")
            ax.set_title(label)
            ax.legend(frameon=False)
        return save(figure, out / "conversion")


def _draw_losses(ax: Axes, table: pd.DataFrame) -> None:
    places = np.arange(len(table))[::-1]
    colors = [
        _VERMILION if name.endswith((STATE_OFF, WINDOW_OFF)) else _BLUE for name in table.model
    ]
    colors[0] = _GRAY
    ax.hlines(places, table.loss.min(), table.loss, color=colors, linewidth=1)
    ax.scatter(table.loss, places, color=colors, zorder=2)
    for place, loss in zip(places, table.loss, strict=True):
        ax.annotate(f"{loss:.2f}", (loss, place), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, table.model)
    ax.margins(x=0.2)
    ax.grid(axis="y", visible=False)
    ax.set_title("loss, nats per token")


def _draw_heads(figure: Figure, ax: Axes, heads: pd.DataFrame) -> None:
    """A map of the last stage: the share of the state in each head, else the error."""
    last = heads[heads.stage == heads.stage.iloc[-1]]
    shares = last.get("state_share")
    known = shares is not None and shares.notna().any()
    column = "state_share" if known else "error"
    grid = last.pivot_table(index="layer", columns="head", values=column)
    image = ax.imshow(grid, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
    above = "max" if grid.to_numpy().max() > 1 else "neither"
    ax.set_yticks(range(0, len(grid), max(1, len(grid) // 10)))
    ax.set_yticklabels(grid.index[:: max(1, len(grid) // 10)])
    ax.grid(False)
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    what = "state's share of the weights" if known else "error against softmax"
    ax.set_title(f"{heads.stage.iloc[-1]}: {what}")
    figure.colorbar(image, ax=ax, extend=above)


def _plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A table's rows for JSON, missing and infinite numbers as nulls."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=15))
    return rows
