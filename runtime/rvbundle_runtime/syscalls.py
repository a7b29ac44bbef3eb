"""The system calls that Python 3.11 has no function for, each raising OSError with what it was doing.

Numbers and flags: Linux's include/uapi (mount.h, sched.h, prctl.h, capability.h, mman-common.h).
"""

import ctypes
import os
from collections.abc import Collection

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_SLAVE = 32, 4096, 8192, 16384, 1 << 19
MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 1024, 2048, 1 << 21
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_RISCV_V_GET_CONTROL = 70

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_MOUNT_SETATTR = 442  # the same everywhere, like all calls since Linux 5.1
_RISCV_HWPROBE = 258  # on riscv64, Linux 6.4
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63  # prctl refuses the ones that the kernel does not have

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, doing: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), doing)


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def map_ids(user: tuple[int, int], group: tuple[int, int]) -> None:
    """Map the user and the group of this new user namespace: (inside, outside)."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user[0]} {user[1]} 1\n"),
        ("gid_map", f"{group[0]} {group[1]} 1\n"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Call mount(2); empty strings stand for NULL."""
    words = [word.encode() if word else None for word in (source, target, kind, data)]
    result = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(result, f"mount {target}")


def umount_lazily(target: str) -> None:
    """Detach a mount and all that is mounted below it."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root and put the old root at `old`."""
    number = _PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(ctypes.c_long(number), new.encode(), old.encode()), f"pivot_root {new}")


def make_read_only(target: str) -> None:
    """Make the mount at `target` read-only, without set-user-id programs and devices.

    With mount_setattr (Linux 5.12) the mounts below it too; on older kernels only the mount itself,
    keeping the flags that a user namespace may not clear.
    """
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(-100),  # AT_FDCWD
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    if result < 0:
        kept = {os.ST_NOEXEC: MS_NOEXEC, os.ST_NOATIME: MS_NOATIME, os.ST_RELATIME: MS_RELATIME}
        have = os.statvfs(target).f_flag
        flags = sum(flag for bit, flag in kept.items() if have & bit)
        mount("none", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | flags)


def prctl(option: int, value: int = 0) -> int:
    """Call prctl(2) with one argument; return what it returns."""
    unused = ctypes.c_ulong(0)
    result: int = _libc.prctl(option, ctypes.c_ulong(value), unused, unused, unused)
    _check(result, f"prctl {option}")
    return result


def drop_privileges() -> None:
    """Give up all capabilities for good, and the means to win some by executing a program."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the kernel's last capability, or none are held: then capset says the rest
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, data), "capset")


def sethostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name.encode()))), "sethostname")


def syncfs(fd: int) -> None:
    """Write what the file system of `fd` has not yet written."""
    _check(_libc.syncfs(fd), "syncfs")


def riscv_hwprobe(keys: Collection[int], cpus: Collection[int]) -> dict[int, int]:
    """Return the values of those `keys` that the kernel knows, for the processors `cpus` together."""
    pairs = (ctypes.c_uint64 * (2 * len(keys)))()
    for at, key in enumerate(keys):
        pairs[2 * at] = key
    size = max(cpus, default=0) // 64 * 8 + 8  # bytes: the kernel's masks are of whole words
    mask = sum(1 << cpu for cpu in cpus).to_bytes(size, "little")
    number, count = ctypes.c_long(_RISCV_HWPROBE), ctypes.c_size_t(len(keys))
    _check(
        _libc.syscall(number, pairs, count, ctypes.c_size_t(size), mask, ctypes.c_uint(0)), "riscv_hwprobe"
    )
    unknown = (1 << 64) - 1  # what the kernel makes of a key that it does not know
    return {pairs[at]: pairs[at + 1] for at in range(0, 2 * len(keys), 2) if pairs[at] != unknown}


def call_code(code: bytes) -> int:
    """Run machine code: a C function without arguments that returns a long.

    Raises OSError where no memory can be made executable (SELinux and others deny it). The kernel makes
    caches see the code when its page becomes executable, as it does for a library's.
    """
    import mmap  # only here: other runs need not load it

    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        memory.write(code)
        start = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(start)
        try:
            protection = ctypes.c_int(mmap.PROT_READ | mmap.PROT_EXEC)
            length = ctypes.c_size_t(mmap.PAGESIZE)
            _check(_libc.mprotect(ctypes.c_void_p(address), length, protection), "mprotect")
            result: int = ctypes.CFUNCTYPE(ctypes.c_long)(address)()
        finally:
            del start  # while it is there, the memory can't be closed
    return result
