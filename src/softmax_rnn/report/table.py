"""The comparison as a table: one row per variant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table
from rich.text import Text

from softmax_rnn import variants
from softmax_rnn._utils.errors import differences
from softmax_rnn._utils.units import bytes_text
from softmax_rnn.data.tasks import is_task
from softmax_rnn.ops import AttentionSpec, Variant, resolve_layer
from softmax_rnn.report.memory import LayerMemory, layer_memory
from softmax_rnn.report.statistics import BLOCKS_ONLY, Difference, paired_runs
from softmax_rnn.report.sweeps import read_sweep
from softmax_rnn.report.terminal import terminal_table
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder

REFERENCE = "softmax"
# Fields of a summary that are shown only if one is not 0, and their column titles.
_EVENTS = {"skipped_steps": "steps skipped", "loss_spikes": "loss spikes"}
# The corpus may have another path, or be read in another way: its text is compared by hash.
_OF_FILES = ("corpus", "text_column", "encoding", "bad_files")
_MAY_DIFFER = ("attention", "layer", "seed", *_OF_FILES, *RunConfig.neutral_fields())


def results(runs: Sequence[RunFolder]) -> pd.DataFrame:
    """One row per variant; losses are means over its seeds.

    Columns: variant; seeds; learning_rate; setting and value (if a setting was chosen for each
    variant, see :mod:`softmax_rnn.report.sweeps`); parameters; state_bytes and state_kind (of one
    layer, see :class:`softmax_rnn.report.memory.LayerMemory`); train_loss (mean over the last tenth
    of the run); test_loss and test_accuracy (on the full test split after the last step; accuracy
    is that of a task's answers, and NaN for text); difference, low and high (difference to softmax
    with its 95% interval, paired by seed and block; NaN without softmax); interval_over (what the
    interval covers: with one shared seed, test blocks only); tokens_per_second (median);
    peak_memory_bytes (maximum); skipped_steps and loss_spikes (sums over seeds).

    Raises:
        ValueError: if runs cannot be compared; the message names two runs and what differs.
    """
    require_comparable(runs)
    setting = swept_setting(runs[0])
    grouped = by_variant(runs)
    reference = grouped.get(REFERENCE, {})
    rows = []
    for variant, seeds in grouped.items():
        summaries = pd.DataFrame([run.summary for run in seeds.values()])
        config = next(iter(seeds.values())).new_model
        memory, asked = layer_memory(config), is_task(config.corpus)
        row = {
            "variant": variant,
            "seeds": len(seeds),
            "learning_rate": config.learning_rate,
            "setting": setting,
            "value": getattr(config, setting) if setting else None,
            "parameters": int(summaries.parameters[0]),
            "state_bytes": memory.size,
            "state_kind": memory.kind,
            "train_loss": summaries.train_loss.mean(),
            "test_loss": summaries.test_loss.mean(),
            "test_accuracy": summaries.test_accuracy.mean() if asked else np.nan,
            **dict.fromkeys(("difference", "low", "high"), np.nan),
            "interval_over": "",
            "tokens_per_second": summaries.tokens_per_second.median(),
            "peak_memory_bytes": int(summaries.peak_memory_bytes.max()),
            **{name: int(summaries[name].sum()) for name in _EVENTS},
        }
        shared = sorted(set(seeds) & set(reference))
        if shared and variant != REFERENCE:
            paired = paired_runs(seeds, reference, shared)
            row |= {"difference": paired.mean, "low": paired.low, "high": paired.high}
            row["interval_over"] = paired.over
        rows.append(row)
    return pd.DataFrame(rows)


def require_comparable(runs: Sequence[RunFolder]) -> None:
    """Raise ``ValueError`` unless the runs differ in nothing but attention and seed.

    Variants may have different values of a setting that was chosen for each of them. On a task
    runs may end at different steps.
    """
    values: dict[str, RunFolder] = {}
    for run in runs:
        run.check_same_attention()
        same = values.setdefault(label(run), run)
        setting = swept_setting(run) or "learning_rate"
        here, there = (getattr(each.config, setting) for each in (run, same))
        if here != there:
            raise ValueError(
                f"{same.path} and {run.path} are runs of one variant with different values of "
                f"{setting} ({there} and {here}). Report on them separately."
            )
    first = _conditions(runs[0])
    for run in runs[1:]:
        if differing := differences(first, _conditions(run), "here"):
            raise ValueError(
                f"{runs[0].path} (there) and {run.path} (here) cannot be compared: {differing}. "
                "Report on them separately."
            )


def _conditions(run: RunFolder) -> dict[str, Any]:
    fields = run.config.to_dict()
    for name in _MAY_DIFFER:
        del fields[name]
    if setting := swept_setting(run):  # each variant has the best of its own
        del fields[setting]
    found = {**fields, "chosen setting": setting, **run.corpus, "test blocks": len(run.test_losses)}
    if run.config.stop_at_accuracy is not None:  # runs may end at different steps
        return found
    rows = {"metrics": len(run.metrics), "evaluations": len(run.evaluations)}
    return found | {f"rows of {name}.jsonl": count for name, count in rows.items()}


def swept_setting(run: RunFolder) -> str:
    """The setting whose value was chosen for each variant of a run's folder; empty for none."""
    found = read_sweep(run.path.parent)
    return found["setting"] if found else ""


