"""Broken input and faults: each folder beside this file is one, with the message that a user must read.

A folder's `case.toml` holds:

    what        one sentence: what is wrong, and how a user meets it
    command     the words after `rvbundle`; the current folder is a copy of the case's folder
    exit        the exit code (default 0)
    expected    stderr, exactly, without the lines of a build's phases ...
    contains    ... or texts that it must hold, where parts of it vary (pip's and the system's own words)
    stdout      the same for standard output (default: nothing) ...
    stdout_contains
    cache       "own": an empty cache, "shared" (builds): that of all tests, so that nothing is frozen twice
    setup       shell commands in a private mount namespace, before the command
    wrap        words before the command, such as a script that takes rights away
    env         variables
    leaves      globs: the only new paths that the command may leave in its folder
    [[also]]    more commands for the same broken input: command, exit, expected, contains, stdout …

All texts may use {folder} (the copy), {cache}, {image} (a copy of the probe agent's image), {probe} (that
agent's folder), {python} (the interpreter that runs rvbundle), {machine} (its architecture). A `prepare.py`
makes what can't lie in a repository: its `prepare(folder, image)` gets the copy and an image not to be
changed (its cold pack lies beside it), and may return variables. The cache, if it is the case's own, is
`folder.parent / "cache"`.
"""

import ctypes
import fnmatch
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import AGENTS, TEST_CACHE, Result

HERE = Path(__file__).resolve().parent
CASES = sorted(path.parent.name for path in HERE.glob("*/case.toml"))
NO_COPY = shutil.ignore_patterns("case.toml", "prepare.py", "__pycache__")
PHASE = re.compile(r"(done|reused|failed)  | {8}\S")
OUR_TRACEBACK = re.compile(r"Traceback .*rvbundle/__main__\.py", re.DOTALL)  # an agent's own is no fault
PR_SET_CHILD_SUBREAPER = 36
NO_STAGES = ("last", "locks", "frames", "debian")  # the last is what apt knows, and packages by their digests
TIMEOUT = 120


@dataclass(frozen=True)
class Place:
    """Where a case runs: its copied folder, its cache, its folder for temporary files, an image."""

    folder: Path
    cache: Path
    tmp: Path
    image: Path

    def fill(self, text: str) -> str:
        names = {
            "folder": self.folder,
            "cache": self.cache,
            "image": self.image,
            "probe": AGENTS / "probe",
            "python": sys.executable,
            "machine": os.uname().machine,
        }
        for name, value in names.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    """Processes that a command leaves behind become children of this one, so that they can be seen."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """An empty place; where a case needs the probe's image, a copy of it lies there."""
    place = Place(
        tmp_path / "case", tmp_path / "cache", tmp_path / "tmp", tmp_path / "image" / "probe-1.0.rvb"
    )
    place.tmp.mkdir()
    return place


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, place: Place, request: pytest.FixtureRequest) -> None:
    text = (HERE / name / "case.toml").read_text()
    case = tomllib.loads(text)
    assert case.pop("what")
    shutil.copytree(HERE / name, place.folder, ignore=NO_COPY)
    has_preparation = (HERE / name / "prepare.py").exists()
    if has_preparation or "{image}" in text or "{probe}" in text:
        probe: Path = request.getfixturevalue("probe_image")
        place.image.parent.mkdir()
        shutil.copyfile(probe, place.image)
    shared = case.get("cache", "shared" if case["command"][0] in ("build", "lock") else "own") == "shared"
    place = Place(place.folder, TEST_CACHE if shared else place.cache, place.tmp, place.image)
    env = {name: place.fill(value) for name, value in case.get("env", {}).items()}
    if has_preparation:
        env |= load_preparation(name).prepare(place.folder, probe) or {}
    if "setup" in case:
        place.cache.mkdir(exist_ok=True)  # something to mount on
    for step in (case, *case.pop("also", [])):
        check(place, {**{k: case[k] for k in ("setup", "wrap") if k in case}, **step}, env)


def check(place: Place, step: dict[str, Any], env: dict[str, str]) -> None:
    """Run one command of a case; compare its messages, and see to it that nothing is left behind."""
    mounts = Path("/proc/self/mountinfo").read_text()
    before = listing(place)
    result, after = run(place, step, env)
    message = "\n".join(without_phases(result.err))
    assert not OUR_TRACEBACK.search(result.err), result.err
    if "contains" in step:
        for text in step["contains"]:
            assert place.fill(text) in message, message
    else:
        assert message == place.fill(step.get("expected", "")).strip("\n")
    if "stdout_contains" in step:
        for text in step["stdout_contains"]:
            assert place.fill(text) in result.out, result.out
    else:
        assert result.out.strip("\n") == place.fill(step.get("stdout", "")).strip("\n")
    assert result.code == step.get("exit", 0)
    assert strays(place, before, after, step.get("leaves", [])) == []
    assert list(place.tmp.iterdir()) == []
    assert left_processes() == []
    assert Path("/proc/self/mountinfo").read_text() == mounts


