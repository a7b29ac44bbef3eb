from dataclasses import replace

import pytest

from rvbundle_runtime import launchers, machine
from rvbundle_runtime.launchers import Start, qemu
from rvbundle_runtime.launchers.start import itself

from .models import BOX64 as MODEL
from .models import NEHALEM, V256
from .test_plan import HOST
from .test_selection import BOX64, OLD, QEMU

FOLDER = "/run/rvbundle/emulator.d"


def test_the_order_of_preference() -> None:
    assert list(launchers.ALL) == ["native", "qemu", "box64"]


def test_native() -> None:
    assert launchers.native.why_not(HOST, "riscv64") == ""
    assert launchers.native.why_not(HOST, "x86_64") == "this machine is riscv64"
    assert launchers.native.start(HOST, "riscv64", "", machine.DEFAULT) == Start()
    assert Start().command("/bin/x", ("x", "y")) == ("x", "y")


def test_why_not() -> None:
    host = replace(HOST, emulators=(OLD,))
    assert launchers.qemu.why_not(host, "x86_64") == (
        "/usr/bin/qemu-x86_64 is version 7.2.0; 9 or newer is needed"
    )
    assert launchers.qemu.why_not(host, "aarch64") == "there is no qemu-aarch64 in PATH"
    assert launchers.qemu.why_not(replace(HOST, emulators=(OLD, QEMU)), "x86_64") == ""
    assert launchers.box64.why_not(host, "x86_64") == "there is no box64 in PATH"
    assert launchers.box64.why_not(replace(HOST, emulators=(BOX64,)), "x86_64") == ""
    assert launchers.box64.why_not(replace(HOST, emulators=(BOX64,)), "riscv64") == (
        "it runs x86_64 programs only"
    )


@pytest.mark.parametrize("size", [16384, 65536])
def test_pages_that_are_too_large(size: int) -> None:
    host = replace(HOST, arch="aarch64", page_size=size, emulators=(QEMU, BOX64))
    reason = f"the kernel's pages are of {size >> 10} KiB, and payloads for x86_64 need 4 KiB"
    assert launchers.qemu.why_not(host, "x86_64") == reason
    assert launchers.box64.why_not(host, "x86_64") == reason


def test_arm64_payloads_are_laid_out_for_large_pages() -> None:
    qemu_aarch64 = replace(QEMU, guest="aarch64")
    host = replace(HOST, page_size=65536, emulators=(qemu_aarch64,))
    assert launchers.qemu.why_not(host, "aarch64") == ""


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("10.0.13", ""),
        ("9.0.0", ""),
        ("11", ""),
        ("8.2.3", "is version 8.2.3; 9 or newer is needed"),
        ("8.2.0", "is version 8.2.0, which is known to crash (8.2.0 to 8.2.2 are)"),
        ("8.2.1", "is version 8.2.1, which is known to crash (8.2.0 to 8.2.2 are)"),
        ("8.2.2", "is version 8.2.2, which is known to crash (8.2.0 to 8.2.2 are)"),
        ("7.2.22", "is version 7.2.22; 9 or newer is needed"),
        ("", "is version unknown; 9 or newer is needed"),
    ],
)
def test_versions_of_qemu(version: str, reason: str) -> None:
    assert qemu.refuse_version(version) == reason


def test_qemu_in_the_sandbox() -> None:
    start = launchers.qemu.start(replace(HOST, emulators=(QEMU,)), "x86_64", "", NEHALEM)
    inside = f"{FOLDER}/qemu-x86_64"
    assert start == Start(
        words=(inside, "-cpu", "Nehalem"),
        files=(("/usr/bin/qemu-x86_64", inside),),
        argv0="-0",
        memory=160 << 20,
    )
    assert start.command("/usr/bin/python3", ("python", "-c", "1")) == (
        *(inside, "-cpu", "Nehalem", "-0", "python", "/usr/bin/python3", "-c", "1"),
    )
    assert start.settings() == (f"emulator {inside}\nword -cpu\nword Nehalem\nargv0 -0\n")


def test_qemu_without_a_sandbox() -> None:
    start = launchers.qemu.start(replace(HOST, emulators=(QEMU,)), "x86_64", "/store/root", NEHALEM)
    assert start.words == ("/usr/bin/qemu-x86_64", "-cpu", "Nehalem", "-L", "/store/root")
    assert start.files == ()


def test_qemu_for_others_has_its_own_processor() -> None:
    host = replace(HOST, arch="x86_64", emulators=(replace(QEMU, guest="riscv64", path="/q/qemu-riscv64"),))
    start = launchers.qemu.start(host, "riscv64", "", machine.DEFAULT)
    assert (start.words, start.env) == ((f"{FOLDER}/qemu-riscv64",), {})
    start = launchers.qemu.start(host, "riscv64", "", V256)
    assert start.words == (f"{FOLDER}/qemu-riscv64", "-cpu", "rv64,v=true,vlen=256")


def test_box64_brings_its_libraries() -> None:
    start = launchers.box64.start(replace(HOST, emulators=(BOX64,)), "x86_64", "", MODEL)
    name = f"{FOLDER}/box64"  # by which box64 starts children: a starter stands there
    assert start.words == (name,)
    assert start.program == (
        *(f"{FOLDER}/ld.so", "--library-path", FOLDER, "--argv0", name, f"{name}.program"),
    )
    assert start.files == (
        ("/lib/libc.so.6", f"{FOLDER}/libc.so.6"),
        ("/lib/ld.so", f"{FOLDER}/ld.so"),
        ("/usr/bin/box64", f"{name}.program"),
    )
    assert start.command("/bin/x", ("y", "z")) == (name, "/bin/x", "z")
    assert (start.argv0_variable, start.preload) == ("BOX64_ARG0", "BOX64_LD_PRELOAD")
    assert start.env["BOX64_NORCFILES"] == "1"


def test_box64_without_a_sandbox() -> None:
    start = launchers.box64.start(replace(HOST, emulators=(BOX64,)), "x86_64", "/store/root", MODEL)
    assert (start.words, start.files) == (("/usr/bin/box64",), ())
    assert start.env["BOX64_LD_LIBRARY_PATH"] == "/store/root/lib:/store/root/usr/lib"


def test_libraries_that_are_carried_along() -> None:
    carried = replace(BOX64, path="/e/box64", loader="/e/box64.libs/ld.so", carried=True)
    assert itself(carried, confined=False).words == (
        *("/e/box64.libs/ld.so", "--library-path", "/e/box64.libs", "/e/box64"),
    )
