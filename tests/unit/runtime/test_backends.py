"""The choice of backends: on recorded machines, and what is made of each row."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from rvbundle_runtime import backends, families, launchers, nativefiles, table
from rvbundle_runtime.backends import Setting, choose
from rvbundle_runtime.decision import Decision, Situation, Wanted, dumps, loads
from rvbundle_runtime.errors import HostError, UsageError
from rvbundle_runtime.host import Host
from rvbundle_runtime.processor import Cluster, Processor
from rvbundle_runtime.selection import Launch, native_launch
from rvbundle_runtime.store import PayloadInfo

from . import machines
from .test_plan import HOST, INFO

TABLE = backends.load_table()
XEON = Processor("GenuineIntel", frozenset("avx2 fma bmi1 bmi2 f16c movbe sse4_2 popcnt".split()))
WIDE = replace(XEON, flags=XEON.flags | set("avx512f avx512vl avx512bw avx512dq avx512_bf16".split()))
V128 = Processor("", frozenset("imafdcv"), vlen=128)


def payload(arch: str, trimmed: bool = False, openblas: str = "0.3.29", **more: Any) -> PayloadInfo:
    """Return a payload with torch and numpy; a trimmed one has what an Intel processor has traced."""
    best = {"x86_64": XEON, "riscv64": replace(V128, vlen=256), "aarch64": Processor()}[arch]
    traced = families.to_trace(arch, best, ()) if trimmed else ()
    blas = {} if arch == "x86_64" else {"openblas": openblas, "reference": "3.12.1"}
    return replace(INFO, arch=arch, families=traced, trimmed=trimmed, blas=blas, **more)


def on(host: Host, info: PayloadInfo, cold: bool = False, launch: Launch | None = None) -> Situation:
    return Situation(host, launch or native_launch(host), info, cold)


def this(processor: Processor, arch: str = "x86_64", count: int = 4, **more: Any) -> Host:
    return replace(HOST, arch=arch, processor=processor, usable=tuple(range(count)), **more)


def decide(situation: Situation, found: Decision | None = None, **wanted: Any) -> Decision:
    return choose(TABLE, situation, Wanted(**wanted), found)


def reason(decision: Decision, what: str) -> str:
    (found,) = [choice.reason for choice in decision.choices if choice.what == what]
    return found


@pytest.mark.parametrize("name", machines.ALL)
def test_plans_on_recorded_machines(name: str) -> None:
    machine = machines.load(name)
    host, expected = machines.to_host(machine), machine.expected["plan"]
    whole = decide(on(host, payload(machine.arch)))
    assert (whole.backend, whole.threads) == (expected["whole"], expected["threads"])
    assert decide(on(host, payload(machine.arch, trimmed=True), cold=True)).backend == expected["whole"]
    held = decide(on(host, payload(machine.arch, trimmed=True)))
    assert held.backend == expected["held"]
    assert not held.choices[0].warn
    reduced = decide(on(host, payload(machine.arch)), precision="bf16")
    assert reduced.backend == expected["bf16"]
    assert reduced.precision == ("bf16" if expected["bf16"] == "bf16" else "float32")
    if "wrong" in expected:
        assert decide(on(host, payload("riscv64", openblas="0.3.33"))).backend == expected["wrong"]


def test_every_row_is_complete_in_itself() -> None:
    """What one sets never reaches a payload of another architecture, and each has its reason and source."""
    x86 = {"ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE"}
    for row in TABLE.backends:
        assert row.reason
        assert row.source
        assert set(row.launchers) <= launchers.ALL.keys()
        if row.family:
            assert row.family in [family.name for family in families.of(row.arch)]
        core = row.env.get("OPENBLAS_CORETYPE", "").upper()
        assert not core or row.arch != "riscv64" or core.startswith("RISCV64_")
    generic = decide(on(this(Processor(), "riscv64"), payload("riscv64", trimmed=True)))
    assert generic.env["OPENBLAS_CORETYPE"] == "RISCV64_GENERIC"
    assert "ATEN_CPU_CAPABILITY" not in generic.env
    any_ = decide(on(this(XEON), payload("x86_64")))
    assert not x86 & any_.env.keys()


def test_the_families_that_are_traced_are_those_of_rows() -> None:
    for arch in ("x86_64", "riscv64", "aarch64"):
        rows = {row.family for row in TABLE.backends if row.arch == arch} - {""}
        assert rows == {family.name for family in families.of(arch)}


def test_what_was_traced_counts() -> None:
    info = payload("x86_64", trimmed=True)
    without = decide(on(this(WIDE), info))
    assert (without.backend, without.env["ONEDNN_MAX_CPU_ISA"]) == ("avx2", "AVX2")
    assert reason(without, "backend") == "without a cold pack only kernels that were traced"
    with pytest.raises(
        HostError, match="--backend any can't be had: its kernels were not traced, and the cold"
    ):
        decide(on(this(WIDE), info), backend="any")
    assert decide(on(this(WIDE), info, cold=True), backend="aten-avx2").env == {"ATEN_CPU_CAPABILITY": "avx2"}


def test_an_image_of_another_table_is_held_to_what_it_has() -> None:
    strange = families.Family("avx1024", ("avx2",), {"X": "1"}, ())
    info = replace(payload("x86_64", trimmed=True), families=(strange,))
    made = decide(on(this(XEON), info))
    assert (made.backend, made.env) == ("avx1024", {"X": "1"})


def test_nothing_fits() -> None:
    made = decide(on(this(Processor("X", frozenset())), payload("x86_64", trimmed=True)))
    assert (made.backend, made.env, made.choices[0].warn) == ("any", {}, True)
    assert reason(made, "backend").startswith(
        "none that were traced fit: not avx2: this processor has no avx2"
    )


QEMU = Launch("x86_64", "qemu", "", "")


def test_emulated() -> None:
    board = this(Processor(), "riscv64")
    made = decide(on(board, payload("x86_64", trimmed=True), launch=QEMU))
    assert made.model
    assert (made.backend, made.model.option) == ("nehalem", "Nehalem")
    assert made.env["MKL_CBWR"] == "COMPATIBLE"
    other = decide(on(board, payload("x86_64", trimmed=True), launch=QEMU), backend="haswell")
    assert other.model
    assert (other.model.option, other.env["OPENBLAS_CORETYPE"]) == ("Haswell-noTSX", "Haswell")
    with pytest.raises(HostError, match="libraries run other code on AuthenticAMD"):
        decide(on(board, payload("x86_64", trimmed=True), launch=QEMU), backend="epyc")


def test_native_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never taken without a measurement, and has what its neighbour has beside it."""
    situation = on(this(Processor(), "riscv64"), payload("x86_64", trimmed=True), launch=QEMU)
    made, plain = decide(situation, backend="nehalem-native-blas"), decide(situation)
    assert (made.native_blas, plain.native_blas) == (True, False)
    assert (made.env, made.model) == (plain.env, plain.model)
    assert "nehalem-native-blas" in [row.name for row in backends.fitting(TABLE, situation)]
    lacking = "blas.so"
    monkeypatch.setattr(nativefiles, "path", lambda arch, name: "" if name == lacking else f"/{arch}/{name}")
    with pytest.raises(HostError, match=r"this installation of rvbundle has no blas.so for x86_64"):
        decide(situation, backend="nehalem-native-blas")
    lacking = "blasworker"
    with pytest.raises(HostError, match="this installation of rvbundle has no blasworker for riscv64"):
        decide(situation, backend="nehalem-native-blas")
    assert decide(situation).backend == "nehalem"


