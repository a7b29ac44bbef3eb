"""Facts about the machine that runs an image: the only place of the run side that looks at it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rvbundle_runtime import processor as processor_
from rvbundle_runtime import store
from rvbundle_runtime.errors import SandboxError
from rvbundle_runtime.machine import parse_cpu_list
from rvbundle_runtime.processor import Cluster, Processor

# What of the caller's environment an agent may see. Everything else stays out: LD_*, PYTHON*, OMP_*,
# OPENBLAS_* and the like change results or crash, and the rest would make runs differ from host to host.
ENV_ALLOWED = ("TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "TZ", "COLUMNS", "LINES")
EMULATORS_VARIABLE = "RVBUNDLE_EMULATORS"  # names a folder where emulators are looked for before PATH
ENV_PROXIES = tuple(
    name for base in ("http_proxy", "https_proxy", "no_proxy", "all_proxy") for name in (base, base.upper())
)


@dataclass(frozen=True)
class Emulator:
    """A program that runs programs of the architecture `guest`, and what was found out about it.

    `kind` is "qemu" or "box64"; `version` is as it says itself, "" if unknown; `probe` is "" where it has
    passed its probe, else what went wrong. One that is linked dynamically needs its `loader` (ld.so) and
    `libraries`; `carried`: these lie in a folder of its own, where the host's ld.so would not look for them.
    """

    kind: str
    guest: str
    path: str
    version: str = ""
    probe: str = ""
    loader: str = ""
    libraries: tuple[str, ...] = ()
    carried: bool = False


@dataclass(frozen=True)
class Host:
    """A machine and a caller. `namespaces_denied` is "" where user namespaces work, else why not.

    `cpus` are the numbers of the processors that are online, `usable` those of them that this process may
    run on, `quota` is the processors' worth of time that its control group gets (None: all), `clusters` are
    the kinds of cores, the biggest first. `processor` tells of the usable ones. What costs time to find out
    is looked at only where it matters (`emulators.look`): the `emulators`, and `binfmt_denied`, which is ""
    where a user namespace can have emulators of its own (binfmt_misc).
    """

    arch: str
    kernel: str
    page_size: int
    uid: int
    gid: int
    cwd: str
    environ: Mapping[str, str]
    namespaces_denied: str
    namespaces_fix: str
    processor: Processor = field(default_factory=Processor)
    cpus: tuple[int, ...] = (0,)
    emulators: tuple[Emulator, ...] = ()
    binfmt_denied: str = "not looked at"
    usable: tuple[int, ...] = (0,)
    quota: float | None = None
    clusters: tuple[Cluster, ...] = ()


class Memory(NamedTuple):  # no dataclass: to make one costs every run 0.4 ms, and only doctor needs it
    """Of the machine, in bytes; `limit` is that of this process's control group, None without one."""

    total: int
    available: int
    limit: int | None = None


def read_host() -> Host:
    """Look at this machine; costs one short-lived child process. Raises SandboxError."""
    uname = os.uname()
    denied, fix = _probe_namespaces()
    cpus = _online_cpus()
    usable = _usable_cpus(cpus)
    cpuinfo = read_cpuinfo(uname.machine)
    return Host(
        arch=uname.machine,
        kernel=uname.release,
        page_size=os.sysconf("SC_PAGESIZE"),
        uid=os.getuid(),
        gid=os.getgid(),
        cwd=_current_folder(),
        environ=dict(os.environ),
        namespaces_denied=denied,
        namespaces_fix=fix,
        processor=_read_processor(uname.machine, cpuinfo, usable),
        cpus=cpus,
        usable=usable,
        quota=read_quota(),
        clusters=processor_.clusters(cpus, cpuinfo, *_read_kinds(uname.machine, cpus)),
    )


