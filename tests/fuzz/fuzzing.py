"""What the fuzz tests share: odd values, damage, and what counts as a clear error."""

from __future__ import annotations

import contextlib
import copy
import math
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import currently_in_test_context, event
from hypothesis import strategies as st

import softmax_rnn
from softmax_rnn.data import CorpusError

_SECONDS = 20  # of the processor's time for one example; more is a hang
_PACKAGE = str(Path(softmax_rnn.__file__).parent)


class Hang(BaseException):
    """An example that took too long; nothing in the library may catch it."""


@contextlib.contextmanager
def time_limit(seconds: float = _SECONDS) -> Iterator[None]:
    """Raise :class:`Hang` in a block that takes longer."""

    def stop(*_: object) -> None:
        raise Hang(f"No result after {seconds} s.")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Outcome(NamedTuple):
    """What a call gave: a value, or a clear error."""

    value: Any
    error: Exception | None


def outcome(call: Callable[[], Any], names: str = "") -> Outcome:
    """The result of ``call``, or its error, which must be clear.

    Clear is a ``ValueError`` raised by this package's own code, or an ``OSError`` that names a
    file; in either case with a message of a few lines that says ``names``.
    """
    try:
        with time_limit():
            value = call()
    except (ValueError, OSError) as error:
        clear(error, names)
        _note("refused")
        return Outcome(None, error)
    _note("right")
    return Outcome(value, None)


def _note(what: str) -> None:
    if currently_in_test_context():  # counted by --hypothesis-show-statistics
        event(what)


def clear(error: Exception, names: str = "") -> None:
    """Assert that an error is one that a user can act on."""
    message = str(error)
    if isinstance(error, ValueError):
        assert type(error) in (ValueError, CorpusError), f"{type(error).__name__}: {message}"
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        assert where.startswith(_PACKAGE), f"raised in {where}: {message}"
    else:
        assert isinstance(error, OSError)
        assert error.filename is not None or type(error) is FileNotFoundError, message
    assert message.strip()
    assert len(message) < 12_000, f"{len(message)} characters"
    assert len(message.splitlines()) <= 8, message
    assert names in message, f"{names!r} is not in: {message}"


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder, with what it holds; folders and links to nowhere hold None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


_ODD = [
    *(None, True, False, 0, 1, -1, 2, 7, 1000, 10**6, 2**31, 2**53, 2**63, 2**64, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 2.5, -1.5, 1e-320, 1e308, math.inf, -math.inf, math.nan),
    *("", " ", ".", "..", "../../x", "/etc/passwd", "a/b", "\0", "\ud800", "\r\n", "é" * 300),
    *(
        "nan",
        "1e400",
        "1e-3",
        "-1",
        "null",
        "true",
        "[a]",
        "[/b]",
        "<script>",
        "%s",
        "{}",
        "=",
        "~",
    ),
    *("norm", "softmax", "taylor", "exp", "elu1", "sum", "bytes", "1/sqrt(d)", "x" * 5000),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, ["a", 1], [0.5, -1]),
]

odd_values = st.one_of(
    st.sampled_from(_ODD).map(copy.deepcopy),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=5,
    ),
)


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value inside a plain one."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*at, key)
        yield from _paths(inner, (*at, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def mutated(draw: st.DrawFn, original: Any, most: int = 3) -> Any:
    """Plain data with one to ``most`` places deleted, retyped, moved, renamed or made odd."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.sampled_from([1, 1, 2, most]))):
        paths = list(_paths(value))
        if not paths or draw(st.integers(0, 60)) == 0:
            value = draw(odd_values)
            continue
        *outer, last = draw(st.sampled_from(paths))
        place = _at(value, tuple(outer))
        action = draw(st.sampled_from(["odd", "delete", "add", "rename", "copy", "nudge", "nudge"]))
        if action == "odd":
            place[last] = draw(odd_values)
        elif action == "delete":
            del place[last]
        elif action == "add":
            if isinstance(place, dict):
                place[draw(st.text(max_size=8))] = draw(odd_values)
            else:
                place.insert(last, draw(odd_values))
        elif action == "rename" and isinstance(place, dict):
            place[f"{last}{draw(st.sampled_from(['s', '_', ' ', '.x']))}"] = place.pop(last)
        elif action == "copy":
            place[last] = copy.deepcopy(_at(value, draw(st.sampled_from(paths))))
        elif action == "nudge":
            place[last] = draw(_nudged(place[last]))
    return value


def _nudged(value: Any) -> st.SearchStrategy[Any]:
    """Values near one: the next number, another type, a word with a letter more."""
    if isinstance(value, bool):
        return st.sampled_from([int(value), str(value), not value])
    if isinstance(value, int | float):
        return st.sampled_from([value + 1, value - 1, -value, value * 2, str(value), [value]])
    if isinstance(value, str):
        return st.sampled_from([value + "x", value[1:], value.upper(), f"../{value}", [value]])
    return st.sampled_from([[value], {"a": value}, str(value), None])


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes cut short, extended, with flipped bits, or with others in their place."""
    place = draw(st.integers(0, max(0, len(data) - 1)))
    action = draw(st.sampled_from(["cut", "extend", "flip", "insert", "remove", "repeat", "empty"]))
    if action == "cut":
        return data[:place]
    if action == "extend":
        return data + draw(st.binary(min_size=1, max_size=20))
    if action == "flip" and data:
        flipped = bytearray(data)
        for _ in range(draw(st.integers(1, 4))):
            flipped[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(flipped)
    if action == "insert":
        odd = st.sampled_from([b"\0", b"\xff\xfe", b"\xc3", b"\r", b"\n", b"\xed\xa0\x80", b'"'])
        return data[:place] + draw(odd | st.binary(min_size=1, max_size=4)) + data[place:]
    if action == "remove":
        return data[:place] + data[place + draw(st.integers(1, 9)) :]
    return b"" if action == "empty" else data + data[place:]
