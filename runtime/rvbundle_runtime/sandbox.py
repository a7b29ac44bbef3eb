"""The sandbox as a list of operations: each can describe itself and be carried out.

They run in a new mount namespace. The first makes an empty root with the host's at /oldroot, the last
takes /oldroot away; between them the paths of the host are those below /oldroot.
"""

import errno
import os
import stat
from dataclasses import dataclass
from typing import Protocol

from rvbundle_runtime import runinfo, starter
from rvbundle_runtime import syscalls as sys_
from rvbundle_runtime.emulation import (
    BINFMT,
    BLAS,
    BLAS_WORKER,
    EMULATE,
    EMULATOR_FILE,
    PRELOAD,
    Emulation,
)
from rvbundle_runtime.errors import SandboxError
from rvbundle_runtime.launchers import Start
from rvbundle_runtime.plan import HOME, Mount, Plan

_OLD = "/oldroot"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class Operation(Protocol):
    """One step of making the sandbox."""

    def describe(self) -> str:
        """Say in a few words what will be done."""

    def execute(self) -> None:
        """Do it; raises OSError."""


@dataclass(frozen=True)
class EnterRoot:
    """Make a tmpfs the root; `base` is any folder of the host (nothing in it is touched)."""

    base: str

    def describe(self) -> str:
        return "make an empty root"

    def execute(self) -> None:
        sys_.mount("none", "/", "", sys_.MS_REC | sys_.MS_SLAVE)
        sys_.mount("tmpfs", self.base, "tmpfs", sys_.MS_NOSUID | sys_.MS_NODEV, "mode=0755")
        os.mkdir(self.base + _OLD)
        try:
            sys_.pivot_root(self.base, self.base + _OLD)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._cover_root()  # the host's root is its initramfs, which pivot_root(2) can't move
        os.chdir("/")

    def _cover_root(self) -> None:
        """Move the new root over the old one, as switch_root(8) does, and show the old one at /oldroot."""
        sys_.mount("/", self.base + _OLD, "", sys_.MS_BIND | sys_.MS_REC)
        sys_.umount_lazily(self.base + _OLD + self.base)  # a copy of the new root: it hides the payload
        os.chdir(self.base)
        sys_.mount(self.base, "/", "", sys_.MS_MOVE)
        os.chroot(".")


@dataclass(frozen=True)
class MountPayload:
    """Show a payload's tree read-only: its folders by bind mounts, its links again, its /etc as a copy."""

    root: str

    def describe(self) -> str:
        return f"mount the payload {self.root}"

    def execute(self) -> None:
        root = _resolve(self.root)  # the store may lie behind a link
        for name in sorted(os.listdir(root)):
            path = f"{root}/{name}"
            if os.path.islink(path):
                os.symlink(os.readlink(path), f"/{name}")
            elif name != "etc":
                os.mkdir(f"/{name}", 0o755)
                sys_.mount(path, f"/{name}", "", sys_.MS_BIND)
                sys_.make_read_only(f"/{name}")
        os.mkdir("/etc", 0o755)
        if os.path.isdir(f"{root}/etc"):
            for name in sorted(os.listdir(f"{root}/etc")):
                with open(f"{root}/etc/{name}", "rb") as source, open(f"/etc/{name}", "wb") as copy:
                    copy.write(source.read())