def by_variant(runs: Sequence[RunFolder]) -> dict[str, dict[int, RunFolder]]:
    """The runs by the name of their attention, then by seed, in the order of the variants."""
    grouped: dict[str, dict[int, RunFolder]] = {}
    for run in runs:
        seeds = grouped.setdefault(label(run), {})
        if run.config.seed in seeds:
            raise ValueError(
                f"{run.path} and {seeds[run.config.seed].path} are runs of one variant and seed: "
                "report on one of them."
            )
        first = next(iter(seeds.values()), run)
        if first.config.variant != run.config.variant:
            raise ValueError(
                f"{first.path} and {run.path} have one name, {label(run)!r}, for two attentions: "
                "report on them separately."
            )
        seeds[run.config.seed] = run
    rank = {name.partition(":")[0]: index for index, name in enumerate(variants())}

    def position(name: str) -> tuple[int, int, str]:
        family, _, order = name.partition("+")[0].partition(":")
        return rank.get(family, len(rank)), int(order) if order.isdecimal() else 0, name

    return {name: grouped[name] for name in sorted(grouped, key=position)}


def label(run: RunFolder) -> str:
    """The name of a run's attention in tables and figures.

    This is the name of its variant. For an attention that is given by its fields, or has layer
    options of its own, it is NAME if the run's folder is ``NAME-seed0``, else the fields that
    differ from softmax's.
    """
    attention = run.config.attention
    folder = run.path.absolute().name
    name = folder.removesuffix(f"-seed{run.config.seed}")
    if isinstance(attention, str) and (
        not run.config.layer or name in (folder, attention.replace(":", "-"))
    ):
        return attention
    if name != folder and may_name(name, run.config.variant):
        return name
    plain, fields = map(_fields, (Variant(AttentionSpec()), run.config.variant))
    changed = (f"{key}={fields[key]}" for key in plain if fields[key] != plain[key])
    return ", ".join(changed) or REFERENCE


def _fields(attention: Variant) -> dict[str, Any]:
    options = {f"layer.{name}": value for name, value in attention.options.to_dict().items()}
    return attention.spec.to_dict() | options


def may_name(name: str, attention: Variant) -> bool:
    """Whether an attention may have this name: it is valid, and no other variant's name."""
    try:
        return resolve_layer(name) == attention
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None


def cells(table: pd.DataFrame) -> list[list[str]]:
    """The table's cells as text, header first; columns that tell nothing are dropped."""
    setting = table.setting.iloc[0]
    shown = {
        "variant": table.variant,
        "seeds": table.seeds.map(str),
        **({setting.replace("_", " "): table.value.map(_plain_number)} if setting else {}),
        "parameters": table.parameters.map("{:,}".format),
        "train loss": table.train_loss.map("{:.4f}".format),
        "test loss": table.test_loss.map("{:.4f}".format),
        **(
            {"test accuracy": table.test_accuracy.map("{:.4f}".format)}
            if table.test_accuracy.notna().all()
            else {}
        ),
        f"minus {REFERENCE} [95% interval]": [
            difference_text({**row, "interval_over": ""} if _one_seed(table) else row)
            for row in table.to_dict("records")
        ],
        "tokens/s": table.tokens_per_second.map("{:,.0f}".format),
        "state per layer": map(memory_text, table.to_dict("records")),
        "peak memory": table.peak_memory_bytes.map(bytes_text),
        **{title: table[x].map("{:,}".format) for x, title in _EVENTS.items() if table[x].any()},
    }
    return [list(shown), *(list(row) for row in zip(*shown.values(), strict=True))]


