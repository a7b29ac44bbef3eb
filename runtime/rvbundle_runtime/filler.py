"""Fills the holes of trimmed libraries in the store from the cold pack: the pager's part for pages.

What is filled is shared by all processes of a run through the file `present`, and outlives the run through
a list beside the tree (see `store.restored_runs`).
"""

import mmap
import os
from pathlib import Path

from rvbundle_runtime import format as fmt
from rvbundle_runtime import store
from rvbundle_runtime.absent import RUN, TABLE, AbsentLibrary, load, run_count
from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.image import Reader

_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


def initial_present(unpacked: store.Unpacked) -> bytes:
    """Return the content of `present` at the start of a run; raises ImageError for a damaged table."""
    try:
        libraries = load((unpacked.root / TABLE).read_bytes())
    except OSError as error:
        raise ImageError(
            f"{unpacked.root / TABLE}: {error.strerror}",
            "was a part of the unpacked image removed? `rvbundle cache prune --images`, then run it again",
        ) from None
    bits = bytearray(max(1, -(-run_count(libraries) // 8)))
    restored = store.restored_runs(unpacked)
    for library in libraries if restored else ():
        for run in restored.get(library.path, ()):
            if run < library.runs:
                _set(bits, library.first_run + run)
    return bytes(bits)


def _set(bits: "bytearray | mmap.mmap", number: int) -> None:
    bits[number >> 3] |= 1 << (number & 7)


class Filler:
    """Fills runs of one payload's libraries. One thread at a time may use it."""

    def __init__(self, cold: Reader, root: int, log: Path) -> None:
        """Take a cold pack, a descriptor of the tree's root, and the path of the list of what was filled."""
        self._cold = cold
        self._root = root
        self._present: mmap.mmap | None = None
        self._libraries: dict[str, AbsentLibrary] | None = None
        self._windows: dict[str, dict[int, fmt.Piece]] = {}
        self._files: dict[str, int] = {}
        self._token = os.urandom(6).hex()
        self._dirty: set[str] = set()
        self._began = False
        self._boot = store.boot_id()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._log: int | None = os.open(log, flags, 0o644)
        except OSError:  # a read-only store: nothing will be filled there
            self._log = None

    def share(self, fd: int, size: int) -> None:
        """Keep the bits of the file `fd`, `size` bytes long, from now on."""
        self._present = mmap.mmap(fd, size)

    def fill(self, entry: fmt.Entry, offset: int, send: bool) -> bytes | None:
        """Bring the run of `offset` of a library into its file in the store.

        Returns None if it lies there now; else (`send`, or the store can't take it) all bytes of the run.
        Raises ImageError (damaged pack; nothing absent there) and OSError.
        """
        start = offset // RUN * RUN
        library = self._known().get(entry.path)
        if library is None or entry.size != library.size:
            raise ImageError(f"{entry.path} is no trimmed library of this image")
        cold = list(self._cold.read_pieces(self._window(entry, start)))
        if not send:
            try:
                self._write(entry.path, cold)
            except OSError:
                send = True  # full or read-only: the guard keeps the bytes in memory
            else:
                self._note(library, _runs_of(cold))
        return self._whole_run(library, cold, start) if send else None

    def close(self) -> None:
        """Bring what was filled to the disk, so that it counts after a crash too."""
        if not self._dirty or self._log is None:
            return
        try:
            for path in self._dirty:
                os.fdatasync(self._files[path])
            os.write(self._log, f"S {self._token}\n".encode())
        except OSError:
            return  # then it counts until the next boot

    def _known(self) -> dict[str, AbsentLibrary]:
        if self._libraries is None:
            fd = os.open(TABLE, os.O_RDONLY | _NOFOLLOW, dir_fd=self._root)
            with os.fdopen(fd, "rb") as file:
                self._libraries = {library.path: library for library in load(file.read())}
        return self._libraries

    def _window(self, entry: fmt.Entry, start: int) -> fmt.Piece:
        """Return the piece that has the cold bytes of the run at `start`."""
        runs = self._windows.get(entry.path)
        if runs is None:
            runs = {}
            for piece in entry.pieces[1:]:  # the first is the ELF header, which is never absent
                for offset, size in piece.ranges:
                    for run in range(offset // RUN, (offset + size - 1) // RUN + 1):
                        runs[run] = piece
            self._windows[entry.path] = runs
        try:
            return runs[start // RUN]
        except KeyError:
            raise ImageError(f"the cold pack has nothing at {start:#x} of {entry.path}") from None

    def _write(self, path: str, cold: list[tuple[int, bytes]]) -> None:
        if path not in self._files:
            self._files[path] = _open_below(self._root, path, os.O_RDWR)
        fd = self._files[path]
        for offset, data in cold:
            view = memoryview(data)
            while len(view):
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
        self._dirty.add(path)

    def _note(self, library: AbsentLibrary, runs: list[int]) -> None:
        if self._log is not None:
            begin = "" if self._began else f"B {self._token} {self._boot}\n"
            self._began = True
            lines = "".join(f"P {self._token} {run} {library.path}\n" for run in runs)
            os.write(self._log, (begin + lines).encode())
        for run in runs:
            if self._present is not None and run < library.runs:
                _set(self._present, library.first_run + run)

    def _whole_run(self, library: AbsentLibrary, cold: list[tuple[int, bytes]], start: int) -> bytes:
        size = min(RUN, library.size - start)
        fd = _open_below(self._root, library.path, os.O_RDONLY)
        try:
            try:
                whole = bytearray(os.pread(fd, size, start))
            except OSError:
                whole = bytearray()  # then only what is cold is right, which is all that the guard takes
        finally:
            os.close(fd)
        whole += bytes(size - len(whole))
        for offset, data in cold:
            a, b = max(offset, start), min(offset + len(data), start + size)
            if a < b:
                whole[a - start : b - start] = data[a - offset : b - offset]
        return bytes(whole)


def _runs_of(cold: list[tuple[int, bytes]]) -> list[int]:
    """Return the runs that ranges of a file reach into."""
    found: set[int] = set()
    for offset, data in cold:
        found.update(range(offset // RUN, (offset + len(data) - 1) // RUN + 1))
    return sorted(found)


def _open_below(root: int, path: str, flags: int) -> int:
    """Open a file below the folder `root`; no link is followed on the way."""
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY | _NOFOLLOW, dir_fd=root)
    try:
        *above, name = path.split("/")
        for part in above:
            deeper = os.open(part, os.O_PATH | os.O_DIRECTORY | _NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = deeper
        return os.open(name, flags | _NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)
