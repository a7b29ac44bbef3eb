"""Which payload of an image runs, and by which launcher. Pure."""

from dataclasses import dataclass

from rvbundle_runtime import launchers
from rvbundle_runtime.errors import HostError
from rvbundle_runtime.host import Host
from rvbundle_runtime.launchers import native, qemu
from rvbundle_runtime.launchers.start import SMALL_PAGES, why_pages
from rvbundle_runtime.machine import Model
from rvbundle_runtime.options import AUTO, NO_EMULATOR, RunOptions

# The payloads in the order in which they are emulated: torch starts sooner on QEMU as x86-64 than as RISC-V.
_EMULATED_FIRST = ("x86_64", "aarch64", "riscv64")
_EMULATING = tuple(name for name in launchers.ALL if name != native.name)


@dataclass(frozen=True)
class Launch:
    """Which payload runs, by which launcher (a key of launchers.ALL), and why.

    `told` is the processor to emulate where that is not left to rvbundle.
    """

    arch: str
    launcher: str
    why_payload: str
    why_launcher: str
    told: Model | None = None

    @property
    def native(self) -> bool:
        """Tell whether the processor itself runs it."""
        return self.launcher == native.name


def native_launch(host: Host) -> Launch:
    """Return the launch of a payload for the host's own architecture."""
    return Launch(host.arch, native.name, f"native to this machine ({host.arch})", "the payload is native")


def may_run_natively(host: Host, options: RunOptions) -> bool:
    """Tell whether a payload for the host's own architecture, if there is one, is the one to run."""
    return options.emulator in (AUTO, NO_EMULATOR) and options.payload in (None, host.arch)


def to_emulate(host: Host, available: tuple[str, ...], options: RunOptions) -> tuple[str, ...]:
    """Return the architectures whose emulators must be looked for before `choose_launch`, the best first."""
    natively = may_run_natively(host, options) and host.arch in available
    return () if natively or options.emulator == NO_EMULATOR else _wanted(host, available, options)


def _wanted(host: Host, available: tuple[str, ...], options: RunOptions) -> tuple[str, ...]:
    if options.payload is not None:
        return tuple(arch for arch in available if arch == options.payload)
    order = (host.arch, *_EMULATED_FIRST)
    return tuple(sorted(available, key=lambda arch: order.index(arch) if arch in order else len(order)))


def choose_launch(host: Host, available: tuple[str, ...], options: RunOptions, image: str) -> Launch:
    """Choose among the payloads `available` in `image`, and among launchers; raises HostError if none fits.

    `host` has been looked at for the emulators of `to_emulate`.
    """
    wanted = _wanted(host, available, options)
    if not wanted:
        have = ", ".join(available)
        raise HostError(
            f"{image} has no payload for {options.payload}; it has: {have}", "leave --payload out"
        )
    if may_run_natively(host, options) and host.arch in wanted:
        return native_launch(host)
    refused: list[str] = []
    names = _EMULATING if options.emulator == AUTO else (options.emulator,)
    for name in names if options.emulator != NO_EMULATOR else ():
        for arch in wanted:
            why = launchers.ALL[name].why_not(host, arch)
            if not why:
                return Launch(arch, name, _why_emulated(host, arch, options), "; ".join(refused))
            refused.append(f"not {name} for {arch}: {why}")
    raise _nothing_fits(host, available, options, image, refused)


def _why_emulated(host: Host, arch: str, options: RunOptions) -> str:
    if options.payload is not None:
        return "--payload says so"
    if arch == host.arch:
        return f"native to this machine ({host.arch}), but --emulator {options.emulator} says to emulate it"
    return f"the image has none for this machine ({host.arch})"


def _nothing_fits(
    host: Host, available: tuple[str, ...], options: RunOptions, image: str, refused: list[str]
) -> HostError:
    what = f"{image} has no payload for this machine ({host.arch})"
    if options.payload is not None:
        what = f"{image}: the payload for {options.payload} is not native to this machine ({host.arch})"
    elif host.arch in available:
        what = f"{image}: --emulator {options.emulator} says not to run it natively"
    have = f"it has: {', '.join(available)}"
    if options.emulator == NO_EMULATOR:
        return HostError(f"{what}, and --emulator none forbids emulation; {have}", "leave that option out")
    lines = "".join(f"\n  {line}" for line in refused)
    first = SMALL_PAGES if all(why_pages(host, arch) for arch in available) else qemu.INSTALL
    return HostError(
        f"{what}, and no emulator will do; {have}{lines}",
        f"{first}, or build the image with a payload for {host.arch}",
    )
