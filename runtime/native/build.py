"""Compile tracer.c for each target with ``zig cc`` (PyPI: ziglang). Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "tracer.c"
TARGETS = ["x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17", "riscv64-linux-gnu.2.27"]
COMPILE = [
    "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-sanitize=undefined",
    "-fPIC", "-fvisibility=hidden", "-fno-builtin", "-fno-stack-protector",
    "-fasynchronous-unwind-tables", "-c",
]  # fmt: skip
# No libc and no helper library: an undefined symbol must fail here, not in ld.so.
LINK = ["-shared", "-nostdlib", "-Wl,-z,defs", "-s"]
# Atomic operations in line, not by calling compiler-rt.
EXTRA_FLAGS = {"aarch64": ["-mno-outline-atomics"]}


def output(out: Path, target: str) -> Path:
    return out / target.split("-")[0] / "tracer.so"


def build(out: Path, targets: list[str], extra: list[str] | None = None) -> list[Path]:
    """Return the libraries built: ``out/<architecture>/tracer.so``, one per target."""
    results = []
    for target in targets:
        result = output(out, target)
        result.parent.mkdir(parents=True, exist_ok=True)
        compiled = result.with_suffix(f".{os.getpid()}.o")
        # Built next to its final name and moved there: a running process may map the old one.
        new = result.with_suffix(f".{os.getpid()}.new")
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", target]
        flags = [*COMPILE, *EXTRA_FLAGS.get(target.split("-")[0], []), *(extra or [])]
        subprocess.run([*zig, *flags, "-o", str(compiled), str(SOURCE)], check=True)
        # zig tells the linker's input by its suffix: .o
        subprocess.run([*zig, *LINK, "-o", str(new), str(compiled)], check=True)
        compiled.unlink()
        new.replace(result)
        results.append(result)
    return results


if __name__ == "__main__":
    for path in build(Path(sys.argv[1]), sys.argv[2:] or TARGETS):
        print(path)
