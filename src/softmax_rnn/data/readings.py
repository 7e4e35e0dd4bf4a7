"""Tasks that ask once, at the end, for what a row is as a whole: ListOps, and images of digits.

They are for models of both directions; a causal one answers them, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from softmax_rnn._utils.errors import missing_extra
from softmax_rnn._utils.validation import PositiveInt
from softmax_rnn.data.rows import IGNORED
from softmax_rnn.data.task_base import Integers, Stream, Task, below, bits

_DIGITS = 10  # the answers, and ids of their own in ListOps
# Values of a list, in the order of their operators' ids.
_OPERATORS = (
    max,
    min,
    lambda values: sorted(values)[(len(values) - 1) // 2],  # the median, the lower of two
    lambda values: sum(values) % 10,
)
_MOST = 5  # arguments of a list, but for the deepest ones


@dataclass(frozen=True)
class _Reading(Task):
    """A row, then a token that asks, then the same token again."""

    def predicted(self, seed: int, positions: Integers) -> Integers:
        """As in :class:`Task`: one."""
        return np.ones(len(positions), np.int64)

    def asked(self, rows: Integers, answers: Integers) -> tuple[Integers, Integers]:
        """Ids and labels of rows [N, block_size - 2] with these answers."""
        ids = np.pad(rows, ((0, 0), (0, 2)), constant_values=self.vocab_size - 1)
        labels = np.full_like(ids, IGNORED)
        labels[:, -1] = answers
        return ids, labels


@dataclass(frozen=True)
class ListOps(_Reading):
    """Nested lists of digits (Nangia and Bowman 2018, arXiv:1804.06028); each fills its row.

    Digits are the ids 0 to 9, then come ``[MAX``, ``[MIN``, ``[MED`` (of two medians the lower) and
    ``[SM`` (the sum modulo 10), ``]``, and the token that asks. An argument is a digit or a list.

    Attributes:
        depth: of the deepest lists.
    """

    name: ClassVar[str] = "listops"
    depth: PositiveInt = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_length(5, "a list of a digit, and two tokens that ask")

    @property
    def vocab_size(self) -> int:
        """The digits, the operators, the end of a list and the token that asks."""
        return _DIGITS + len(_OPERATORS) + 2

    def draw(self, seed: int, positions: Integers) -> tuple[Integers, Integers]:
        """As in :class:`Task`."""
        room = self.block_size - 2
        # More than a row can take: a number for each token, and the sizes of each list.
        random = bits(seed, Stream.TOKENS, positions, 2 * room).tolist()
        rows, answers = np.empty((len(positions), room), np.int64), np.empty(len(positions), int)
        for i, numbers in enumerate(random):
            tokens: list[int] = []
            answers[i] = _list(iter(numbers), room, self.depth, tokens)
            rows[i] = tokens
        return self.asked(rows, answers)


def _list(random: Iterator[int], room: int, depth: int, tokens: list[int]) -> int:
    """Add a list of ``room`` tokens; return its value."""
    drawn, room = next(random), room - 2
    operator, drawn = drawn % len(_OPERATORS), drawn // len(_OPERATORS)
    tokens.append(_DIGITS + operator)
    sizes = [1] * room
    if depth > 1 and room > _MOST:
        count = 2 + drawn % (_MOST - 1)
        cuts = sorted({1 + next(random) % (room - 1) for _ in range(count - 1)})
        parts = [b - a for a, b in zip([0, *cuts], [*cuts, room], strict=True)]
        # What has no room for a list is digits.
        sizes = [size for part in parts for size in ([part] if part > 3 else [1] * part)]
    values = []
    for size in sizes:
        if size == 1:
            values.append(next(random) % _DIGITS)
            tokens.append(values[-1])
        else:
            values.append(_list(random, size, depth - 1, tokens))
    tokens.append(_DIGITS + len(_OPERATORS))
    return int(_OPERATORS[operator](values))


# Images of the test and the validation split; the others are for training.
_HELD_OUT = {"test": 512, "validation": 256}


@dataclass(frozen=True)
class Digits(_Reading):
    """The digit of an image, as 64 pixels in 17 shades: scikit-learn's 1,797 images (Alpaydin).

    Training draws its images again and again; the test split has each of its own once.

    Attributes:
        part: the images: ``train``, or those of a split that is held out.
    """

    name: ClassVar[str] = "digits"
    part: Literal["train", "test", "validation"] = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size != 66:
            raise ValueError(
                f"task:digits: block_size must be 66, not {self.block_size}: a row holds 64 pixels "
                "and two tokens that ask."
            )

    @property
    def vocab_size(self) -> int:
        """The shades, of which the first ten are the answers as well, and the token that asks."""
        return 18

    def for_testing(self, split: str = "test") -> Digits:
        """As in :class:`Task`: other images."""
        assert split in _HELD_OUT
        return replace(self, part="test" if split == "test" else "validation")

    def draw(self, seed: int, positions: Integers) -> tuple[Integers, Integers]:
        """As in :class:`Task`."""
        pixels, answers = _images(self.part)
        if self.part == "train":
            chosen = below(len(pixels), seed, Stream.PLACES, positions, 1)[:, 0]
        else:
            chosen = positions % len(pixels)
        return self.asked(pixels[chosen], answers[chosen])


@functools.cache
def _images(part: str) -> tuple[Integers, Integers]:
    """Pixels [N, 64] and digits [N] of a part of the images, which a fixed order divides."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise missing_extra("digits", "task:digits", error) from error
    pixels, answers = load_digits(return_X_y=True)
    order = bits(0, Stream.PLACES, np.arange(1), len(pixels))[0].argsort(kind="stable")
    ends = np.cumsum([0, *_HELD_OUT.values()])
    places = dict(zip(_HELD_OUT, map(slice, ends[:-1], ends[1:]), strict=True))
    chosen = order[places.get(part, slice(ends[-1], None))]
    return pixels[chosen].astype(np.int64), answers[chosen].astype(np.int64)
