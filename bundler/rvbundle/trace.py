"""The trace stage: run every workload once in the frozen tree and record what it used."""

import difflib
import hashlib
import json
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rvbundle import process, run_tree
from rvbundle.filewatch import FileWatch
from rvbundle.freeze import Frozen, module_name
from rvbundle.recipe import Recipe, Workload
from rvbundle.stage_agent import StagedAgent
from rvbundle_runtime.errors import SandboxError, TraceError

_FORMAT = 1
# Also a sign: "-0.5" and "0.5" are different numbers, "3-5" are two.
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)(?![\w])")


@dataclass(frozen=True)
class WorkloadTrace:
    """What one workload did: the tree's files that it opened, the modules that these are, its output."""

    args: tuple[str, ...]
    modules: tuple[str, ...]
    opened: tuple[str, ...]
    stdout: str


@dataclass(frozen=True)
class Trace:
    """All workloads' records. `pages` and `families` are for traces by page, one per CPU kernel family."""

    workloads: tuple[WorkloadTrace, ...]
    pages: Mapping[str, tuple[int, ...]]
    families: tuple[str, ...]

    def opened_by(self) -> dict[str, int]:
        """Return {path: number of the first workload that opened it}, counted from 1."""
        found: dict[str, int] = {}
        for number, workload in enumerate(self.workloads, 1):
            for path in workload.opened:
                found.setdefault(path, number)
        return found


def dumps(trace: Trace, key: dict[str, Any]) -> str:
    """Return the record as JSON that a version control system can show the changes of."""
    value = {"format": _FORMAT, "key": key, **asdict(trace)}
    return json.dumps(value, sort_keys=True, indent=0, ensure_ascii=False) + "\n"


def loads(text: str) -> tuple[Trace, dict[str, Any]]:
    """Read a record and the key it was made for; raises ValueError for anything else."""
    try:
        value = json.loads(text)
        if value["format"] != _FORMAT:
            raise ValueError("another format")
        workloads = tuple(
            WorkloadTrace(tuple(w["args"]), tuple(w["modules"]), tuple(w["opened"]), w["stdout"])
            for w in value["workloads"]
        )
        pages = {path: tuple(numbers) for path, numbers in value["pages"].items()}
        return Trace(workloads, pages, tuple(value["families"])), dict(value["key"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no trace record: {error}") from None


def trace(recipe: Recipe, frozen: Frozen, agent: StagedAgent) -> Trace:
    """Run the workloads; raises TraceError for one that fails or hangs."""
    records = []
    for number, workload in enumerate(recipe.workloads, 1):
        with FileWatch(frozen.tree) as watch:
            stdout = run_in_tree(recipe, frozen, agent, workload, number)
        opened = tuple(sorted(watch.opened))
        records.append(WorkloadTrace(workload.args, _modules(frozen, opened), opened, stdout))
    return Trace(tuple(records), {}, ())


def _modules(frozen: Frozen, opened: tuple[str, ...]) -> tuple[str, ...]:
    suffixes = (".py", ".pyc", ".so")
    inner = [frozen.inner(path) for path in opened if path.startswith(f"{frozen.stdlib}/")]
    return tuple(sorted({module_name(path) for path in inner if path.endswith(suffixes)}))


def run_in_tree(recipe: Recipe, frozen: Frozen, agent: StagedAgent, workload: Workload, number: int) -> str:
    """Run one workload in the frozen tree, sandboxed as it will be in the image; return its stdout."""
    request = {
        "tree": str(frozen.tree),
        "app": str(agent.folder),
        "name": recipe.name,
        "version": recipe.version,
        "arch": frozen.arch,
        "python": frozen.python_version,
        "libdir": frozen.libdir,
        "network": recipe.network,
        "env": recipe.env,
        "argv": [*agent.argv],
        "args": [*workload.args],
    }
    with tempfile.TemporaryDirectory(prefix="rvbundle-trace-") as scratch:
        done = process.run(
            [sys.executable, "-m", "rvbundle.run_tree"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            cwd=Path(scratch),
            stdin=json.dumps(request).encode(),
            timeout=workload.timeout,
            check=False,
        )
    _raise_sandbox_error(done)
    explain_failure(done, workload, number, "the frozen tree")
    return done.stdout.decode("utf-8", "replace")


def _raise_sandbox_error(done: process.Finished) -> None:
    """Raise what kept the workload from starting at all."""
    _, marker, text = done.stderr.rpartition(run_tree.MARKER)
    if done.code == SandboxError.exit_code and marker:
        value = json.loads(text)
        raise SandboxError(value["message"], value["hint"].partition("\n")[0])


def explain_failure(done: process.Finished, workload: Workload, number: int, where: str) -> None:
    """Raise TraceError if a workload did not end with exit code 0 in time."""
    name = f"trace workload {number} ({' '.join(workload.args) or 'no arguments'})"
    if done.timed_out:
        raise TraceError(
            f"{name} did not end within {workload.timeout:g} s in {where}{_tail(done)}",
            "give it less to do, or raise `timeout` in its [[trace]]",
        )
    if done.code:
        signalled = done.code < 0
        how = f"was ended by {_signal(-done.code)}" if signalled else f"ended with exit code {done.code}"
        missing = _MODULE_MISSING.findall(done.stderr)
        hint = f"add what provides {missing[-1]} to [python] requires" if missing else _WHERE_IT_RUNS
        raise TraceError(f"{name} {how} in {where}; it must end with 0{_tail(done)}", hint)


_MODULE_MISSING = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_WHERE_IT_RUNS = (
    "it starts in an empty working folder, without a network unless [run] says so; data files "
    "must be in [agent] include and be found through __file__"
)


def _tail(done: process.Finished) -> str:
    tail = done.tail()
    return f":\n{tail}" if tail else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def compare(expected: str, found: str, tolerance: float | None) -> str:
    """Return "" if two outputs are the same, else a few lines that show where they differ.

    With a tolerance the texts between the numbers must be equal, and each number within that relative
    difference (math.isclose; nan equals nan).
    """
    if expected == found:
        return ""
    if tolerance is not None and _close(expected, found, tolerance):
        return ""
    lines = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "when traced", "now", lineterm="", n=0
    )
    shown = [line[:200] for line in lines][:8]
    return "\n".join(f"    {line}" for line in shown) or "    (only line ends differ)"


def _close(expected: str, found: str, tolerance: float) -> bool:
    if _NUMBER.split(expected) != _NUMBER.split(found):
        return False
    pairs = zip(_NUMBER.findall(expected), _NUMBER.findall(found), strict=True)
    return all(
        math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=0.0)
        or (math.isnan(float(a)) and math.isnan(float(b)))
        for a, b in pairs
    )


def digest(trace: Trace) -> str:
    """Return a SHA-256 (hex) of a record."""
    return hashlib.sha256(dumps(trace, {}).encode()).hexdigest()
