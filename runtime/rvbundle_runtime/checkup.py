"""What only `rvbundle doctor` wants to know about this machine: facts, read and tried out, nothing decided.

What a run needs is tried, not guessed: the sandbox's own operations are carried out in a child process, in
namespaces of its own, so that nothing of it is left.
"""

import json
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rvbundle_runtime import emulators, sandbox, store, trials, zstd
from rvbundle_runtime import syscalls as sys_
from rvbundle_runtime.errors import RvbundleError
from rvbundle_runtime.host import Emulator, Host, Memory, cache_place, read_cpuinfo, read_memory
from rvbundle_runtime.processor import Cluster, Processor
from rvbundle_runtime.trials import Outcome

GUESTS = ("x86_64", "aarch64", "riscv64")  # what payloads there can be


@dataclass(frozen=True)
class Confinement:
    """What came of making a sandbox. `failed` and `hint` are "" if it can be made.

    `root_only`: without user namespaces, which root can do. `shared_proc`: its /proc is the host's, for the
    kernel allows no new one.
    """

    failed: str = ""
    hint: str = ""
    root_only: bool = False
    shared_proc: bool = False


@dataclass(frozen=True)
class StorePlace:
    """Where unpacked images lie; `unusable` is "" or why nothing can be run from there; `free` in bytes."""

    base: str
    reason: str
    unusable: str
    free: int


@dataclass(frozen=True)
class Facts:
    """All that `doctor.examine` looks at. `top_address`: the highest that something is mapped at here.

    `seccomp` is the mode that /proc/self/status names (2: a filter), `container` the name of the container
    engine that this runs in ("" for none known), `mmu` is what a RISC-V kernel says of addresses ("sv39");
    `processor`, `cpus`, `usable`, `quota` and `clusters` are as in `host.Host`, `trials` those of the
    processor. `zstd` is "" if there is a decoder, else why not, and `binfmt` is "" if a user namespace can
    have a binfmt_misc of its own, else why not.
    """

    arch: str
    kernel: str
    page_size: int
    uid: int
    namespaces_denied: str
    namespaces_fix: str
    confinement: Confinement
    processor: Processor
    cpus: tuple[int, ...]
    usable: tuple[int, ...]
    top_address: int
    memory: Memory
    store: StorePlace
    shm_free: int | None
    binfmt: str = ""
    emulators: tuple[Emulator, ...] = ()
    zstd: str = ""
    seccomp: int = 0
    no_new_privs: bool = False
    container: str = ""
    mmu: str = ""
    quota: float | None = None
    clusters: tuple[Cluster, ...] = ()
    trials: tuple[Outcome, ...] = ()


def read_facts(host: Host) -> Facts:
    """Look at this machine; starts the emulators that it finds, for a moment. Raises nothing of its own."""
    place = cache_place(host.environ, host.uid)
    host = emulators.look(host, [arch for arch in GUESTS if arch != host.arch], place.base)
    status = _fields("/proc/self/status")
    return Facts(
        arch=host.arch,
        kernel=host.kernel,
        page_size=host.page_size,
        uid=host.uid,
        namespaces_denied=host.namespaces_denied,
        namespaces_fix=host.namespaces_fix,
        confinement=_try_confinement(host),
        processor=host.processor,
        cpus=host.cpus,
        usable=host.usable,
        top_address=_top_address(_text("/proc/self/maps")),
        memory=read_memory(),
        store=_read_store(place.base, place.reason),
        shm_free=_free("/dev/shm"),
        binfmt=host.binfmt_denied,
        emulators=host.emulators,
        zstd=_why_no_decoder(),
        seccomp=int(status.get("Seccomp", "0") or 0),
        no_new_privs=status.get("NoNewPrivs", "0") == "1",
        container=_container(host.environ),
        mmu=_mmu(read_cpuinfo(host.arch)),
        quota=host.quota,
        clusters=host.clusters,
        trials=trials.make(host.arch),
    )


