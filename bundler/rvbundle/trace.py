"""The trace stage: run every workload once in the frozen tree and record what it used."""

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rvbundle import constants, native, process, run_tree
from rvbundle.filewatch import FileWatch
from rvbundle.freeze import Frozen, module_name, modules_matching
from rvbundle.kernelruns import KernelRun, kernel_runs
from rvbundle.pages import PageTrace, dump_runs, load_runs, parse_record
from rvbundle.recipe import Recipe, Workload
from rvbundle.stage_agent import StagedAgent
from rvbundle_runtime import families as families_
from rvbundle_runtime import measuring
from rvbundle_runtime.emulators import signal_name
from rvbundle_runtime.errors import HostError, SandboxError, TraceError
from rvbundle_runtime.families import Family
from rvbundle_runtime.golden import compare
from rvbundle_runtime.host import EMULATORS_VARIABLE, read_processor
from rvbundle_runtime.measured import SCRIPTS
from rvbundle_runtime.processor import Processor

_FORMAT = 2
_TRACER, _RECORDS, _EXERCISE = "/trace/tracer.so", "/trace/pages", "/trace/exercise.py"  # as in traceall.c
_MEASURE = "/trace/measure"  # a folder
_TRACE_ALL, _PRELOAD = "/trace/traceall.so", "/etc/ld.so.preload"
_PRELOAD_LIST = "preload.txt"  # among the records, whose names begin with %
_NOT_BY_PAGE = "the workloads fail while their pages are watched; libraries stay whole"


@dataclass(frozen=True)
class WorkloadTrace:
    """What one workload did: the tree's files that it opened, the modules that these are, its output."""

    args: tuple[str, ...]
    modules: tuple[str, ...]
    opened: tuple[str, ...]
    stdout: str


