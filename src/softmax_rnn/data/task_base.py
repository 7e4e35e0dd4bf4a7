"""What synthetic tasks share: their interface, their options, and their random draws."""

from __future__ import annotations

import abc
import dataclasses
import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, ClassVar, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, create_model

from softmax_rnn._utils.validation import validated
from softmax_rnn.data.draws import mix

PREFIX = "task:"

AtLeastTwo = Annotated[int, Field(strict=True, ge=2, lt=2**53)]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Task(abc.ABC):
    """Rows of questions whose answers follow from the tokens before them.

    ``str(task)`` is the text that :func:`parse_task` reads. It leaves out options that have their
    default value, so a task has one name.

    Attributes:
        block_size: tokens per row.

    Raises:
        ValueError: if an option has the wrong type or is out of range, or rows are too short.
    """

    name: ClassVar[str]
    block_size: AtLeastTwo

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("block_size", *self.options())}
        for name, value in validated(_fields(type(self)), values, self.title).model_dump().items():
            object.__setattr__(self, name, value)  # integers in float fields become floats

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Each option with its default."""
        return {x.name: x.default for x in dataclasses.fields(cls) if x.name != "block_size"}

    @property
    def title(self) -> str:
        """The task without its options."""
        return PREFIX + self.name

    def __str__(self) -> str:
        given = [
            f"{option}={getattr(self, option)}"
            for option, default in self.options().items()
            if getattr(self, option) != default
        ]
        return self.title + ("?" + "&".join(given) if given else "")

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids; all ids are smaller."""

    @abc.abstractmethod
    def draw(self, seed: int, positions: Integers) -> tuple[Integers, Integers]:
        """Token ids and labels, both [N, block_size], of the rows at ``positions`` [N]."""

    @abc.abstractmethod
    def predicted(self, seed: int, positions: Integers) -> Integers:
        """[N] number of labels other than -100 in each of these rows; no row is drawn for it."""

    def lengths(self, seed: int, positions: Integers) -> Integers:
        """[N] number of tokens in these rows, without padding on the right."""
        return np.full(len(positions), self.block_size)

    def for_testing(self, split: str = "test") -> Task:
        """The task of ``split``, ``test`` or ``validation``; by default the same."""
        return self

    def require_length(self, least: int, reason: str) -> None:
        """Raise ``ValueError`` if rows are shorter than ``least``."""
        if self.block_size < least:
            raise ValueError(
                f"{self.title}: block_size must be at least {least}, not {self.block_size}: a row "
                f"holds {reason}."
            )


@functools.cache
def _fields(task: type[Task]) -> type[BaseModel]:
    """A pydantic model of a task's fields, from its annotations."""
    hints = get_type_hints(task, include_extras=True)
    fields: dict[str, Any] = {x.name: (hints[x.name], ...) for x in dataclasses.fields(task)}
    return create_model(task.__name__, __config__=ConfigDict(strict=True), **fields)


class Stream(IntEnum):
    """What random bits are for; each quantity of a row has its own."""

    SETTING = 0
    TOKENS = 1
    PLACES = 2
    KEYS = 3
    VALUES = 4
    WRITES = 5
    GAPS = 6
    HIDDEN = 7


def bits(seed: int, stream: Stream, positions: Integers, count: int) -> NDArray[np.uint64]:
    """[N, count] random integers of 64 bits."""
    return mix(seed, stream, positions[:, None], np.arange(count))


def below(size: int, seed: int, stream: Stream, positions: Integers, count: int) -> Integers:
    """[N, count] random integers below ``size``."""
    return (bits(seed, stream, positions, count) % np.uint64(size)).astype(np.int64)


def distinct(size: int, seed: int, stream: Stream, positions: Integers, count: int) -> Integers:
    """[N, count] distinct random integers below ``size``, in random order.

    R. Floyd's algorithm: unlike sorting random keys, its cost does not depend on ``size``.
    """
    random = bits(seed, stream, positions, 2 * count)
    largest = np.arange(size - count, size)
    drawn = (random[:, :count] % (largest + 1).astype(np.uint64)).astype(np.int64)
    for i in range(1, count):
        repeated = (drawn[:, :i] == drawn[:, i : i + 1]).any(axis=1)
        drawn[repeated, i] = largest[i]
    return np.take_along_axis(drawn, random[:, count:].argsort(axis=1), axis=1)
