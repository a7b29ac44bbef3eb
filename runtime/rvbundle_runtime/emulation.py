"""How the programs of an emulated payload are started, and what of the machine they see. Pure."""

from dataclasses import dataclass, replace

from rvbundle_runtime import launchers, machine, nativefiles
from rvbundle_runtime.absent import GUARD
from rvbundle_runtime.choice import NAMESPACES, NONE, Choice
from rvbundle_runtime.decision import Decision
from rvbundle_runtime.host import Host
from rvbundle_runtime.launchers import box64
from rvbundle_runtime.selection import Launch
from rvbundle_runtime.store import PayloadInfo

BINFMT, PRELOAD, EMULATOR = "binfmt_misc", "preload", "emulator"
EMULATE = "/run/rvbundle/emulate.so"  # in the sandbox: what puts the emulator before the programs executed
EMULATOR_FILE = "/run/rvbundle/emulator"  # in the sandbox: what tells it how (docs/emulation.md)
# In the sandbox: what programs preload, the program that it calls, that one's socket (runtime/native/blas.c).
BLAS, BLAS_WORKER, BLAS_SOCKET = "/run/rvbundle/blas.so", "/run/rvbundle/blasworker", "/run/rvbundle/blas"


@dataclass(frozen=True)
class NativeBlas:
    """What computes products of matrices natively: a program and a guest's library, files of the host."""

    worker: str
    library: str
    threads: int

    def command(self) -> tuple[str, ...]:
        """Return the words that start the worker in the sandbox."""
        return BLAS_WORKER, BLAS_SOCKET, str(self.threads)


@dataclass(frozen=True)
class Emulation:
    """How a payload's programs are emulated.

    `start` is what comes before each; `children` is BINFMT (the kernel executes `starter`, which puts it
    there), PRELOAD (`library` puts it before what a program executes) or EMULATOR (it sees to children
    itself); both are files of the host. `native` tells whether the payload is for the host's own architecture
    after all; `cpuinfo` replaces /proc/cpuinfo, "" where the emulator does that; `preload` are the libraries
    that every program preloads.
    """

    start: launchers.Start
    children: str
    native: bool
    cpuinfo: str
    starter: str
    library: str
    preload: tuple[str, ...]
    blas: NativeBlas | None = None

    def command(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words that start the program `argv`."""
        return argv if self.children == BINFMT else self.start.command(argv[0], argv)


def plan_emulation(
    host: Host, launch: Launch, info: PayloadInfo, sandbox: str, root: str, decision: Decision
) -> tuple[Emulation | None, tuple[Choice, ...]]:
    """Decide how the payload `info`, unpacked at `root`, is emulated; None for one that runs natively."""
    if launch.native:
        return None, (Choice("emulator", "none", launch.why_launcher),)
    emulator = launchers.usable(host, launch.launcher, launch.arch)
    assert emulator  # that is why it was chosen
    seen = "" if sandbox != NONE else root  # where the payload's programs see its root
    model = decision.model or machine.DEFAULT
    start = launchers.ALL[launch.launcher].start(host, launch.arch, seen, model)
    start = replace(start, env={**start.env, **decision.emulator_env})
    children, why_children = _choose_children(host, sandbox, start)
    library = nativefiles.place(launch.arch, nativefiles.EMULATE)
    preload = [f"{seen}/{GUARD}"] if info.trimmed else []
    if children == PRELOAD:
        preload.append(EMULATE if sandbox != NONE else library)
    native_blas, choosing_blas = _choose_blas(host, launch, sandbox, decision)
    if native_blas:
        preload.append(BLAS)
    if start.preload and preload:
        start = replace(start, env={**start.env, start.preload: ":".join(preload)})
    cpuinfo = machine.cpuinfo(model, host.cpus) if sandbox != NONE else ""
    native = launch.arch == host.arch
    no_pages = info.trimmed and launch.launcher == box64.name
    whys = (f"{emulator.path} passed its probe", launch.why_launcher, box64.NO_PAGES if no_pages else "")
    why = "; ".join(filter(None, whys))
    starter = nativefiles.place(host.arch, nativefiles.STARTER)
    return Emulation(start, children, native, cpuinfo, starter, library, tuple(preload), native_blas), (
        Choice("emulator", f"{launch.launcher} {emulator.version}", why, warn=no_pages),
        Choice("processor", model.option or "its default", model.reason),
        Choice("children", children, why_children),
        *choosing_blas,
    )


def _choose_blas(
    host: Host, launch: Launch, sandbox: str, decision: Decision
) -> tuple[NativeBlas | None, tuple[Choice, ...]]:
    if not decision.native_blas:
        return None, ()
    if sandbox == NONE:
        return None, (Choice("native BLAS", "none", "it needs the sandbox", warn=True),)
    threads = decision.threads or len(host.usable)
    made = NativeBlas(
        worker=nativefiles.place(host.arch, nativefiles.BLAS_WORKER),
        library=nativefiles.place(launch.arch, nativefiles.BLAS),
        threads=threads,
    )
    value = f"{threads} thread{'s' * (threads > 1)}"
    return made, (Choice("native BLAS", value, "the backend has large products computed natively"),)


def _choose_children(host: Host, sandbox: str, start: launchers.Start) -> tuple[str, str]:
    """Choose what starts the emulator for the programs that the agent executes."""
    if sandbox == NONE:
        why = "binfmt_misc needs the sandbox"
    elif sandbox != NAMESPACES:
        why = "without a user namespace binfmt_misc would be the whole machine's"
    elif host.binfmt_denied:
        why = f"no binfmt_misc in user namespaces: {host.binfmt_denied}"
    else:
        return BINFMT, "the sandbox's user namespace has its own"
    if start.starts_children:
        return EMULATOR, f"it starts all but scripts by itself; {why}"
    return PRELOAD, why