# Bytes of /proc/cpuinfo. On x86 the first processor's part, even of a machine with hundreds: the kernel asks
# each for its clock. Elsewhere processors differ, and 256 of them fit.
_CPUINFO_READ = {"x86_64": 16384}
_CPUINFO_READ_OTHERS = 1 << 18


def read_cpuinfo(arch: str) -> str:
    """Return as much of /proc/cpuinfo as it takes to know the processors; "" if there is none."""
    return _text("/proc/cpuinfo", _CPUINFO_READ.get(arch, _CPUINFO_READ_OTHERS))


def read_processor() -> Processor:
    """Return what the kernel says of the processors that this process may use."""
    arch = os.uname().machine
    return _read_processor(arch, read_cpuinfo(arch), _usable_cpus(()))


def _read_processor(arch: str, cpuinfo: str, usable: Sequence[int]) -> Processor:
    if arch == "x86_64":
        return processor_.combine(arch, cpuinfo)
    hwcap, hwcap2 = processor_.parse_auxv(_bytes("/proc/self/auxv"))
    pairs = _read_hwprobe(usable) if arch == "riscv64" else {}
    vlen = _read_vlen() if pairs.get(processor_.IMA_EXT_0, 0) & processor_.IMA_V else 0
    return processor_.combine(arch, cpuinfo, hwcap, hwcap2, pairs, vlen, usable)


_VECTORS_OFF = 1  # PR_RISCV_V_VSTATE_CTRL_OFF of include/uapi/linux/prctl.h, in the lowest two bits


def _read_hwprobe(usable: Sequence[int]) -> dict[int, int]:
    """Ask riscv_hwprobe; vectors that are switched off for this process count as not there."""
    from rvbundle_runtime import syscalls

    try:
        pairs = syscalls.riscv_hwprobe(processor_.HWPROBE_KEYS, usable)
    except OSError:
        return {}  # before Linux 6.4
    try:
        if syscalls.prctl(syscalls.PR_RISCV_V_GET_CONTROL) & 3 == _VECTORS_OFF:
            pairs[processor_.IMA_EXT_0] &= ~processor_.IMA_V
    except OSError:
        return pairs  # a kernel without vectors, which has no such bit; or an emulator
    return pairs


def _read_vlen() -> int:
    """Return the bits of a vector register, 0 if they can't be read. A processor without dies of SIGILL."""
    from rvbundle_runtime import syscalls, trials

    try:
        return syscalls.call_code(trials.VLENB) * 8
    except OSError:
        return 0  # no memory can be made executable


_CPU = "/sys/devices/system/cpu"


def _read_kinds(arch: str, cpus: Sequence[int]) -> tuple[dict[int, int], dict[str, tuple[int, ...]]]:
    """Return the capacities of the processors, and on x86 the kinds of cores, where the kernel has them."""
    if arch == "x86_64":
        # Of a hybrid processor each kind of core has performance counters of its own.
        texts = {name: _text(f"/sys/devices/cpu_{name}/cpus") for name in ("core", "atom")}
        return {}, {name: _cpu_list(text) for name, text in texts.items() if text}
    capacities = {cpu: _text(f"{_CPU}/cpu{cpu}/cpu_capacity").strip() for cpu in cpus}
    return {cpu: int(text) for cpu, text in capacities.items() if text.isdecimal()}, {}


def _online_cpus() -> tuple[int, ...]:
    return _cpu_list(_text(f"{_CPU}/online")) or tuple(range(os.cpu_count() or 1))