@dataclass(frozen=True)
class WriteFile:
    """Write a small text file."""

    path: str
    text: str

    def describe(self) -> str:
        return f"write {self.path}"

    def execute(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(self.text)


@dataclass(frozen=True)
class Tmpfs:
    """Mount an empty, writable folder that lives in memory."""

    path: str
    mode: str = "0755"

    def describe(self) -> str:
        return f"mount an empty {self.path}"

    def execute(self) -> None:
        os.makedirs(self.path, exist_ok=True)
        sys_.mount("tmpfs", self.path, "tmpfs", sys_.MS_NOSUID | sys_.MS_NODEV, f"mode={self.mode}")


@dataclass(frozen=True)
class Proc:
    """Mount a /proc of this process-id namespace, or the host's where the kernel allows no new one."""

    def describe(self) -> str:
        return "mount /proc"

    def execute(self) -> None:
        os.mkdir("/proc", 0o755)
        flags = sys_.MS_NOSUID | sys_.MS_NODEV | sys_.MS_NOEXEC
        try:
            sys_.mount("proc", "/proc", "proc", flags)
        except PermissionError:  # a container that hides parts of /proc: a new one would show them
            sys_.mount(f"{_OLD}/proc", "/proc", "", sys_.MS_BIND | sys_.MS_REC)


@dataclass(frozen=True)
class Devices:
    """Make a minimal /dev: the harmless devices, shared memory, pseudo-terminals."""

    def describe(self) -> str:
        return "make a minimal /dev"

    def execute(self) -> None:
        os.mkdir("/dev", 0o755)
        sys_.mount("tmpfs", "/dev", "tmpfs", sys_.MS_NOSUID, "mode=0755")
        for name in _DEVICES:
            if os.path.exists(f"{_OLD}/dev/{name}"):
                _bind(f"{_OLD}/dev/{name}", f"/dev/{name}")
        for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
            os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
        os.mkdir("/dev/shm", 0o1777)
        sys_.mount("tmpfs", "/dev/shm", "tmpfs", sys_.MS_NOSUID | sys_.MS_NODEV, "mode=1777")
        os.mkdir("/dev/pts", 0o755)
        flags = sys_.MS_NOSUID | sys_.MS_NOEXEC
        sys_.mount("devpts", "/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=0620")
        os.symlink("pts/ptmx", "/dev/ptmx")


@dataclass(frozen=True)
class Bind:
    """Show a path of the host."""

    mount: Mount

    def describe(self) -> str:
        how = " read-only" if self.mount.read_only else ""
        return f"mount {self.mount.source} as {self.mount.target}{how}"

    def execute(self) -> None:
        source = _resolve(self.mount.source)
        if self.mount.optional and not os.path.exists(source):
            return
        _bind(source, self.mount.target)
        if self.mount.read_only:
            sys_.make_read_only(self.mount.target)


@dataclass(frozen=True)
class Cover:
    """Show a text in the place of a file that is there, read-only; `folder` is where the text is put."""

    path: str
    text: str
    folder: str = "/run/rvbundle"

    def describe(self) -> str:
        return f"replace {self.path}"

    def execute(self) -> None:
        os.makedirs(self.folder, exist_ok=True)
        file = f"{self.folder}/{os.path.basename(self.path)}"
        with open(file, "w", encoding="utf-8") as output:
            output.write(self.text)
        sys_.mount(file, self.path, "", sys_.MS_BIND)
        sys_.make_read_only(self.path)
        os.unlink(file)  # the mount keeps it, and nobody can write to it any more


@dataclass(frozen=True)
class MarkedCopy:
    """Show a copy of a program for the host's own architecture that is not emulated itself (binfmt.py)."""

    mount: Mount

    def describe(self) -> str:
        return f"copy {self.mount.source} to {self.mount.target}"

    def execute(self) -> None:
        _write_program(self.mount.target, starter.marked(_read(self.mount.source)))


@dataclass(frozen=True)
class WriteStarter:
    """Put a program in an emulator's place that starts it in the way that it needs (starter.py)."""

    source: str
    start: Start

    def describe(self) -> str:
        return f"write {self.start.words[0]}"

    def execute(self) -> None:
        inner = Start(self.start.program, env=self.start.env)
        program = starter.with_settings(_read(self.source), inner, plain=True)
        _write_program(self.start.words[0], program)


def _read(path: str) -> bytes:
    with open(_resolve(path), "rb") as file:
        return file.read()


def _write_program(path: str, data: bytes) -> None:
    """Write a program that nobody can change any more."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), 0o755)
    sys_.mount(path, path, "", sys_.MS_BIND)
    sys_.make_read_only(path)


@dataclass(frozen=True)
class LeaveOldRoot:
    """Take the host's files away and make the root itself read-only."""

    def describe(self) -> str:
        return "take the host's files away"

    def execute(self) -> None:
        sys_.umount_lazily(_OLD)
        os.rmdir(_OLD)
        flags = sys_.MS_REMOUNT | sys_.MS_BIND | sys_.MS_RDONLY | sys_.MS_NOSUID | sys_.MS_NODEV
        sys_.mount("none", "/", "", flags)


def _resolve(path: str) -> str:
    """Return where a host path lies below /oldroot, its links followed as the host would."""
    left = [part for part in path.split("/") if part]
    done = _OLD
    links = 0
    while left:
        part = left.pop(0)
        if part == "..":
            done = os.path.dirname(done) if done != _OLD else _OLD
            continue
        done = f"{done}/{part}" if part != "." else done
        if os.path.islink(done):
            links += 1
            if links > 40:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(done)
            done = _OLD if target.startswith("/") else os.path.dirname(done)
            left = [p for p in target.split("/") if p] + left
    return done


def _bind(source: str, target: str) -> None:
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    sys_.mount(source, target, "", sys_.MS_BIND | sys_.MS_REC)


def operations(plan: Plan, uid: int, gid: int) -> list[Operation]:
    """Return the steps that make the sandbox of `plan`, in order."""
    names = "" if uid == 0 else f"agent:x:{uid}:{gid}:agent:{HOME}:/bin/sh\n"
    groups = "" if gid == 0 else f"agent:x:{gid}:\n"
    steps: list[Operation] = [
        EnterRoot(os.path.dirname(plan.root)),
        MountPayload(plan.root),
        WriteFile("/etc/passwd", f"{names}root:x:0:0:root:{HOME}:/bin/sh\n"),
        WriteFile("/etc/group", f"{groups}root:x:0:\n"),
        WriteFile("/etc/hosts", "127.0.0.1 localhost agent\n::1 localhost\n"),
        WriteFile("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
        Proc(),
        Devices(),
        Tmpfs("/tmp", "1777"),
        Tmpfs("/run"),
        Tmpfs(HOME),
        Tmpfs("/var/tmp", "1777"),
    ]
    if not any(mount.target == "/agent" for mount in plan.mounts):
        steps.append(Tmpfs("/agent"))
    steps += [Bind(mount) for mount in plan.mounts]
    steps += _emulation(plan.emulation)
    if plan.preload is not None:
        steps.append(WriteFile("/etc/ld.so.preload", "".join(f"{line}\n" for line in plan.preload)))
    if plan.report:
        steps.append(WriteFile(runinfo.FILE, plan.report))
    steps.append(LeaveOldRoot())
    return steps


def _emulation(emulation: Emulation | None) -> list[Operation]:
    """Return the steps that show what emulated programs must see."""
    steps: list[Operation] = []
    if emulation and emulation.cpuinfo:
        steps.append(Cover("/proc/cpuinfo", emulation.cpuinfo))
    if emulation:
        show = MarkedCopy if emulation.native and emulation.children == BINFMT else Bind
        steps += [show(Mount(source, target, read_only=True)) for source, target in emulation.start.files]
        if emulation.start.program:
            steps.append(WriteStarter(emulation.starter, emulation.start))
        if emulation.blas:
            steps.append(Bind(Mount(emulation.blas.library, BLAS, read_only=True)))
            steps.append(show(Mount(emulation.blas.worker, BLAS_WORKER, read_only=True)))
    if emulation and emulation.children == PRELOAD:
        steps.append(Bind(Mount(emulation.library, EMULATE, read_only=True)))
        steps.append(WriteFile(EMULATOR_FILE, emulation.start.settings()))
    return steps


def carry_out(steps: list[Operation]) -> None:
    """Execute the steps; raises SandboxError that names the one that failed."""
    for step in steps:
        try:
            step.execute()
        except OSError as error:
            raise SandboxError(
                f"sandbox: could not {step.describe()}: {_errno_text(error)}", _errno_hint(step, error)
            ) from None


def _errno_text(error: OSError) -> str:
    if error.errno == errno.ENOSPC:  # mount(2): "disk full" would send people the wrong way
        return "the kernel's limit of mounts is reached (ENOSPC; fs.mount-max)"
    return str(error.strerror)


def _errno_hint(step: Operation, error: OSError) -> str:
    if isinstance(step, Bind) and error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "it must exist before the run"
    if error.errno in (errno.EPERM, errno.EACCES):
        return "something on this host denies mounts (a container's seccomp or AppArmor profile?)"
    return ""
