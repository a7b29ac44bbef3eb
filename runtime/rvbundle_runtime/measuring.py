"""Runs guest/measure.py in a payload, as an agent is run: one process per candidate, with a time limit."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rvbundle_runtime import launch, supervisor
from rvbundle_runtime import plan as planning
from rvbundle_runtime.choice import NONE
from rvbundle_runtime.decision import Decision
from rvbundle_runtime.emulators import signal_name
from rvbundle_runtime.errors import RvbundleError, StoreError, ToolError
from rvbundle_runtime.launch import Prepared
from rvbundle_runtime.measured import RESULT_MAX, SCRIPTS, STDERR_SUFFIX, from_json
from rvbundle_runtime.options import RunOptions
from rvbundle_runtime.report import print_error

GUEST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guest")  # where SCRIPTS lie
_SHOWN = "/run/rvbundle/measure"  # where the sandbox shows script, request and result
_POLL = 0.01  # seconds
_TAIL, _LINE_MAX = 4000, 200  # characters of what a failing run has printed, and of its line that is shown


@dataclass(frozen=True)
class Answer:
    """What came of a run: the result's value (None: it wrote none), and why it failed ("" if it did not).

    `seconds` is how long it took in all.
    """

    value: dict[str, Any] | None
    failed: str
    seconds: float


@dataclass(frozen=True)
class Laboratory:
    """A prepared image, and a folder for what its runs write."""

    prepared: Prepared
    options: RunOptions
    folder: Path

    def agent(self) -> list[str]:
        """Return the words that start the agent, without the interpreter, as its process sees them."""
        root = self.prepared.plan.root if self.prepared.plan.sandbox == NONE else ""
        return [
            f"{root}{word}" if word.startswith("/") else word for word in self.prepared.unpacked.info.argv[1:]
        ]

    def run(
        self, decision: Decision, request: Mapping[str, Any], limit: float, env: Mapping[str, str]
    ) -> Answer:
        """Run the script under `decision`; one that takes more than `limit` seconds is killed.

        `env` are variables beside the decision's.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "work").mkdir(parents=True)
        (self.folder / "measure").mkdir()
        for name in SCRIPTS:
            shutil.copyfile(os.path.join(GUEST, name), self.folder / "measure" / name)
        (self.folder / "measure" / "request.json").write_text(json.dumps(request))
        started = time.monotonic()
        failed = _in_child(lambda: self._carry_out(decision, env), self.folder, limit)
        value = _read(self.folder / "measure" / "result.json")
        if not failed and not (value and value.get("finished")):
            failed = f"it ended before it was done{_last_words(self.folder)}"
        return Answer(value, failed, time.monotonic() - started)

    def _carry_out(self, decision: Decision, env: Mapping[str, str]) -> int:
        """Be the launcher of one run, in a process of its own."""
        prepared = self.prepared
        plan = self._plan(decision, env)
        cold, _ = launch.find_cold(Path(self.options.image), self.options.cold, plan.info.identity)
        pager, present = launch.restoring(plan, cold, prepared.unpacked)
        outcome = supervisor.run(plan, pager, present)
        return 128 + outcome.signal if outcome.signal else outcome.code

    def _plan(self, decision: Decision, env: Mapping[str, str]) -> planning.Plan:
        prepared = self.prepared
        confined = prepared.plan.sandbox != NONE
        place = (
            _SHOWN if confined else "../measure"
        )  # a word that begins with / would be one of the payload's
        words = (f"{place}/{name}" for name in ("measure.py", "request.json", "result.json"))
        situation = prepared.situation
        options = replace(
            self.options,
            arguments=(),
            cwd=True,
            env=(*self.options.env, *env.items()),
            backend=None,
            threads=None,
            precision=None,
        )
        plan = planning.make_plan(
            replace(situation.host, cwd=str(self.folder / "work")),
            str(prepared.unpacked.root),
            replace(prepared.unpacked.info, argv=(prepared.unpacked.info.argv[0], *words)),
            options,
            planning.ColdPack(prepared.plan.cold or "", ""),
            situation.launch,
            decision,
        )
        shown = planning.Mount(str(self.folder / "measure"), _SHOWN, read_only=False)
        return replace(plan, mounts=(*plan.mounts, shown)) if confined else plan


@contextmanager
def laboratory(prepared: Prepared, options: RunOptions) -> Iterator[Laboratory]:
    """Give a laboratory whose folder is removed in the end; raises StoreError."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="rvbundle-measure-")
    except OSError as error:
        raise StoreError(f"can't make a temporary folder: {error.strerror}") from None
    with folder:
        yield Laboratory(prepared, options, Path(folder.name) / "run")


def _in_child(work: Callable[[], int], folder: Path, limit: float) -> str:
    """Do `work` in a child process; return why it failed, "" if it returned 0 within `limit` seconds."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            fd = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            code = work()
        except RvbundleError as error:
            print_error(error)
            code = error.exit_code
        finally:
            os._exit(code)  # whatever happens, this process must not run on as its parent
    try:
        status = _wait(pid, limit)
    except BaseException:
        os.kill(pid, signal.SIGKILL)  # all that it started dies with it
        os.waitpid(pid, 0)
        raise
    if status is None:
        return f"it did not end within {limit:.0f} s"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ""
    number = code - 128 if code > 128 else -code if code < 0 else 0
    how = f"was ended by {signal_name(number)}" if number else f"ended with exit code {code}"
    return f"it {how}{_last_words(folder)}"


def _wait(pid: int, limit: float) -> int | None:
    """Return the wait status of `pid`; None if it had to be killed."""
    end = time.monotonic() + limit
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(_POLL)


def _last_words(folder: Path) -> str:
    """Return what a failing run has said of it: the guard's message if there is one, else the last line."""
    texts = []
    for path in (folder / "output", folder / "measure" / f"result.json{STDERR_SUFFIX}"):
        with suppress(OSError):  # it may not have come so far
            texts.append(path.read_text(errors="replace")[-_TAIL:])
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("rvbundle: ", "error: "))]
    last = (told or lines)[-1:]
    return f": {last[0].removeprefix('rvbundle: ')[:_LINE_MAX]}" if last else ""


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            value = from_json(file.read(RESULT_MAX + 1))
    except (OSError, ToolError):
        return None
    return value if isinstance(value, dict) else None
