"""Toy libraries and programs, compiled by the tests of tracer.c and guard.c, natively or for an emulator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "runtime" / "native"
# Another machine by qemu-user: RVBUNDLE_TEST_MACHINE=riscv64, RVBUNDLE_TEST_EMULATOR="qemu-riscv64
# -L SYSROOT" (with glibc in SYSROOT/lib); toys are then compiled by zig. Tests that start programs
# from programs need binfmt_misc.
MACHINE = os.environ.get("RVBUNDLE_TEST_MACHINE", platform.machine())
EMULATOR = os.environ.get("RVBUNDLE_TEST_EMULATOR", "").split()
ONLY_NATIVE = pytest.mark.skipif(bool(EMULATOR), reason="starts programs from programs")
# Flags: constants in a segment of their own, or in one with code (as on Debian's riscv64).
LAYOUTS = [
    pytest.param([] if EMULATOR else ["-Wl,-z,separate-code"], id="separate"),
    pytest.param(
        ["-Wl,-z,noseparate-code"],
        id="one-segment",
        marks=pytest.mark.skipif(bool(EMULATOR), reason="zig's linker always separates them"),
    ),
]
TARGET = {
    "x86_64": "x86_64-linux-gnu.2.17",
    "aarch64": "aarch64-linux-gnu.2.17",
    "riscv64": "riscv64-linux-gnu.2.27",
}
# The interpreter that has ziglang; it need not be the one that runs pytest.
BUILD_PYTHON = os.environ.get("RVBUNDLE_BUILD_PYTHON", sys.executable)
FUNCTIONS = 100


def zig_build(out: Path, targets: list[str], extra: list[str] = ()) -> None:
    code = (
        f"import sys, pathlib, build; build.build(pathlib.Path({str(out)!r}), {targets!r}, {list(extra)!r})"
    )
    subprocess.run([BUILD_PYTHON, "-c", code], cwd=NATIVE, check=True)


class Toys:
    """Compiles toys into a folder and runs programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def compile(self, output: str, source: str, *flags: str, compiler: str = "gcc") -> Path:
        path = self.folder / output
        source_file = path.with_suffix(".cc" if compiler == "g++" else ".c")
        source_file.write_text(source)
        command = [compiler]
        if EMULATOR:
            zig = "c++" if compiler == "g++" else "cc"
            command = [BUILD_PYTHON, "-m", "ziglang", zig, "-target", f"{MACHINE}-linux-gnu.2.36"]
            command += ["-fno-sanitize=undefined", "-fno-strict-aliasing", "-fno-builtin"]
        command += ["-g", "-O1", "-w", "-o", path, source_file, f"-L{self.folder}"]
        subprocess.run([*command, f"-Wl,-rpath,{self.folder}", "-pthread", *flags], check=True)
        return path

    def library(self, name: str = "libtoy.so", count: int = FUNCTIONS, extra: str = "", *flags):
        source = "".join(
            f"__attribute__((aligned(4096))) int f{i}(int x) {{ return x + {i}; }}\n" for i in range(count)
        )
        table = ",".join(f"f{i}" for i in range(count))
        source += f"int (*const toy_table[])(int) = {{{table}}};\n"
        # After the last function, so that its page holds nothing else.
        source += extra + "__attribute__((aligned(4096))) void last_one(void) {}\n"
        return self.compile(name, source, "-shared", "-fPIC", f"-Wl,-soname,{name}", *flags)

    def program(self, body: str, *flags: str, name: str = "program") -> Path:
        head = """
            #define _GNU_SOURCE
            #include <dlfcn.h>
            #include <errno.h>
            #include <pthread.h>
            #include <setjmp.h>
            #include <signal.h>
            #include <spawn.h>
            #include <stdio.h>
            #include <stdlib.h>
            #include <string.h>
            #include <sys/mman.h>
            #include <sys/wait.h>
            #include <unistd.h>
            extern int (*const toy_table[])(int);
            extern char **environ;
        """
        head += "".join(f"int f{i}(int);" for i in range(FUNCTIONS))
        return self.compile(name, head + body, *(flags or ("-ltoy",)))

    def command(self, *words: str | Path) -> list[str | Path]:
        return [*EMULATOR, *words]

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, **more}

    def run(self, *words: str | Path, code: int = 0, **more: str) -> str:
        """Run a program to its end, which must be with this code; return what it wrote."""
        result = subprocess.run(
            self.command(*words),
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
        return result.stdout + result.stderr

    def symbols(self, name: str = "libtoy.so") -> dict[str, int]:
        output = subprocess.check_output(["readelf", "-sW", self.folder / name], text=True)
        fields = (line.split() for line in output.splitlines())
        return {f[7]: int(f[1], 16) // 4096 for f in fields if len(f) == 8 and f[3] != "SECTION"
                and f[1] != "Value"}  # fmt: skip
