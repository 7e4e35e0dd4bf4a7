"""The commands that read finished runs (claims, report, generate, analyze), and ``variants``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from softmax_rnn import variants
from softmax_rnn._utils.errors import require_choice
from softmax_rnn._utils.files import require_writable, write_json
from softmax_rnn.cli.command import CACHES, Command, show, show_paths, write_report
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.ops import ALIASES, FAMILIES, AttentionSpec, LayerOptions, layer_options


def _claims_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument("runs", type=str, nargs="?", default="runs", help="folder of the runs")
    parser.add_argument("--scale", type=str, default="demo", help=f"one of {', '.join(SCALES)}")
    parser.add_argument(
        "--best",
        type=str,
        default="",
        metavar="SETTING",
        help="of runs in which each variant has its best value, as reproduce --sweep makes them: "
        "--best learning_rate",
    )


def _claims(parsed: Namespace) -> int:
    from softmax_rnn.experiments.reproduce import finished_runs
    from softmax_rnn.experiments.verdicts import judge, rich_verdicts, verdict_table

    require_choice("scale", parsed.scale, SCALES)
    root, scale = Path(parsed.runs), SCALES[parsed.scale].with_best(parsed.best)
    found = finished_runs(scale, root)
    if not found:
        more = f" --sweep {parsed.best}=VALUE,VALUE,..." if parsed.best else ""
        raise ValueError(
            f"No finished run of scale {scale.folder!r} in {root}: start with softmax-rnn "
            f"reproduce figure4 --scale {parsed.scale} --out {root}{more}."
        )
    verdicts = judge(found, scale)
    show(rich_verdicts(verdicts))
    path = root / scale.folder / "claims.json"
    write_json(path, verdict_table(verdicts))
    show_paths([path])
    return 0


def _report_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument("runs", type=str, help="folder that contains the runs")


def _report(parsed: Namespace) -> int:
    from softmax_rnn.report.outputs import find_runs

    root = Path(parsed.runs)
    write_report(find_runs(root), root)
    return 0


def _generate_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument(
        "checkpoint",
        type=str,
        help="folder of a run or of a saved model, a GGUF file, or hf:owner/name",
    )
    parser.add_argument("--prompt", type=str, required=True, help="the text to continue")
    parser.add_argument(
        "--max_new_tokens", type=int, default=200, help="generate at most this many"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--top_k", type=int, help="sample among this many likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="random seed of sampling")
    parser.add_argument("--cache", type=str, default="auto", help=f"one of {', '.join(CACHES)}")


def _generate(parsed: Namespace) -> int:
    from transformers.utils.logging import disable_progress_bar

    from softmax_rnn.cli.generate import generate

    disable_progress_bar()
    options = parsed.as_dict()
    print(f"\n{generate(Path(options.pop('checkpoint')), **options, streamed=True)}")
    return 0


def _analyze_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument(
        "checkpoint",
        type=str,
        help="folder of a run or of a saved model, a GGUF file, or hf:owner/name",
    )
    parser.add_argument(
        "--corpus", type=str, help="text to measure on (default: the run's; else required)"
    )
    parser.add_argument(
        "--blocks", type=int, default=16, help="number of test blocks to measure on"
    )
    parser.add_argument(
        "--block_size", type=int, help="tokens per block (default: the run's; else up to 1024)"
    )
    parser.add_argument("--order", type=int, default=10, help="highest power to show")
    parser.add_argument(
        "--tolerance", type=float, default=1e-2, help="allowed relative error of the output"
    )
    parser.add_argument("--out", type=str, help="folder to write to (default: the checkpoint's)")


def _analyze(parsed: Namespace) -> int:
    from transformers.utils.logging import disable_progress_bar

    from softmax_rnn.analysis.heads.analyze import analyze_checkpoint
    from softmax_rnn.analysis.heads.figure import draw
    from softmax_rnn.analysis.heads.result import write
    from softmax_rnn.analysis.heads.table import table
    from softmax_rnn.models.loading import HUB

    options = parsed.as_dict()
    source, out = options.pop("checkpoint"), options.pop("out")
    if out is None and (source.startswith(HUB) or source.endswith(".gguf")):
        raise ValueError(f"{source} is not a folder to write to: name one with --out.")
    folder = Path(out or source)
    require_writable(folder)  # fail before the work, not after it
    disable_progress_bar()
    found = analyze_checkpoint(source, **options)
    show(table(found))
    show_paths([*write(found, folder), *draw(found, folder, title=Path(source).name)])
    return 0


def _variants(_: Namespace) -> int:
    from softmax_rnn.report.terminal import terminal_table

    plain, added = AttentionSpec().to_dict(), LayerOptions().to_dict()
    aliases = {name: alias for alias, name in ALIASES.items()}
    rows = []
    for name, spec in variants().items():
        options = layer_options(name).to_dict()
        fields = _changed(spec.to_dict(), plain) or "the defaults"
        if options != added:
            fields += f"\nlayer: {_changed(options, added)}"
        rows.append([name, aliases.get(name, ""), fields])
    header = ("variant", "also named", "fields that differ from the defaults")
    show(terminal_table(header, rows, left=header))
    print(f"Defaults: {_changed(plain, {})}")
    print(f"Defaults of the layer: {_changed(added, {})}")
    orders = [name for name, field in FAMILIES.items() if field == "order"]
    print(f"{', '.join(orders)} take any order, as in taylor:4.")
    print("window:N sees the last N keys; lolcats:N and window_state:N have a window of N keys.")
    print("NAME+decay adds a forget gate, a decay per head and token, as in softmax+decay.")
    return 0


def _changed(fields: dict[str, Any], plain: dict[str, Any]) -> str:
    """The fields that differ from plain ones."""
    changed = (item for item in fields.items() if item not in plain.items())
    return ", ".join(f"{key}={value}" for key, value in changed)


COMMANDS = {
    "claims": Command(
        "a verdict on every claim",
        _claims_options,
        _claims,
        about="Give a verdict on each of the paper's eleven claims, and on our own claims about "
        "the figures family and recall, from the finished runs.",
        extra="report",
    ),
    "report": Command(
        "write table, figure and HTML page of finished runs",
        _report_options,
        _report,
        extra="report",
    ),
    "generate": Command(
        "continue a prompt with a trained or converted model",
        _generate_options,
        _generate,
        about="Continue a prompt, print the text while it is generated, then the cache that was "
        "used and its size.",
    ),
    "analyze": Command(
        "measure which powers a decoder's heads use, and where they attend",
        _analyze_options,
        _analyze,
        about="Measure on real text, in every head of a trained decoder, how large each power's "
        "term is, the effective order (the lowest at which polynomials of the scores give "
        "softmax's output within a tolerance), and how softmax's weights are spread. Decoders of "
        "almost any Hugging Face family are measured as they are.",
        extra="report",
    ),
    "variants": Command("list the variants", lambda parser, defaults: None, _variants),
}
