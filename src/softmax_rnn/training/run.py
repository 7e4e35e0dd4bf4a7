"""One run, from its configuration to its results."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from transformers.utils import logging as transformers_logging

from softmax_rnn.data import (
    DocumentRows,
    PreparedCorpus,
    Rows,
    TokenBlocks,
    load_tokenizer,
    prepare,
    progress_bar,
)
from softmax_rnn.files import remove_leftovers, write_json
from softmax_rnn.models import SoftmaxRNNConfig, SoftmaxRNNForCausalLM, initialize
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.environment import environment, peak_memory
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.matmul import widest_float32_products
from softmax_rnn.training.trainer import SpecTrainer


def load_corpus(config: RunConfig, *, workers: int | None = None) -> PreparedCorpus:
    """The run's corpus, tokenised now if it never was, by so many processes (one a core)."""
    with progress_bar(f"Tokenising {config.corpus}") as progress:
        return prepare(
            config.corpus,
            load_tokenizer(config.tokenizer),
            text_column=config.text_column,
            test_fraction=config.test_fraction,
            split_seed=config.split_seed,
            max_tokens=config.max_tokens,
            workers=workers,
            progress=progress,
        )


def load_blocks(config: RunConfig) -> tuple[PreparedCorpus, Rows, Rows]:
    """The run's corpus, and its blocks or documents to train and to test on.

    Raises:
        ValueError: for a corpus or split that will not do, or a package that the run lacks.
    """
    if config.tensorboard and find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard needs a package of its own: pip install 'softmax-rnn[tensorboard]'."
        )
    corpus = load_corpus(config)
    rows = DocumentRows if config.packing == "documents" else TokenBlocks
    train_blocks, test_blocks = (
        rows(corpus, split, config.block_size) for split in ("train", "test")
    )
    return corpus, train_blocks, test_blocks


def model_config(config: RunConfig, vocab_size: int, end_of_text: int) -> SoftmaxRNNConfig:
    """The model of a run."""
    rows = vocab_size if config.vocab_size is None else config.vocab_size
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


@widest_float32_products()
def train(config: RunConfig, path: Path, *, resume: bool = False) -> RunFolder:
    """Run ``config`` in the folder ``path``, or go on where it stopped.

    Args:
        config: what to run.
        path: the run's folder.
        resume: go on from the newest checkpoint of an unfinished run.

    Returns:
        The folder, with its results. A finished run is not run again.

    Raises:
        ValueError: if the folder holds another run or one on other text, or an unfinished one and
            ``resume`` is off.
        NonFiniteError: if the loss or its gradient is not finite.
    """
    folder = RunFolder(path)
    if folder.exists:
        folder.check_same_config(config)
        if not folder.finished and not resume:
            raise ValueError(f"{path} holds an unfinished run: add --resume to go on with it.")
    corpus, train_blocks, test_blocks = load_blocks(config)
    if folder.exists:
        folder.check_same_corpus(corpus.manifest)
        if folder.finished:
            return folder
    model = SoftmaxRNNForCausalLM(
        model_config(config, corpus.manifest["vocab_size"], corpus.manifest["end_of_text"])
    )
    initialize(model, config.seed)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # one a checkpoint, over the run's own
    trainer = SpecTrainer(
        model,
        config,
        folder,
        train_blocks,
        test_blocks,
        processing_class=load_tokenizer(config.tokenizer),
    )
    checkpoint = folder.checkpoints[-1] if folder.checkpoints else None
    if trainer.is_world_process_zero():
        path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        folder.record_session(environment(), corpus.manifest)
        config.save(folder.config_file)
        folder.rewind(0 if checkpoint is None else int(checkpoint.name.partition("-")[2]))
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.tested_at != config.steps:
        trainer.evaluate()
    if trainer.is_world_process_zero():
        _finish(trainer, folder)
    trainer.accelerator.wait_for_everyone()
    return folder


def _finish(trainer: SpecTrainer, folder: RunFolder) -> None:
    metrics, config = folder.metrics, folder.config
    tokens = metrics.tokens.diff().fillna(metrics.tokens)  # a row's own: the last may hold fewer
    last_tenth = metrics.step > 0.9 * config.steps
    assert trainer.test_losses is not None
    np.save(folder.path / "test_losses.npy", trainer.test_losses)
    write_json(
        folder.path / "summary.json",
        {
            "parameters": trainer.model.num_parameters(),
            "steps": config.steps,
            "tokens": int(metrics.tokens.iloc[-1]),
            "train_loss": float(np.average(metrics.loss[last_tenth], weights=tokens[last_tenth])),
            "test_loss": float(folder.evaluations.test_loss.iloc[-1]),
            "tokens_per_second": float(metrics.tokens_per_second.median()),
            "peak_memory_bytes": peak_memory(),
            "seconds": float((tokens / metrics.tokens_per_second).sum()),  # of all sessions' steps
        },
    )