def _plain_number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def difference_text(row: Mapping[Any, Any]) -> str:
    """A row's difference to softmax with its interval; the row is one of ``results``."""
    if np.isnan(row["difference"]):
        return "-"
    return str(Difference(row["difference"], row["low"], row["high"], row["interval_over"]))


def memory_text(row: Mapping[Any, Any]) -> str:
    """The state of a layer, or what it keeps instead; the row is one of ``results``."""
    return str(LayerMemory(row["state_bytes"], row["state_kind"]))


def _one_seed(table: pd.DataFrame) -> bool:
    """Whether all intervals are over a single seed: then the note says so once."""
    return bool((table.interval_over[table.difference.notna()] == BLOCKS_ONLY).all())


def interval_note(table: pd.DataFrame) -> str:
    """A warning if the table contains an interval over a single seed, else nothing."""
    if not (table.interval_over == BLOCKS_ONLY).any():
        return ""
    if _one_seed(table):
        return (
            f"The intervals cover {BLOCKS_ONLY}, as each comes from a single seed: with another "
            "seed a difference may be outside its interval."
        )
    return (
        f"An interval over {BLOCKS_ONLY} comes from a single seed: with another seed the "
        "difference may be outside it."
    )


def conclusion(table: pd.DataFrame) -> str:
    """Who is better than softmax, by how much and how surely, in one sentence.

    A variant is better or worse if the 95% interval of its difference excludes 0.

    Args:
        table: that of ``results``.
    """
    found = table[table.difference.notna()].sort_values("difference")
    if found.empty:
        return f"No variant shares a seed with {REFERENCE}: no difference can be judged."
    alone = found.interval_over == BLOCKS_ONLY
    if alone.all():
        best = found.iloc[0]
        names = (best.variant, REFERENCE) if best.difference < 0 else (REFERENCE, best.variant)
        return (
            f"One seed decides nothing: in it {names[0]} has the lowest test loss, "
            f"{abs(best.difference):.4f} nats per token below that of {names[1]}."
        )
    better, worse = found[~alone & (found.high < 0)], found[~alone & (found.low > 0)]
    unclear = found[~alone & (found.low <= 0) & (found.high >= 0)]
    parts = [
        f"{group.variant.iloc[0]} is {word} than {REFERENCE} by {_by(group.iloc[0])}"
        + (f", and {_names(group[1:])} by {rest}" if len(group) > 1 else "")
        for group, word, rest in ((better, "better", "less"), (worse, "worse", "more"))
        if len(group)
    ]
    if len(unclear):
        includes = "its interval includes" if len(unclear) == 1 else "their intervals include"
        parts.append(f"{_names(unclear)} cannot be told from {REFERENCE}, since {includes} 0")
    if alone.any():
        parts.append(f"one seed decides nothing about {_names(found[alone])}")
    return "; ".join(parts) + "."


def _by(row: pd.Series) -> str:
    near, far = sorted((abs(row.low), abs(row.high)))
    return (
        f"{abs(row.difference):.4f} nats per token (95% interval: {near:.4f} to {far:.4f}, over "
        f"{row.interval_over})"
    )


def _names(found: pd.DataFrame) -> str:
    """The names of up to three variants, or their number."""
    names = list(found.variant)
    if len(names) > 3:
        return f"{len(names)} variants"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def rich_table(table: pd.DataFrame) -> Table:
    """The table for the terminal."""
    header, *rows = cells(table)
    shown = terminal_table(header, rows, left=header[:1])
    shown.title = Text(conclusion(table))
    shown.caption = interval_note(table) or None
    return shown
