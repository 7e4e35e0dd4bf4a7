"""The configuration of one run: flat, typed, saved in the run's folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from softmax_rnn._utils.errors import shown, unknown
from softmax_rnn._utils.files import write_text
from softmax_rnn._utils.plain_yaml import format_yaml, parse_yaml
from softmax_rnn._utils.validation import (
    BadFiles,
    Count,
    NonNegative,
    Positive,
    PositiveInt,
    Seed,
    validated,
)
from softmax_rnn.ops import AttentionSpec, Variant, resolve_layer
from softmax_rnn.sizes import SIZES

Precision = Literal["auto", "fp32", "bf16"]
Packing = Literal["blocks", "segments", "documents"]
HeldOut = Literal["test", "validation"]
Compile = bool | Literal["auto"]
Objective = Literal["language", "transfer"]
# Of a conversion.
STAGES = ("fit", "transfer", "choose", "finetune", "controls", "report")

# Appendix D; the schedule's horizon is that of the authors' code.
_PAPER: dict[str, Any] = {
    "tokenizer": "meta-llama/Llama-2-7b-hf",
    "initializer_range": 0.02,
    "block_size": 1024,
    "test_fraction": 0.001,
    "steps": 100_000,
    "schedule_steps": 1_000_000,
    "warmup_steps": 10_000,
    "batch_size": 36,
    "learning_rate": 1e-4,
    "gradient_clip": None,
    "evaluate_every": 10_000,
    "save_every": 1_000,
}
_SIZE_FIELDS = ("hidden_size", "intermediate_size", "num_layers", "num_heads")

Fraction = Annotated[float, Field(strict=True, gt=0, lt=1)]
# The first token of a block is not predicted.
BlockSize = Annotated[int, Field(strict=True, ge=2, lt=2**53)]
Decay = Annotated[float, Field(strict=True, ge=0, lt=1)]

# Marks a setting that affects updates only by rounding errors; it may change on resuming.
NEUTRAL = "neutral"


def _size(name: str) -> dict[str, int]:
    return dict(zip(_SIZE_FIELDS, SIZES[name].values(), strict=True))


#: The settings of ``--preset`` by name, as fields of :class:`RunConfig`.
PRESETS: dict[str, dict[str, Any]] = {
    "demo": _size("demo"),
    **{name: {**_size(name), **_PAPER} for name in ("small", "large", "deep")},
}


@dataclass(frozen=True)
class TrainingConfig:
    """What all training runs have: an attention, a corpus, steps.

    Attributes:
        attention: a variant's name (``taylor:4`` with an order), or a full specification.
        layer: fields of LayerOptions in place of those of the variant, as in ``--layer.qk_dim 16``.
        seed: draws the initial values and the order of the blocks.
        corpus: ``stdlib`` (the source text of Python's standard library), ``torch-headers`` (C++),
            ``docstrings`` (English), a file, folder or glob, ``hf:owner/name[@config]`` of the
            Hugging Face Hub, a prepared corpus's folder, or ``task:NAME?option=value``, a synthetic
            task in rows of block_size tokens. A task has its own tokens: a tokenizer, test_fraction
            and packing do not apply.
        text_column: key or column of the text in JSON lines, Parquet and datasets.
        encoding: of text files and JSON lines; of several names, as in ``utf-8,cp1252``, each file
            has the first one in which it can be read.
        bad_files: ``error``, or ``skip`` to leave out the files that cannot be read; the prepared
            corpus's manifest names them.
        end_of_text: the token that ends every document; by default the tokenizer's own.
        block_size: tokens per block.
        test_fraction: share of the documents held out.
        split_seed: draws the documents held out.
        evaluate_on: ``test``, or ``validation`` to choose settings: another ``test_fraction`` of
            the documents is held out, in place of the test split, which is not read.
        max_tokens: approximate limit on the number of prepared tokens; by default unlimited.
        packing: ``blocks`` of tokens, packed across document boundaries; ``segments``, the same
            blocks, in which no document sees another; or ``documents``, one per row, truncated or
            padded to block_size, sampled with replacement (as in the authors' code).
        steps: optimizer steps of the run.
        schedule_steps: step at which the linear decay reaches zero, at least ``steps``; by default
            ``steps``.
        warmup_steps: steps of the linear warm-up; by default a sixth of the schedule.
        batch_size: blocks per step, over all devices and accumulated micro-batches.
        accumulation: micro-batches per step.
        learning_rate: peak learning rate.
        beta1: AdamW's decay rate of the first moment.
        beta2: AdamW's decay rate of the second moment.
        epsilon: AdamW's epsilon.
        weight_decay: AdamW's weight decay, on weight matrices.
        stop_at_accuracy: end the run after the first evaluation in which at least this share of the
            test split's predictions is right; by default never.
        gradient_clip: largest gradient norm; 0 for none, null for the paper's rule: 1 for
            variants with a gate, none for the others.
        skip_non_finite: number of consecutive steps that may be skipped because their loss or
            gradient is not finite; the next one stops the run (with 0, the first one).
        precision: ``bf16`` autocast, ``fp32``, or ``auto``: bf16 on a GPU, fp32 elsewhere.
        gradient_checkpointing: recompute activations in the backward pass.
        compile: run the model through torch.compile; ``auto``: if the run is long enough for that
            to pay and measured steps are faster (half a minute to find out).
        fsdp: under torchrun, shard weights, gradients and optimizer states over the processes
            (FSDP2), instead of a full model on each (DDP).
        context_parallel: under torchrun, the number of processes that share each block, in equal
            parts; it divides the block size and the number of processes.
        log_every: steps between rows of metrics.jsonl.
        evaluate_every: steps between evaluations on the whole test split; a multiple of
            log_every. The last step is always evaluated.
        save_every: steps between checkpoints; a multiple of log_every.
        keep_checkpoints: newest checkpoints to keep.
        tensorboard: also log to TensorBoard, below the run's folder.
        wandb: also log to Weights & Biases.
    """

    attention: str | dict[str, Any] = "softmax"
    layer: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: Seed = 0

    corpus: str = "stdlib"
    text_column: str = "text"
    encoding: str = "utf-8"
    bad_files: BadFiles = "error"
    end_of_text: str | None = None
    block_size: BlockSize = 256
    test_fraction: Fraction = 0.02
    split_seed: Seed = 123
    evaluate_on: HeldOut = "test"
    max_tokens: PositiveInt | None = None
    packing: Packing = "blocks"

    steps: PositiveInt = 1000
    schedule_steps: PositiveInt | None = None
    warmup_steps: Count | None = None
    batch_size: PositiveInt = 4
    accumulation: Annotated[PositiveInt, NEUTRAL] = 1
    learning_rate: Positive = 2e-3
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: NonNegative = 1e-7
    weight_decay: NonNegative = 0.01
    stop_at_accuracy: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    gradient_clip: NonNegative | None = 1.0
    skip_non_finite: Annotated[Count, NEUTRAL] = 0
    precision: Precision = "auto"
    gradient_checkpointing: bool = False
    compile: Compile = False
    fsdp: Annotated[bool, NEUTRAL] = False
    context_parallel: Annotated[PositiveInt, NEUTRAL] = 1

    log_every: PositiveInt = 10
    evaluate_every: PositiveInt = 250
    save_every: Annotated[PositiveInt, NEUTRAL] = 100
    keep_checkpoints: Annotated[PositiveInt, NEUTRAL] = 2
    tensorboard: Annotated[bool, NEUTRAL] = False
    wandb: Annotated[bool, NEUTRAL] = False

    # Pairs of settings, of which the first must divide the second.
    _divisors: ClassVar[tuple[tuple[str, str], ...]] = (
        ("accumulation", "batch_size"),
        ("context_parallel", "block_size"),
        ("log_every", "evaluate_every"),  # so that a resumed run logs the same rows
        ("log_every", "save_every"),
    )

    def __post_init__(self) -> None:
        assert self.variant is not None  # raises for an unknown one
        own: Any = type(self)
        fields = _fields(own)
        for name, value in validated(fields, vars(self)).model_dump().items():
            object.__setattr__(self, name, value)  # integers in float fields become floats
        for divisor, name in self._divisors:
            if getattr(self, name) % (getattr(self, divisor) or 1):
                raise ValueError(
                    f"{divisor}={getattr(self, divisor)} must divide {name}={getattr(self, name)}."
                )
        if self.packing == "segments" and self.context_parallel > 1:
            raise ValueError("packing='segments' is not for blocks that processes share.")
        if self.horizon < self.steps:
            raise ValueError(
                f"schedule_steps={self.schedule_steps} must be at least steps={self.steps}: "
                "past the schedule's end the learning rate is zero."
            )
        if self.warmup >= self.horizon:
            raise ValueError(
                f"warmup_steps={self.warmup} must be less than the schedule's {self.horizon} steps."
            )

    @property
    def variant(self) -> Variant:
        """The attention's specification and the options of its layer."""
        if isinstance(self.attention, dict):
            return resolve_layer(AttentionSpec.from_dict(self.attention), self.layer)
        if isinstance(self.attention, str) and self.attention.endswith((".yaml", ".yml", ".json")):
            raise ValueError(
                f"attention={self.attention!r} is a file: give its fields as `attention:` in a "
                "file for --config, or compare it by a name of its own (softmax-rnn compare "
                f"mine={self.attention})."
            )
        if isinstance(self.attention, str):
            return resolve_layer(self.attention, self.layer)
        raise ValueError(
            "attention must be a variant's name or a mapping of an AttentionSpec's fields, not "
            f"{shown(self.attention)}."
        )

    @property
    def spec(self) -> AttentionSpec:
        """The attention's specification."""
        return self.variant.spec

    @property
    def horizon(self) -> int:
        """The step at which the learning rate reaches zero."""
        return self.steps if self.schedule_steps is None else self.schedule_steps

    @property
    def warmup(self) -> int:
        """Steps of the linear warm-up."""
        return self.horizon // 6 if self.warmup_steps is None else self.warmup_steps

    @property
    def clip(self) -> float:
        """The largest gradient norm; 0 for no clipping."""
        if self.gradient_clip is not None:
            return self.gradient_clip
        return 1.0 if self.spec.input_gate or self.spec.output_gate != "none" else 0.0

    @property
    def trackers(self) -> list[str]:
        """The experiment trackers that rows are logged to as well."""
        return [name for name in ("tensorboard", "wandb") if getattr(self, name)]

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, padding included."""
        return self.batch_size * self.block_size

    def learning_rate_factor(self, step: int) -> float:
        """The fraction of the peak rate at ``step`` (counted from 0); never 0 during the run."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        return (self.horizon - step) / (self.horizon - self.warmup)

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`, from any plain data.

        Raises:
            ValueError: on an unknown key or a value of the wrong type.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for key in data:
            if key not in names:
                raise unknown("config key", key, names)
        return cls(**data)

    @classmethod
    def neutral_fields(cls) -> list[str]:
        """The settings that may change when a run resumes: no update depends on them."""
        hints = get_type_hints(cls, include_extras=True)
        return [n for n, kind in hints.items() if NEUTRAL in getattr(kind, "__metadata__", ())]

    def save(self, path: Path) -> None:
        """Write the whole configuration as YAML."""
        write_text(path, format_yaml(self.to_dict()))


@dataclass(frozen=True)
class RunConfig(TrainingConfig):
    """One training run of a new model. The defaults are the ``demo`` preset.

    Attributes:
        tokenizer: ``bytes``, or a Hugging Face tokenizer's name or path.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP; 0 for none.
        num_layers: decoder layers.
        num_heads: query heads per layer.
        num_kv_heads: key/value heads per layer; by default num_heads.
        vocab_size: rows of the embedding; by default the size of the tokenizer's vocabulary.
        initializer_range: standard deviation of the initial weights (the paper: 0.02).
        causal: whether tokens see earlier ones alone. Otherwise the model is an encoder: of text it
            predicts hidden tokens (15%), each in its place; a task's answers are as they were.
    """

    tokenizer: str = "bytes"
    hidden_size: PositiveInt = 128
    intermediate_size: Count = 256
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt | None = None
    vocab_size: PositiveInt | None = None
    initializer_range: NonNegative = 0.05
    causal: bool = True

    _divisors: ClassVar[tuple[tuple[str, str], ...]] = (
        ("num_heads", "hidden_size"),
        ("num_kv_heads", "num_heads"),
        *TrainingConfig._divisors,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, only in (("packing", "blocks"), ("context_parallel", 1)):
            if not self.causal and getattr(self, name) != only:
                raise ValueError(
                    f"causal=false needs {name}={only!r}, not {getattr(self, name)!r}."
                )
        if (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over num_heads={self.num_heads} gives heads of "
                f"width {self.hidden_size // self.num_heads}; rotary positions need an even one."
            )

    @classmethod
    def preset(cls, name: str, **fields: Any) -> RunConfig:
        """A preset by name; ``fields`` override its values."""
        if name not in PRESETS:
            raise unknown("preset", name, PRESETS)
        return cls.from_dict({**PRESETS[name], **fields})


@dataclass(frozen=True)
class ConversionConfig(TrainingConfig):
    """One training run of a pretrained model whose attention is converted.

    Attributes:
        source: the model, as :func:`softmax_rnn.training.opening.open_model` takes it. If it is
            converted already, its attention must be the run's. Its tokenizer is the run's.
        layers: indices of the layers to convert; by default all.
        objective: ``transfer``: the outputs of each converted layer come close to those of softmax
            attention, on the source's inputs of each layer; only the parameters of the new
            attention are trained. ``language``: the next token.
        distillation: of ``language``, the share in the loss of the divergence from the source's
            predictions; the rest is the cross-entropy.
        lora_rank: of ``language``, the rank of the additions to linear layers that are trained
            besides the new attention (LoRA); 0 to train all weights.
        window_dropout: of ``language``, and of an attention with a window and a state: how often a
            layer is trained without its window, so that its state carries weight. The probability
            is drawn for each batch, from 0 to a bound that falls from this value to 0 at the end.
    """

    source: str = ""
    layers: list[Count] | None = None
    objective: Objective = "language"
    distillation: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.5
    lora_rank: Count = 8
    window_dropout: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.source:
            raise ValueError("source must name a pretrained model.")
        spec = self.spec
        if self.window_dropout and spec.outside != "series":
            raise ValueError(
                f"window_dropout={self.window_dropout} needs an attention with a window and a "
                f"state, such as 'window_state:64'; attention={self.attention!r} has not both."
            )
        if spec.outside == "series" and (spec.window or 0) + spec.global_keys >= self.block_size:
            raise ValueError(
                f"The window of {self.attention} sees all {self.block_size} tokens of a block, so "
                "its state would not be trained: give a larger block_size, or a smaller window."
            )
        if self.packing == "documents":
            raise ValueError("A conversion needs packing='blocks' or 'segments', not 'documents'.")
        if self.fsdp:
            raise ValueError("fsdp=true is for new models: a conversion has a full model per GPU.")

    @property
    def adapted(self) -> bool:
        """Whether the run trains LoRA's additions."""
        return self.objective == "language" and self.lora_rank > 0


def load_config(path: Path) -> TrainingConfig:
    """Read what :meth:`TrainingConfig.save` wrote: a conversion if it has a source."""
    data = parse_yaml(path.read_bytes(), path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} does not hold a mapping of config keys.")
    try:
        return (ConversionConfig if "source" in data else RunConfig).from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@functools.cache
def _fields(config: Any) -> type[BaseModel]:
    """A pydantic model of the fields of a class, from its annotations."""
    hints = get_type_hints(config, include_extras=True)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ...) for field in dataclasses.fields(config)
    }
    fields["attention"] = (Any, ...)
    return create_model("RunFields", __config__=ConfigDict(strict=True), **fields)
