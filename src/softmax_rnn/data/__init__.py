"""From corpora to rows of tokens, tokenised once, memory-mapped and read in a fixed order."""

from softmax_rnn.data.cache import prepare, progress_bar
from softmax_rnn.data.manifest import SPLITS
from softmax_rnn.data.preparation import Progress
from softmax_rnn.data.readers import CorpusError
from softmax_rnn.data.rows import DocumentRows, Rows, TokenBlocks
from softmax_rnn.data.shards import PreparedCorpus
from softmax_rnn.data.tokenizer import load_tokenizer

__all__ = [
    "SPLITS",
    "CorpusError",
    "DocumentRows",
    "PreparedCorpus",
    "Progress",
    "Rows",
    "TokenBlocks",
    "load_tokenizer",
    "prepare",
    "progress_bar",
]
