"""box64: translates x86-64 programs, and uses the host's libc for them."""

from dataclasses import replace

from rvbundle_runtime.host import Host
from rvbundle_runtime.launchers.start import Start, itself, usable, why_none
from rvbundle_runtime.machine import Model

name = "box64"
probe = ("pages", "box64")
GUEST = "x86_64"
# What it opens by name at run time, beside what ld.so sees that it needs: glibc's other parts.
LIBRARIES = ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1")
# It keeps no file name for the gaps of a trimmed library, by which the guard would know them (0.3.4).
NO_PAGES = "it can't bring absent pages of libraries back: a program that needs one ends"
# docs/USAGE.md of box64: no banner and no files of settings; NaN and rounding as x86-64 does them; no AVX, so
# that the processor is the one of machine.BOX64; libgomp as the payload has it (the wrapper knows four
# functions only).
_ENV = {
    "HOME": "/",  # without one it crashes (0.3.4); most processes have their own
    "BOX64_NOBANNER": "1",
    "BOX64_LOG": "0",
    "BOX64_NORCFILES": "1",
    "BOX64_AVX": "0",
    "BOX64_DYNAREC_FASTNAN": "0",
    "BOX64_DYNAREC_FASTROUND": "0",
    "BOX64_EMULATED_LIBS": "libgomp.so.1",
}


def why_not(host: Host, arch: str) -> str:
    """Return "" if a box64 that has passed its probe is there; it knows x86-64 only."""
    if arch != GUEST:
        return f"it runs {GUEST} programs only"
    return why_none(host, name, arch, name)


def start(host: Host, arch: str, root: str, model: Model) -> Start:  # noqa: ARG001
    """Return box64, by its own ld.so where it is linked dynamically."""
    emulator = usable(host, name, arch)
    assert emulator  # why_not said so
    plain = itself(emulator, confined=not root)
    env = {**_ENV, "BOX64_LD_LIBRARY_PATH": f"{root}/lib:{root}/usr/lib"} if root else _ENV
    return replace(
        plain, env=env, argv0_variable="BOX64_ARG0", preload="BOX64_LD_PRELOAD", starts_children=True
    )
