"""The library comes from a cache that others may write to: their code is never loaded."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from softmax_rnn._utils.trusted import locked, objection
from softmax_rnn.ops.forms.cpu import cpp

pytestmark = pytest.mark.skipif(
    bool(cpp.missing()), reason="needs g++ and SOFTMAX_RNN_CPU_KERNEL other than 0"
)
KEY = "key"
Forget = Callable[[], None]


def answer(fresh: Forget) -> int:
    """What the library of a process says that has built nothing."""
    fresh()
    return int(cpp.load().answer())


class Samples(NamedTuple):
    """A library as it is built, another's, and the file that exists once the latter was loaded."""

    good: bytes
    planted: bytes
    marker: Path


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    folder = tmp_path_factory.mktemp("samples")
    marker = folder / "marker"
    code = {
        "good": 'extern "C" int answer() { return 42; }',
        "planted": '#include <cstdio>\nextern "C" int answer() { return 13; }\n'
        f'__attribute__((constructor)) static void f() {{ fclose(fopen("{marker}", "w")); }}',
    }
    for name, text in code.items():
        (folder / f"{name}.cpp").write_text(text)
        command = ["g++", "-shared", "-fPIC", f"{name}.cpp", "-o", f"{name}.so"]
        subprocess.run(command, cwd=folder, check=True)
    good, planted = ((folder / f"{name}.so").read_bytes() for name in code)
    assert ctypes.CDLL(str(folder / "planted.so")).answer() == 13
    marker.unlink()  # it exists: loading a library is enough
    return Samples(good, planted, marker)


@pytest.fixture
def built(
    fresh: object, monkeypatch: pytest.MonkeyPatch, samples: Samples, temporary: Path
) -> list[Path]:
    """Building is writing a small library, in the folders of this list."""
    folders: list[Path] = []

    def build(compiler: str, key: str, folder: Path) -> Path:
        folders.append(folder.resolve())
        return write(folder / "native.so", samples.good, key)

    opened: list[tuple[int, ctypes.CDLL]] = []

    def load(descriptor: int) -> ctypes.CDLL:
        """Forget the one before: there may be thousands."""
        for number, library in opened:
            _ctypes.dlclose(library._handle)
            os.close(number)
        opened[:] = [(descriptor, real(descriptor))]
        return opened[0][1]

    real = cpp._library
    monkeypatch.setattr(cpp, "_library", load)
    monkeypatch.setattr(cpp, "_key", lambda _: KEY)
    monkeypatch.setattr(cpp, "_built", build)
    return folders


def write(path: Path, content: bytes, key: str = KEY, mode: int = 0o600) -> Path:
    """A library with the hash that it should have, which anyone can compute."""
    path.write_bytes(content + cpp._seal(content, key))
    path.chmod(mode)
    return path


class Plant(NamedTuple):
    """Something in a cache: the library's path, the samples and a number say what and where."""

    put: Callable[[Path, Samples, int], object]
    quiet: bool = False  # no warning: it is nobody's attack


def changed(change: Callable[[bytes, int], bytes]) -> Plant:
    """A library of ours that is damaged somewhere."""

    def put(path: Path, samples: Samples, at: int) -> None:
        content = write(path, samples.good).read_bytes()
        path.write_bytes(change(content, at % len(content)))

    return Plant(put)


def instead(make: Callable[[Path], object]) -> Plant:
    """Something else in place of our folder."""
    return Plant(lambda path, samples, _: (path.parent.rmdir(), make(path.parent)))


def beside(name: str, make: Callable[[Path], object], quiet: bool = False) -> Plant:
    """Something else beside the library."""
    return Plant(lambda path, samples, _: make(path.with_name(name)), quiet)


def planted(change: Callable[[Path], object], mode: int = 0o600) -> Plant:
    """Another's library; ``change`` is of its path."""
    return Plant(lambda path, s, _: change(write(path, s.planted, mode=mode)))


def moved(path: Path) -> Path:
    """The file or folder under another name."""
    return path.rename(path.with_name("other"))


