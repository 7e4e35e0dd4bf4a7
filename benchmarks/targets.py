"""Target ratios of the benchmarks, which were set before measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.measure import ratios, summary

Where = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A ratio of two rows of one benchmark, and its limit.

    Attributes:
        benchmark: the benchmark that measures it.
        device: ``cpu`` or ``cuda``.
        of: name of the row in the numerator.
        to: name of the row in the denominator; ``name*`` is the fastest row that starts with it.
        limit: limit of the median over rounds of the ratio.
        quantity: ``time`` and ``memory`` must not exceed the limit; ``speed`` must reach it.
        cells: fields of both rows; the target must hold for every cell.
        to_where: fields in which the denominator's row differs.
    """

    benchmark: str
    device: str
    of: str
    to: str
    limit: float
    quantity: Literal["time", "speed", "memory"] = "time"
    cells: Sequence[Where] = ({},)
    to_where: Where = field(default_factory=dict)


def _at(lengths: Sequence[int], widths: Sequence[int] = (64, 128)) -> list[Where]:
    return [{"length": length, "width": width} for width in widths for length in lengths]


_DECODED = [{"length": length, "batch": batch} for length in (128, 2048) for batch in (1, 16)]
_GPU = _at((1024, 4096, 16384))
TARGETS = (
    Target("op", "cpu", "norm", "sdpa", 1.05, cells=_at((2048, 8192), (64,))),
    Target("op", "cpu", "gate", "sdpa", 1.35, cells=_at((2048, 8192), (64,))),
    Target("op", "cpu", "taylor:10", "sdpa", 1.7, cells=_at((2048, 8192), (64,))),
    Target("op", "cpu", "linear_elu", "sdpa", 0.6, cells=_at((2048,), (64,))),
    Target("op", "cpu", "linear_elu", "sdpa", 0.4, cells=_at((8192,), (64,))),
    Target("op", "cpu", "norm", "materialised norm", 3.5, "speed", _at((2048,), (64,))),
    Target("op", "cpu", "gate", "materialised gate", 3.5, "speed", _at((2048,), (64,))),
    *(
        Target("op", "cpu", name, name, 4.5, "memory", _at((8192,), (64,)), {"length": 2048})
        for name in ("norm", "gate")
    ),
    Target("forgetting", "cpu", "token decay", "sdpa", 1.3, cells=_at((2048,), (64,))),
    Target("forgetting", "cpu", "token decay", "sdpa", 1.0, cells=_at((8192,), (64,))),
    Target("forgetting", "cpu", "window 256", "sdpa", 0.2, cells=_at((8192,), (64,))),
    Target(
        *("forgetting", "cpu", "linear_elu, token decay", "linear_elu", 1.3),
        cells=_at((2048, 8192), (64,)),
    ),
    Target("step", "cpu", "norm", "softmax", 1.05),
    Target("step", "cpu", "softmax", "llama", 1.05),
    Target("step", "cpu", "linear_elu", "softmax", 1.0),
    Target("decode", "cpu", "softmax", "llama", 1.05, cells=_DECODED),
    Target("decode", "cpu", "softmax compiled", "llama compiled", 1.05, cells=_DECODED[::2]),
    Target("decode", "cpu", "taylor:2", "llama", 1.5, cells=_DECODED[:2]),
    Target("decode", "cpu", "taylor:2", "llama", 1.0, cells=_DECODED[2:]),
    Target("op", "cuda", "norm", "sdpa", 1.05, cells=_GPU),
    Target("op", "cuda", "gate", "sdpa*", 1.3, cells=_GPU),
    Target("op", "cuda", "taylor:10", "sdpa*", 1.3, cells=_GPU),
    Target("op", "cuda", "linear_elu", "flash-linear-attention", 1.0, "speed", _GPU),
    Target("op", "cuda", "power:2", "power-attention*", 1.0, "speed", _at((65536,))),
    Target("op", "cuda", "norm", "materialised norm", 10.0, "speed", _at((4096,))),
    Target("op", "cuda", "gate", "materialised gate", 10.0, "speed", _at((4096,))),
    Target("step", "cuda", "softmax", "llama", 0.97, "speed"),
    Target("step", "cuda", "norm", "llama", 0.97, "speed"),
)


def judge(
    result: Mapping[str, Any], targets: Sequence[Target] | None = None
) -> list[dict[str, Any]]:
    """Every target of a result's benchmark and device, with its measurement.

    Returns:
        For each: ``what``, ``limit``, ``found`` (a median), its quartiles ``low`` and ``high``,
        ``where`` (the worst of several cells), ``holds``; ``None`` if rows are missing, except
        that a target fails if one of its cells does.
    """
    if targets is None:
        kind = (result["benchmark"], result["device"])
        targets = [target for target in TARGETS if (target.benchmark, target.device) == kind]
    return [_answer(target, result.get("rows", [])) for target in targets]


def _answer(target: Target, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = [(_ratio(target, rows, cell), cell) for cell in target.cells]
    known = [(ratio, cell) for ratio, cell in found if ratio]
    least = target.quantity == "speed"
    answer: dict[str, Any] = {
        "what": f"{target.quantity} of {_name(target)}{_place(target)}",
        "limit": f"{'>=' if least else '<='} {target.limit:g}",
        **dict.fromkeys(("found", "low", "high", "where", "holds")),
    }
    if known:
        worst, cell = (min if least else max)(known, key=lambda pair: pair[0]["median"])
        median = worst["median"]
        answer |= {"found": median, "low": worst["low"], "high": worst["high"]}
        answer["where"] = _words(cell) if len(found) > 1 else None
        held = median >= target.limit if least else median <= target.limit
        answer["holds"] = held if len(known) == len(found) or not held else None
    return answer


def _ratio(
    target: Target, rows: Sequence[Mapping[str, Any]], cell: Where
) -> dict[str, float] | None:
    of = _row(rows, target.of, cell)
    to = _row(rows, target.to, {**cell, **target.to_where})
    if of is None or to is None:
        return None
    if target.quantity == "memory":
        return summary([of["peak_extra_bytes"] / to["peak_extra_bytes"]])
    if target.quantity == "speed":
        of, to = to, of
    return ratios(of["rounds"], to["rounds"])


def _row(rows: Sequence[Mapping[str, Any]], name: str, cell: Where) -> Mapping[str, Any] | None:
    """The row of that name; for ``name*`` the fastest match."""

    def named(row: Mapping[str, Any]) -> bool:
        return row["name"].startswith(name[:-1]) if name.endswith("*") else row["name"] == name

    here = [row for row in rows if named(row) and all(row.get(key, 1) == cell[key] for key in cell)]
    return min(here, key=lambda row: row["seconds"]["median"], default=None)


def _name(target: Target) -> str:
    if target.to_where:
        return target.of
    to = f"the fastest {target.to[:-1]}" if target.to.endswith("*") else target.to
    return f"{target.of} / {to}"


def _place(target: Target) -> str:
    if not target.cells[0]:
        return ""
    fields = {key: sorted({cell[key] for cell in target.cells}) for key in target.cells[0]}
    place = f" at {_words({key: ', '.join(map(str, fields[key])) for key in fields})}"
    return f"{place} / at {_words(target.to_where)}" if target.to_where else place


def _words(cell: Where) -> str:
    short = {"length": "T", "width": "D", "batch": "B"}
    return "; ".join(f"{short.get(key, key)}={value}" for key, value in cell.items())
