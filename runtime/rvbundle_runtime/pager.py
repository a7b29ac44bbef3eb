"""The pager: gives a running agent what its image left out, from the cold pack (docs/pager.md).

A request is 4 bytes of length and a path of the payload's tree, or a zero byte, a place in a trimmed
library and its path; the answer is a status byte, 4 bytes of length and a text (or bytes). What is asked for
is written into the store's tree at its own path, where the agent sees it through the read-only mount, and
where the next run finds it.
"""

import contextlib
import errno
import os
import socket
import struct
import threading
from pathlib import Path

from rvbundle_runtime import format as fmt
from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.filler import Filler
from rvbundle_runtime.image import Reader
from rvbundle_runtime.store import PAGES_LIST, RESTORED_LIST
from rvbundle_runtime.zstd import decoder

RESTORED, NOT_IN_PACK, FAILED, BYTES = 0, 1, 2, 3
REQUEST = struct.Struct("<I")
PAGE_REQUEST = struct.Struct("<BQB")  # zero (no path starts with it), offset in the library's file, flags
SEND = 1  # flag: answer with the bytes, do not touch the store
ANSWER = struct.Struct("<BI")
_UCRED = struct.Struct("iII")  # struct ucred: process, user and group id
_CONNECTIONS_MAX = 256
_IDLE = 3600.0  # seconds after which a silent connection is closed; the guest opens a new one


class Pager:
    """Serves one payload from one cold pack; everything it needs is open before the root changes."""

    def __init__(self, cold: Reader, arch: str, root: str) -> None:
        """Open the tree at `root`; raises ImageError if the pack has nothing for `arch`."""
        decoder()  # once the root has changed, nothing can be imported any more
        self._cold = cold
        self._arch = arch
        self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._log = _open_log(os.path.join(os.path.dirname(root), RESTORED_LIST))
        self.filler = Filler(cold, self._root, Path(os.path.dirname(root), PAGES_LIST))
        self._entries: dict[tuple[str, bool], fmt.Entry] | None = None
        self._lock = threading.Lock()
        self._token = os.urandom(6).hex()  # every supervisor has process id 1
        self._free = threading.Semaphore(_CONNECTIONS_MAX)

    def listen(self, address: str) -> None:
        """Serve on a Unix socket from a thread of its own until the process ends.

        `address` is a path, or "@NAME" for one in the abstract namespace, which leaves nothing behind.
        """
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if address.startswith("@"):
            server.bind("\0" + address[1:])
        else:
            os.makedirs(os.path.dirname(address), exist_ok=True)
            server.bind(address)
            os.chmod(address, 0o666)
        server.listen(64)
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            self._free.acquire()
            connection, _ = server.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            if _UCRED.unpack(credentials)[1] != os.getuid():
                connection.close()  # an abstract name is open to every user of the machine
                self._free.release()
                continue
            connection.settimeout(_IDLE)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                while True:
                    head = _receive(connection, REQUEST.size)
                    if head is None:
                        return
                    (length,) = REQUEST.unpack(head)
                    body = _receive(connection, length) if length < fmt.PATH_MAX else None
                    if body is None:
                        return  # no request of ours: such a client is not answered
                    status, data = self._answer(body)
                    connection.sendall(ANSWER.pack(status, len(data)) + data)
        except OSError:
            return  # the client is gone
        finally:
            self._free.release()

    def _answer(self, body: bytes) -> tuple[int, bytes]:
        if body[:1] != b"\0":
            status, text = self.restore(body.decode("utf-8", "replace"))
            return status, text.encode()
        if len(body) <= PAGE_REQUEST.size:
            return NOT_IN_PACK, b"a request for pages without a path"
        _, offset, flags = PAGE_REQUEST.unpack_from(body)
        path = body[PAGE_REQUEST.size :].decode("utf-8", "replace")
        return self.restore_pages(path, offset, bool(flags & SEND))

    def restore_pages(self, path: str, offset: int, send: bool) -> tuple[int, bytes]:
        """Bring a run of the trimmed library `path` back; return a status, and a text or bytes."""
        with self._lock:
            try:
                entry = self._known().get((path, True))
                if entry is None:
                    return NOT_IN_PACK, f"the cold pack has no pages of {path}".encode()
                data = self.filler.fill(entry, offset, send)
            except ImageError as error:
                return FAILED, error.message.encode()
            except OSError as error:
                return FAILED, f"{path} could not be restored: {error.strerror}".encode()
        return (RESTORED, b"") if data is None else (BYTES, data)

    def restore(self, path: str) -> tuple[int, str]:
        """Bring the file, link or folder `path` into the tree; return a status and a text for it."""
        with self._lock:
            try:
                entry = self._known().get((path, False))
                if entry is None:
                    return NOT_IN_PACK, f"{path} is not in the cold pack"
                self._write(entry)
            except ImageError as error:
                return FAILED, error.message
            except OSError as error:
                return FAILED, f"{path} could not be restored: {error.strerror}"
        return RESTORED, ""

    def _known(self) -> dict[tuple[str, bool], fmt.Entry]:
        if self._entries is None:
            payload = next((p for p in self._cold.index().payloads if p.arch == self._arch), None)
            if payload is None:
                raise ImageError(f"the cold pack has nothing for {self._arch}")
            self._entries = {(e.path, e.kind == fmt.RANGES): e for e in payload.entries if e.kind != fmt.TAIL}
        return self._entries

    def _write(self, entry: fmt.Entry) -> None:
        parts = entry.path.split("/")
        folder = _open_folder(self._root, parts if entry.kind == fmt.DIRECTORY else parts[:-1])
        try:
            if entry.kind == fmt.LINK:
                with contextlib.suppress(FileExistsError):
                    os.symlink(entry.target, parts[-1], dir_fd=folder)
            elif entry.kind != fmt.DIRECTORY:
                self._write_file(entry, folder, parts[-1])
        finally:
            os.close(folder)

    def _write_file(self, entry: fmt.Entry, folder: int, name: str) -> None:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            return  # restored before, by this run or another
        except FileNotFoundError:
            data = self._cold.read_blob(entry.blob)
        temporary = f".rvbundle-{self._token}"  # one at a time: `restore` holds the lock
        mode = 0o755 if entry.kind == fmt.EXECUTABLE else 0o644
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, mode, dir_fd=folder)
        try:
            try:
                os.fchmod(fd, mode)
                view = memoryview(data)
                while len(view):
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            if self._log is not None:
                os.write(self._log, f"{entry.path}\n".encode())
        except OSError:
            os.unlink(temporary, dir_fd=folder)
            raise


def _open_log(path: str) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:  # a read-only store: nothing can be restored into it either
        return None


def _open_folder(root: int, parts: list[str]) -> int:
    """Open the folder `parts` below `root`, making what is missing; links are not followed."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(".", flags, dir_fd=root)
    for part in parts:
        try:
            try:
                os.mkdir(part, 0o755, dir_fd=folder)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.EROFS):
                    raise
            deeper = os.open(part, flags, dir_fd=folder)
        finally:
            os.close(folder)
        folder = deeper
    return folder


def _receive(connection: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return None
        data += chunk
    return data
