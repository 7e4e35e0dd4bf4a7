"""A training step: forward, loss, backward, clipping, AdamW; ours and Hugging Face's Llama.

    python -m benchmarks.step                  # CPU: the demo preset, float32
    python -m benchmarks.step --device cuda    # the small preset (275 M), bfloat16 autocast

All models start from the same weights. Before anything is timed, softmax and both Llamas must give
the same logits and parameter gradients. Ratios are relative to Llama with SDPA. Float32 products
have the precision that `softmax-rnn train` uses, for all models.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import measure
from benchmarks.llama import LLAMA, PRESET, VOCABULARY, models, run_config, tokens
from benchmarks.targets import judge
from softmax_rnn.experiments.costs import GPUS, cost
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.matmul import widest_float32_products

VARIANTS = ["softmax", "norm", "gate", "linear_elu"]
BATCH = {"cpu": None, "cuda": 8}  # None: the preset's
TOLERANCE = 1e-4  # of logits and gradients, in float32


def check(made: dict[str, Any], ids: Tensor) -> dict[str, float]:
    """The largest relative error of logits and gradients against Llama's; exits if it is large."""

    def found(name: str) -> list[Tensor]:
        model = made[name]
        out = model(input_ids=ids, labels=ids, use_cache=False)
        names = [key for key, _ in made["llama"].named_parameters()]
        weights = dict(model.named_parameters())
        return [out.logits, *torch.autograd.grad(out.loss, [weights[key] for key in names])]

    expected = found("llama")
    errors = {}
    for name in ("softmax", *LLAMA):
        errors[name] = measure.relative_error(list(zip(found(name), expected, strict=True)))
        if not errors[name] <= TOLERANCE:
            raise SystemExit(f"Not timed: {name} differs from Llama by {errors[name]:.1e}.")
    return errors


class Trainee:
    """A model with its optimizer; a call is one step."""

    def __init__(self, model: Any, config: RunConfig, ids: Tensor) -> None:
        self.model, self.config, self.ids = model.train(), config, ids
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def __call__(self) -> Tensor:
        """One step; its loss."""
        device = self.ids.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            out = self.model(input_ids=self.ids, labels=self.ids, use_cache=False)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = out.loss.detach()
        return loss


def data_sheet(result: dict[str, Any]) -> float | None:
    """This GPU's peak operations per second by its data sheet; ``None`` if it is not listed."""
    names = " ".join(result["environment"]["gpus"][:1])
    found = [peak for name, peak in GPUS.items() if name.partition("-")[0] in names]
    return found[0] if found and result["device"] == "cuda" else None


@widest_float32_products()
def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check, then measure; returns plain data."""
    device = arguments.device
    config = run_config(arguments.preset, arguments.batch or BATCH[device])
    result = measure.opening("step", arguments)
    made = models(config, VARIANTS, device)
    errors = check(made, tokens(config, (2, min(config.block_size, 256)), device))
    ids = tokens(config, (config.batch_size, config.block_size), device)
    trainees = {name: Trainee(model, config, ids) for name, model in made.items()}
    work: dict[str, measure.Work] = {}
    not_timed: dict[str, str] = {}
    for name, trainee in trainees.items():
        try:
            loss = float(trainee())
        except torch.OutOfMemoryError as problem:
            not_timed[name] = str(problem)[:200]
            continue
        if not loss < float("inf"):
            raise SystemExit(f"Not timed: the loss of {name} is {loss}.")
        work[name] = trainee
    options = {"device": device, "patience": arguments.patience}
    times = measure.seconds(work, arguments.rounds, **options)
    found = measure.measured(work, times, "llama", device)
    operations = cost(config, next(iter(GPUS))).operations
    sheet = data_sheet(result)
    rows = []
    for name in work:
        median = found[name]["seconds"]["median"]
        rate = operations / median
        rows.append(
            {
                "name": name,
                "parameters": made[name].num_parameters(),
                **found[name],
                "tokens_per_second": config.tokens_per_step / median,
                "flop_per_second": rate,
                "utilisation": rate / result["ceiling"]["flop_per_second"],
                "utilisation_of_data_sheet": None if sheet is None else rate / sheet,
            }
        )
    return {
        **result,
        "preset": arguments.preset,
        "dtype": "torch.float32" if device == "cpu" else "torch.bfloat16 autocast",
        "batch": config.batch_size,
        "length": config.block_size,
        "reference": "llama",
        "operations": operations,
        "errors": errors,
        "not_timed": not_timed,
        "rows": rows,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The rows as a table."""
    table = measure.table(
        "name", "ms", "/ Llama [quartiles]", "extra MiB", "tokens/s", "TFLOP/s", "of the ceiling"
    )
    for row in result["rows"]:
        table.add_row(
            row["name"],
            f"{1e3 * row['seconds']['median']:.1f}",
            measure.spread(row["ratio"], digits=3),
            f"{row['peak_extra_bytes'] / 2**20:,.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flop_per_second'] / 1e12:.3f}",
            f"{row['utilisation']:.1%}",
        )
    console.print(table)
    for row in result["rows"]:
        if row["utilisation_of_data_sheet"] is not None:
            share = row["utilisation_of_data_sheet"]
            console.print(f"{row['name']}: model FLOPs utilisation {share:.1%} of the data sheet")
    for name, reason in result["not_timed"].items():
        console.print(f"not timed: {name}: {reason}")


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=50, patience=120.0)
    options.add_argument("--preset", choices=list(VOCABULARY))
    options.add_argument("--batch", type=int, help="sequences per step")
    arguments = measure.parsed(options, argv)
    arguments.preset = arguments.preset or PRESET[arguments.device]
    return measure.carry_out(arguments, run, show, judge)


if __name__ == "__main__":
    raise SystemExit(main())
