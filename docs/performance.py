"""Make the tables and figures of performance.md from JSON: ``python docs/performance.py``.

The JSON is what ``make bench`` and ``make bench-gpu`` write to benchmarks/results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks is not installed

from benchmarks.figures import draw_decode, draw_op
from benchmarks.measure import FORMAT, RESULTS, spread
from benchmarks.targets import TARGETS, Target, judge

from softmax_rnn._utils.files import write_text
from softmax_rnn.report import markdown
from softmax_rnn.report.markdown import table

Result = Mapping[str, Any]
Results = Mapping[tuple[str, str], Result]
Row = Mapping[str, Any]

HERE = Path(__file__).parent
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
# In the order of the page, CPU before GPU; some run on a CPU only.
BENCHMARKS = (
    *((name, device) for device in DEVICES for name in ("op", "recurrence", "step", "decode")),
    ("forgetting", "cpu"),
    ("choice", "cpu"),
    ("prepare", "cpu"),
)
NONE = "not measured"


def load(folder: Path) -> dict[tuple[str, str], Result]:
    """Every result in the current format, by benchmark and kind of machine."""
    found = {}
    for benchmark, device in BENCHMARKS:
        for path in sorted(folder.glob(f"{benchmark}-{device}*.json")):
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.get("format") == FORMAT:
                found[benchmark, path.stem.removeprefix(f"{benchmark}-")] = data
            else:
                print(f"{path} has another format: run the benchmark again.")
    return found


def title(place: str) -> str:
    """The name of a kind of machine: ``GPU``, ``EPYC``."""
    device, _, name = place.partition("-")
    return {"epyc": "EPYC"}.get(name, name.title()) if name else DEVICES[device]


def of(results: Results, benchmark: str, device: str) -> dict[str, Result]:
    """The results of a benchmark, by kind of machine."""
    return {
        place: result
        for (name, place), result in results.items()
        if name == benchmark and place.partition("-")[0] == device
    }


def targets(results: Results) -> str:
    """Every target with its measurement on each CPU, then those on a GPU."""
    parts = []
    for device, kind in DEVICES.items():
        wanted = [t for t in TARGETS if t.device == device]
        places = sorted({place for _, place in results if place.startswith(device)}) or [device]
        rows = []
        for target in wanted:
            cells = [
                _judged(results.get((target.benchmark, place), {}), target) for place in places
            ]
            answer = judge({}, [target])[0]
            rows.append([target.benchmark, answer["what"], answer["limit"], *cells])
        columns = ["benchmark", "target", "limit", *map(title, places)]
        parts.append(f"On a {kind}:\n\n" + table(columns, rows, left=2))
    return "\n\n".join(parts)


def _judged(result: Result, target: Target) -> str:
    """What was measured, its quartiles, and whether the target held."""
    answer = judge(result, [target])[0]
    if answer["found"] is None:
        return NONE
    worst = f" at {answer['where']}" if answer["where"] else ""
    held = {True: "holds", False: "**fails**", None: "holds there, others not measured"}
    held = held[answer["holds"]]
    return f"{spread({**answer, 'median': answer['found']})}{worst}: {held}"


def machines(results: Results) -> str:
    """The machine and versions of every result."""
    if not results:
        return f"Nothing: {NONE}."
    places: dict[str, list[str]] = {}
    rows = []
    for (benchmark, kind), result in results.items():
        where, top = result["environment"], result["ceiling"]
        packages = [f"{name} {version}" for name, version in where["packages"].items()]
        versions = ", ".join([*packages, *result.get("peers", [])])
        gpus = f", {', '.join(where['gpus'])}, CUDA {where['cuda']}" if where["gpus"] else ""
        place = (
            f"{where['processor']}, {where['cores']} cores, {where['memory_bytes'] / 2**30:.0f} GiB"
            f"{gpus}; {where['platform']}, Python {where['python']}, {versions}"
        )
        name = f"{benchmark}, {title(kind)}"
        places.setdefault(place, []).append(name)
        rows.append(
            [
                f"`{result['command']}`",
                str(where["commit"])[:10],
                str(where["threads"]),
                f"{where['busy_before_percent']:.0f}%",
                f"{_rate(top['flop_per_second'])}FLOP/s",
                f"{_rate(top['bytes_per_second'])}B/s",
            ]
        )
    lines = [f"- {'; '.join(names)}: {place}" for place, names in places.items()]
    ways = dict.fromkeys(result["ceiling"]["how"] for result in results.values())
    columns = ["command", "commit", "threads", "cores busy before", "product", "copy"]
    return "\n".join([*lines, f"- the ceiling: {'; '.join(ways)}", "", table(columns, rows)])


def missing(results: Results) -> str:
    """What was not measured, and why."""
    lines = [
        f"- {benchmark} on a {DEVICES[device]}: {NONE}."
        for benchmark, device in BENCHMARKS
        if not of(results, benchmark, device)
    ]
    for (benchmark, kind), result in results.items():
        place = f"{benchmark}, {title(kind)}"
        if result.get("not_installed"):
            lines.append(f"- {place}: not installed: {', '.join(result['not_installed'])}.")
        for key, value in result.get("not_timed", {}).items():
            reasons = {key: value} if isinstance(value, str) else value
            lines += [f"- {place}: {name} not timed: {why}." for name, why in reasons.items()]
    return "\n".join(lines) or "Everything was measured."


def op(result: Result) -> str:
    """Every contestant at every length."""
    top = result["ceiling"]
    columns = ["T", "name", "form", "ms", "/ SDPA [quartiles]", "extra MiB", "FLOP/s", "B/s"]
    rows = [
        [
            str(row["length"]),
            _code(row),
            row["form"] or "",
            spread(row["seconds"], 1e3, 1),
            spread(row["ratio"]),
            f"{row['peak_extra_bytes'] / 2**20:,.0f}",
            _share(row["flop_per_second"], top["flop_per_second"]),
            _share(row["bytes_per_second"], top["bytes_per_second"]),
        ]
        for row in result["rows"]
    ]
    widths = dict.fromkeys(row["width"] for row in result["rows"])
    parts = []
    for width in widths:
        own = [
            cells for row, cells in zip(result["rows"], rows, strict=True) if row["width"] == width
        ]
        first = next(row for row in result["rows"] if row["width"] == width)
        parts.append(
            f"D={width}, {_dtype(result)}, B={first['batch']} H={first['heads']} at "
            f"T={first['length']}:\n\n" + table(columns, own, left=3)
        )
    return "\n\n".join(parts)


def forgetting(result: Result) -> str:
    """Every spec at every length."""
    columns = ["T", "name", "ms", "/ SDPA [quartiles]", "extra MiB"]
    rows = [
        [
            str(row["length"]),
            row["name"],
            spread(row["seconds"], 1e3, 1),
            spread(row["ratio"]),
            f"{row['peak_extra_bytes'] / 2**20:,.0f}",
        ]
        for row in result["rows"]
    ]
    first = result["rows"][0]
    place = f"D={first['width']}, {_dtype(result)}, B={first['batch']} H={first['heads']}:"
    return f"{place}\n\n{table(columns, rows, left=2)}"


def step(result: Result) -> str:
    """Every model's step."""
    columns = ["name", "ms", "/ Llama [quartiles]", "extra MiB", "tokens/s", "model FLOP/s"]
    sheet = any(row["utilisation_of_data_sheet"] is not None for row in result["rows"])
    rows = []
    for row in result["rows"]:
        cells = [
            _code(row),
            spread(row["seconds"], 1e3, 1),
            spread(row["ratio"], digits=3),
            f"{row['peak_extra_bytes'] / 2**20:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            _share(row["flop_per_second"], result["ceiling"]["flop_per_second"]),
        ]
        rows.append(cells + ([f"{row['utilisation_of_data_sheet']:.1%}"] if sheet else []))
    size = result["rows"][0]["parameters"] / 1e6
    head = (
        f"The {result['preset']} preset ({size:.1f} M parameters), {_dtype(result)}, "
        f"{result['batch']} sequences of {result['length']} tokens:\n\n"
    )
    return head + table(columns + ["of the data sheet"] * sheet, rows)