PLANTS: dict[str, Plant] = {
    "nothing": Plant(lambda *_: None, quiet=True),
    "our own": Plant(lambda path, samples, _: write(path, samples.good), quiet=True),
    # In place of the library.
    "the group may write": planted(lambda path: None, mode=0o620),
    "all may write": planted(lambda path: None, mode=0o606),
    "a link": planted(lambda path: path.symlink_to(moved(path))),
    "a hard link": planted(lambda path: path.hardlink_to(moved(path))),
    "without a hash": Plant(lambda path, samples, _: path.write_bytes(samples.planted)),
    "for another key": Plant(lambda path, samples, _: write(path, samples.planted, "another")),
    "a pipe": Plant(lambda path, *_: os.mkfifo(path)),
    "a folder": Plant(lambda path, *_: path.mkdir()),
    "cut short": changed(lambda content, at: content[:at]),
    "a hash cut short": changed(lambda content, at: content[: -1 - at % 64]),
    "longer": changed(lambda content, at: content + bytes(at + 1)),
    "a flipped bit": changed(lambda x, at: x[:at] + bytes([x[at] ^ 1]) + x[at + 1 :]),
    # In place of its folder.
    "the group may write in it": planted(lambda path: path.parent.chmod(0o770)),
    "all may write in it": planted(lambda path: path.parent.chmod(0o1777)),
    "a link to a folder": planted(lambda path: path.parent.symlink_to(moved(path.parent))),
    "a link to nothing": instead(lambda path: path.symlink_to("nothing")),
    "a file": instead(Path.touch),
    "a pipe for a folder": instead(os.mkfifo),
    # Beside it.
    "left by a killed process": beside("building", lambda x: (x.mkdir(), (x / "a").touch()), True),
    "a link for building": beside("building", lambda path: path.symlink_to(path.parents[1])),
    "a file for building": beside("building", Path.touch),
    "a folder for the lock": beside("lock", Path.mkdir),
    "a link for the lock": beside("lock", lambda path: path.symlink_to("/etc/passwd")),
    "a pipe for the lock": beside("lock", os.mkfifo, True),
}
if os.geteuid() == 0:  # may give files to others
    PLANTS["another user's"] = planted(lambda path: os.chown(path, 12345, -1))
    PLANTS["another user's folder"] = planted(lambda path: os.chown(path.parent, 12345, -1))


@pytest.mark.parametrize("kind", PLANTS)
@settings(max_examples=4, deadline=None, suppress_health_check=[*HealthCheck])
@given(number=st.integers(0, 1 << 20), umask=st.sampled_from([0o022, 0o002, 0o077, 0o000]))
def test_no_code_but_our_own_is_loaded(
    fresh: Forget,
    built: list[Path],
    samples: Samples,
    temporary: Path,
    tmp_path: Path,
    kind: str,
    number: int,
    umask: int,
) -> None:
    """Whatever is in a cache in which all may write: the right library, and nothing is left."""
    cache = Path(tempfile.mkdtemp(dir=tmp_path))
    before = os.umask(umask)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SOFTMAX_RNN_CACHE", str(cache))
            cache.chmod(0o777)
            (path := cpp.folder() / f"{KEY}.so").parent.mkdir(mode=0o700)
            PLANTS[kind].put(path, samples, number)
            built.clear()
            for healed in (False, True):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    assert answer(fresh) == 42
                assert not samples.marker.exists()
                assert not any(temporary.iterdir())
                assert bool(caught) != (PLANTS[kind].quiet or healed)
                assert len(built) == {"our own": 0, "a folder": 2}.get(kind, 1)
                if not path.is_file() or (built and built[-1].name != "building"):
                    break  # nothing could be kept
                assert not (path.parent / "building").exists()
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("moment", "swapped"), [("_verified", "folder"), ("_library", "folder"), ("_library", "file")]
)
def test_what_was_checked_is_loaded(
    fresh: Forget,
    built: list[Path],
    samples: Samples,
    moment: str,
    swapped: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the names lead elsewhere once the folder or the library has been checked."""
    cpp.folder().mkdir(parents=True, mode=0o700)
    path = write(cpp.folder() / f"{KEY}.so", samples.good)
    then = getattr(cpp, moment)

    def late(*args: object) -> object:
        if swapped == "folder":
            path.parent.rename(path.parent.with_name("away"))
            path.parent.mkdir(mode=0o700)
        else:
            path.unlink()
        write(path, samples.planted)
        return then(*args)

    monkeypatch.setattr(cpp, moment, late)
    assert answer(fresh) == 42
    assert not samples.marker.exists()
    assert not built


@pytest.mark.parametrize(
    ("mode", "owner", "reason"),
    [
        (0o600, 0, None),
        (0o600, 7, None),
        (0o644, 7, None),
        (0o755, 0, None),
        (0o600, 8, "it belongs to the user 8"),
        (0o620, 7, "others may write to it (mode 620)"),
        (0o602, 0, "others may write to it (mode 602)"),
        (0o1777, 7, "others may write to it (mode 1777)"),
    ],
)
def test_whose_a_file_is(
    mode: int, owner: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    for kind in (stat.S_IFREG, stat.S_IFDIR):
        assert objection(os.stat_result((kind | mode, 1, 1, 1, owner, 9, 1, 1, 1, 1))) == reason


def test_a_lock_is_of_one_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    for _ in range(2):
        with (
            locked(tmp_path / "lock", 0),
            pytest.raises(OSError, match="another process has locked it for 0 s"),
            locked(tmp_path / "lock", 0),
        ):
            pass
