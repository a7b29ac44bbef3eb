import contextlib
import json
import os
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rvbundle import freeze, native, process, trace
from rvbundle.pages import PageTrace
from rvbundle.process import Finished
from rvbundle.recipe import Workload
from rvbundle.stage_agent import StagedAgent
from rvbundle.trace import Trace, WorkloadTrace
from rvbundle_runtime.errors import TraceError
from rvbundle_runtime.families import Family
from rvbundle_runtime.processor import Processor

from .test_split import LIB, RECIPE, SITE, file, frozen

FAMILY = Family("avx2", ("avx2", "fma"), {"ATEN_CPU_CAPABILITY": "avx2"}, ("AVX512F",), "GenuineIntel")
TRACE = Trace(
    (
        WorkloadTrace(("--x",), ("torch",), ("a", "b"), "loss 0.5\n"),
        WorkloadTrace((), (), ("b", "c"), "ü\n"),
    ),
    ("c", "d"),
    {"lib.so": PageTrace(((1, 3), (7, 8)), ((0, 9),))},
    {"libx.so": "it has an executable stack"},
    (FAMILY,),
    "a note",
)


def test_first_workload_that_opened_a_file() -> None:
    assert TRACE.opened_by() == {"a": 1, "b": 1, "c": 2}


def test_round_trip() -> None:
    text = trace.dumps(TRACE, {"tree": "x"})
    assert trace.loads(text) == (TRACE, {"tree": "x"})
    assert trace.dumps(*trace.loads(text)) == text
    assert "ü" in text


def test_digest_is_of_the_record_alone() -> None:
    assert trace.digest(TRACE) == trace.digest(trace.loads(trace.dumps(TRACE, {"any": "key"}))[0])
    assert trace.digest(TRACE) != trace.digest(Trace(()))


def test_pages_are_written_as_short_texts() -> None:
    value = json.loads(trace.dumps(TRACE, {}))
    assert value["pages"] == {"lib.so": ["1-2 7", "0-8"]}
    assert value["families"] == [
        {
            "name": "avx2",
            "needs": ["avx2", "fma"],
            "env": {"ATEN_CPU_CAPABILITY": "avx2"},
            "numpy": ["AVX512F"],
            "vendor": "GenuineIntel",
            "vlen": 0,
        }
    ]


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "5", json.dumps({"format": 2})])
def test_no_record(text: str) -> None:
    with pytest.raises(ValueError):
        trace.loads(text)


@pytest.mark.parametrize(
    ("key", "item"),
    [
        ("format", 1),
        ("format", 3),
        ("format", "2"),
        ("workloads", [[]]),
        ("workloads", [{"args": []}]),
        ("workloads", 5),
        ("extra", 5),
        ("pages", []),
        ("pages", {"a": "1-2"}),
        ("pages", {"a": ["1-2"]}),
        ("pages", {"a": ["1-2", "x"]}),
        ("pages", {"a": ["5 1", "1-9"]}),
        ("pages", {"a": ["1", "1", "1"]}),
        ("pages", {"a": [[1, 2], [1, 9]]}),
        ("whole", []),
        ("families", [5]),
        ("families", [{}]),
        ("families", [{"name": "a", "needs": [], "env": [], "numpy": [], "vendor": ""}]),
        ("key", 5),
    ],
    ids=repr,
)
def test_bad_records(key: str, item: object) -> None:
    value = json.loads(trace.dumps(TRACE, {}))
    assert trace.loads(json.dumps(value))[0] == TRACE
    with pytest.raises(ValueError):
        trace.loads(json.dumps({**value, key: item}))
    del value[key]
    with pytest.raises(ValueError):
        trace.loads(json.dumps(value))


def test_modules_of_what_was_opened() -> None:
    paths = (
        f"{SITE}/torch/__init__.pyc",
        f"{SITE}/torch/_C.cpython-311-x.so",
        f"{SITE}/torch/data.bin",
        f"{LIB}/lib-dynload/_json.cpython-311-x.so",
        f"{LIB}/os.py",
        f"{LIB}/os.pyc",
        "usr/lib/x/libc.so.6",
        "usr/bin/python3.11",
    )
    assert trace._modules(frozen(), paths) == ("_json", "os", "torch", "torch._C")