def decode(result: Result) -> str:
    """Every model after every prompt."""
    columns = [
        "batch",
        "prompt",
        "name",
        "cache",
        "tokens/s",
        "time / Llama [quartiles]",
        "prompt, ms",
    ]
    rows = [
        [
            str(row.get("batch", 1)),
            str(row["length"]),
            _code(row),
            row["cache"],
            f"{row['tokens_per_second']:,.0f}",
            spread(row["ratio"]),
            f"{1e3 * row['prompt_seconds']['median']:,.1f}",
            f"{row['cache_bytes'] / 2**20:,.2f}",
            f"{row['peak_extra_bytes'] / 2**20:,.1f}",
            _share(row["bytes_per_second"], result["ceiling"]["bytes_per_second"]),
        ]
        for row in result["rows"]
    ]
    head = (
        f"The {result['preset']} preset, {_dtype(result)}, {result['new_tokens']} tokens a "
        "round:\n\n"
    )
    return head + table([*columns, "cache, MiB", "extra MiB", "B/s"], rows, left=4)


def recurrence(result: Result) -> str:
    """The expectations for finite series, with measurements."""
    rows = [
        [row["what"], row["limit"], f"{row['found']:.3g}", "yes" if row["holds"] else "**no**"]
        for row in result["verdicts"]
    ]
    return table(["expectation", "limit", "measured", "held?"], rows)


