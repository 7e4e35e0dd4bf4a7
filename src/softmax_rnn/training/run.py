"""One run, from its configuration to its results."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from rich.progress import Progress
from transformers.utils import logging as transformers_logging

from softmax_rnn.data import PreparedCorpus, TokenBlocks, load_tokenizer, prepare
from softmax_rnn.files import write_json
from softmax_rnn.models import SoftmaxRNNConfig, SoftmaxRNNForCausalLM, initialize
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.environment import environment, peak_memory
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.trainer import SpecTrainer


def load_corpus(config: RunConfig) -> PreparedCorpus:
    """The run's corpus, tokenised now if it never was."""
    with Progress(transient=True) as progress:
        task = progress.add_task(f"Tokenising {config.corpus}", total=1.0)
        return prepare(
            config.corpus,
            load_tokenizer(config.tokenizer),
            text_column=config.text_column,
            test_fraction=config.test_fraction,
            split_seed=config.split_seed,
            progress=lambda done: progress.update(task, completed=done),
        )


def model_config(config: RunConfig, vocab_size: int, end_of_text: int) -> SoftmaxRNNConfig:
    """The model of a run."""
    rows = config.vocab_size or vocab_size
    if rows < vocab_size:
        raise ValueError(
            f"The tokenizer {config.tokenizer!r} has {vocab_size} ids, more than "
            f"vocab_size={rows} rows of the embedding."
        )
    return SoftmaxRNNConfig(
        attention=config.spec,
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
        use_cache=True,
    )


def train(config: RunConfig, path: Path, *, resume: bool = False) -> RunFolder:
    """Run ``config`` in the folder ``path``, or go on where it stopped.

    Args:
        config: what to run.
        path: the run's folder.
        resume: go on from the newest checkpoint of an unfinished run.

    Returns:
        The folder, with its results. A finished run is not run again.

    Raises:
        ValueError: if the folder holds another run, or an unfinished one and ``resume`` is off.
        NonFiniteError: if the loss or its gradient is not finite.
    """
    folder = RunFolder(path)
    if folder.exists:
        folder.check_same_config(config)
        if folder.finished:
            return folder
        if not resume:
            raise ValueError(f"{path} holds an unfinished run: add --resume to go on with it.")
    started = time.perf_counter()
    tokenizer = load_tokenizer(config.tokenizer)
    corpus = load_corpus(config)
    train_blocks, test_blocks = (
        TokenBlocks(corpus, split, config.block_size) for split in ("train", "test")
    )
    model = SoftmaxRNNForCausalLM(
        model_config(config, corpus.manifest["vocab_size"], corpus.manifest["end_of_text"])
    )
    initialize(model, config.seed)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "environment.json", {**environment(), "corpus": corpus.manifest})
    config.save(folder.config_file)
    transformers_logging.set_verbosity_error()
    trainer = SpecTrainer(
        model, config, folder, train_blocks, test_blocks, processing_class=tokenizer
    )
    checkpoint = folder.checkpoints[-1] if folder.checkpoints else None
    folder.rewind(0 if checkpoint is None else int(checkpoint.name.partition("-")[2]))
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.tested_at != config.steps:
        trainer.evaluate()
    if trainer.is_world_process_zero():
        _finish(trainer, folder, time.perf_counter() - started)
    return folder


def _finish(trainer: SpecTrainer, folder: RunFolder, seconds: float) -> None:
    metrics, config = folder.metrics, folder.config
    last_tenth = metrics[metrics.step > 0.9 * config.steps]
    assert trainer.test_losses is not None
    np.save(folder.path / "test_losses.npy", trainer.test_losses)
    write_json(
        folder.path / "summary.json",
        {
            "parameters": trainer.model.num_parameters(),
            "steps": config.steps,
            "tokens": config.steps * config.tokens_per_step,
            "train_loss": float(last_tenth.loss.mean()),
            "test_loss": float(folder.evaluations.test_loss.iloc[-1]),
            "tokens_per_second": float(metrics.tokens_per_second.median()),
            "peak_memory_bytes": peak_memory(),
            "seconds": seconds,
        },
    )