def _usable_cpus(online: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except OSError:  # denied, or more processors than Python has room for
        return online


def _cpu_list(text: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(text)
    except ValueError:
        return ()


def _bytes(path: str, size: int = 1 << 20) -> bytes:
    """Return the first bytes of a file of the kernel; none if it is not there or may not be read."""
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _text(path: str, size: int = 1 << 20) -> str:
    return _bytes(path, size).decode("utf-8", "replace")


def _groups(controller: str) -> list[str]:
    """Return the folders of this process's control group and of those above it, for this controller.

    Version 2 has one tree for all ("0::/path" in /proc/self/cgroup), version 1 one each ("4:cpu,cpuacct:/x").
    In a container the path may be the host's, and only the top is there.
    """
    found = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = f"/sys/fs/cgroup/{controller}" if controllers else "/sys/fs/cgroup"
        steps = [part for part in path.split("/") if part not in ("", "..")]
        found += ["/".join([top, *steps[:count]]) for count in range(len(steps), -1, -1)]
    return found or ["/sys/fs/cgroup"]


def read_quota() -> float | None:
    """Return the processors' worth of time that the control groups allow; None if they set no limit."""
    found = []
    for group in _groups("cpu"):
        words = _text(f"{group}/cpu.max").split() or [
            _text(f"{group}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def read_memory() -> Memory:
    """Return how much memory there is, and how much of it the control groups allow."""
    values = {}
    for line in _text("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        values[name] = int(value.split()[0]) << 10 if value.split() else 0
    texts = [
        _text(f"{group}/{name}").strip()
        for group in _groups("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    total = values.get("MemTotal", 0)
    limit = min((int(text) for text in texts if text.isdecimal()), default=None)
    limit = limit if limit is not None and limit < total else None
    return Memory(total, values.get("MemAvailable", 0), limit)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise SandboxError(f"the current folder can't be used: {error.strerror}", "cd to another") from None


def _probe_namespaces() -> tuple[str, str]:
    """Try what the sandbox needs in a child. Ubuntu's AppArmor lets unshare pass and denies the mount."""
    from rvbundle_runtime import syscalls

    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
            syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_SLAVE)
        except OSError as error:
            code = min(error.errno or 255, 255)
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "", ""
    return _explain_denial(code if code > 0 else 1)


def _explain_denial(code: int) -> tuple[str, str]:
    if _sysctl("user/max_user_namespaces") == "0":
        return (
            "the kernel allows none (user.max_user_namespaces is 0)",
            "sudo sysctl -w user.max_user_namespaces=15000",
        )
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        return (
            "the kernel allows them to root only (kernel.unprivileged_userns_clone is 0)",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        )
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor denies them (kernel.apparmor_restrict_unprivileged_userns is 1, as on Ubuntu 24.04)",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        )
    return (
        f"{os.strerror(code).lower()} (inside a container? then its runtime's seccomp profile denies them)",
        "allow user namespaces on this machine",
    )


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class CachePlace:
    """Where unpacked images live, and why there."""

    base: Path
    reason: str


def cache_place(environ: Mapping[str, str], uid: int) -> CachePlace:
    """Return the first usable of RVBUNDLE_CACHE (then only that), the user's cache, /var/tmp and /tmp.

    A place is unusable if it can't be written, or programs can't be executed from it. Raises nothing:
    if none is usable the first is returned, and using it fails with the error that fits.
    """
    if environ.get("RVBUNDLE_CACHE"):
        return CachePlace(Path(environ["RVBUNDLE_CACHE"]).absolute(), "RVBUNDLE_CACHE says so")
    candidates = []
    if environ.get("XDG_CACHE_HOME", "").startswith("/"):
        candidates.append((Path(environ["XDG_CACHE_HOME"], "rvbundle"), "XDG_CACHE_HOME says so"))
    elif environ.get("HOME", "").startswith("/"):
        candidates.append((Path(environ["HOME"], ".cache", "rvbundle"), "your cache folder"))
    candidates += [(Path(f"{tmp}/rvbundle-{uid}"), "a temporary folder") for tmp in ("/var/tmp", "/tmp")]
    refused: list[str] = []
    for base, reason in candidates:
        why = store.why_unusable(base)
        if not why:
            return CachePlace(base, "; ".join([*refused, reason]))
        refused.append(why)
    base, reason = candidates[0]
    return CachePlace(base, "; ".join([*refused, reason]))
