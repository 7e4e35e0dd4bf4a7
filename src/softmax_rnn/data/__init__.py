"""From corpora to rows of tokens, tokenised once, memory-mapped and read in a fixed order."""

from softmax_rnn.data.cache import check, left_out, prepare, progress_bar
from softmax_rnn.data.manifest import SPLITS
from softmax_rnn.data.preparation import Progress
from softmax_rnn.data.readers import CorpusError
from softmax_rnn.data.rows import DocumentRows, MaskedBlocks, Rows, SegmentedBlocks, TokenBlocks
from softmax_rnn.data.shards import PreparedCorpus
from softmax_rnn.data.task_rows import TaskCorpus, TaskRows, task_tokenizer
from softmax_rnn.data.tasks import is_task, parse_task
from softmax_rnn.data.tokenizer import load_tokenizer
from softmax_rnn.data.validation import ValidationCorpus

__all__ = [
    "SPLITS",
    "CorpusError",
    "DocumentRows",
    "MaskedBlocks",
    "PreparedCorpus",
    "Progress",
    "Rows",
    "SegmentedBlocks",
    "TaskCorpus",
    "TaskRows",
    "TokenBlocks",
    "ValidationCorpus",
    "check",
    "is_task",
    "left_out",
    "load_tokenizer",
    "parse_task",
    "prepare",
    "progress_bar",
    "task_tokenizer",
]