@dataclass(frozen=True)
class Trace:
    """All workloads' records, once for every CPU kernel family (the outputs are those of the first).

    `extra` are files opened while errors were provoked and the modules of [keep] were imported; `pages`
    {path of a library: its pages}; `whole` {path: why its pages could not be watched}; `note` is not ""
    where no pages could be watched at all.
    """

    workloads: tuple[WorkloadTrace, ...]
    extra: tuple[str, ...] = ()
    pages: Mapping[str, PageTrace] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    families: tuple[Family, ...] = ()
    note: str = ""

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
    value["pages"] = {
        path: [dump_runs(pages.touched), dump_runs(pages.watched)] for path, pages in trace.pages.items()
    }
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
        pages = {path: PageTrace(*map(load_runs, texts)) for path, texts in value["pages"].items()}
        families = tuple(families_.from_json(family) for family in value["families"])
        whole = {str(path): str(why) for path, why in value["whole"].items()}
        return (
            Trace(workloads, tuple(value["extra"]), pages, whole, families, value["note"]),
            dict(value["key"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no trace record: {error}") from None


@dataclass(frozen=True)
class _Watch:
    """How a run in the tree is held to a family of kernels, and where records of its pages go.

    `processor` is the one to emulate (machine.Model's option), "" for the usual one.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    records: Path | None = None
    processor: str = ""


def trace(recipe: Recipe, frozen: Frozen, agent: StagedAgent, processor: Processor) -> Trace:
    """Run the workloads; raises TraceError for one that fails or hangs."""
    if recipe.trim != "traced" or not native.exists(frozen.arch, native.TRACER):
        plain, _ = _run_all(recipe, frozen, agent, (_Watch(),))
        return Trace(plain)
    dispatch = frozen.numpy_dispatch
    if frozen.emulators and any(f.numpy for f in families_.to_trace(frozen.arch, processor, None)):
        dispatch = _emulated_dispatch(recipe, frozen, agent)
    runs = kernel_runs(frozen, processor, dispatch)
    with tempfile.TemporaryDirectory(prefix="rvbundle-pages-") as scratch:
        records = Path(scratch)
        # Written once: runs side by side must never find it half there.
        (records / _PRELOAD_LIST).write_text(f"{_TRACE_ALL}\n")
        constants.write_lists(frozen.tree, frozen.files, records)
        watched = runs.watched or (KernelRun({}),)
        watches = tuple(_Watch(run.env, records, run.processor) for run in watched)
        try:
            workloads, modules = _run_all(recipe, frozen, agent, watches)
        except TraceError:
            # Is it the agent, or that it can't be watched (it takes SIGSEGV for itself by a system call)?
            workloads, _ = _run_all(recipe, frozen, agent, (_Watch(),))
            return Trace(workloads, note=_NOT_BY_PAGE)
        extra = _exercise(recipe, frozen, agent, modules, watches)
        pages, whole = _read_records(records)
        return Trace(workloads, extra, pages, whole, runs.families)


# As inside/inventory.py finds it out on this machine.
_DISPATCH = """
try:
    from numpy._core._multiarray_umath import __cpu_dispatch__ as found
except ImportError:
    found = ()
print(*found)
"""


def _emulated_dispatch(recipe: Recipe, frozen: Frozen, agent: StagedAgent) -> tuple[str, ...]:
    """Return the processor features that a foreign tree's numpy picks kernels by; raises TraceError."""
    words = ("/usr/bin/python3", "-c", _DISPATCH)
    done = _in_tree(recipe, frozen, agent, words, time_limit(frozen, _EXERCISE_TIMEOUT), _Watch())
    _raise_sandbox_error(done)
    if done.code:
        raise TraceError(f"Python does not run in the tree for {frozen.arch}:\n{done.tail()}")
    return tuple(done.stdout.decode().split())


def processor_of(frozen: Frozen) -> Processor:
    """Return the processor that workloads of a tree run on: for a foreign one, what is sure of any."""
    return Processor() if frozen.emulators else read_processor()


def check_same(recipe: Recipe, frozen: Frozen, native: Trace, found: Trace) -> None:
    """Raise TraceError if a golden workload of another architecture prints something else than here."""
    for number, workload in enumerate(recipe.workloads, 1):
        if workload.golden:
            expected, other = (record.workloads[number - 1].stdout for record in (native, found))
            difference = compare(expected, other, workload.tolerance)
            if difference:
                raise TraceError(
                    f"{_name(workload, number)} prints something else on {frozen.arch}:\n{difference}",
                    "other versions and kernels round otherwise: set `tolerance` in its [[trace]] for "
                    "numbers that may differ, or golden = false",
                )


def _name(workload: Workload, number: int) -> str:
    return f"trace workload {number} ({' '.join(workload.args) or 'no arguments'})"


def _run_all(
    recipe: Recipe, frozen: Frozen, agent: StagedAgent, watches: tuple[_Watch, ...]
) -> tuple[tuple[WorkloadTrace, ...], frozenset[str]]:
    """Run every workload once per watch, those of one workload side by side; also return all modules."""
    numbered = list(enumerate(recipe.workloads, 1))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        if not frozen.emulators:
            records = [_run_workload(recipe, frozen, agent, w, n, watches, pool) for n, w in numbered]
        else:
            # Slow: side by side, each workload in a copy of the tree, so that what is opened can be told
            # apart.
            with ThreadPoolExecutor(len(numbered)) as waiting:
                records = list(
                    waiting.map(
                        lambda p: _run_in_copy(recipe, frozen, agent, p[1], p[0], watches, pool), numbered
                    )
                )
    return tuple(records), frozenset(name for record in records for name in record.modules)


def _run_workload(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    workload: Workload,
    number: int,
    watches: tuple[_Watch, ...],
    pool: ThreadPoolExecutor,
) -> WorkloadTrace:
    """Run a workload once per watch in `pool`; the output is that of the first."""

    def run(watch: _Watch) -> str:
        return _run_in_tree(recipe, frozen, agent, workload, number, watch)

    with FileWatch(frozen.tree) as seen:
        outputs = list(pool.map(run, watches))
    opened = tuple(sorted(seen.opened))
    return WorkloadTrace(workload.args, _modules(frozen, opened), opened, outputs[0])


def _run_in_copy(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    workload: Workload,
    number: int,
    watches: tuple[_Watch, ...],
    pool: ThreadPoolExecutor,
) -> WorkloadTrace:
    with tempfile.TemporaryDirectory(prefix="tree-", dir=frozen.folder) as scratch:
        shutil.copytree(frozen.tree, Path(scratch) / "tree", symlinks=True, copy_function=os.link)
        copy = replace(frozen, folder=Path(scratch))
        return _run_workload(recipe, copy, agent, workload, number, watches, pool)


def _exercise(
    recipe: Recipe, frozen: Frozen, agent: StagedAgent, modules: frozenset[str], watches: tuple[_Watch, ...]
) -> tuple[str, ...]:
    """Provoke errors, import what [keep] names, and do once per watch what `rvbundle tune` will do.

    Returns the files that this opened.
    """
    known = list(frozen.modules())
    kept = sorted({name for pattern in recipe.keep_modules for name in modules_matching(pattern, known)})
    traced = sorted({name.partition(".")[0] for name in modules})
    limit = time_limit(frozen, _EXERCISE_TIMEOUT)

    def run(watch: _Watch) -> None:
        first = watch == watches[0]
        request = {"modules": kept, "traced": traced, "measure": _MEASURE, "errors": first}
        words = ("/usr/bin/python3", _EXERCISE, json.dumps(request))
        _in_tree(recipe, frozen, agent, words, limit, watch)

    with FileWatch(frozen.tree) as seen, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(run, watches))
    return tuple(sorted(seen.opened))


_EXERCISE_TIMEOUT = 300.0  # seconds
_EMULATED_SLOWNESS = 20  # emulated programs take 10 to 20 times as long


def time_limit(frozen: Frozen, native: float) -> float:
    """Return after how many seconds a program of `frozen` is stopped, given the limit for a native one."""
    return native * (_EMULATED_SLOWNESS if frozen.emulators else 1)


def _read_records(folder: Path) -> tuple[dict[str, PageTrace], dict[str, str]]:
    pages, whole = {}, {}
    for path in sorted(folder.iterdir()):
        if path.name == "skipped":
            for line in path.read_text().splitlines():
                name, _, reason = line.partition("\t")
                whole[name.lstrip("/")] = reason
        elif path.name.startswith("%"):
            pages[path.name.replace("%", "/")[1:]] = parse_record(path.read_bytes())
    return pages, whole


def _modules(frozen: Frozen, opened: tuple[str, ...]) -> tuple[str, ...]:
    suffixes = (".py", ".pyc", ".so")
    inner = [frozen.inner(path) for path in opened if path.startswith(f"{frozen.stdlib}/")]
    return tuple(sorted({module_name(path) for path in inner if path.endswith(suffixes)}))


def run_again(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    workload: Workload,
    number: int,
    env: Mapping[str, str],
) -> str:
    """Run one workload in the frozen tree, sandboxed as it will be in the image; return its stdout.

    `env` are variables beside the recipe's. Raises TraceError.
    """
    return _run_in_tree(recipe, frozen, agent, workload, number, _Watch(env))


def _run_in_tree(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    workload: Workload,
    number: int,
    watch: _Watch,
) -> str:
    limit = time_limit(frozen, workload.timeout)
    done = _in_tree(recipe, frozen, agent, (*agent.argv, *workload.args), limit, watch)
    _raise_sandbox_error(done)
    explain_failure(done, workload, number, "the frozen tree", limit)
    return done.stdout.decode("utf-8", "replace")


def _in_tree(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    argv: tuple[str, ...],
    timeout: float,
    watch: _Watch,
) -> process.Finished:
    mounts = [[str(agent.folder), "/app", True]]
    if watch.records:
        mounts += [
            [str(native.library(frozen.arch, native.TRACER)), _TRACER, True],
            [str(native.library(frozen.arch, native.TRACE_ALL)), _TRACE_ALL, True],
            [str(watch.records), _RECORDS, False],
            [str(Path(__file__).parent / "inside" / "exercise.py"), _EXERCISE, True],
            *([f"{measuring.GUEST}/{name}", f"{_MEASURE}/{name}", True] for name in SCRIPTS),
            [str(watch.records / _PRELOAD_LIST), _PRELOAD, True],
        ]
    request = {
        "tree": str(frozen.tree),
        "mounts": mounts,
        "name": recipe.name,
        "version": recipe.version,
        "arch": frozen.arch,
        "python": frozen.python_version,
        "libdir": frozen.libdir,
        "network": recipe.network,
        "env": {**watch.env, **recipe.env},
        "argv": [*argv],
        "processor": watch.processor,
    }
    with tempfile.TemporaryDirectory(prefix="rvbundle-trace-") as scratch:
        return process.run(
            [sys.executable, "-m", "rvbundle.run_tree"],
            env=launcher_environment(frozen),
            cwd=Path(scratch),
            stdin=json.dumps(request).encode(),
            timeout=timeout,
            check=False,
        )


def launcher_environment(frozen: Frozen) -> dict[str, str]:
    """Return the environment for a child that runs programs of `frozen`."""
    env = process.own_environment()
    return {**env, EMULATORS_VARIABLE: str(frozen.emulators)} if frozen.emulators else env


def _raise_sandbox_error(done: process.Finished) -> None:
    """Raise what kept the workload from starting at all."""
    _, marker, text = done.stderr.rpartition(run_tree.MARKER)
    for error in (SandboxError, HostError):
        if done.code == error.exit_code and marker:
            value = json.loads(text)
            raise error(value["message"], value["hint"].partition("\n")[0])


def explain_failure(
    done: process.Finished, workload: Workload, number: int, where: str, limit: float
) -> None:
    """Raise TraceError if a workload did not end with exit code 0 within `limit` seconds."""
    name = _name(workload, number)
    if done.timed_out:
        raise TraceError(
            f"{name} did not end within {limit:g} s in {where}{_tail(done)}",
            "give it less to do, or raise `timeout` in its [[trace]]",
        )
    if done.code:
        signalled = done.code < 0
        how = f"was ended by {signal_name(-done.code)}" if signalled else f"ended with exit code {done.code}"
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


def digest(trace: Trace) -> str:
    """Return a SHA-256 (hex) of a record."""
    return hashlib.sha256(dumps(trace, {}).encode()).hexdigest()
