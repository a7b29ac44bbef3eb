"""The probe program: it passes where guests run rightly, and tells what is wrong by its exit code."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.toys import TARGET, zig_build

MACHINES = ("x86_64", "aarch64", "riscv64")
NATIVE = pytest.mark.skipif(platform.machine() not in MACHINES, reason="no probe for this machine")


@pytest.fixture(scope="session")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ARCHITECTURE/probe."""
    folder = tmp_path_factory.mktemp("probes")
    zig_build(folder, [TARGET[machine] for machine in MACHINES])
    return folder


def run(*words: str | Path, **more: object) -> tuple[int, str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, **more)
    return done.returncode, done.stdout


@NATIVE
@pytest.mark.parametrize("arguments", [[], ["pages"], ["other"]])
def test_on_this_machine(probes, arguments):
    machine = platform.machine()
    line = f"rvbundle probe {machine} {os.sysconf('SC_PAGESIZE')}\n"
    assert run(probes / machine / "probe", *arguments) == (0, line)


@pytest.mark.parametrize("folder", ["/usr/bin", os.environ.get("RVBUNDLE_TEST_QEMU", "")])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("arguments", [[], ["pages"]])
def test_under_qemu(probes, folder, machine, arguments):
    emulator = shutil.which(f"qemu-{machine}", path=folder) if folder else None
    if emulator is None:
        pytest.skip("no such emulator")
    code, out = run(emulator, probes / machine / "probe", *arguments)
    assert (code, out) == (0, f"rvbundle probe {machine} {os.sysconf('SC_PAGESIZE')}\n")


def test_it_needs_nothing(probes):
    """No loader, no libc; small enough for pages of 64 KiB."""
    for machine in MACHINES:
        path = probes / machine / "probe"
        headers = subprocess.check_output(["readelf", "-lW", path], text=True)
        assert "INTERP" not in headers
        assert "DYNAMIC" not in headers
        loads = [line.split() for line in headers.splitlines() if line.split()[:1] == ["LOAD"]]
        assert {int(fields[-1], 16) for fields in loads} == {65536}
        assert path.stat().st_size < 16384
        assert os.access(path, os.X_OK)


@NATIVE
@pytest.mark.parametrize(
    ("before", "code"),
    [
        (["setarch", "linux32"], 3),  # uname(2) tells of a 32-bit machine
        (["sh", "-c", 'exec "$0" >&-'], 1),
    ],
)
def test_a_check_that_fails(probes, before, code):
    assert run(*before, probes / platform.machine() / "probe") == (code, "")


@NATIVE
def test_no_room_for_one_more_mapping(probes):
    """The program itself takes about 200 KB: below, the kernel kills it; above, all is well."""
    codes = [
        run("prlimit", f"--as={size}", probes / platform.machine() / "probe")[0]
        for size in range(100_000, 400_000, 8192)
    ]
    assert 10 in codes
    assert codes[-1] == 0
