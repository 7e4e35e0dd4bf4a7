"""Corpora to tokens to rows: read, tokenised once, memory-mapped, in a fixed order."""

from softmax_rnn.data.blocks import DocumentRows, Rows, ShuffledBlocks, TokenBlocks
from softmax_rnn.data.corpus import CorpusError
from softmax_rnn.data.prepare import prepare
from softmax_rnn.data.prepared import PreparedCorpus
from softmax_rnn.data.progress import Progress, progress_bar
from softmax_rnn.data.tokenizer import load_tokenizer

__all__ = [
    "CorpusError",
    "DocumentRows",
    "PreparedCorpus",
    "Progress",
    "Rows",
    "ShuffledBlocks",
    "TokenBlocks",
    "load_tokenizer",
    "prepare",
    "progress_bar",
]
