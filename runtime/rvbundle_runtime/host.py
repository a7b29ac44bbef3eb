"""Facts about the machine that runs an image: the only place of the run side that looks at it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rvbundle_runtime import store
from rvbundle_runtime.errors import SandboxError
from rvbundle_runtime.families import Processor, parse_cpuinfo
from rvbundle_runtime.machine import parse_cpu_list

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

    `cpus` are the numbers of the processors that are online. What costs time to find out is looked at only
    where it matters (`emulators.look`): the `emulators`, and `binfmt_denied`, which is "" where a user
    namespace can have emulators of its own (binfmt_misc).
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


def read_host() -> Host:
    """Look at this machine; costs one short-lived child process. Raises SandboxError."""
    uname = os.uname()
    denied, fix = _probe_namespaces()
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
        processor=read_processor(),
        cpus=_online_cpus(),
    )


_CPUINFO_READ = 16384  # bytes: the first processor's part, even of a machine with hundreds


def read_processor() -> Processor:
    """Return what the kernel says of the first processor; nothing where there is no /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return parse_cpuinfo(file.read(_CPUINFO_READ).decode("utf-8", "replace"))
    except OSError:
        return Processor()


def _online_cpus() -> tuple[int, ...]:
    try:
        return parse_cpu_list(Path("/sys/devices/system/cpu/online").read_text())
    except (OSError, ValueError):
        return tuple(range(os.cpu_count() or 1))


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
