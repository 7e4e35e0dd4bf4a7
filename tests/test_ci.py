"""What .ci/run does about a browser, with stand-ins for the machine's commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / ".ci" / "run"
ROOT, NOBODY = "echo 0", "echo 1000"
TARGETS = ["make test-all", "make docs", "make fuzz SECONDS=60", "make lint"]
INSTALLS = 'echo "apt-get $*" >> "$LOG"; echo chatter'


@pytest.mark.parametrize(
    ("commands", "said", "done"),
    [
        ({"chromium": "", "id": ROOT}, "", []),
        ({"google-chrome": "", "id": ROOT, "apt-get": INSTALLS}, "", []),
        (
            {"id": ROOT, "apt-get": INSTALLS},
            "",
            ["apt-get update", "apt-get install -y --no-install-recommends chromium"],
        ),
        ({"id": NOBODY, "apt-get": INSTALLS}, "No browser (not root): the tests of", []),
        ({"id": ROOT}, "No browser (no apt-get): the tests of", []),
        ({"id": ROOT, "apt-get": "echo a; echo E: 404 >&2; exit 100"}, "No browser (E: 404)", []),
    ],
)
def test_a_browser_is_installed_where_it_can_be(
    commands: dict[str, str], said: str, done: list[str], tmp_path: Path
) -> None:
    ended = run(tmp_path, {**commands, "make": 'echo "make $*" >> "$LOG"'})
    assert ended.returncode == 0
    assert ended.stdout.startswith(said)
    assert ended.stdout.count("\n") == bool(said)
    found = (tmp_path / "log").read_text().splitlines()
    assert found[:-3] == [*done, TARGETS[0]]
    assert sorted(found[-3:]) == TARGETS[1:]  # at the same time


def test_it_tells_what_fresh_examples_find(tmp_path: Path) -> None:
    ended = run(tmp_path, {"chromium": "", "make": "[ $1 != fuzz ] || exit 2"})
    assert ended.returncode == 0
    assert ended.stdout == "Fresh examples found a fault: mend it in a change of its own.\n"


@pytest.mark.parametrize("target", ["test-all", "lint", "docs"])
def test_it_fails_where_a_target_does(target: str, tmp_path: Path) -> None:
    ended = run(tmp_path, {"chromium": "", "make": f"[ $1 != {target} ] || exit 2"})
    assert ended.returncode == 2


def run(folder: Path, commands: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run .ci/run where nothing but these commands (name: script) and the shell's own is there."""
    path = folder / "bin"
    path.mkdir()
    for name in ("dirname", "tail"):
        (path / name).symlink_to(str(shutil.which(name)))
    for name, script in commands.items():
        (path / name).write_text(f"#!/bin/sh\n{script}\n")
        (path / name).chmod(0o755)
    env = {"PATH": str(path), "LOG": str(folder / "log")}
    return subprocess.run(["/bin/sh", RUN], env=env, capture_output=True, text=True, check=False)
