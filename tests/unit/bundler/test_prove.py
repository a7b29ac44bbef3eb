from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rvbundle import process, trace
from rvbundle import prove as proving
from rvbundle.freeze import Frozen
from rvbundle.prove import prove
from rvbundle.recipe import Workload
from rvbundle.stage_agent import StagedAgent
from rvbundle.trace import Trace, WorkloadTrace
from rvbundle_runtime.errors import ProveError, TraceError
from rvbundle_runtime.families import Family
from rvbundle_runtime.processor import Processor

from .test_split import RECIPE, frozen

FAST = Family("avx2", ("avx2",), {"ATEN_CPU_CAPABILITY": "avx2"}, ("AVX512F",), "GenuineIntel")
SLOW = Family("baseline", ("sse4_2",), {"ATEN_CPU_CAPABILITY": "default"}, ())


@pytest.mark.parametrize(
    ("processor", "env"),
    [
        (Processor("GenuineIntel", frozenset({"avx2", "sse4_2"})), {"ATEN_CPU_CAPABILITY": "avx2"}),
        (
            Processor("GenuineIntel", frozenset({"avx2", "sse4_2", "avx512f"})),
            {"ATEN_CPU_CAPABILITY": "avx2", "NPY_DISABLE_CPU_FEATURES": "AVX512F"},
        ),
        (Processor("AuthenticAMD", frozenset({"avx2", "sse4_2"})), {"ATEN_CPU_CAPABILITY": "default"}),
        (Processor(), {}),
    ],
    ids=["first", "held back", "second", "none"],
)
def test_kernels_of_the_comparison(
    monkeypatch: pytest.MonkeyPatch, processor: Processor, env: dict[str, str]
) -> None:
    """Those that `run` without a cold pack will use here."""
    monkeypatch.setattr(trace, "read_processor", lambda: processor)
    chosen, recorded = proving._kernels(Trace((), families=(FAST, SLOW)), frozen())
    assert chosen == env
    assert recorded["ATEN_CPU_CAPABILITY"] == "avx2"
    assert proving._kernels(Trace(()), frozen()) == ({}, {})


def test_kernels_under_an_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's processor says nothing of them."""
    monkeypatch.setattr(trace, "read_processor", lambda: pytest.fail("of this machine"))
    generic = Family("generic", (), {"OPENBLAS_CORETYPE": "RISCV64_GENERIC"}, ())
    emulated = replace(frozen(), arch="riscv64", emulators=Path("/e"))
    env = {"OPENBLAS_CORETYPE": "RISCV64_GENERIC"}
    assert proving._kernels(Trace((), families=(generic,)), emulated) == (env, env)
    vectors = Family("zvl256b", ("v",), {"OPENBLAS_CORETYPE": "RISCV64_ZVL256B"}, (), vlen=256)
    assert proving._kernels(Trace((), families=(vectors, generic)), emulated) == (env, env)


def test_a_record_of_another_processor(attempt: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs are of other kernels: then what the tree prints with those of the image decides."""
    slow = {"ATEN_CPU_CAPABILITY": "default"}
    monkeypatch.setattr(proving, "_kernels", lambda *_: (slow, {"ATEN_CPU_CAPABILITY": "avx2"}))
    attempt(["loss 0.5\n", "anything\n", "loss 2.001\n"], again="loss 0.5\n")
    with pytest.raises(ProveError):
        attempt(["loss 0.7\n", "anything\n", "loss 2.001\n"], again="loss 0.5\n")


WORKLOADS = (
    Workload(("a",), True, None, 1.0),
    Workload((), False, None, 1.0),
    Workload(("c",), True, 0.1, 1.0),
)
TRACE = Trace(tuple(WorkloadTrace(w.args, (), (), f"loss {n}.0\n") for n, w in enumerate(WORKLOADS)))
SAID = ["loss 0.0\n", "anything\n", "loss 2.001\n"]


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that proves, given what workloads print in the image and again in the tree."""
    image = tmp_path / "x.rvb"
    image.write_bytes(b"image")

    def run(said: list[str], again: str = "") -> None:
        def in_image(alone: Path, _: Frozen, workload: Workload, number: int, scratch: Path) -> str:
            assert [p.name for p in alone.parent.iterdir()] == ["x.rvb"]  # no cold pack beside it
            assert alone.read_bytes() == b"image"
            return said[number - 1]

        monkeypatch.setattr(proving, "_run", in_image)
        monkeypatch.setattr(proving, "run_again", lambda *_: again)
        agent = StagedAgent(Path("/a"), (), ())
        value: Any = replace(RECIPE, workloads=WORKLOADS)
        prove(value, frozen(), agent, TRACE, image)

    return run


def test_all_as_traced(attempt: Callable[..., None], tmp_path: Path) -> None:
    attempt(SAID)
    assert [p.name for p in tmp_path.iterdir()] == ["x.rvb"]


def test_another_output_than_in_the_tree(attempt: Callable[..., None]) -> None:
    with pytest.raises(ProveError) as caught:
        attempt(["loss 9.0\n", *SAID[1:]], again="loss 0.0\n")
    assert caught.value.message.startswith(
        "trace workload 1 (a) prints something else in the finished image than in the tree it was made of:\n"
    )
    assert caught.value.message.endswith("    -loss 0.0\n    +loss 9.0")


def test_another_output_each_time(attempt: Callable[..., None]) -> None:
    with pytest.raises(TraceError) as caught:
        attempt([*SAID[:2], "loss 9.0\n"], again="loss 5.0\n")
    assert caught.value.message.startswith(
        "trace workload 3 (c) prints something else each time, in the same tree too:\n"
    )


def test_the_first_difference_is_told(attempt: Callable[..., None]) -> None:
    """Workloads run side by side; what is said of them does not depend on which ends first."""
    with pytest.raises(ProveError) as caught:
        attempt(["x", "y", "z"], again="loss 0.0\n")
    assert caught.value.message.startswith("trace workload 1 (a) ")


@pytest.mark.parametrize(
    ("place", "which", "limit", "variable"),
    [
        (frozen(), [], 1.0, None),
        (
            replace(frozen(), arch="riscv64", emulators=Path("/emulators")),
            ["--payload", "riscv64"],
            20.0,
            "/emulators",
        ),
    ],
    ids=["native", "emulated"],
)
def test_a_workload_in_the_image(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Frozen,
    which: list[str],
    limit: float,
    variable: str | None,
) -> None:
    """The payload that is proven is named, and gets the emulators and the time that it was traced with."""
    seen: list[tuple[list[str], dict[str, Any]]] = []

    def run(command: list[Any], **options: Any) -> process.Finished:
        seen.append(([str(word) for word in command], options))
        return process.Finished("cmd", -9, b"", "", timed_out=True)

    monkeypatch.delenv(trace.EMULATORS_VARIABLE, raising=False)
    monkeypatch.setattr(process, "run", run)
    with pytest.raises(ProveError) as caught:
        proving._run(tmp_path / "x.rvb", place, WORKLOADS[0], 1, tmp_path)
    assert caught.value.message == (
        f"trace workload 1 (a) did not end within {limit:g} s in the finished image"
    )
    ((command, options),) = seen
    assert command[1:] == ["-m", "rvbundle", "run", *which, f"{tmp_path}/x.rvb", "--", "a"]
    assert options["timeout"] == limit
    assert options["env"].get(trace.EMULATORS_VARIABLE) == variable
    assert options["env"]["RVBUNDLE_CACHE"] == f"{tmp_path}/cache"