def test_box64_variables_are_the_emulators() -> None:
    board = this(Processor(), "riscv64")
    box64 = Launch("x86_64", "box64", "", "")
    made = decide(on(board, payload("x86_64"), launch=box64), backend="box64-avx")
    assert made.emulator_env == {"BOX64_AVX": "2"}
    assert not [name for name in made.env if name.startswith("BOX64")]


def test_the_reference_blas() -> None:
    board = this(V128, "riscv64")
    made = decide(on(board, payload("riscv64")), backend="reference")
    assert (made.library, made.env) == ("reference", {})
    bare = replace(payload("riscv64"), blas={})
    with pytest.raises(HostError, match="the payload has no reference BLAS"):
        decide(on(board, bare), backend="reference")


THREE_KINDS = (Cluster((2, 3), 1024), Cluster((1,), 600), Cluster((0,), 300))


@pytest.mark.parametrize(
    ("host", "threads", "why"),
    [
        (this(XEON), 0, "each library starts one for each processor that may be used"),
        (this(XEON, quota=1.5), 1, "the control group gives the time of 1.5"),
        (this(XEON, quota=0.2), 1, "the control group gives the time of 0.2"),
        (this(XEON, quota=8.0), 0, "each library starts one for each processor that may be used"),
        (
            this(XEON, clusters=(Cluster((0, 1)), Cluster((2, 3)))),
            2,
            "the fast ones of 4: threads wait for the slowest",
        ),
        (
            this(
                Processor(),
                "aarch64",
                clusters=(Cluster((2, 3), 1024), Cluster((1,), 600), Cluster((0,), 300)),
            ),
            3,
            "the fast ones of 4: threads wait for the slowest",
        ),
        (
            this(Processor(), "aarch64", clusters=(Cluster((0, 1)), Cluster((2, 3)))),
            0,
            "each library starts one for each processor that may be used",
        ),
    ],
    ids=["plain", "quota", "little", "more than there are", "hybrid", "big and little", "unknown"],
)
def test_threads_without_a_measurement(host: Host, threads: int, why: str) -> None:
    made = decide(on(host, payload(host.arch)))
    assert made.threads == threads
    assert reason(made, "threads") == why
    names = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    assert {name: made.env[name] for name in names & made.env.keys()} == (
        dict.fromkeys(names, str(threads)) if threads else {}
    )


