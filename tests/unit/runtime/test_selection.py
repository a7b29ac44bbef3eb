from dataclasses import replace

import pytest

from rvbundle_runtime.errors import HostError
from rvbundle_runtime.host import Emulator, Host
from rvbundle_runtime.options import RunOptions
from rvbundle_runtime.selection import Launch, choose_launch, may_run_natively, to_emulate

from .test_plan import HOST

QEMU = Emulator("qemu", "x86_64", "/usr/bin/qemu-x86_64", "10.0.13")
BOX64 = Emulator(
    "box64", "x86_64", "/usr/bin/box64", "0.3.4", loader="/lib/ld.so", libraries=("/lib/libc.so.6",)
)
OLD = replace(QEMU, version="7.2.0", probe="is version 7.2.0; 9 or newer is needed")
NO_QEMU = "not qemu for x86_64: there is no qemu-x86_64 in PATH"
NO_BOX64 = "not box64 for x86_64: there is no box64 in PATH"


def options(**given: object) -> RunOptions:
    return RunOptions("x.rvb", **given)  # type: ignore[arg-type]


def having(*emulators: Emulator, arch: str = "riscv64") -> Host:
    return replace(HOST, arch=arch, emulators=emulators)


@pytest.mark.parametrize("given", [{}, {"payload": "riscv64"}, {"emulator": "none"}])
def test_native_first(given: dict[str, str]) -> None:
    launch = choose_launch(having(QEMU), ("x86_64", "riscv64"), options(**given), "x.rvb")
    assert launch == Launch("riscv64", "native", "native to this machine (riscv64)", "the payload is native")
    assert launch.native


@pytest.mark.parametrize(
    ("available", "given", "expected"),
    [
        (("x86_64", "riscv64"), {}, ()),
        (("x86_64", "riscv64"), {"payload": "riscv64"}, ()),
        (("x86_64", "riscv64"), {"payload": "x86_64"}, ("x86_64",)),
        (("x86_64", "riscv64"), {"payload": "s390x"}, ()),
        (("x86_64", "riscv64"), {"emulator": "none"}, ()),
        (("x86_64",), {"emulator": "none"}, ()),
        (("aarch64", "riscv64", "x86_64"), {"emulator": "qemu"}, ("riscv64", "x86_64", "aarch64")),
        (("aarch64", "x86_64"), {}, ("x86_64", "aarch64")),
        (("new", "aarch64"), {}, ("aarch64", "new")),
    ],
)
def test_which_emulators_may_be_needed(
    available: tuple[str, ...], given: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert to_emulate(HOST, available, options(**given)) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"emulator": "none"}, True),
        ({"emulator": "qemu"}, False),
        ({"emulator": "box64"}, False),
        ({"payload": "riscv64"}, True),
        ({"payload": "x86_64"}, False),
    ],
)
def test_may_run_natively(given: dict[str, str], expected: bool) -> None:
    assert may_run_natively(HOST, options(**given)) is expected


@pytest.mark.parametrize(
    ("emulators", "given", "launcher", "reasons"),
    [
        ((QEMU, BOX64), {}, "qemu", ("the image has none for this machine (riscv64)", "")),
        ((BOX64,), {}, "box64", ("the image has none for this machine (riscv64)", NO_QEMU)),
        (
            (OLD, BOX64),
            {"payload": "x86_64"},
            "box64",
            (
                "--payload says so",
                "not qemu for x86_64: /usr/bin/qemu-x86_64 is version 7.2.0; 9 or newer is needed",
            ),
        ),
        ((OLD, QEMU), {}, "qemu", ("the image has none for this machine (riscv64)", "")),
        (
            (QEMU, BOX64),
            {"emulator": "box64"},
            "box64",
            ("the image has none for this machine (riscv64)", ""),
        ),
    ],
    ids=["qemu first", "only box64", "old qemu", "two of qemu", "forced"],
)
def test_emulated(
    emulators: tuple[Emulator, ...], given: dict[str, str], launcher: str, reasons: tuple[str, str]
) -> None:
    launch = choose_launch(having(*emulators), ("x86_64",), options(**given), "x.rvb")
    assert launch == Launch("x86_64", launcher, *reasons)
    assert not launch.native


def test_a_native_payload_may_be_emulated() -> None:
    launch = choose_launch(having(QEMU, arch="x86_64"), ("x86_64",), options(emulator="qemu"), "x.rvb")
    assert launch.why_payload == "native to this machine (x86_64), but --emulator qemu says to emulate it"


def test_the_payload_that_an_emulator_is_there_for() -> None:
    arm = replace(QEMU, guest="aarch64")
    assert choose_launch(having(arm), ("x86_64", "aarch64"), options(), "x.rvb").arch == "aarch64"


@pytest.mark.parametrize(
    ("host", "available", "given", "message", "hint"),
    [
        (
            having(),
            ("x86_64",),
            {},
            "x.rvb has no payload for this machine (riscv64), and no emulator will do; it has: x86_64"
            f"\n  {NO_QEMU}\n  {NO_BOX64}",
            "install QEMU's user mode, version 9.0 or newer, as a static program (Debian 13: apt install "
            "qemu-user), or build the image with a payload for riscv64",
        ),
        (
            having(OLD),
            ("x86_64",),
            {"payload": "x86_64"},
            "x.rvb: the payload for x86_64 is not native to this machine (riscv64), and no emulator will do; "
            "it has: x86_64\n"
            "  not qemu for x86_64: /usr/bin/qemu-x86_64 is version 7.2.0; 9 or newer is needed\n"
            f"  {NO_BOX64}",
            "install QEMU's",
        ),
        (
            having(QEMU),
            ("x86_64",),
            {"emulator": "none"},
            "x.rvb has no payload for this machine (riscv64), and --emulator none forbids emulation; "
            "it has: x86_64",
            "leave that option out",
        ),
        (
            having(arch="x86_64"),
            ("x86_64", "riscv64"),
            {"emulator": "box64"},
            "x.rvb: --emulator box64 says not to run it natively, and no emulator will do; it has: x86_64, "
            f"riscv64\n  {NO_BOX64}\n  not box64 for riscv64: it runs x86_64 programs only",
            "install QEMU's",
        ),
        (
            having(QEMU),
            ("x86_64", "riscv64"),
            {"payload": "s390x"},
            "x.rvb has no payload for s390x; it has: x86_64, riscv64",
            "leave --payload out",
        ),
    ],
    ids=["no emulator", "an old one", "none allowed", "forced", "no such payload"],
)
def test_nothing_fits(
    host: Host, available: tuple[str, ...], given: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(HostError) as caught:
        choose_launch(host, available, options(**given), "x.rvb")
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


def test_pages_that_are_too_large_for_what_an_image_has() -> None:
    host = replace(HOST, arch="aarch64", page_size=16384, emulators=(QEMU,))
    with pytest.raises(HostError) as caught:
        choose_launch(host, ("x86_64",), options(), "x.rvb")
    assert caught.value.message == (
        "x.rvb has no payload for this machine (aarch64), and no emulator will do; it has: x86_64\n"
        "  not qemu for x86_64: the kernel's pages are of 16 KiB, and payloads for x86_64 need 4 KiB\n"
        "  not box64 for x86_64: the kernel's pages are of 16 KiB, and payloads for x86_64 need 4 KiB"
    )
    assert caught.value.hint == (
        "boot a kernel with pages of 4 KiB (Raspberry Pi 5: kernel=kernel8.img in "
        "/boot/firmware/config.txt), or build the image with a payload for aarch64"
    )
    assert choose_launch(host, ("x86_64", "aarch64"), options(), "x.rvb").native
