"""Compile libraries and programs for each target with ``zig cc`` (PyPI: ziglang). Standard library only."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARIES = ["tracer", "traceall", "guard", "emulate", "blas"]
INIT_FIRST = ["traceall", "guard"]
# With libc.so.6 among what it needs: box64 binds weak symbols only to what is loaded by then.
NEED_LIBC = ["guard", "emulate", "blas"]
BARE_PROGRAMS = ["probe", "starter"]
STATIC_PROGRAMS = ["blasworker"]  # with a libc (zig's musl)
MUSL_LICENCE = "musl.COPYRIGHT"
PROGRAMS = [*BARE_PROGRAMS, *STATIC_PROGRAMS]
TARGETS = ["x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17", "riscv64-linux-gnu.2.27"]
COMPILE = [
    "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-sanitize=undefined",
    "-fPIC", "-fvisibility=hidden", "-fno-builtin", "-fno-stack-protector",
    "-ftls-model=initial-exec", "-fasynchronous-unwind-tables", "-c",
]  # fmt: skip
# No libc and no helper library: an undefined symbol must fail here, not in ld.so (the weak ones are
# libc's and Python's, if the process has these). Nothing can unload it: handlers point there.
LINK = ["-shared", "-nostdlib", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-z,nodelete", "-s"]
# A static program that no loader has to relocate; its segments fit kernels with pages of up to 64 KiB.
LINK_PROGRAM = ["-static", "-nostdlib", "-Wl,-z,max-page-size=65536", "-s"]
# What computes: a product and a sum may become one instruction (FMA).
STATIC = [
    "-std=c11", "-O3", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-fno-sanitize=undefined",
    "-pthread", "-static", "-Wl,-z,max-page-size=65536", "-s",
]  # fmt: skip
# Atomic operations in line, not by calling compiler-rt.
EXTRA_FLAGS = {"aarch64": ["-mno-outline-atomics"]}


def output(out: Path, target: str, name: str) -> Path:
    return out / target.split("-")[0] / (name if name in PROGRAMS else f"{name}.so")


def is_fresh(out: Path, targets: list[str]) -> bool:
    """Tell whether every result is there and newer than everything that it is made of."""
    results = [output(out, target, name) for target in targets for name in [*LIBRARIES, *PROGRAMS]]
    if not all(result.is_file() for result in results):
        return False
    newest = max(path.stat().st_mtime for path in FOLDER.iterdir() if path.is_file())
    return min(result.stat().st_mtime for result in results) > newest


def build(out: Path, targets: list[str], extra: list[str] | None = None) -> list[Path]:
    """Return what was built: ``out/<architecture>/tracer.so`` and the others, for each target."""
    _copy_licence(out)
    return [
        _build(output(out, target, name), target, name, extra or [])
        for target in targets
        for name in [*LIBRARIES, *PROGRAMS]
    ]


def _copy_licence(out: Path) -> None:
    """Put the licence of musl, which is in the static programs, beside what is built."""
    import ziglang

    out.mkdir(parents=True, exist_ok=True)
    text = Path(ziglang.__file__).parent / "lib" / "libc" / "musl" / "COPYRIGHT"
    (out / MUSL_LICENCE).write_bytes(text.read_bytes())


def _build(result: Path, target: str, name: str, extra: list[str]) -> Path:
    result.parent.mkdir(parents=True, exist_ok=True)
    if name in STATIC_PROGRAMS:
        return _build_static(result, target, name, extra)
    compiled = result.with_suffix(f".{os.getpid()}.o")
    # Built next to its final name and moved there: a running process may map the old one.
    new = result.with_suffix(f".{os.getpid()}.new")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target]
    flags = [*COMPILE, *EXTRA_FLAGS.get(target.split("-")[0], []), *extra]
    subprocess.run([*zig, *flags, "-o", str(compiled), str(FOLDER / f"{name}.c")], check=True)
    # zig tells the linker's input by its suffix: .o
    link = [*(LINK_PROGRAM if name in PROGRAMS else LINK), "-o", str(new), str(compiled)]
    with tempfile.TemporaryDirectory() as folder:
        if name in NEED_LIBC:
            link += ["-Wl,--no-as-needed", str(_empty_libc(Path(folder), zig))]
        subprocess.run([*zig, *link], check=True)
    compiled.unlink()
    if name in INIT_FIRST:
        _init_first(new)
    new.replace(result)
    return result


def _build_static(result: Path, target: str, name: str, extra: list[str]) -> Path:
    new = result.with_suffix(f".{os.getpid()}.new")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{target.split('-')[0]}-linux-musl"]
    subprocess.run([*zig, *STATIC, *extra, "-o", str(new), str(FOLDER / f"{name}.c")], check=True)
    new.replace(result)
    return result


def _empty_libc(folder: Path, zig: list[str]) -> Path:
    """Make a library that is libc by its name alone: what is linked with it needs no version of a symbol."""
    source, library = folder / "libc.c", folder / "libc.so.6"
    source.write_text("")
    command = [*zig, "-shared", "-nostdlib", "-Wl,-soname,libc.so.6", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


def _init_first(path: Path) -> None:
    """Do what the linker's -z initfirst does, which zig doesn't know: set DF_1_INITFIRST in DT_FLAGS_1."""
    data = bytearray(path.read_bytes())
    (offset,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    programs = [struct.unpack_from("<IIQQQQQQ", data, offset + 56 * i) for i in range(count)]
    (dynamic,) = [p for p in programs if p[0] == 2]  # PT_DYNAMIC
    places = range(dynamic[2], dynamic[2] + dynamic[5], 16)
    (place,) = [p for p in places if struct.unpack_from("<Q", data, p)[0] == 0x6FFFFFFB]  # DT_FLAGS_1
    (flags,) = struct.unpack_from("<Q", data, place + 8)
    struct.pack_into("<Q", data, place + 8, flags | 0x20)
    path.write_bytes(data)


if __name__ == "__main__":
    for path in build(Path(sys.argv[1]), sys.argv[2:] or TARGETS):
        print(path)