@pytest.mark.parametrize(
    ("count", "quota", "expected"),
    [
        (1, None, [(1, "")]),
        (2, None, [(1, ""), (2, ""), (2, "passive")]),
        (8, None, [(1, ""), (2, ""), (4, ""), (8, ""), (8, "passive"), (4, "passive")]),
        (8, 2.7, [(1, ""), (2, ""), (2, "passive")]),
    ],
)
def test_threads_to_measure(count: int, quota: float | None, expected: list[tuple[int, str]]) -> None:
    found = backends.thread_settings(TABLE, this(XEON, count=count, quota=quota))
    assert [(setting.threads, setting.wait) for setting in found] == expected


def test_overrides_that_there_are_not() -> None:
    with pytest.raises(UsageError) as caught:
        decide(on(this(XEON), payload("x86_64")), backend="haswel")
    assert caught.value.message == (
        "run: --backend haswel: expected auto or one of any, avx2, aten-avx2, onednn-off, baseline, bf16, "
        "bf16-fpmath (those for a payload of x86_64)"
    )
    with pytest.raises(UsageError, match="those for a payload of x86_64 on qemu"):
        decide(on(this(Processor(), "riscv64"), payload("x86_64"), launch=QEMU), backend="any")


def test_a_backend_of_another_precision() -> None:
    situation = on(this(WIDE), payload("x86_64"))
    with pytest.raises(HostError, match="its precision is bf16, and --precision says float32"):
        decide(situation, backend="bf16", precision="float32")
    assert decide(situation, backend="bf16").precision == "bf16"


