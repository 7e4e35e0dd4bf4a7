"""One run, from its configuration to its results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from softmax_rnn._utils.files import make_writable, remove_leftovers, write_json
from softmax_rnn._utils.integrity import sha256
from softmax_rnn._utils.progress import notice
from softmax_rnn.conversion.trainable import conversion_model
from softmax_rnn.data import (
    SPLITS,
    DocumentRows,
    MaskedBlocks,
    PreparedCorpus,
    Rows,
    SegmentedBlocks,
    TaskCorpus,
    TaskRows,
    TokenBlocks,
    ValidationCorpus,
    check,
    is_task,
    left_out,
    load_tokenizer,
    parse_task,
    prepare,
    progress_bar,
    task_tokenizer,
)
from softmax_rnn.models import (
    SoftmaxRNNConfig,
    SoftmaxRNNForCausalLM,
    SoftmaxRNNForMaskedLM,
    initialize,
)
from softmax_rnn.models.loading import HUB
from softmax_rnn.training import compilation
from softmax_rnn.training.checkpoint import newest_whole, read_progress
from softmax_rnn.training.config import ConversionConfig, RunConfig, TrainingConfig
from softmax_rnn.training.distributed import leaving_its_group, require_a_group, together
from softmax_rnn.training.environment import environment, peak_memory
from softmax_rnn.training.folder import RunFolder, append_row
from softmax_rnn.training.loop import Loop, NonFiniteError
from softmax_rnn.training.matmul import widest_float32_products
from softmax_rnn.training.metrics import loss_spikes
from softmax_rnn.training.opening import open_model, tokenizer_name
from softmax_rnn.training.stopping import RunStopped, StopRequest

# The rows of each way of packing.
_ROWS: dict[str, Any] = {
    "blocks": TokenBlocks,
    "segments": SegmentedBlocks,
    "documents": DocumentRows,
}


def load_corpus(
    config: TrainingConfig, *, workers: int | None = None, create: bool = True
) -> PreparedCorpus:
    """The run's corpus, from the cache or tokenised by ``workers`` threads (one per core).

    Without ``create``, ``FileNotFoundError`` for one that is not prepared.
    """
    with progress_bar(config.corpus) as progress:
        corpus = prepare(
            config.corpus,
            run_tokenizer(config),
            **_reading(config),
            test_fraction=config.test_fraction,
            split_seed=config.split_seed,
            max_tokens=config.max_tokens,
            workers=workers,
            create=create,
            progress=progress,
        )
    _tell(config, corpus.manifest.get("source", {}))
    return corpus


def check_corpora(configs: Iterable[TrainingConfig]) -> None:
    """Read all local files of the corpora of runs, and tokenise nothing.

    Raises:
        CorpusError: if files cannot be read; it names all files of a corpus.
    """
    found = {
        repr((config.corpus, _reading(config))): config
        for config in configs
        if not is_task(config.corpus)
    }
    for config in found.values():
        with progress_bar(config.corpus) as progress:
            source = check(config.corpus, **_reading(config), progress=progress)
        _tell(config, source)


def _reading(config: TrainingConfig) -> dict[str, Any]:
    """The settings by which the files of a corpus are read."""
    return {name: getattr(config, name) for name in ("text_column", "encoding", "bad_files")}


def _tell(config: TrainingConfig, source: dict[str, Any]) -> None:
    if os.environ.get("RANK", "0") == "0" and (missing := left_out(source)):
        notice(f"The corpus {config.corpus}: {missing}")


def load_rows(
    config: TrainingConfig, *, create: bool = True
) -> tuple[PreparedCorpus | TaskCorpus, Rows, Rows]:
    """The run's corpus (as :func:`load_corpus`), and its rows for training and testing."""
    for tracker in config.trackers:
        if find_spec(tracker) is None:
            raise ValueError(
                f"{tracker}=true needs an additional package: pip install 'softmax-rnn[{tracker}]'."
            )
    causal = not isinstance(config, RunConfig) or config.causal
    if is_task(config.corpus):
        task = parse_task(config.corpus, config.block_size)
        tested = task.for_testing(config.evaluate_on)
        test_rows = TaskRows(tested, config.evaluate_on, config.split_seed, causal)
        train_rows = TaskRows(task, "train", config.seed, causal)
        return TaskCorpus.of(task, test_rows), train_rows, test_rows
    corpus = load_corpus(config, create=create)
    corpus.check_unchanged()
    if config.evaluate_on == "validation":
        corpus = ValidationCorpus.of(corpus, config.test_fraction, config.split_seed)
    kind = _ROWS[config.packing] if causal else MaskedBlocks
    train, test = (kind(corpus, split, config.block_size) for split in SPLITS)
    return corpus, train, test