def test_records_of_the_tracer(tmp_path: Path) -> None:
    bits = struct.pack("<8sQQQ", b"RVPAGES1", 4096, 16, 10)
    (tmp_path / "%usr%lib%liba.so.1").write_bytes(bits + b"\x05\x00" + b"\xff\x03")
    (tmp_path / "%usr%lib%libb.so").write_bytes(bits + b"\x00\x00" + b"\x0f\x00")
    (tmp_path / "skipped").write_text(
        "/usr/lib/libc.so.6\tit is small\n/usr/lib/x y.so\tits PT_LOADs overlap\n"
    )
    (tmp_path / "other").write_text("not ours")
    pages, whole = trace._read_records(tmp_path)
    assert pages == {
        "usr/lib/liba.so.1": PageTrace(((16, 17), (18, 19)), ((16, 26),)),
        "usr/lib/libb.so": PageTrace((), ((16, 20),)),
    }
    assert whole == {"usr/lib/libc.so.6": "it is small", "usr/lib/x y.so": "its PT_LOADs overlap"}


def test_no_records_of_the_tracer(tmp_path: Path) -> None:
    assert trace._read_records(tmp_path) == ({}, {})


PROCESSOR = Processor("GenuineIntel", frozenset("sse4_2 popcnt avx2 fma bmi1 bmi2 f16c movbe".split()))
DID = (WorkloadTrace((), (), ("a",), "out\n"),)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Let no workload really run; return the list of what is held to what in each pass over them."""
    calls: list[tuple[Any, ...]] = []

    def run_all(recipe: object, frozen: object, agent: object, watches: tuple[Any, ...]) -> object:
        calls.append(watches)
        return DID, frozenset({"torch.nn"})

    monkeypatch.setattr(trace, "_run_all", run_all)
    monkeypatch.setattr(trace, "_exercise", lambda *_: ("extra",))
    monkeypatch.setattr(native, "exists", lambda arch, name: (arch, name) == ("x86_64", "tracer.so"))
    return calls


def run_trace(frozen_: Any = None, **changes: Any) -> Trace:
    agent = StagedAgent(Path("/a"), (), ("/usr/bin/python3",))
    return trace.trace(replace(RECIPE, **changes), frozen_ or frozen(), agent, PROCESSOR)


def test_each_family_is_traced(runs: list[tuple[Any, ...]]) -> None:
    found = run_trace()
    assert [family.name for family in found.families] == ["avx2", "baseline"]
    assert (found.workloads, found.extra, found.note) == (DID, ("extra",), "")
    ((first, second),) = runs
    assert first.env["ATEN_CPU_CAPABILITY"] == "avx2"
    assert second.env["ATEN_CPU_CAPABILITY"] == "default"
    assert first.records == second.records is not None


@pytest.mark.parametrize("level", ["reachable", "none"])
def test_pages_are_not_traced_at_other_levels(runs: list[tuple[Any, ...]], level: str) -> None:
    assert run_trace(trim=level) == Trace(DID)
    ((watch,),) = runs
    assert (dict(watch.env), watch.records) == ({}, None)


def test_pages_are_not_traced_where_there_is_no_tracer(runs: list[tuple[Any, ...]]) -> None:
    assert run_trace(replace(frozen(), arch="s390x")) == Trace(DID)
    assert len(runs) == 1


def test_an_architecture_without_families_is_traced_once(
    runs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "exists", lambda *_: True)
    found = run_trace(replace(frozen(), arch="s390x"))
    ((watch,),) = runs
    assert (found.families, dict(watch.env)) == ((), {})
    assert watch.records is not None


@pytest.mark.parametrize(
    ("arch", "family", "numpy", "env"),
    [
        ("riscv64", "generic", (), {"OPENBLAS_CORETYPE": "RISCV64_GENERIC", "OPENSSL_riscvcap": "rv64gc"}),
        ("aarch64", "armv8", ("ASIMDHP",), {"OPENBLAS_CORETYPE": "ARMV8", "ATEN_CPU_CAPABILITY": "default"}),
    ],
)
def test_another_architecture_is_traced_once(
    runs: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    family: str,
    numpy: tuple[str, ...],
    env: dict[str, str],
) -> None:
    """With the kernels that any processor of it can run; its own numpy says what else it has."""
    monkeypatch.setattr(native, "exists", lambda *_: True)
    monkeypatch.setattr(trace, "_in_tree", lambda *_: Finished("cmd", 0, b"ASIMDHP SVE2\n", ""))
    found = run_trace(replace(frozen(), arch=arch, emulators=Path("/e")))
    ((watch, *held_back),) = runs
    assert [(f.name, f.numpy) for f in found.families] == [(family, numpy)]
    assert dict(watch.env).items() >= env.items()
    # Natively numpy is told not to use what the emulated processor has: then it runs other code.
    off = [{**watch.env, "NPY_DISABLE_CPU_FEATURES": " ".join(numpy)}] if numpy else []
    assert [dict(w.env) for w in held_back] == off


def test_an_agent_that_can_not_be_watched(
    runs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs, but not under the tracer: its libraries stay whole, and the build says so."""

    def run_all(recipe: object, frozen: object, agent: object, watches: tuple[Any, ...]) -> object:
        runs.append(watches)
        if watches[0].records is not None:
            raise TraceError("it was ended by SIGSEGV")
        return DID, frozenset()

    monkeypatch.setattr(trace, "_run_all", run_all)
    assert run_trace() == Trace(
        DID, note="the workloads fail while their pages are watched; libraries stay whole"
    )
    assert len(runs) == 2


