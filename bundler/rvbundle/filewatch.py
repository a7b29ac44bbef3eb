"""Which files of a tree are opened, by whatever process and in whatever way: inotify on every folder."""

import ctypes
import errno
import os
import select
import struct
import threading
from pathlib import Path
from types import TracebackType

from rvbundle_runtime.errors import TraceError

_IN_OPEN = 0x20
_IN_ISDIR = 0x40000000
_IN_Q_OVERFLOW = 0x4000
_IN_ONLYDIR = 0x01000000
_EVENT = struct.Struct("iIII")  # struct inotify_event: watch, mask, cookie, length of the name
_BUFFER = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """A context in which opened files are noted; `opened` is complete once the context has ended.

    Inotify sees a file by its inode, so also through bind mounts and in other namespaces.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._folders: dict[int, str] = {}
        self._stop_reading, self._stop_writing = os.pipe2(os.O_CLOEXEC)
        self._overflow = False
        self.opened: set[str] = set()

    def __enter__(self) -> "FileWatch":
        self._fd = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise _failure("inotify_init1")
        for place, _, _ in os.walk(self._tree):
            number = _libc.inotify_add_watch(self._fd, place.encode(), _IN_OPEN | _IN_ONLYDIR)
            if number < 0:
                raise _failure("inotify_add_watch")
            self._folders[number] = os.path.relpath(place, self._tree)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.write(self._stop_writing, b".")
        self._thread.join()
        for fd in (self._fd, self._stop_reading, self._stop_writing):
            os.close(fd)
        if self._overflow and kind is None:
            raise TraceError(
                "files were opened faster than the trace could note them",
                "sudo sysctl -w fs.inotify.max_queued_events=1048576",
            )

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._fd, self._stop_reading], [], [])
            try:
                data = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                data = b""
            self._note(data)
            if not data and self._stop_reading in ready:
                return

    def _note(self, data: bytes) -> None:
        place = 0
        while place < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, place)
            name = data[place + _EVENT.size : place + _EVENT.size + length].rstrip(b"\0").decode()
            place += _EVENT.size + length
            if mask & _IN_Q_OVERFLOW:
                self._overflow = True
            elif name and not mask & _IN_ISDIR:
                folder = self._folders[watch]
                self.opened.add(name if folder == "." else f"{folder}/{name}")


def _failure(call: str) -> TraceError:
    error = ctypes.get_errno()
    hint = ""
    if error == errno.ENOSPC:
        hint = "sudo sysctl -w fs.inotify.max_user_watches=1048576"
    elif error == errno.EMFILE:
        hint = "sudo sysctl -w fs.inotify.max_user_instances=1024"
    return TraceError(f"the trace can't watch the tree: {call}: {os.strerror(error)}", hint)