def run_tokenizer(config: TrainingConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the run's corpus."""
    if is_task(config.corpus):
        return task_tokenizer(parse_task(config.corpus, config.block_size).vocab_size)
    if isinstance(config, ConversionConfig):
        name, local = tokenizer_name(config.source), not config.source.startswith(HUB)
        return load_tokenizer(name, end_of_text=config.end_of_text, local=local)
    assert isinstance(config, RunConfig)
    return load_tokenizer(config.tokenizer, end_of_text=config.end_of_text)


def new_model(config: RunConfig, vocab_size: int, end_of_text: int | None) -> PreTrainedModel:
    """The model of a run, of ``vocab_size`` ids with that of :func:`hidden_ids`."""
    kind = SoftmaxRNNForCausalLM if config.causal else SoftmaxRNNForMaskedLM
    return kind(model_config(config, vocab_size, end_of_text))


def hidden_ids(config: RunConfig) -> int:
    """The number of ids beyond the vocabulary: one in place of hidden tokens, or none."""
    return int(not config.causal and not is_task(config.corpus))


def model_config(config: RunConfig, vocab_size: int, end_of_text: int | None) -> SoftmaxRNNConfig:
    """The model of a run."""
    rows = vocab_size if config.vocab_size is None else config.vocab_size
    if rows < vocab_size:
        what = config.corpus if is_task(config.corpus) else f"The tokenizer {config.tokenizer!r}"
        raise ValueError(
            f"{what} has {vocab_size} ids, more than vocab_size={rows} rows of the embedding."
        )
    return SoftmaxRNNConfig(
        attention=config.spec,
        layer_options=config.variant.options,
        vocab_size=rows,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.block_size,
        initializer_range=config.initializer_range,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=end_of_text,
        use_cache=config.causal,
        is_causal=config.causal,
    )


@widest_float32_products()
@leaving_its_group()
def train(
    config: TrainingConfig,
    path: Path,
    *,
    resume: bool = False,
    stop_after: float | None = None,
) -> RunFolder:
    """Run ``config`` in the folder ``path``, or resume it.

    SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 stop the run after its current step, with a
    checkpoint. A second SIGTERM, SIGINT or SIGHUP ends the process at once.

    Args:
        config: what to run.
        path: the run's folder.
        resume: resume an unfinished run from its newest intact checkpoint.
        stop_after: seconds after which to stop as by a signal; None for no limit.

    Returns:
        The folder, with its results. A finished run is not repeated.

    Raises:
        ValueError: if the folder contains another run, folders of runs, a run on other text, or
            (unless ``resume``) an unfinished run; if another process uses the folder, or it is not
            writable; if the prepared corpus is damaged.
        RunStopped: if a signal or the time stopped the run; it can be resumed.
        NonFiniteError: if the loss or its gradient is not finite, and the step may not be skipped.
        CheckpointError: if a checkpoint cannot be written, or all of them are damaged.
        ChildProcessError: if another process of the run failed.
    """
    with StopRequest(stop_after) as stop:
        folder = RunFolder(path)
        _check(folder, config, resume)
        corpus, train_rows, test_rows = load_rows(config)
        if folder.exists:
            folder.check_same_corpus(corpus.manifest)
            if folder.finished:
                return folder
        model, source = _model(config, corpus)
        if folder.exists:
            folder.check_same_source(source)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()  # it would cover the run's own bar
        make_writable(folder.path)
        require_a_group()
        accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="no",  # the loop's: else the environment could choose another
            log_with=config.trackers or None,
            project_dir=path,
        )
        accelerator.wait_for_everyone()  # a process that fails early would end others' connecting
        loop = Loop(
            *(config, folder, corpus, train_rows, test_rows),
            *(model, run_tokenizer(config), accelerator, stop),
            source=source,
        )
        if config.fsdp and accelerator.num_processes == 1:
            notice(
                "fsdp=true shards nothing in a run of one process; to use N of them: torchrun "
                "--nproc-per-node N -m softmax_rnn train."
            )
        with ExitStack() as until_done:
            stop.defer()  # from here on, processes wait for each other: they must stop together
            checkpoint = _start(loop, resume, until_done)
            if code := loop.stop_request():
                raise RunStopped(code)
            until_done.enter_context(_tracking(accelerator, config, path))
            until_done.enter_context(_divergence_recorded(loop))
            loop.run(checkpoint, within=compilation.chosen)
            with together(accelerator):
                if accelerator.is_main_process:
                    _finish(loop, folder)
    return folder


def _model(
    config: TrainingConfig, corpus: PreparedCorpus | TaskCorpus
) -> tuple[PreTrainedModel, str | None]:
    """The model of a run with its initial weights, and the hash of its source if it has one."""
    size = corpus.manifest["vocab_size"]
    if isinstance(config, ConversionConfig):
        found, source = conversion_model(open_model(config.source).model, config)
        if size > found.config.vocab_size:
            raise ValueError(
                f"{config.corpus} has {size} ids, more than the {found.config.vocab_size} of the "
                f"model {config.source}."
            )
        return found, source
    assert isinstance(config, RunConfig)
    size += hidden_ids(config)
    model = new_model(config, size, corpus.manifest["end_of_text"])
    initialize(model, config.seed)
    return model, None


