"""Plans of emulated runs."""

from dataclasses import replace

import pytest

from rvbundle_runtime import families
from rvbundle_runtime.emulation import BINFMT, PRELOAD
from rvbundle_runtime.host import Host
from rvbundle_runtime.machine import Model
from rvbundle_runtime.options import RunOptions
from rvbundle_runtime.plan import ColdPack, Plan, make_plan
from rvbundle_runtime.selection import choose_launch

from .models import V128, V256
from .test_plan import FAST, HOST, INFO, NO_PACK, ROOT, SLOW, choice
from .test_selection import BOX64, QEMU

BOARD = replace(HOST, emulators=(QEMU,), binfmt_denied="", cpus=(0, 1))
FOREIGN = replace(INFO, arch="x86_64", families=(FAST, SLOW), trimmed=True)
QEMU_INSIDE = "/run/rvbundle/emulator.d/qemu-x86_64"


def plan(host: Host = BOARD, pack: ColdPack = NO_PACK, **given: object) -> Plan:
    options = RunOptions("x.rvb", **given)  # type: ignore[arg-type]
    launch = choose_launch(host, ("x86_64",), options, "x.rvb")
    return make_plan(host, ROOT, FOREIGN, options, pack, launch)


def test_by_the_kernel() -> None:
    made = plan()
    assert made.emulation
    assert made.emulation.children == BINFMT
    assert made.command == made.argv == INFO.argv
    assert made.preload is None
    assert choice(made, "payload") == ("x86_64", "the image has none for this machine (riscv64)")
    assert choice(made, "emulator") == ("qemu 10.0.13", "/usr/bin/qemu-x86_64 passed its probe")
    assert choice(made, "processor")[0] == "Nehalem"
    assert choice(made, "children") == ("binfmt_misc", "the sandbox's user namespace has its own")
    assert "model name" in made.emulation.cpuinfo
    assert made.emulation.cpuinfo.count("processor") == 2
    assert not made.emulation.native


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (
            replace(BOARD, binfmt_denied="the kernel has none"),
            "no binfmt_misc in user namespaces: the kernel has none",
        ),
        (
            replace(BOARD, uid=0, namespaces_denied="they are off"),
            "without a user namespace binfmt_misc would be the whole machine's",
        ),
    ],
    ids=["older kernel", "root without namespaces"],
)
def test_by_the_preload(host: Host, reason: str) -> None:
    made = plan(host)
    assert made.emulation
    assert made.emulation.children == PRELOAD
    assert made.command == (QEMU_INSIDE, "-cpu", "Nehalem", "-0", INFO.argv[0], *INFO.argv)
    assert made.preload == ("/usr/lib/rvbundle/guard.so", "/run/rvbundle/emulate.so")
    assert choice(made, "children") == ("preload", reason)
    assert made.emulation.library.endswith("/rvbundle_runtime/native/x86_64/emulate.so")  # the guest's
    assert made.emulation.starter.endswith("/rvbundle_runtime/native/riscv64/starter")  # the host's


def test_without_a_sandbox() -> None:
    made = plan(sandbox=False)
    assert made.emulation
    program = f"{ROOT}/usr/bin/python3"
    assert made.command[:8] == (
        *("/usr/bin/qemu-x86_64", "-cpu", "Nehalem", "-L", ROOT, "-0", program, program),
    )
    assert made.env["LD_PRELOAD"] == f"{ROOT}/usr/lib/rvbundle/guard.so:{made.emulation.library}"
    assert made.env["LD_LIBRARY_PATH"] == f"{ROOT}/{INFO.libdir}"
    assert (made.preload, made.emulation.cpuinfo) == (None, "")
    assert choice(made, "children") == ("preload", "binfmt_misc needs the sandbox")


@pytest.mark.parametrize(
    ("denied", "children"),
    [
        ("", ("binfmt_misc", "the sandbox's user namespace has its own")),
        (
            "x",
            (
                "emulator",
                "it starts all but scripts by itself; no binfmt_misc in user namespaces: x",
            ),
        ),
    ],
)
def test_box64_has_its_own_ways(denied: str, children: tuple[str, str]) -> None:
    host = replace(BOARD, emulators=(BOX64,), binfmt_denied=denied)
    made = plan(host)
    assert made.emulation
    assert made.preload == ()  # what the payload's file lists is not for box64's own ld.so
    assert made.env["BOX64_LD_PRELOAD"] == "/usr/lib/rvbundle/guard.so"
    assert choice(made, "children") == children
    assert made.env["HOME"] == "/home/agent"  # box64 needs one, but not its own
    assert choice(made, "emulator") == (
        "box64 0.3.4",
        "/usr/bin/box64 passed its probe; not qemu for x86_64: there is no qemu-x86_64 in PATH; "
        "it can't bring absent pages of libraries back: a program that needs one ends",
    )
    assert [c.what for c in made.choices if c.warn] == ["emulator"]
    free = plan(host, sandbox=False)
    assert not {"LD_PRELOAD", "LD_LIBRARY_PATH"} & free.env.keys()


