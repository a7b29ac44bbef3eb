"""Bootstraps in the store, and the table that a self-running file has of its parts.

BASE/bootstrap/DIGEST/            a bootstrap; DIGEST: the first half of its manifest's SHA-256, in hex
BASE/bootstrap/DIGEST/ready       written last: whoever finds it starts from there
BASE/bootstrap/tmp.DIGEST.N/      one being unpacked, or left by a start that was killed
BASE/bootstrap/lock               exclusive while one is put into its place or removed

A self-running file: a script for sh, padded to whole blocks; the table (a line with the SHA-256 of what
follows, then JSON), padded likewise; the packed bootstraps; the cold pack, if it is inside; the image.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rvbundle_runtime import store
from rvbundle_runtime.errors import ImageError, StoreError

BLOCK = 4096  # bytes: sections start at multiples, so that `dd bs=4096` takes them out
MANIFEST = "manifest"
READY = "ready"
TABLE_FORMAT = 1
MAGIC = b"#!/bin/sh\n# rvbundle self-running file: "
HEAD_MAX = 1 << 16  # bytes of script and table: far more than they ever have
_STALE = 3600  # seconds: nobody takes that long to unpack a bootstrap
_AGAIN = "copy the file again from its source"


@dataclass(frozen=True)
class Section:
    """A packed bootstrap in a self-running file: where it lies, in bytes, and its digests in hex.

    `licences` are rows of component, version, licence, source, and where its text lies in the bootstrap.
    """

    arch: str
    offset: int
    size: int
    sha256: str
    manifest: str
    packages: tuple[tuple[str, str], ...]
    emulators: tuple[str, ...]
    licences: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Table:
    """What a self-running file says of itself. `size` counts the bytes of the whole file."""

    size: int
    name: str
    version: str
    image: str
    sections: tuple[Section, ...]


def folder_name(manifest: str) -> str:
    """Return the folder's name for the SHA-256 of a manifest."""
    return manifest[:32]


