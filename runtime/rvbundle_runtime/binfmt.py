"""binfmt_misc in a user namespace of our own: the kernel has every program of a payload emulated.

Since Linux 6.7 a user namespace may mount its own binfmt_misc, without privileges; what is registered there
counts for it and for the user namespaces below it, and hides what the host has registered (fs/binfmt_misc.c).
The entries live as long as the file system is referenced: by a mount, or by an open descriptor of it.
"""

import errno
import os
from pathlib import Path

from rvbundle_runtime import syscalls as sys_
from rvbundle_runtime.launchers import Start
from rvbundle_runtime.machine import E_MACHINE
from rvbundle_runtime.starter import marked, with_settings

# ELF64, little-endian, version 1; any OSABI, as programs with IFUNCs or unique symbols say 3; padding zero.
# Then ET_EXEC or ET_DYN (2 or 3: the lowest bit does not count) and the machine.
_IDENTITY = b"\x7fELF\x02\x01\x01\x00" + bytes(8)
_IDENTITY_MASK = b"\xff" * 7 + b"\x00" + b"\xff" * 8
_TYPE, _TYPE_MASK = b"\x02\x00", b"\xfe\xff"
_MACHINE_MASK = b"\xff\xff"
NO_BINFMT = "the kernel has none"
_PLACE = "/proc"  # a folder that is there: the mount covers it for a moment
# F: what is executed for a program is opened now, where it is; P: it is told the program's argv[0].
_FLAGS = "PF"


def rule(guest: str, interpreter: str) -> bytes:
    """Return the line to register: the file `interpreter` (an absolute path) runs programs for `guest`."""
    magic = _IDENTITY + _TYPE + E_MACHINE[guest].to_bytes(2, "little")
    mask = _IDENTITY_MASK + _TYPE_MASK + _MACHINE_MASK
    return b":rvbundle:M::%s:%s:%s:%s" % (
        _escape(magic),
        _escape(mask),
        os.fsencode(interpreter),
        _FLAGS.encode(),
    )


def _escape(data: bytes) -> bytes:
    return b"".join(b"\\x%02x" % byte for byte in data)


def enter(uid: int, gid: int) -> int:
    """Move this process into a user namespace with an empty binfmt_misc; return a descriptor that keeps it.

    Its user 0 is `uid` outside: the file system belongs to user 0, and is of no use where there is none. The
    process must have one thread. Raises OSError.
    """
    sys_.unshare(sys_.CLONE_NEWUSER | sys_.CLONE_NEWNS)
    sys_.map_ids((0, uid), (0, gid))
    sys_.mount("binfmt_misc", _PLACE, "binfmt_misc")
    try:
        return os.open(_PLACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        sys_.umount_lazily(_PLACE)


def register(instance: int, guest: str, starter: str, start: Start, native: bool) -> None:
    """Have the kernel run programs for `guest` as `start` says, in what `enter` returned; raises OSError.

    What is registered is a copy in memory of `starter` (runtime/native/starter.c) with these settings in it;
    `native`: it is a program for `guest` itself.
    """
    fd = os.open("register", os.O_WRONLY | os.O_CLOEXEC, dir_fd=instance)
    data = with_settings(Path(starter).read_bytes(), start)
    program = _in_memory(marked(data) if native else data)
    try:
        os.write(fd, rule(guest, f"/proc/self/fd/{program}"))
    finally:
        os.close(fd)
        os.close(program)


def _in_memory(program: bytes) -> int:
    """Return a descriptor, for reading only, of a file in memory."""
    writing = os.memfd_create("starter", os.MFD_CLOEXEC)
    try:
        os.write(writing, program)
        # What is open for writing can't be executed (ETXTBSY).
        return os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writing)


def why_denied(uid: int, gid: int) -> str:
    """Try it in a child; return "" if `enter` works here, else why not."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            os.close(os.open("register", os.O_WRONLY, dir_fd=enter(uid, gid)))
            code = 0
        except OSError as error:
            code = min(error.errno or 255, 255)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return ""
    if code == errno.EPERM:
        return "the kernel gives a user namespace none of its own (Linux 6.7 and newer do)"
    if code == errno.ENODEV:
        return NO_BINFMT
    return os.strerror(code).lower() if code > 0 else "the attempt was killed"
