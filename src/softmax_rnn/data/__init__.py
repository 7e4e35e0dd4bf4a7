"""Corpora to tokens to blocks: read, tokenised once, memory-mapped, in a fixed order."""

from softmax_rnn.data.blocks import ShuffledBlocks, TokenBlocks
from softmax_rnn.data.corpus import CorpusError
from softmax_rnn.data.prepare import PreparedCorpus, prepare
from softmax_rnn.data.tokenizer import load_tokenizer

__all__ = [
    "CorpusError",
    "PreparedCorpus",
    "ShuffledBlocks",
    "TokenBlocks",
    "load_tokenizer",
    "prepare",
]