def dump_table(table: Table, script: bytes) -> bytes:
    """Return the table of a file whose padded script is `script`, padded to whole blocks."""
    value = {
        "format": TABLE_FORMAT,
        "script": hashlib.sha256(script).hexdigest(),
        "size": table.size,
        "name": table.name,
        "version": table.version,
        "image": table.image,
        "bootstraps": [
            {**vars(section), "packages": [list(pair) for pair in section.packages]}
            for section in table.sections
        ],
    }
    text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    return padded(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def padded(data: bytes) -> bytes:
    """Return `data` filled up to whole blocks with newlines."""
    return data + b"\n" * (-len(data) % BLOCK)


def find_table(path: Path) -> Table | None:
    """Return the table of a self-running file, having checked script, table and size; None for other files.

    Raises ImageError.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_MAX)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ImageError(f"can't open {path}: {error.strerror}") from None
    if not head.startswith(MAGIC):
        return None
    for offset in range(BLOCK, len(head), BLOCK):
        digest, _, text = head[offset:].partition(b"\n")
        text = text.partition(b"\n")[0] + b"\n"
        if len(digest) == 64 and hashlib.sha256(text).hexdigest().encode() == digest:
            table = _load_table(path, text, head[:offset])
            end = min((section.offset for section in table.sections), default=0)
            if head[offset + len(digest) + 1 + len(text) : end].strip(b"\n"):
                break  # what fills the last block is something else
            _check_size(path, size, table.size)
            return table
    raise ImageError(f"{path} is damaged: its header is not as it was written", _AGAIN)


def _load_table(path: Path, text: bytes, script: bytes) -> Table:
    try:
        value = json.loads(text)
        table, digest = _table(value), value["script"]
    except (ValueError, LookupError, TypeError) as error:
        raise ImageError(f"{path}: its header can't be read ({type(error).__name__}: {error})") from None
    if hashlib.sha256(script).hexdigest() != digest:
        raise ImageError(f"{path} is damaged: its header is not as it was written", _AGAIN)
    return table


def _check_size(path: Path, size: int, expected: int) -> None:
    if size < expected:
        raise ImageError(f"{path} is cut short: {size} bytes of {expected} are here", _AGAIN)
    if size > expected:
        raise ImageError(f"{path} is damaged: {size - expected} bytes stand behind its end", _AGAIN)


def _table(value: dict[str, Any]) -> Table:
    if value["format"] != TABLE_FORMAT:
        raise ValueError(f"format {value['format']}")
    sections = tuple(
        Section(
            **{
                **row,
                "packages": tuple((name, version) for name, version in row["packages"]),
                "emulators": tuple(row["emulators"]),
                "licences": tuple(_five_texts(texts) for texts in row["licences"]),
            }
        )
        for row in value["bootstraps"]
    )
    return Table(value["size"], value["name"], value["version"], value["image"], sections)


def _five_texts(row: list[Any]) -> tuple[str, ...]:
    if len(row) != 5 or not all(isinstance(text, str) for text in row):
        raise ValueError("a row of licences that has not five texts")
    return tuple(row)


def check_tree(folder: Path, manifest: str) -> None:
    """Raise ImageError unless `folder` holds what the manifest of this SHA-256 (hex) says, no more."""
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise ImageError(f"the bootstrap is damaged: {MANIFEST}: {error.strerror}", _AGAIN) from None
    if hashlib.sha256(text).hexdigest() != manifest:
        raise ImageError("the bootstrap is damaged: its manifest is another", _AGAIN)
    listed = {MANIFEST, READY}
    for line in text.decode().splitlines():
        digest, mode, path = line.split(" ", 2)
        listed.add(path)
        why = _why_wrong(folder / path, digest, mode == "x")
        if why:
            raise ImageError(f"the bootstrap is damaged: {path} {why}", _AGAIN)
    for place, _, files in os.walk(folder):
        for name in files:
            path = os.path.relpath(os.path.join(place, name), folder)
            if path not in listed:
                raise ImageError(f"the bootstrap is damaged: {path} does not belong to it", _AGAIN)


def _why_wrong(path: Path, digest: str, executable: bool) -> str:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        return f"can't be read ({error.strerror})"
    if found != digest:
        return "is not as it was packed"
    return "can't be executed" if executable and not mode & 0o100 else ""


def install(base: Path, work: Path, manifest: str) -> None:
    """Put the bootstrap that was unpacked at `work` into its place below `base`, once it is checked.

    If another start was faster, `work` is just removed. Raises ImageError (a file is not as it was packed)
    and StoreError.
    """
    check_tree(work, manifest)
    folder = base / "bootstrap"
    target = folder / folder_name(manifest)
    with store.translated(base, "unpack the bootstrap into"), _locked(folder):
        if (target / READY).exists():
            shutil.rmtree(work)
        else:
            (work / READY).write_bytes(b"")
            (work / READY).chmod(0o644)  # whatever the umask is
            _sync(work)
            if target.exists():  # damaged from outside: it lacks the mark
                shutil.rmtree(target)
            work.rename(target)
            _sync(folder)
        _remove_stale(folder)


def _sync(folder: Path) -> None:
    from rvbundle_runtime import syscalls

    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        syscalls.syncfs(fd)
    finally:
        os.close(fd)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(folder: Path) -> None:
    """Remove what killed starts left; one that can't be removed is left to the next start."""
    for stray in folder.glob("tmp.*"):
        with suppress(OSError):
            if _is_stale(stray):
                shutil.rmtree(stray)


def _is_stale(place: Path) -> bool:
    return abs(time.time() - place.stat().st_mtime) > _STALE  # clocks of boards may jump either way


def hold(folder: Path) -> int | None:
    """Keep `prune` away from a bootstrap until the descriptor that is returned is closed.

    None where there is nothing to open: a read-only store.
    """
    try:
        fd = os.open(folder / READY, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    fcntl.flock(fd, fcntl.LOCK_SH)
    with suppress(OSError):  # a store of somebody else's has no history
        os.utime(fd)
    return fd


@dataclass(frozen=True)
class Stored:
    """A bootstrap in the store: its folder's name, bytes on disk, the time of its last start."""

    key: str
    size: int
    used: float


def list_stored(base: Path) -> list[Stored]:
    """Return the complete bootstraps at `base`, the most recently used first."""
    marks = (base / "bootstrap").glob(f"*/{READY}")
    found = [Stored(m.parent.name, store.disk_usage(m.parent), m.stat().st_mtime) for m in marks]
    return sorted(found, key=lambda stored: -stored.used)


def prune(base: Path) -> tuple[list[Stored], list[Stored]]:
    """Remove the bootstraps at `base` and what killed starts left; return (removed, in use).

    One that is being unpacked stays. Raises StoreError.
    """
    folder = base / "bootstrap"
    removed: list[Stored] = []
    busy: list[Stored] = []
    if not folder.is_dir():
        return removed, busy
    with store.translated(base, "remove bootstraps from"), _locked(folder):
        for stored in list_stored(base):
            (busy if _in_use(folder / stored.key) else removed).append(stored)
        for stored in removed:
            (folder / stored.key / READY).unlink()  # from here on it is absent, whatever happens
        for place in sorted(p for p in folder.iterdir() if p.is_dir()):
            unpacking = place.name.startswith("tmp.") and not _is_stale(place)
            if not unpacking and not (place / READY).exists():
                shutil.rmtree(place)
    return removed, busy


def _in_use(place: Path) -> bool:
    try:
        fd = os.open(place / READY, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return True
    finally:
        os.close(fd)
    return False


def check_section(path: Path, section: Section) -> None:
    """Raise ImageError unless a packed bootstrap is as it was written."""
    digest = hashlib.sha256()
    left = section.size
    try:
        with path.open("rb") as file:
            file.seek(section.offset)
            while left:
                data = file.read(min(left, 1 << 20))
                if not data:
                    break
                digest.update(data)
                left -= len(data)
    except OSError as error:
        raise StoreError(f"can't read {path}: {error.strerror}") from None
    if left or digest.hexdigest() != section.sha256:
        raise ImageError(f"{path}: the bootstrap for {section.arch} is damaged", _AGAIN)
