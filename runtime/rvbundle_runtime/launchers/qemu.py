"""QEMU's user mode: one process of the host for each process of the payload."""

from dataclasses import replace

from rvbundle_runtime.host import Host
from rvbundle_runtime.launchers.start import Start, itself, usable, why_none
from rvbundle_runtime.machine import Model

name = "qemu"
probe = ("pages",)
# Bytes of its own that count as a process's data (VmData of Python under 10.0 and without: 152 MiB apart);
# 128 MiB of them are the buffer for translated code (tcg/region.c).
MEMORY = 160 << 20
OLDEST = (9, 0)
INSTALL = (
    f"install QEMU's user mode, version {'.'.join(map(str, OLDEST))} or newer, as a static program "
    "(Debian 13: apt install qemu-user)"
)
# They crash at once on some hosts and at random on others (lance-format/lance#7902,
# chimera-linux/cports#1258).
CRASHING = ((8, 2, 0), (8, 2, 1), (8, 2, 2))


def why_not(host: Host, arch: str) -> str:
    """Return "" if a QEMU that has passed its probe emulates `arch`."""
    return why_none(host, name, arch, f"qemu-{arch}")


def refuse_version(version: str) -> str:
    """Return why a QEMU of this version may not be chosen; "" if it may."""
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    if numbers[:3] in CRASHING:
        return f"is version {version}, which is known to crash (8.2.0 to 8.2.2 are)"
    if numbers < OLDEST:
        return f"is version {version or 'unknown'}; {OLDEST[0]} or newer is needed"
    return ""


def start(host: Host, arch: str, root: str, model: Model) -> Start:
    """Return QEMU with the processor to emulate; -L finds the payload's ld.so without a sandbox."""
    emulator = usable(host, name, arch)
    assert emulator  # why_not said so
    plain = itself(emulator, confined=not root)
    words = (*plain.words, *(("-cpu", model.option) if model.option else ()), *(("-L", root) if root else ()))
    return replace(plain, words=words, argv0="-0", memory=MEMORY)
