"""Multi-query associative recall, also with keys that are written again."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from softmax_rnn._utils.errors import shown
from softmax_rnn._utils.validation import Positive, PositiveInt, Text
from softmax_rnn.data.rows import IGNORED
from softmax_rnn.data.task_base import Integers, Stream, Task, below, bits, distinct

_SETTING = r"[1-9]\d{0,8}x[1-9]\d{0,8}"  # length x pairs


@dataclass(frozen=True)
class Mqar(Task):
    """Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv:2312.04927).

    A row begins with keys, each followed by its value. Later each key occurs once more, as a
    question, and the answer is its value. The distance from the pairs to a question follows a power
    law: gap ``g = 1, 2...`` has the weight ``g ** (power - 1)``. Distances are drawn without
    replacement; the first pair has the first distance drawn, and so on.

    With ``writes`` above 1 each key is written that many times, in random order, each time with
    another value, and the answer is the value written last.

    A pair has two tokens, as has a question with the token after it, so the length is even.

    Attributes:
        pairs: keys of a row; by default 16, without ``settings``.
        vocab: number of ids. Keys are below ``vocab // 2`` and not 0; values are the others.
        power: exponent of the power law; 1 is uniform.
        filler: tokens that are neither pairs nor questions: ``random`` (any id) or ``zero``.
        writes: times that each key is written.
        settings: a mixture instead of ``pairs``, as lengths and pairs: ``64x4,128x8``. Each row
            draws one of them, evenly, and is padded on the right with 0. One that is given twice is
            drawn twice as often.
        test: settings of the rows of the test split, which may be longer; by default the same.
    """

    name: ClassVar[str] = "mqar"
    pairs: PositiveInt | None = None
    vocab: PositiveInt = 128
    power: Positive = 0.01
    filler: Literal["random", "zero"] = "random"
    writes: PositiveInt = 1
    settings: Text | None = None
    test: Text | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, text in (("settings", self.settings), ("test", self.test)):
            if text is not None and not re.fullmatch(f"{_SETTING}(,{_SETTING})*", text, re.ASCII):
                raise ValueError(
                    f"{self.title}: {option} must be lengths and pairs such as 64x4,128x8, not "
                    f"{shown(text)}."
                )
        if self.settings is None:
            object.__setattr__(self, "pairs", self.pairs or 16)
        elif self.pairs is not None:
            raise ValueError(
                f"{self.title}: settings={self.settings} gives the pairs; leave out "
                f"pairs={self.pairs}."
            )
        else:
            object.__setattr__(self, "settings", ",".join(f"{t}x{n}" for t, n in self.mixture))
        for length, pairs in self.mixture:
            self._check(length, pairs)
        self.for_testing()  # raises for invalid settings

    def _check(self, length: int, pairs: int) -> None:
        what = "block_size" if self.settings is None else f"the length of {length}x{pairs}"
        if length % 2:
            raise ValueError(
                f"{self.title}: {what} must be even, not {length}: keys and questions are at even "
                "positions."
            )
        if length > self.block_size:
            raise ValueError(f"{self.title}: {what} must be at most block_size={self.block_size}.")
        least = 2 * pairs * (self.writes + 1)
        if length < least:
            raise ValueError(
                f"{self.title}: {what} must be at least {least}, not {length}: a row holds "
                f"{pairs * self.writes} pairs and {pairs} questions, of 2 tokens each."
            )
        keys, values = self.vocab // 2 - 1, self.vocab - self.vocab // 2
        if keys < pairs or values < pairs * self.writes:
            raise ValueError(
                f"{self.title}: vocab={self.vocab} has {max(keys, 0)} keys and {values} values, "
                f"but a row needs {pairs} keys and {pairs * self.writes} values."
            )

    @functools.cached_property
    def mixture(self) -> tuple[tuple[int, int], ...]:
        """Length and pairs of each setting, in ascending order."""
        if self.settings is None:
            assert self.pairs is not None
            return ((self.block_size, self.pairs),)
        parts = (setting.split("x") for setting in self.settings.split(","))
        return tuple(sorted((int(length), int(pairs)) for length, pairs in parts))

    def for_testing(self, split: str = "test") -> Mqar:
        """The task of the test split: with the settings of ``test``, if it is given."""
        if self.test is None:
            return self
        longest = max(int(length) for length in re.findall(r"(\d+)x", self.test))
        return replace(self, block_size=longest, pairs=None, settings=self.test, test=None)

    @property
    def vocab_size(self) -> int:
        """``vocab``."""
        return self.vocab

    def predicted(self, seed: int, positions: Integers) -> Integers:
        """As in :class:`Task`: the pairs of each row."""
        return np.array([pairs for _, pairs in self.mixture])[self._chosen(seed, positions)]

    def lengths(self, seed: int, positions: Integers) -> Integers:
        """As in :class:`Task`."""
        return np.array([length for length, _ in self.mixture])[self._chosen(seed, positions)]

    def draw(self, seed: int, positions: Integers) -> tuple[Integers, Integers]:
        """As in :class:`Task`."""
        ids = np.zeros((len(positions), self.block_size), np.int64)
        labels = np.full_like(ids, IGNORED)
        chosen = self._chosen(seed, positions)
        for number, (length, pairs) in enumerate(self.mixture):
            mine = chosen == number
            ids[mine, :length], labels[mine, :length] = self._rows(
                seed, positions[mine], length, pairs
            )
        return ids, labels

    def _chosen(self, seed: int, positions: Integers) -> Integers:
        return below(len(self.mixture), seed, Stream.SETTING, positions, 1)[:, 0]

    def _rows(
        self, seed: int, positions: Integers, length: int, pairs: int
    ) -> tuple[Integers, Integers]:
        count, half = pairs * self.writes, self.vocab // 2
        keys = 1 + distinct(half - 1, seed, Stream.KEYS, positions, pairs)
        values = half + distinct(self.vocab - half, seed, Stream.VALUES, positions, count)
        places = bits(seed, Stream.WRITES, positions, count).argsort(axis=1)
        written = np.empty_like(values)  # the key of each pair
        np.put_along_axis(written, places, np.tile(keys, (1, self.writes)), axis=1)
        last = np.sort(places.reshape(-1, self.writes, pairs).max(axis=1), axis=1)

        questions = 2 * (count + self._gaps(seed, positions, length // 2 - count)[:, :pairs])
        ids = np.zeros((len(positions), length), np.int64)
        if self.filler == "random":
            ids = below(self.vocab, seed, Stream.TOKENS, positions, length)
        ids[:, 0 : 2 * count : 2], ids[:, 1 : 2 * count : 2] = written, values
        np.put_along_axis(ids, questions, np.take_along_axis(written, last, axis=1), axis=1)
        labels = np.full_like(ids, IGNORED)
        np.put_along_axis(labels, questions + 1, np.take_along_axis(values, last, axis=1), axis=1)
        return ids, labels

    def _gaps(self, seed: int, positions: Integers, space: int) -> Integers:
        """[N, space] the numbers below ``space`` as drawn by weight, without replacement.

        An item of weight w waits for an exponential time of rate w. In the order of these times,
        items are drawn without replacement (Efraimidis and Spirakis 2006). Logarithms of times do
        not overflow, whatever the power.
        """
        whole = bits(seed, Stream.GAPS, positions, space) >> np.uint64(12)
        uniform = (whole.astype(np.float64) + 0.5) * 2.0**-52  # neither 0 nor 1
        log_weights = (self.power - 1) * np.log(np.arange(1, space + 1))
        return (np.log(-np.log(uniform)) - log_weights).argsort(axis=1)