@pytest.mark.parametrize("pack", [NO_PACK, ColdPack("/c.rvb", "named")], ids=["alone", "with the cold pack"])
def test_kernels_are_those_of_the_emulated_processor(pack: ColdPack) -> None:
    made = plan(pack=pack)
    assert choice(made, "backend") == (
        "nehalem",
        "wider vectors and FMA are emulated in software, and slower",
    )
    assert made.env["ATEN_CPU_CAPABILITY"] == "default"


BLAS = "/run/rvbundle/blas.so"


@pytest.mark.parametrize(
    ("denied", "preload"),
    [
        ("", ("/usr/lib/rvbundle/guard.so", BLAS)),
        ("x", ("/usr/lib/rvbundle/guard.so", "/run/rvbundle/emulate.so", BLAS)),
    ],
    ids=["binfmt_misc", "preload"],
)
def test_native_blas(denied: str, preload: tuple[str, ...]) -> None:
    """All programs of the payload preload it; the worker is a program for the host."""
    made = plan(replace(BOARD, binfmt_denied=denied), backend="nehalem-native-blas", threads=3)
    assert made.emulation
    assert made.emulation.blas
    assert made.preload == preload
    assert made.emulation.blas.worker.endswith("/native/riscv64/blasworker")
    assert made.emulation.blas.library.endswith("/native/x86_64/blas.so")
    assert made.emulation.blas.command() == ("/run/rvbundle/blasworker", "/run/rvbundle/blas", "3")
    assert choice(made, "native BLAS")[0] == "3 threads"
    assert choice(plan(backend="nehalem-native-blas"), "native BLAS")[0] == "1 thread"  # the host has one


def test_native_blas_needs_the_sandbox() -> None:
    made = plan(backend="nehalem-native-blas", sandbox=False)
    assert made.emulation
    assert made.emulation.blas is None
    assert choice(made, "native BLAS") == ("none", "it needs the sandbox")
    assert [c.what for c in made.choices if c.warn] == ["native BLAS"]
    assert "blas" not in made.env["LD_PRELOAD"]


VECTORS = families.to_trace("riscv64", V256.processor, ())
RISCV = replace(INFO, families=VECTORS, trimmed=True, blas={"openblas": "0.3.29"})
ELSEWHERE = replace(BOARD, arch="x86_64", emulators=(replace(QEMU, guest="riscv64", path="/q/qemu-riscv64"),))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (None, "rv64,v=false"),
        (V128, "rv64,v=true,vlen=128"),
        (
            replace(V256, option="rv64,v=true,vlen=512", vlen=512),
            "rv64,v=true,vlen=512",
        ),
    ],
    ids=["left to rvbundle", "told", "told of longer vectors"],
)
def test_an_emulated_riscv_processor(told: Model | None, words: str) -> None:
    options = RunOptions("x.rvb", sandbox=False)
    launch = replace(choose_launch(ELSEWHERE, ("riscv64",), options, "x.rvb"), told=told)
    made = make_plan(ELSEWHERE, ROOT, RISCV, options, NO_PACK, launch)
    assert made.command[:3] == ("/q/qemu-riscv64", "-cpu", words)
    assert choice(made, "processor")[0] == words
    assert choice(made, "backend")[0] == "generic"


def test_kernels_that_the_emulated_processor_lacks() -> None:
    options = RunOptions("x.rvb")
    launch = choose_launch(BOARD, ("x86_64",), options, "x.rvb")
    strange = replace(FOREIGN, families=(replace(FAST, vendor="CentaurHauls"),))
    made = make_plan(BOARD, ROOT, strange, options, NO_PACK, launch)
    assert choice(made, "backend") == (
        "any",
        "none that were traced fit: not haswell: traced on CentaurHauls, and libraries run other code on "
        "GenuineIntel; not epyc: traced on CentaurHauls, and libraries run other code on AuthenticAMD",
    )
    assert [c.what for c in made.choices if c.warn] == ["backend"]


def test_nothing_of_the_callers_emulators_gets_in() -> None:
    environ = {
        "QEMU_LD_PREFIX": "/x", "QEMU_SET_ENV": "A=1", "QEMU_CPU": "max", "QEMU_STRACE": "1",
        "BOX64_LOG": "3", "RVBUNDLE_EMULATORS": "/x", "RVBUNDLE_EMULATOR_FILE": "/x", "LC_ALL": "tr_TR",
    }  # fmt: skip
    for sandbox in (True, False):
        made = plan(replace(BOARD, environ={**BOARD.environ, **environ}), sandbox=sandbox)
        assert made.env["LANG"] == "C.UTF-8"
        assert not environ.keys() & made.env.keys()


def test_the_emulators_memory_is_not_the_agents() -> None:
    made = plan(memory=64 << 20)
    assert made.memory == 224 << 20
    assert choice(made, "memory") == (
        "64 MiB of data per process",
        "--memory (RLIMIT_DATA), and 160 MiB for the emulator",
    )
    assert plan().memory is None


def test_every_choice_has_a_reason() -> None:
    made = plan()
    assert all(c.what and c.value and c.reason for c in made.choices)
    assert len({c.what for c in made.choices}) == len(made.choices)
