"""The trials' machine code, run on processors that have what is tried and on others, which qemu-user plays.

RVBUNDLE_TEST_QEMU: a folder with another qemu-riscv64 and qemu-aarch64 that the tests use as well.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from rvbundle_runtime.trials import TRIALS
from tests.native.toys import BUILD_PYTHON, TARGET

# The code is the program's: its result is the exit code.
PROGRAM = """
__asm__(".text\\n.balign 4\\n.globl trial\\ntrial:\\n.byte %s\\n");
long trial(void);
void _start(void) {
    long result = trial();
#ifdef __aarch64__
    register long x8 __asm__("x8") = 93, x0 __asm__("x0") = result;
    __asm__ volatile("svc 0" : : "r"(x8), "r"(x0));
#else
    register long a7 __asm__("a7") = 93, a0 __asm__("a0") = result;
    __asm__ volatile("ecall" : : "r"(a7), "r"(a0));
#endif
    __builtin_unreachable();
}
"""
SIGILL = -signal.SIGILL
NO_VECTORS, VECTORS = "rv64,v=false", "rv64,v=true"


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A static program for each trial of another architecture than x86-64, by name."""
    folder = tmp_path_factory.mktemp("trials")
    made = {}
    for trial in TRIALS:
        if trial.arch == "x86_64":
            continue
        source = folder / f"{trial.name}.c"
        source.write_text(PROGRAM % ", ".join(map(str, trial.code)))
        made[trial.name] = folder / trial.name
        command = [BUILD_PYTHON, "-m", "ziglang", "cc", "-target", TARGET[trial.arch], "-O2", "-static"]
        command += ["-nostdlib", "-fno-sanitize=undefined", "-o", str(made[trial.name]), str(source)]
        subprocess.run(command, check=True)
    return made


@pytest.mark.parametrize("folder", ["/usr/bin", os.environ.get("RVBUNDLE_TEST_QEMU", "")])
@pytest.mark.parametrize(
    ("name", "cpu", "code"),
    [
        ("v", f"{VECTORS},vlen=128", 16),
        ("v", f"{VECTORS},vlen=256", 32),
        ("v", f"{VECTORS},vlen=1024", 128),
        ("v", NO_VECTORS, SIGILL),
        ("zvfh", f"{VECTORS},zvfh=true", 1),
        ("zvfh", f"{VECTORS},zfh=false", SIGILL),  # QEMU 7 asks for this one
        ("zvfh", NO_VECTORS, SIGILL),
        ("zvfbfmin", f"{VECTORS},zfbfmin=true,zvfbfmin=true", 1),
        ("zvfbfmin", f"{VECTORS},zvfh=true", SIGILL),
        ("zvfbfwma", f"{VECTORS},zfbfmin=true,zvfbfmin=true,zvfbfwma=true", 1),
        ("zvfbfwma", f"{VECTORS},zvfh=true", SIGILL),
        ("zvfbfwma", NO_VECTORS, SIGILL),
        ("bf16", "max", 1),
        ("bf16", "neoverse-v1", 1),
        ("bf16", "neoverse-n1", SIGILL),
        ("bf16", "cortex-a53", SIGILL),
    ],
)
def test_under_qemu(programs, folder, name, cpu, code):
    arch = next(trial.arch for trial in TRIALS if trial.name == name)
    emulator = shutil.which(f"qemu-{arch}", path=folder) if folder else None
    if emulator is None:
        pytest.skip("no such emulator")
    command = [emulator, "-cpu", cpu, programs[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "not found" in done.stderr or "unable to find CPU model" in done.stderr:
        pytest.skip("an emulator without this processor or extension")
    assert done.returncode == code, done.stderr