def choice(result: Result) -> str:
    """The forms of each cell, and auto over the fastest one."""
    rows = []
    for row in result["rows"]:
        times = {name: x["median"] for name, x in row["seconds"].items() if name != "auto"}
        forms = ", ".join(
            f"{name} {1e3 * times[name]:.2f}" for name in sorted(times, key=times.get)
        )
        name = row["spec"] if "spec" in row else f"taylor:{row['order']}"
        sizes = [name, str(row["length"]), str(row["width"])]
        rows.append([*sizes, forms, spread(row["auto_over_best"])])
    worst = result["verdicts"][0]
    held = "holds" if worst["holds"] else "**fails**"
    head = f"The worst of {len(rows)} cells: {worst['found']:.2f} ({worst['limit']}): {held}.\n\n"
    columns = ["attention", "T", "d", "forms, ms", "auto / the fastest [quartiles]"]
    return head + table(columns, rows, left=1)


def prepare(result: Result) -> str:
    """The tokenizer alone, and every number of workers."""
    own = spread(result["alone_tokens_per_second"], 1e-6)
    rows = [["the tokenizer alone", own, "1"]] + [
        [
            f"{row['workers']} worker{'s' if row['workers'] > 1 else ''}",
            spread(row["tokens_per_second"], 1e-6),
            spread(row["of_alone_a_worker"]),
        ]
        for row in result["speeds"]
    ]
    kills = result["kills"]
    same = "the same hashes" if kills["same"] else "**other hashes**"
    head = f"{result['megabytes']:g} MB of JSON lines, {result['tokenizer']}:\n\n"
    tail = f"\n\nKilled {len(kills['stretches_left'])} times at random moments: {same}."
    columns = [
        "",
        "million tokens/s [quartiles]",
        "relative to the tokenizer, per worker [quartiles]",
    ]
    return head + table(columns, rows) + tail


def _code(row: Row) -> str:
    """The name of a row: a variant's as code, any other as text."""
    name: str = row["name"]
    plain = name.startswith(("sdpa", "llama", "materialised", "flash-linear", "power-attention"))
    return name if plain else f"`{name}`"


def _dtype(result: Result) -> str:
    return str(result["dtype"]).removeprefix("torch.")


def _share(rate: float, top: float) -> str:
    return f"{_rate(rate)} ({rate / top:.0%})"


def _rate(value: float) -> str:
    """A number with three digits and a unit prefix: ``123 G``."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


PARTS: dict[str, Callable[[Result], str]] = {
    "op": op,
    "forgetting": forgetting,
    "step": step,
    "decode": decode,
    "recurrence": recurrence,
    "choice": choice,
    "prepare": prepare,
}
FIGURES: dict[str, tuple[Callable[[Result, Path], None], str]] = {
    "op": (draw_op, "Time and memory of the operation against the length"),
    "decode": (draw_decode, "Speed of decoding and size of the cache against the prompt"),
}


def figures(results: Results, folder: Path) -> None:
    """Draw the figures of the measured benchmarks."""
    for (benchmark, place), result in results.items():
        if benchmark in FIGURES:
            FIGURES[benchmark][0](result, folder / f"performance_{benchmark}_{place}.png")


def fill(text: str, results: Results) -> str:
    """The page with every generated part replaced."""
    parts = {
        "targets": targets(results),
        "machines": machines(results),
        "missing": missing(results),
    }
    for benchmark, device in BENCHMARKS:
        shown = []
        for place, result in of(results, benchmark, device).items():
            part = PARTS[benchmark](result)
            space = "\n\n" if part.startswith("|") else " "
            part = f"**{title(place)}.**{space}{part}"
            if benchmark in FIGURES:
                image = f"images/performance_{benchmark}_{place}.png"
                part = f"![{FIGURES[benchmark][1]}]({image})\n\n{part}"
            shown.append(part)
        parts[f"{benchmark} {device}"] = "\n\n".join(shown) or NONE
    return markdown.fill(text, parts)


def main() -> None:
    """Fill the page and draw the figures from ``benchmarks/results``."""
    results = load(RESULTS)
    figures(results, HERE / "images")
    page = HERE / "performance.md"
    write_text(page, fill(page.read_text(encoding="utf-8"), results))


if __name__ == "__main__":
    main()