@pytest.mark.parametrize(
    ("processor", "recipe", "line", "precision", "why"),
    [
        (WIDE, "float32", None, "float32", "the recipe asks for nothing else"),
        (WIDE, "float32", "bf16", "bf16", "--precision says so"),
        (WIDE, "bf16", None, "bf16", "the recipe says so"),
        (WIDE, "bf16", "float32", "float32", "--precision says so"),
        (
            XEON,
            "bf16",
            None,
            "float32",
            "the recipe says bf16, but this processor has none of avx512_bf16, amx_bf16",
        ),
        (
            WIDE,
            "auto",
            None,
            "float32",
            "the recipe says auto: bf16 is taken once `rvbundle tune` has found it right and 10 % faster",
        ),
    ],
)
def test_precision(processor: Processor, recipe: str, line: str | None, precision: str, why: str) -> None:
    made = decide(on(this(processor), payload("x86_64", precision=recipe)), precision=line)
    assert made.precision == precision
    assert reason(made, "precision") == why
    assert ("RVBUNDLE_TORCH" in made.env) is (precision == "bf16")


def test_precision_that_no_library_has() -> None:
    made = decide(on(this(V128, "riscv64"), payload("riscv64")), precision="bf16")
    assert reason(made, "precision") == "--precision says bf16, but no library has it for this architecture"


def test_kernels_of_reduced_precision_were_not_traced() -> None:
    made = decide(on(this(WIDE), payload("x86_64", trimmed=True, precision="bf16")))
    assert (made.backend, made.precision) == ("avx2", "float32")
    assert reason(made, "precision").endswith("its kernels were not traced, and the cold pack is not here")


def test_what_was_measured_stays_but_for_what_is_asked() -> None:
    situation = on(this(WIDE), payload("x86_64"))
    row = next(row for row in TABLE.backends if row.name == "avx2")
    static = decide(situation)
    found = replace(
        backends.settle(TABLE, situation, row, Setting(1)),
        measured=True,
        choices=tuple(replace(choice, reason="measured") for choice in static.choices),
    )
    kept = decide(situation, found)
    assert (kept.backend, kept.threads, kept.measured) == ("avx2", 1, True)
    more = decide(situation, found, threads=3)
    assert (more.backend, more.threads, more.measured) == ("avx2", 3, False)
    assert (reason(more, "backend"), reason(more, "threads")) == ("measured", "--threads says so")
    other = decide(situation, found, backend="any")
    assert (other.backend, other.threads) == ("any", 0)


def test_json() -> None:
    made = decide(on(this(Processor(), "riscv64"), payload("x86_64", trimmed=True), launch=QEMU))
    for decision in (made, replace(made, native_blas=True)):
        text = dumps(decision, {"k": 1})
        assert loads(text, {"k": 1}) == decision
        assert loads(text, {"k": 2}) is None
    with pytest.raises(ValueError, match="expected whether matrices are multiplied natively"):
        loads(dumps(replace(made, native_blas=1), {}), {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 1, "key": {}}',
        '{"format": 1, "key": {}, "decision": {"model": null, "choices": []}}',
        '{"format": 1, "key": {}, "decision": {"model": 3, "choices": []}}',
        '{"format": 1, "key": {}, "decision": {"model": null, "choices": [{"what": 1}]}}',
    ],
)
def test_what_is_no_decision(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text, {})


def test_a_decision_with_a_variable_that_can_not_be() -> None:
    made = replace(decide(on(this(XEON), payload("x86_64"))), env={"A": "b\0c"})
    with pytest.raises(ValueError, match="expected texts"):
        loads(dumps(made, {}), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"typo": 1}, "backend any: .*typo"),
        ({"precision": "fp8"}, "backend any: precision 'fp8'"),
        ({"launchers": ["qemu"], "processor": "x"}, "backend any: no processor 'x' of qemu"),
        ({"native_blas": True}, "backend any: native_blas is for emulators"),
    ],
)
def test_a_row_that_is_wrong(change: dict[str, Any], message: str) -> None:
    row = {"name": "any", "arch": "x86_64", "launchers": ["native"], "reason": "r", "source": "s"}
    with pytest.raises(ValueError, match=message):
        backends.make_table({"backend": [{**row, **change}], "threads": []}, TABLE.processors)


def test_the_table_has_the_rows_that_it_has() -> None:
    assert len(TABLE.backends) == len(table.read()["backend"])
    assert asdict(TABLE.threads[0]) == {"count": "1", "wait": ""}