def _mmu(cpuinfo: str) -> str:
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "mmu"), "")


def _text(path: str, size: int = 1 << 20) -> str:
    """Return the first bytes of a file of the kernel; "" if it is not there or may not be read."""
    try:
        with open(path, "rb") as file:
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


def _fields(path: str) -> dict[str, str]:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _top_address(maps: str) -> int:
    """Return the highest address of /proc/self/maps; x86-64's vsyscall page, which is the kernel's, aside."""
    ends = [int(line.split()[0].partition("-")[2], 16) for line in maps.splitlines() if "-" in line]
    return max((end for end in ends if end < 1 << 63), default=0)


def _free(path: str | Path) -> int | None:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _read_store(base: Path, reason: str) -> StorePlace:
    place = store.nearest_existing(base)
    why = store.why_unusable(base) or _why_not_executable(place)
    return StorePlace(str(base), reason, why, _free(place) or 0)


def _why_not_executable(folder: Path) -> str:
    """Try to map code from a file in `folder`: security modules deny that without a mount flag to see."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        return f"code can't be mapped from a file in {folder}: {error.strerror}"
    return ""


def _why_no_decoder() -> str:
    try:
        zstd.decoder()
    except RvbundleError as error:
        return error.message
    return ""


def _container(environ: Mapping[str, str]) -> str:
    """Return the engine of the container that this runs in, by the marks that engines leave; "" for none."""
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.path.exists("/.dockerenv"):
        return "docker"
    return environ.get("container", "")  # set by systemd-nspawn, LXC and others


def _try_confinement(host: Host) -> Confinement:
    """Make a sandbox as a run would (`supervisor.py`), and look around in it."""
    root_only = bool(host.namespaces_denied) and host.uid == 0
    if host.namespaces_denied and not root_only:
        return Confinement(host.namespaces_denied, host.namespaces_fix)

    def outside() -> dict[str, str | bool]:
        sys_.unshare(sys_.CLONE_NEWPID if root_only else sys_.CLONE_NEWPID | sys_.CLONE_NEWUSER)
        if not root_only:
            sys_.map_ids((host.uid, host.uid), (host.gid, host.gid))
        return _in_child(_confine)

    value = _in_child(outside)
    return Confinement(
        failed=str(value.get("failed", "")),
        hint=str(value.get("hint", "")),
        root_only=root_only,
        shared_proc=bool(value.get("shared_proc")),
    )


def _confine() -> dict[str, str | bool]:
    """Be pid 1 of a sandbox without a payload."""
    sys_.unshare(sys_.CLONE_NEWNS | sys_.CLONE_NEWIPC | sys_.CLONE_NEWUTS | sys_.CLONE_NEWNET)
    sys_.sethostname("agent")
    steps = (
        sandbox.EnterRoot(os.path.dirname(os.path.abspath(__file__))),
        sandbox.Proc(),
        sandbox.Devices(),
        sandbox.Tmpfs("/tmp", "1777"),
    )
    sandbox.carry_out([*steps, sandbox.LeaveOldRoot()])
    sys_.drop_privileges()
    return {"shared_proc": os.readlink("/proc/self") != str(os.getpid())}


def _in_child(function: Callable[[], dict[str, str | bool]]) -> dict[str, str | bool]:
    """Return what `function` returns in a child process; {"failed", "hint"} if it fails there."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        value: dict[str, str | bool] = {"failed": "the child failed", "hint": ""}
        try:
            value = function()
        except RvbundleError as error:
            value = {"failed": error.message, "hint": error.hint}
        except OSError as error:
            value = {"failed": f"sandbox: {error.filename or 'start'}: {error.strerror}", "hint": ""}
        finally:
            os.write(writing, json.dumps(value).encode())
            os._exit(0)  # whatever happens, this process must not run on as its parent
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    found: dict[str, str | bool] = json.loads(text) if text else {"failed": "a child was killed", "hint": ""}
    return found