def run(place: Place, step: dict[str, Any], env: dict[str, str]) -> tuple[Result, list[str]]:
    """Run a step's command; return what it did and which files there are afterwards, seen from its mounts."""
    command = [place.fill(w) for w in step.get("wrap", [])]
    command += [sys.executable, "-m", "rvbundle", *map(place.fill, step["command"])]
    found = place.tmp.parent / "listing"
    if "setup" in step:
        who = [] if os.getuid() == 0 else ["--map-root-user"]
        words = " ".join(f"'{word}'" for word in find_command(place))
        script = f'{place.fill(step["setup"])}\n"$@" && code=0 || code=$?\n{words} >"{found}"\nexit $code'
        command = ["unshare", "--mount", *who, "sh", "-euc", script, "sh", *command]
    done = subprocess.run(
        command,
        cwd=place.folder,
        env={**os.environ, "RVBUNDLE_CACHE": str(place.cache), "TMPDIR": str(place.tmp), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    after = found.read_text().splitlines() if found.exists() else listing(place)
    found.unlink(missing_ok=True)
    return Result(done.returncode, done.stdout, done.stderr), after


def without_phases(text: str) -> list[str]:
    """Return the lines of stderr without those by which a build reports its phases."""
    lines = text.rstrip("\n").splitlines()
    while lines and PHASE.match(lines[0]):
        del lines[0]
    return lines


def find_command(place: Place) -> list[str]:
    """Return the words that list what lies in the case's folder and near the top of its cache."""
    folders = [str(path) for path in (place.folder, place.cache) if path.exists()]
    return ["find", *folders, "-maxdepth", "4"]


def listing(place: Place) -> list[str]:
    """Return the paths that `find_command` finds."""
    return subprocess.run(find_command(place), capture_output=True, text=True, check=True).stdout.splitlines()


def strays(place: Place, before: list[str], after: list[str], leaves: list[str]) -> list[str]:
    """Return the new paths that are neither wanted nor part of a complete result."""
    found = []
    there = set(after)
    # An own cache must be clean afterwards, whatever lay there before; in the shared one what is new counts.
    candidates = there - set(before) if place.cache == TEST_CACHE else there
    for path in map(Path, sorted(candidates)):
        if path.is_relative_to(place.folder):
            name = str(path.relative_to(place.folder))
            if str(path) not in before and not any(fnmatch.fnmatch(name, pattern) for pattern in leaves):
                found.append(str(path))
        elif path.is_relative_to(place.cache):
            parts = path.relative_to(place.cache).parts
            unpacking = parts[:2] == ("store", "tmp") and len(parts) > 2
            temporary = len(parts) > 2 and parts[0] == "build" and path.name.startswith(".")
            payload = len(parts) == 2 and parts[0] == "store" and "-" in parts[1]
            half_payload = payload and f"{path}/payload.json" not in there
            stage = len(parts) == 3 and parts[0] == "build" and parts[1] not in NO_STAGES
            half_stage = stage and f"{path}/key.json" not in there
            fetching = parts[:2] == ("build", "debian") and path.name == "fetched"
            if unpacking or temporary or half_payload or half_stage or fetching:
                found.append(str(path))
    return found


def left_processes() -> list[str]:
    """Return the command lines of the processes that outlived what a test started, after a short wait."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(100):
        while children.read_text().strip() and os.waitpid(-1, os.WNOHANG)[0]:
            pass
        if not children.read_text().strip():
            return []
        time.sleep(0.02)
    left = []
    for pid in children.read_text().split():
        left.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
    return left


def load_preparation(name: str) -> Any:
    """Import the `prepare.py` of a case."""
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", HERE / name / "prepare.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_folder_is_a_case() -> None:
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(CASES)


def test_two_first_runs_at_once(place: Place, probe_image: Path) -> None:
    place.folder.mkdir()
    env = {**os.environ, "RVBUNDLE_CACHE": str(place.cache), "TMPDIR": str(place.tmp)}
    command = [sys.executable, "-m", "rvbundle", "run", str(probe_image), "hello"]
    runs = [
        subprocess.Popen(command, cwd=place.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    assert [run.communicate(timeout=TIMEOUT) for run in runs] == [(b"hello\n", b"")] * 4
    assert [run.returncode for run in runs] == [0] * 4
    assert strays(place, [], listing(place), []) == [str(place.folder)]
    assert left_processes() == []


def test_killed_while_unpacking(place: Place, probe_image: Path) -> None:
    place.folder.mkdir()
    env = {**os.environ, "RVBUNDLE_CACHE": str(place.cache), "TMPDIR": str(place.tmp)}
    command = [sys.executable, "-m", "rvbundle", "run", str(probe_image), "hello"]
    killed = subprocess.Popen(command, cwd=place.folder, env=env, stdout=subprocess.DEVNULL)
    unpacking = place.cache / "store" / "tmp"
    while killed.poll() is None and not (unpacking.exists() and any(unpacking.iterdir())):
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    assert left_processes() == []
    check(place, {"command": ["run", str(probe_image), "hello"], "stdout": "hello"}, {})
