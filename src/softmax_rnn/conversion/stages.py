"""The conversion of a pretrained model: fit, transfer, finetune, report.

OUT/conversion.yaml    the settings of every stage
OUT/scores/            the scores of the source's heads: ranges, sinks, orders
OUT/fitted/            the converted model before any training, with fitted initial values
OUT/transfer/          the run that trains the new attention to give softmax's outputs
OUT/layers.json        with --layers auto:N: what each layer's conversion costs
OUT/chosen/            the model with softmax again in the N layers where it costs most
OUT/finetune/          the run that trains LoRA's additions, or all weights, to predict tokens
OUT/model/             the result: model and tokenizer
OUT/controls/          runs as the last one, of the source and of the window alone
OUT/heads.csv, ...     the report
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from softmax_rnn._utils.errors import differences, require_choice
from softmax_rnn._utils.files import make_writable, write_json, write_text
from softmax_rnn._utils.integrity import MANIFEST, damage, seal, sha256
from softmax_rnn._utils.plain_yaml import format_yaml, parse_yaml
from softmax_rnn._utils.progress import ProgressBar, notice
from softmax_rnn.analysis.heads.analyze import analyze
from softmax_rnn.analysis.heads.figure import draw
from softmax_rnn.analysis.heads.result import Analysis, write
from softmax_rnn.conversion.card import NAME as CARD
from softmax_rnn.conversion.card import card
from softmax_rnn.conversion.choice import costliest, divergences, restore_softmax
from softmax_rnn.conversion.initial_values import fit_initial_values
from softmax_rnn.conversion.layer import converted_layers
from softmax_rnn.conversion.lora import require_peft
from softmax_rnn.conversion.measures import SOURCE_TRAINED, WINDOW_TRAINED
from softmax_rnn.conversion.trainable import converted_source, weights_hash
from softmax_rnn.experiments.compare import read_variant
from softmax_rnn.ops import AttentionSpec, LayerOptions
from softmax_rnn.training.checkpoint import PROGRESS, STATE, newest_whole
from softmax_rnn.training.config import STAGES, ConversionConfig
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.opening import check_source, open_model
from softmax_rnn.training.run import load_rows, run_tokenizer, train
from softmax_rnn.training.stopping import StopRequest

_COUNTS, _LAYERS = "counts.json", "layers.json"
# Files of a checkpoint that are no part of a saved model.
_OF_RUNS = (MANIFEST, PROGRESS, STATE, "*.jsonl")
ROWS = 4  # of text, for fitted initial values
_MAX_ORDER = 32  # of a head's series, in the measured scores

# Settings of both runs, and of each one, in place of those of a ConversionConfig.
COMMON: dict[str, Any] = {
    "block_size": 512,
    "batch_size": 4,
    "test_fraction": 0.005,
    "weight_decay": 0.0,
    "log_every": 5,
    "evaluate_every": 100,
    "save_every": 25,
    "keep_checkpoints": 1,
}
TRANSFER: dict[str, Any] = {"objective": "transfer", "steps": 100, "learning_rate": 3e-2}
FINETUNE: dict[str, Any] = {"objective": "language", "steps": 200, "learning_rate": 5e-4}


@dataclass(frozen=True)
class Conversion:
    """A conversion: its folder, and the settings of its two runs.

    ``transfer`` has the pretrained model as its source; each run starts from the stage before.
    ``keep`` layers keep softmax, chosen after the transfer; 0 for a choice of one's own.
    """

    out: Path
    transfer: ConversionConfig
    finetune: ConversionConfig
    keep: int = 0

    @classmethod
    def of(
        cls,
        source: str,
        out: Path,
        attention: str,
        corpus: str,
        *,
        fields: Mapping[str, Any],
        transfer: Mapping[str, Any],
        finetune: Mapping[str, Any],
        keep: int = 0,
    ) -> Conversion:
        """A conversion of ``source``.

        Args:
            source: the pretrained model, as :func:`softmax_rnn.training.opening.open_model` takes
                it.
            out: the folder of its results.
            attention: a variant's name, or a YAML file as ``compare`` takes it.
            corpus: the text to train on.
            fields: settings of both runs, fields of :class:`ConversionConfig`.
            transfer: settings of the first run only.
            finetune: settings of the second run only.
            keep: how many layers keep softmax, those whose conversion costs most; 0 for the
                ``layers`` of ``fields`` (by default none).

        Raises:
            ValueError: for an invalid setting.
        """
        both = {**fields, "corpus": corpus, "source": source, "attention": attention}
        if attention.endswith((".yaml", ".yml", ".json")):
            found = read_variant(Path(attention))
            both |= {"attention": found.spec.to_dict(), "layer": found.options.to_dict()}
        first = ConversionConfig.from_dict({**COMMON, **TRANSFER, **both, **transfer})
        if first.spec == AttentionSpec() and first.variant.options == LayerOptions():
            raise ValueError(f"attention={attention!r} leaves nothing to convert: it is softmax.")
        second = ConversionConfig.from_dict({**COMMON, **FINETUNE, **both, **finetune})
        return cls(out, first, second, keep)

    @property
    def fitted(self) -> Path:
        """The folder of the model before training."""
        return self.out / "fitted"

    @property
    def source_hash(self) -> str:
        """The hash of the source's weights when it was converted."""
        return str(json.loads((self.fitted / _COUNTS).read_text(encoding="utf-8"))["source"])

    @property
    def chosen(self) -> Path:
        """The folder of the model in which chosen layers have softmax again."""
        return self.out / "chosen"

    @property
    def layers(self) -> list[int] | None:
        """The layers that are converted, as far as they are chosen; ``None`` for all."""
        file = self.out / _LAYERS
        if not self.keep or not file.exists():
            return self.finetune.layers
        layers: list[int] = json.loads(file.read_text(encoding="utf-8"))["converted"]
        return layers

    @property
    def model(self) -> Path:
        """The folder of the result."""
        return self.out / "model"

    @cached_property
    def transfer_run(self) -> RunFolder:
        """The folder of the first run."""
        return RunFolder(self.out / "transfer")

    @cached_property
    def finetune_run(self) -> RunFolder:
        """The folder of the second run."""
        return RunFolder(self.out / "finetune")

    @property
    def controls(self) -> dict[str, ConversionConfig]:
        """What the result is compared with, trained as the last stage: by its name in the report.

        The gap that is left is that to the source trained on the same tokens, and what the state
        brings is beyond what the window alone learns from them.
        """
        changes: dict[str, dict[str, Any]] = {SOURCE_TRAINED: {"attention": "softmax"}}
        spec = self.finetune.spec
        if spec.outside == "series":
            alone = AttentionSpec(window=spec.window, global_keys=spec.global_keys)
            changes[WINDOW_TRAINED] = {"attention": alone.to_dict()}
        start: dict[str, Any] = {"source": self.transfer.source, "layer": {}, "window_dropout": 0.0}
        start["layers"] = self.layers
        return {
            name: dataclasses.replace(self.finetune, **start, **change)
            for name, change in changes.items()
        }

    def control_run(self, name: str) -> RunFolder:
        """The folder of a control's run."""
        return RunFolder(self.out / "controls" / name.partition(",")[0])

    @property
    def models(self) -> dict[str, str]:
        """Where the models of the finished stages are, the pretrained ``source`` first."""
        controls = {name: self.control_run(name) for name in self.controls}
        stages = {"transfer": self.transfer_run, "finetune": self.finetune_run}
        return {
            "source": self.transfer.source,
            **_finished(controls),
            "fitted": str(self.fitted),
            **_finished(stages),
        }

    def execute(
        self, stages: Sequence[str], left: Callable[[], float | None] = lambda: None
    ) -> None:
        """Execute the training stages, each unless it is finished.

        Args:
            stages: of :data:`STAGES`; a stage that is left out must be finished if a later one
                needs it.
            left: the seconds after which to stop as by a signal; ``None`` for no limit.

        Raises:
            ValueError: for an unknown stage, a folder with another conversion, a stage whose
                predecessor is missing; else as :func:`softmax_rnn.training.train`.
        """
        for stage in stages:
            require_choice("stage", stage, STAGES)
        self._check_needs(stages)
        make_writable(self.out)
        self._check_settings()
        if "fit" in stages and not self.fitted.exists():
            with timed("fit"), StopRequest(left()):
                self._fit()
        if not self.fitted.exists():
            raise ValueError(f"There is no {self.fitted}: run the stage 'fit' first.")
        if wrong := damage(self.fitted):
            raise ValueError(
                f"{self.fitted} is damaged ({wrong}): remove it, and run the stage 'fit' again."
            )
        counts = json.loads((self.fitted / _COUNTS).read_text(encoding="utf-8"))
        transferable = counts["new_parameters"] > 0
        first = self.transfer_run if transferable else self.finetune_run
        if first.exists:
            first.check_same_source(counts["weights"])
        start = self.transfer_run.path if transferable else self.fitted
        if "transfer" in stages and not transferable:
            notice("The new attention has no parameters of its own: the stage transfer is skipped.")
        elif "transfer" in stages:
            config = dataclasses.replace(self.transfer, source=str(self.fitted))
            with timed("transfer"):
                train(config, self.transfer_run.path, resume=True, stop_after=left())
        later = {"choose", "finetune"} & set(stages)
        if later and transferable and not self.transfer_run.finished:
            raise ValueError(f"{start} is not finished: run the stage 'transfer' first.")
        if "choose" in stages and self.keep and not self.chosen.exists():
            with timed("choose"), StopRequest(left()):
                self._choose(start)
        if "finetune" in stages:
            if self.keep and not self.chosen.exists():
                raise ValueError(f"There is no {self.chosen}: run the stage 'choose' first.")
            start = self.chosen if self.keep else start
            config = dataclasses.replace(self.finetune, source=str(start), layers=self.layers)
            with timed("finetune"):
                train(config, self.finetune_run.path, resume=True, stop_after=left())
            # One process of a run publishes it, once.
            if os.environ.get("RANK", "0") == "0" and not self.model.exists():
                self._publish()
        for name, config in self.controls.items() if "controls" in stages else ():
            with timed(f"controls: {name}"):
                train(config, self.control_run(name).path, resume=True, stop_after=left())

    def _check_needs(self, stages: Sequence[str]) -> None:
        """Raise before the first stage what would only stop it, or one of the others, later."""
        if "fit" in stages and not self.fitted.exists():
            check_source(self.transfer.source)
        runs = {"finetune": [self.finetune_run]}
        runs["controls"] = [self.control_run(name) for name in self.controls]
        missing = any(not run.finished for stage in stages for run in runs.get(stage, ()))
        if missing and self.finetune.adapted:
            require_peft()

    def _check_settings(self) -> None:
        """Save the settings; raise ``ValueError`` if the folder has a conversion with others."""
        file = self.out / "conversion.yaml"
        runs = {"transfer": self.transfer.to_dict(), "finetune": self.finetune.to_dict()}
        choice = {"keep": self.keep}
        started = any(path.exists() for path in (self.fitted, self.transfer_run.path))
        if not file.exists() or not started:
            write_text(file, format_yaml({**choice, **runs}))
            return
        found = parse_yaml(file.read_bytes(), file)
        if isinstance(found, dict) and found.get("keep", 0) != self.keep:
            raise ValueError(
                f"{self.out} holds a conversion in which {found['keep']} layers keep softmax by "
                f"choice, not {self.keep}. Choose another folder, or the same settings."
            )
        for name, settings in runs.items():
            try:  # an earlier version may lack some settings, which then have their defaults
                there = ConversionConfig.from_dict(found[name]).to_dict()
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{file} is not what a conversion has written: {error}") from error
            neutral = {key: settings[key] for key in ConversionConfig.neutral_fields()}
            if differing := differences({**there, **neutral}, settings):
                raise ValueError(
                    f"{self.out} holds a conversion with other settings of {name} ({differing}). "
                    "Choose another folder, or the same settings."
                )

    def _fit(self) -> None:
        """Measure the source's heads, convert it, and fit the values of the new attention."""
        ids = self._rows()
        # First, since it refuses what cannot be converted.
        model, identity = converted_source(open_model(self.transfer.source).model, self.transfer)
        about = sha256(json.dumps([identity, ids[0].tolist()]))
        done = self.out / "scores" / "of.sha256"
        if not done.exists() or done.read_text() != about:  # else stopped after it
            with ProgressBar("Measuring scores", 1.0) as bar:
                source = open_model(self.transfer.source).model
                scores = measured_scores(source, ids, bar.update)
            write(scores, self.out / "scores")
            draw(scores, self.out / "scores", title=self.transfer.source)
            write_text(done, about)
        with ProgressBar("Fitting initial values", 1.0) as bar:
            fit_initial_values(model, ids, bar.update)
        parts = self.out / ".fitted.parts"
        shutil.rmtree(parts, ignore_errors=True)
        model.save_pretrained(parts)
        run_tokenizer(self.transfer).save_pretrained(parts)
        own = (p.numel() for layer in converted_layers(model) for p in layer.parameters())
        counts = {
            "parameters": model.num_parameters(),
            "new_parameters": sum(own),
            "source": identity,
            "weights": weights_hash(model),
        }
        write_json(parts / _COUNTS, counts)
        seal(parts)
        parts.rename(self.fitted)

    def _rows(self) -> list[Tensor]:
        """Some rows of the training text."""
        _, rows, _ = load_rows(self.transfer)
        chosen = np.random.default_rng(self.transfer.seed).integers(len(rows), size=ROWS)
        return [rows[int(i)]["input_ids"] for i in chosen]

    def _choose(self, start: Path) -> None:
        """Give the layers whose conversion costs most their softmax again."""
        opened = open_model(str(start))
        model = opened.model
        with ProgressBar("Measuring layers", 1.0) as bar:
            found = divergences(model, self._rows(), bar.update)
        kept = costliest(found, self.keep)
        write_json(
            self.out / _LAYERS,
            {"divergence": found, "converted": [x for x in found if x not in kept]},
        )
        restore_softmax(model, kept)
        parts = self.out / ".chosen.parts"
        shutil.rmtree(parts, ignore_errors=True)
        model.save_pretrained(parts)
        opened.tokenizer.save_pretrained(parts)
        parts.rename(self.chosen)
        notice(f"Softmax stays in the layers {', '.join(map(str, kept))}.")

    def _publish(self) -> None:
        """Copy the files of the last checkpoint that belong to a saved model."""
        checkpoint, _ = newest_whole(self.finetune_run.checkpoints)
        assert checkpoint is not None
        parts = self.out / ".model.parts"
        shutil.rmtree(parts, ignore_errors=True)
        shutil.copytree(checkpoint, parts, ignore=shutil.ignore_patterns(*_OF_RUNS))
        # With these, evaluate knows the text that the model was not trained on.
        for path in (self.finetune_run.config_file, self.finetune_run.environment_file):
            shutil.copyfile(path, parts / path.name)
        stages = {"transfer": self.transfer_run, "finetune": self.finetune_run}
        runs = {name: run.summary for name, run in stages.items() if run.finished}
        config = dataclasses.replace(self.transfer, layers=self.layers)
        write_text(parts / CARD, card(config, runs))
        parts.rename(self.model)


def _finished(runs: Mapping[str, RunFolder]) -> dict[str, str]:
    """The folders of those runs that are finished."""
    return {name: str(run.path) for name, run in runs.items() if run.finished}


def measured_scores(
    source: PreTrainedModel, ids: Sequence[Tensor], progress: Callable[[float], None]
) -> Analysis:
    """The scores of the source's heads, on the first of some rows."""
    return analyze(source, torch.stack(list(ids[:1])), max_order=_MAX_ORDER, progress=progress)


@contextlib.contextmanager
def timed(stage: str) -> Iterator[None]:
    """Tell when a stage starts and how long it took."""
    started = time.monotonic()
    notice(f"Stage {stage}")
    yield
    notice(f"Stage {stage}: finished in {(time.monotonic() - started) / 60:.1f} min")