def _check(folder: RunFolder, config: TrainingConfig, resume: bool) -> None:
    if folder.exists:
        folder.check_same_config(config)
        if not folder.finished and not resume:
            raise ValueError(f"{folder.path} holds an unfinished run: add --resume to resume it.")
    elif folder.checkpoints:
        raise ValueError(
            f"{folder.path} holds checkpoints of a run that has lost its config.yaml: restore it, "
            "or choose another folder."
        )
    elif runs := sorted(path.parent.name for path in folder.path.glob("*/environment.json")):
        names = ", ".join(runs[:3]) + ", ..." * (len(runs) > 3)
        raise ValueError(
            f"{folder.path} holds other runs ({names}), as a comparison does: choose another "
            "folder."
        )


@contextlib.contextmanager
def _tracking(accelerator: Accelerator, config: TrainingConfig, path: Path) -> Iterator[None]:
    """Start the configured trackers, TensorBoard and Weights & Biases; finish them at the end."""
    if not config.trackers:
        yield
        return
    identity = sha256(str(path.resolve()))[:16]  # a resumed run continues its curves
    wandb = {"name": path.name, "dir": str(path), "id": identity, "resume": "allow"}
    accelerator.init_trackers("softmax-rnn", config=_flat(config), init_kwargs={"wandb": wandb})
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()


def _flat(config: TrainingConfig) -> dict[str, Any]:
    """The settings without mappings and nulls, which TensorBoard does not accept."""
    plain = (int, float, str, bool)
    return {k: v if isinstance(v, plain) else str(v) for k, v in config.to_dict().items()}


def _start(loop: Loop, resume: bool, until_done: ExitStack) -> Path | None:
    """Lock the folder; return the checkpoint from which all processes resume, if any."""
    chosen: list[Path | None] = [None]
    with together(loop.accelerator):
        if loop.accelerator.is_main_process:
            until_done.enter_context(loop.folder.locked())
            chosen = [_make_ready(loop, resume)]
    return broadcast_object_list(chosen)[0]


def _make_ready(loop: Loop, resume: bool) -> Path | None:
    """Restore the folder to its newest intact checkpoint, if any; return it."""
    folder = loop.folder
    _check(folder, loop.config, resume)  # again: this process holds the lock only now
    remove_leftovers(folder.path)
    found, skipped = newest_whole(folder.checkpoints)
    if found is not None:
        read_progress(found)  # refuses one of an earlier version before anything is changed
    for name, wrong in skipped.items():
        notice(f"{name} is left out: {wrong}. It is renamed {folder.rename_damaged(name)}.")
    session = environment()
    if folder.exists:
        session |= {"start": found.name if found else None, "left_out": skipped}
    folder.record_session(session, loop.config.variant, loop.corpus.manifest, loop.source)
    loop.config.save(folder.config_file)
    folder.rewind(found)
    return found


@contextlib.contextmanager
def _divergence_recorded(loop: Loop) -> Iterator[None]:
    """Write a row if the run ends because a loss or gradient is not finite."""
    try:
        yield
    except NonFiniteError as error:
        if loop.accelerator.is_main_process:
            row = {"step": loop.step, "event": "diverged", "why": str(error)}
            append_row(loop.folder.events_file, row)
        raise


def _finish(loop: Loop, folder: RunFolder) -> None:
    metrics, config = folder.metrics, folder.config
    own = metrics.tokens.diff().fillna(metrics.tokens)  # tokens per row; the last may have fewer
    updates = metrics.loss.notna()
    if not updates.any():
        raise NonFiniteError(f"None of the {config.steps} steps made an update.")
    last_tenth = updates & (
        metrics.step > min(0.9 * loop.last_step, metrics.step[updates].iloc[-1] - 1)
    )
    assert loop.test_losses is not None
    assert loop.test_errors is not None
    np.save(folder.path / "test_losses.npy", loop.test_losses)
    np.save(folder.path / "test_errors.npy", loop.test_errors)
    write_json(
        folder.summary_file,
        {
            "parameters": loop.model.num_parameters(),
            "steps": loop.last_step,
            "tokens": int(folder.evaluations.tokens.iloc[-1]),
            "train_loss": float(np.average(metrics.loss[last_tenth], weights=own[last_tenth])),
            "test_loss": float(folder.evaluations.test_loss.iloc[-1]),
            "test_accuracy": loop.test_accuracy,  # a row of an earlier version has none
            "tokens_per_second": float(metrics.tokens_per_second.median()),
            "skipped_steps": sum(row["event"] == "non_finite" for row in folder.events),
            "loss_spikes": loss_spikes(metrics.loss),
            "peak_memory_bytes": peak_memory(),
            "seconds": float((own / metrics.tokens_per_second).sum()),  # steps of all sessions
        },
    )
