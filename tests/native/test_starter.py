"""What the kernel executes for a program of an emulated payload, called as the kernel calls it."""

import os
import subprocess
from pathlib import Path

import pytest

from rvbundle_runtime import starter
from rvbundle_runtime.launchers import Start

NATIVE = Path(starter.__file__).parent / "native" / os.uname().machine
# In the place of an emulator: prints its words and its environment, one a line.
SHOW = '#!/bin/sh\nfor word; do echo "<$word>"; done\n/usr/bin/env | /usr/bin/sort\n'


@pytest.fixture
def emulator(tmp_path: Path) -> Path:
    path = tmp_path / "emulator"
    path.write_text(SHOW)
    path.chmod(0o755)
    return path


def run(
    folder: Path, start: Start, *words: str, env: dict[str, str] | None = None, plain: bool = False
) -> subprocess.CompletedProcess[str]:
    program = folder / "starter"
    program.write_bytes(starter.with_settings((NATIVE / "starter").read_bytes(), start, plain))
    program.chmod(0o755)
    return subprocess.run(
        ["starter", *words], executable=program, env=env or {}, capture_output=True, text=True
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if not line.startswith(("PWD=", "_=", "SHLVL="))]


def test_words_and_argv0(emulator: Path, tmp_path: Path) -> None:
    start = Start((str(emulator), "-cpu", "a b"), argv0="-0")
    done = run(tmp_path, start, "/bin/program", "its name", "x", "", "y z", env={"A": "1"})
    assert lines(done) == [
        "<-cpu>",
        "<a b>",
        "<-0>",
        "<its name>",
        "</bin/program>",
        "<x>",
        "<>",
        "<y z>",
        "A=1",
    ]


def test_no_arguments(emulator: Path, tmp_path: Path) -> None:
    assert lines(run(tmp_path, Start((str(emulator),)), "/p", "name")) == ["</p>"]


def test_variables_are_added_but_not_replaced(emulator: Path, tmp_path: Path) -> None:
    start = Start((str(emulator),), env={"A": "new", "AB": "new", "B": "x=y"})
    assert lines(run(tmp_path, start, "/p", "p", env={"AB": "old", "C": ""})) == (
        ["</p>", "A=new", "AB=old", "B=x=y", "C="]
    )


def test_argv0_by_a_variable(emulator: Path, tmp_path: Path) -> None:
    start = Start((str(emulator),), argv0_variable="ARG0")
    assert lines(run(tmp_path, start, "/p", "name", env={"ARG0": "of the parent", "A": "1"})) == (
        ["</p>", "A=1", "ARG0=name"]
    )
    assert lines(run(tmp_path, start, "/p", "/p", env={"A": "1"})) == ["</p>", "A=1"]


def test_in_the_place_of_an_emulator(emulator: Path, tmp_path: Path) -> None:
    start = Start((str(emulator), "--library-path", "/l"), env={"A": "1"})
    assert lines(run(tmp_path, start, "/p", "x", plain=True)) == [
        "<--library-path>",
        "</l>",
        "</p>",
        "<x>",
        "A=1",
    ]
    assert lines(run(tmp_path, start, plain=True)) == ["<--library-path>", "</l>", "A=1"]


def test_many_arguments_and_variables(emulator: Path, tmp_path: Path) -> None:
    words = [str(n) for n in range(5000)]
    env = {f"V{n}": str(n) for n in range(1000)}
    found = lines(run(tmp_path, Start((str(emulator),)), "/p", "p", *words, env=env))
    assert found == ["</p>", *(f"<{word}>" for word in words), *sorted(f"{k}={v}" for k, v in env.items())]


@pytest.mark.parametrize(
    ("start", "words", "message"),
    [
        (Start(("/nowhere/emulator",)), ("/p", "p"), "rvbundle: the emulator can't be started\n"),
        (Start(("/x",)), (), "rvbundle: the emulator's starter is not to be called by hand\n"),
        (Start(("/x",) * 70), ("/p", "p"), "rvbundle: too many settings of the emulator\n"),
    ],
)
def test_what_goes_wrong(tmp_path: Path, start: Start, words: tuple[str, ...], message: str) -> None:
    done = run(tmp_path, start, *words)
    assert (done.returncode, done.stdout, done.stderr) == (127, "", message)
