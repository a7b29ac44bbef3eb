"""Launchers: what can turn a payload into running processes, one module each behind one protocol. Pure.

A new one is a module here and a line in ALL.
"""

from typing import Protocol

from rvbundle_runtime.host import Host
from rvbundle_runtime.launchers import box64, native, qemu
from rvbundle_runtime.launchers.start import FOLDER, Start, usable
from rvbundle_runtime.machine import Model

__all__ = ["ALL", "FOLDER", "Launcher", "Start", "box64", "native", "qemu", "usable"]


class Launcher(Protocol):
    """A way to run a payload; the members are those of a module."""

    name: str
    probe: tuple[str, ...]  # the arguments of its probe (runtime/native/probe.c)

    def why_not(self, host: Host, arch: str) -> str:
        """Return why it can't run a payload for `arch` on `host`; "" if it can."""

    def start(self, host: Host, arch: str, root: str, model: Model) -> Start:
        """Return what goes before each of the payload's programs, given the processor that they shall see.

        `root` is "" in the sandbox, where the programs' root is the payload's; else the payload's folder.
        """


# In the order of preference. qemu before box64: it emulates whole programs, libc included, and its floating
# point is exact; box64 takes the host's libc and is not exact about NaN and rounding unless told to be.
ALL: dict[str, Launcher] = {module.name: module for module in (native, qemu, box64)}