def test_an_agent_that_fails_with_and_without_a_watch(
    runs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_all(recipe: object, frozen: object, agent: object, watches: tuple[Any, ...]) -> object:
        raise TraceError("watched" if watches[0].records is not None else "alone")

    monkeypatch.setattr(trace, "_run_all", run_all)
    with pytest.raises(TraceError) as caught:
        run_trace()
    assert caught.value.message == "alone"


def test_what_is_exercised(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the patterns of [keep] mean, and the top-level names of what was imported."""
    seen: list[Any] = []
    monkeypatch.setattr(trace, "_in_tree", lambda *words: seen.append(words))
    files = [
        file(f"{SITE}/{name}.pyc", freeze.BYTECODE)
        for name in ("torch/__init__", "torch/fft", "torch/nn/__init__", "torch/nn/x", "numpy/__init__")
    ]
    monkeypatch.setattr(
        trace, "FileWatch", lambda _: contextlib.nullcontext(SimpleNamespace(opened={"b", "a"}))
    )
    found = trace._exercise(
        replace(RECIPE, keep_modules=("torch.nn", "torch.f*")),
        frozen(*files),
        StagedAgent(Path("/a"), (), ("/usr/bin/python3",)),
        frozenset({"torch.fft", "numpy"}),
        (trace._Watch(), trace._Watch({"A": "1"})),
    )
    assert found == ("a", "b")
    assert {words[:2] for *_, words, _, _ in seen} == {("/usr/bin/python3", "/trace/exercise.py")}
    asked = {
        "modules": ["torch", "torch.fft", "torch.nn", "torch.nn.x"],
        "traced": ["numpy", "torch"],
        "measure": "/trace/measure",
    }
    requests = [(json.loads(words[2]), dict(watch.env)) for *_, words, _, watch in seen]
    assert sorted(requests, key=str) == sorted(
        [({**asked, "errors": True}, {}), ({**asked, "errors": False}, {"A": "1"})], key=str
    )
    assert {timeout for *_, timeout, _ in seen} == {300.0}


WORKLOAD = Workload(("--n", "3"), True, None, 2.5)


def test_success_is_no_failure() -> None:
    trace.explain_failure(Finished("cmd", 0, b"", "noise"), WORKLOAD, 1, "the frozen tree", 2.5)


@pytest.mark.parametrize(
    ("done", "workload", "message", "hint"),
    [
        (
            Finished("cmd", 3, b"", "a\nlast\n"),
            WORKLOAD,
            "trace workload 2 (--n 3) ended with exit code 3 in the frozen tree; it must end with 0:\n"
            "    a\n    last",
            "it starts in an empty working folder",
        ),
        (
            Finished("cmd", -11, b"", ""),
            WORKLOAD,
            "trace workload 2 (--n 3) was ended by SIGSEGV in the frozen tree; it must end with 0",
            "it starts in an empty working folder",
        ),
        (
            Finished("cmd", -9, b"", "slow\n", timed_out=True),
            Workload((), True, None, 2.5),
            "trace workload 2 (no arguments) did not end within 2.5 s in the frozen tree:\n    slow",
            "give it less to do, or raise `timeout` in its [[trace]]",
        ),
    ],
    ids=["exit code", "signal", "timeout"],
)
def test_failures(done: Finished, workload: Workload, message: str, hint: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace.explain_failure(done, workload, 2, "the frozen tree", 2.5)
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


EMULATED = replace(frozen(), arch="riscv64", emulators=Path("/emulators"))


@pytest.mark.parametrize(
    ("place", "limit", "variable"),
    [(frozen(), 2.5, None), (EMULATED, 50.0, "/emulators")],
    ids=["native", "emulated"],
)
def test_a_workload_gets_its_time(
    monkeypatch: pytest.MonkeyPatch, place: freeze.Frozen, limit: float, variable: str | None
) -> None:
    """That of the recipe is for this machine; what is said of one that hangs is the time that it had."""
    seen: list[dict[str, Any]] = []

    def run(command: object, **options: Any) -> Finished:
        seen.append(options)
        return Finished("cmd", -9, b"", "", timed_out=True)

    monkeypatch.delenv(trace.EMULATORS_VARIABLE, raising=False)
    monkeypatch.setattr(process, "run", run)
    agent = StagedAgent(Path("/a"), (), ("/usr/bin/python3", "/app/play.py"))
    with pytest.raises(TraceError) as caught:
        trace._run_in_tree(RECIPE, place, agent, WORKLOAD, 1, trace._Watch(processor="rv64,v=false"))
    assert f"did not end within {limit:g} s in the frozen tree" in caught.value.message
    (options,) = seen
    assert options["timeout"] == limit
    assert options["env"].get(trace.EMULATORS_VARIABLE) == variable
    request = json.loads(options["stdin"])
    assert (request["arch"], request["argv"]) == (
        place.arch,
        ["/usr/bin/python3", "/app/play.py", "--n", "3"],
    )
    assert request["processor"] == "rv64,v=false"


@pytest.mark.parametrize(
    ("place", "limit"), [(frozen(), 300.0), (EMULATED, 6000.0)], ids=["native", "emulated"]
)
def test_what_is_exercised_gets_its_time(
    monkeypatch: pytest.MonkeyPatch, place: freeze.Frozen, limit: float
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(trace, "_in_tree", lambda *words: seen.append(words))
    monkeypatch.setattr(trace, "FileWatch", lambda _: contextlib.nullcontext(SimpleNamespace(opened=set())))
    trace._exercise(RECIPE, place, StagedAgent(Path("/a"), (), ()), frozenset(), (trace._Watch(),))
    ((*_, timeout, _),) = seen
    assert timeout == limit


def printed(*texts: str) -> Trace:
    return Trace(tuple(WorkloadTrace((), (), (), text) for text in texts))


THREE = replace(
    RECIPE,
    workloads=(
        Workload(("a",), True, None, 1.0),
        Workload(("b",), False, None, 1.0),
        Workload((), True, 1e-3, 1.0),
    ),
)


@pytest.mark.parametrize(
    "found", [("x\n", "y\n", "loss 1.0\n"), ("x\n", "other\n", "loss 1.0001\n")], ids=["same", "within"]
)
def test_another_architecture_prints_the_same(found: tuple[str, ...]) -> None:
    trace.check_same(THREE, EMULATED, printed("x\n", "y\n", "loss 1.0\n"), printed(*found))


@pytest.mark.parametrize(
    ("found", "name", "shown"),
    [
        (("z\n", "y\n", "loss 1.0\n"), "trace workload 1 (a)", "    -x\n    +z"),
        (("x\n", "y\n", "loss 1.1\n"), "trace workload 3 (no arguments)", "    -loss 1.0\n    +loss 1.1"),
        (("z\n", "y\n", "loss 1.1\n"), "trace workload 1 (a)", "    -x\n    +z"),
    ],
    ids=["text", "beyond the tolerance", "both"],
)
def test_another_architecture_prints_something_else(found: tuple[str, ...], name: str, shown: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace.check_same(THREE, EMULATED, printed("x\n", "y\n", "loss 1.0\n"), printed(*found))
    assert caught.value.message.startswith(f"{name} prints something else on riscv64:\n")
    assert caught.value.message.endswith(shown)
    assert caught.value.hint == (
        "other versions and kernels round otherwise: set `tolerance` in its [[trace]] for numbers that may "
        "differ, or golden = false"
    )


def small_tree(folder: Path) -> freeze.Frozen:
    """Return a foreign tree on disk: a module, a program that runs, a link."""
    place = folder / "tree"
    (place / SITE).mkdir(parents=True)
    (place / f"{SITE}/a.pyc").write_bytes(b"code of a")
    (place / f"{SITE}/b.pyc").write_bytes(b"code of b")
    (place / "usr/bin").mkdir()
    (place / "usr/bin/x").write_bytes(b"program")
    (place / "usr/bin/x").chmod(0o755)
    (place / "bin").symlink_to("usr/bin")
    (folder / "frozen.json").write_text("{}")
    return replace(EMULATED, folder=folder)


def test_emulated_workloads_have_a_tree_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run side by side, and what one opens is not taken for what another does."""
    both = threading.Barrier(2, timeout=60)
    trees: list[Path] = []

    def run(
        recipe: object, place: freeze.Frozen, agent: object, workload: Workload, number: int, watch: object
    ) -> str:
        assert os.readlink(place.tree / "bin") == "usr/bin"
        assert os.access(place.tree / "bin/x", os.X_OK)
        assert (place.arch, place.emulators) == ("riscv64", EMULATED.emulators)
        trees.append(place.tree)
        both.wait()
        (place.tree / SITE / f"{workload.args[0]}.pyc").read_bytes()
        both.wait()
        return workload.args[0]

    monkeypatch.setattr(trace, "_run_in_tree", run)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    recipe = replace(RECIPE, workloads=tuple(Workload((n,), True, None, 1.0) for n in "ab"))
    place = small_tree(tmp_path)
    records, modules = trace._run_all(recipe, place, StagedAgent(Path("/a"), (), ()), (trace._Watch(),))
    assert [(r.args, r.modules, r.opened, r.stdout) for r in records] == [
        (("a",), ("a",), (f"{SITE}/a.pyc",), "a"),
        (("b",), ("b",), (f"{SITE}/b.pyc",), "b"),
    ]
    assert modules == {"a", "b"}
    assert len({place.tree, *trees}) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen.json", "tree"]


def test_no_more_runs_at_once_than_there_are_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workloads, three families of kernels; what counts is what a workload prints with the first."""
    running, most, lock = [0], [0], threading.Lock()
    three = tuple(trace._Watch({"N": str(n)}) for n in range(3))

    def run(*given: Any) -> str:
        workload, watch = given[3], given[5]
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return f"{workload.args[0]}{watch.env['N']}"

    monkeypatch.setattr(trace, "_run_in_tree", run)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    recipe = replace(RECIPE, workloads=tuple(Workload((n,), True, None, 1.0) for n in "ab"))
    records, _ = trace._run_all(recipe, small_tree(tmp_path), StagedAgent(Path("/a"), (), ()), three)
    assert [record.stdout for record in records] == ["a0", "b0"]
    assert most == [2]


def test_a_workload_that_fails_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> str:
        raise TraceError("it failed")

    monkeypatch.setattr(trace, "_run_in_tree", run)
    place = small_tree(tmp_path)
    with pytest.raises(TraceError):
        trace._run_all(RECIPE, place, StagedAgent(Path("/a"), (), ()), (trace._Watch(),))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen.json", "tree"]


def test_native_workloads_run_in_the_tree_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees: list[Path] = []
    monkeypatch.setattr(trace, "_run_in_tree", lambda *words: trees.append(words[1].tree) or "")
    place = replace(small_tree(tmp_path), emulators=None)
    trace._run_all(RECIPE, place, StagedAgent(Path("/a"), (), ()), (trace._Watch(),))
    assert trees == [tmp_path / "tree"]


@pytest.mark.parametrize(
    ("done", "found"),
    [(Finished("", 0, b"\n", ""), ()), (Finished("", 0, b"NEON ASIMDHP\n", ""), ("NEON", "ASIMDHP"))],
    ids=["no numpy", "numpy"],
)
def test_kernels_of_a_foreign_numpy(
    monkeypatch: pytest.MonkeyPatch, done: Finished, found: tuple[str, ...]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(trace, "_in_tree", lambda *words: seen.append(words) or done)
    assert trace._emulated_dispatch(RECIPE, EMULATED, StagedAgent(Path("/a"), (), ())) == found
    ((*_, words, timeout, _),) = seen
    assert (words[0], timeout) == ("/usr/bin/python3", 6000.0)


def test_a_foreign_tree_in_which_python_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_in_tree", lambda *_: Finished("", 127, b"", "no such file\n"))
    with pytest.raises(TraceError) as caught:
        trace._emulated_dispatch(RECIPE, EMULATED, StagedAgent(Path("/a"), (), ()))
    assert caught.value.message == "Python does not run in the tree for riscv64:\n    no such file"
