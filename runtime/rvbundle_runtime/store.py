"""The store: unpacked payloads by digest, one writer at a time, complete or absent.

BASE/store/IDENTITY-ARCH/root/          the payload's tree
BASE/store/IDENTITY-ARCH/payload.json   what a warm run needs to know, so that it never reads the index
BASE/store/tmp/                         folders of unpackings under way, or of killed ones
BASE/store/locks/IDENTITY-ARCH.lock     exclusive while unpacking or pruning, shared while running
"""

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rvbundle_runtime import format as fmt
from rvbundle_runtime.errors import HostError, StoreError
from rvbundle_runtime.families import Family, from_json
from rvbundle_runtime.image import Reader
from rvbundle_runtime.options import FLOAT32, PRECISIONS

RESTORED_LIST = "restored.txt"  # beside the tree: a line for each path that the pager has put into it
PAGES_LIST = "pages.txt"  # beside the tree: which runs of trimmed libraries it has filled (`restored_runs`)
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_THREADS_MAX = 4  # more do not help: the disk and the page cache become the limit
_SPARE = 16 << 20  # bytes that must stay free beside the payload itself

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PayloadInfo:
    """The part of an index that a run needs.

    `trimmed`: some of its libraries lack pages; `payloads` are the architectures that the image has; `blas`
    the versions of its BLAS libraries by name (blas.py); `precision` is what the recipe asks for; `packages`
    {name: version}.
    """

    identity: str
    name: str
    version: str
    arch: str
    source: str
    python: str
    argv: tuple[str, ...]
    libdir: str
    network: bool
    env: dict[str, str]
    families: tuple[Family, ...] = ()
    trimmed: bool = False
    payloads: tuple[str, ...] = ()
    blas: Mapping[str, str] = field(default_factory=dict)
    precision: str = "float32"
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unpacked:
    """A payload in the store. `fresh` tells whether this call unpacked it."""

    root: Path
    info: PayloadInfo
    lock: Path
    fresh: bool


def describe(index: fmt.Index, payload: fmt.Payload, identity: str) -> PayloadInfo:
    """Return what a run needs to know of `payload`."""
    return PayloadInfo(
        identity,
        index.name,
        index.version,
        payload.arch,
        payload.source,
        payload.python,
        payload.argv,
        payload.libdir,
        index.network,
        index.env,
        payload.families,
        any(entry.kind == fmt.SPARSE for entry in payload.entries),
        tuple(other.arch for other in index.payloads),
        payload.blas,
        _precision(index),
        {package.name: package.version for package in payload.packages},
    )


def _precision(index: fmt.Index) -> str:
    precision = index.details.get("precision")
    return precision if precision in PRECISIONS else FLOAT32


def root_path(base: Path, identity: str, arch: str) -> Path:
    """Return where the tree of a payload lies or would lie."""
    return base / "store" / f"{identity}-{arch}" / "root"


def find(base: Path, identity: str, arch: str) -> Unpacked | None:
    """Return the payload if it lies complete in the store at `base`, else None."""
    folder = base / "store" / f"{identity}-{arch}"
    try:
        value = json.loads((folder / "payload.json").read_bytes())
        families = tuple(from_json(family) for family in value["families"])
        lists = {name: tuple(value[name]) for name in ("argv", "payloads")}
        info = PayloadInfo(**{**value, **lists, "families": families, "blas": fmt.load_blas(value)})
        whole = (folder / "root").is_dir()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        return None  # absent, or damaged from outside: it is unpacked anew
    return Unpacked(folder / "root", info, _lock_path(base, identity, arch), fresh=False)


def known_payloads(base: Path, identity: str) -> tuple[str, ...]:
    """Return the architectures of an image that one of its unpacked payloads tells; () if none lies here."""
    for folder in (base / "store").glob(f"{identity}-*"):
        unpacked = find(base, identity, folder.name.rpartition("-")[2])
        if unpacked:
            return unpacked.info.payloads
    return ()


def restored(unpacked: Unpacked) -> list[str]:
    """Return the paths that runs have restored from the cold pack since the payload was unpacked."""
    try:
        text = (unpacked.root.parent / RESTORED_LIST).read_text()
    except OSError:
        return []
    return sorted(set(text.splitlines()))


def restored_runs(unpacked: Unpacked) -> dict[str, frozenset[int]]:
    """Return {path of a library: its runs (see `absent.py`) whose absent pages lie in its file}.

    Lines of the list: "B TOKEN BOOT" a pager began, "P TOKEN RUN PATH" it filled a run, "S TOKEN" all that
    it has filled is on the disk. What was not brought to the disk counts only until the next boot.
    """
    try:
        lines = (unpacked.root.parent / PAGES_LIST).read_text(errors="replace").splitlines()
    except OSError:
        return {}
    boot = boot_id()
    good = {words[1] for words in map(str.split, lines) if words[:1] == ["S"] and len(words) == 2}
    good |= {
        words[1] for words in map(str.split, lines) if words[:1] == ["B"] and words[2:] == [boot] != ["?"]
    }
    found: dict[str, set[int]] = {}
    for line in lines:
        words = line.split(" ", 3)
        if words[0] == "P" and len(words) == 4 and words[1] in good and words[2].isdecimal():
            found.setdefault(words[3], set()).add(int(words[2]))
    return {path: frozenset(runs) for path, runs in found.items()}


def boot_id() -> str:
    """Return what names this boot of the machine; "?" where the kernel hides it: then no boot is the same."""
    try:
        return Path(BOOT_ID).read_text().strip()
    except OSError:
        return "?"


def ensure(base: Path, reader: Reader, arch: str, progress: Progress | None = None) -> Unpacked:
    """Return the payload for `arch`, unpacking it first if it is not there.

    `progress(done, total)` is told raw bytes. Raises StoreError (disk full, read-only), ImageError
    (damaged image) and HostError (no payload for `arch`); what was written by then is removed.
    """
    found = find(base, reader.identity, arch)
    if found:
        return found
    index = reader.index()
    payload = next((p for p in index.payloads if p.arch == arch), None)
    if payload is None:
        have = ", ".join(p.arch for p in index.payloads) or "none"
        raise HostError(f"the image has no payload for {arch} (it has: {have})")
    info = describe(index, payload, reader.identity)
    check_executable(base)
    with translated(base, "unpack into"), _locked(_lock_path(base, reader.identity, arch)):
        found = find(base, reader.identity, arch)  # another run may have been faster
        if found:
            return found
        _unpack(base, reader, payload, info, progress)
    found = find(base, reader.identity, arch)
    if not found:
        raise StoreError(f"{base}: what was just unpacked is gone again")
    return Unpacked(found.root, found.info, found.lock, fresh=True)


def nearest_existing(path: Path) -> Path:
    """Return `path` or the nearest of its parents that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_executable(base: Path) -> None:
    """Raise StoreError if no program can be executed from `base`, before much is written there."""
    if os.statvfs(nearest_existing(base)).f_flag & os.ST_NOEXEC:
        raise StoreError(
            f"{base} is on a file system mounted noexec: nothing can be executed from it",
            "set RVBUNDLE_CACHE to a folder on another file system",
        )


def write_tree(
    reader: Reader, entries: tuple[fmt.Entry, ...], root: Path, progress: Progress | None = None
) -> None:
    """Write the files, links and folders of `entries` below the existing folder `root`.

    Frames are decoded in parallel, each once; what is filtered comes afterwards. Raises ImageError and
    OSError.
    """
    from concurrent.futures import ThreadPoolExecutor

    for entry in entries:
        target = os.path.join(root, entry.path)
        os.makedirs(target if entry.kind == fmt.DIRECTORY else os.path.dirname(target), exist_ok=True)
        if entry.kind == fmt.LINK:
            os.symlink(entry.target, target)
    pieces: dict[int, list[tuple[fmt.Entry, int, int, int]]] = {}
    for entry in entries:
        if entry.kind == fmt.SPARSE:
            _make_sparse(root, entry)
        for piece in _pieces(reader, entry):
            if piece.filter:
                continue
            for frame, place, start, stop in placed(reader, piece):
                pieces.setdefault(frame, []).append((entry, place, start, stop))
        if entry.kind in (fmt.FILE, fmt.EXECUTABLE) and not reader.index().blobs[entry.blob].size:
            _write_piece(root, entry, 0, b"")
    total = sum(reader.index().frames[f].raw_size for f in pieces)
    done = 0

    def write_frame(number: int) -> int:
        raw = memoryview(reader.read_frame(number))
        for entry, place, start, stop in pieces[number]:
            _write_piece(root, entry, place, raw[start:stop])
        return len(raw)

    workers = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        for size in pool.map(write_frame, sorted(pieces)):
            done += size
            if progress:
                progress(done, total)
    for entry in entries:
        for piece in entry.pieces:
            for place, data in reader.read_pieces(piece) if piece.filter else ():
                _write_piece(root, entry, place, data)


def _pieces(reader: Reader, entry: fmt.Entry) -> tuple[fmt.Piece, ...]:
    """Return what fills the file of an entry."""
    if entry.kind in (fmt.FILE, fmt.EXECUTABLE):
        return (fmt.Piece(entry.blob, ((0, reader.index().blobs[entry.blob].size),)),)
    return entry.pieces if entry.kind in (fmt.SPARSE, fmt.RANGES) else ()


def placed(reader: Reader, piece: fmt.Piece) -> Iterator[tuple[int, int, int, int]]:
    """Yield (frame, place in the file, start and stop in the frame's raw bytes) of a piece."""
    ranges = iter(piece.ranges)
    place, room = next(ranges, (0, 0))
    for frame, start, stop in reader.extents(piece.blob):
        while start < stop:
            size = min(room, stop - start)
            yield frame, place, start, start + size
            start, place, room = start + size, place + size, room - size
            if not room:
                place, room = next(ranges, (0, 0))


def _make_sparse(root: str | Path, entry: fmt.Entry) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(root, entry.path), flags, 0o644)
    try:
        os.ftruncate(fd, entry.size)
    finally:
        os.close(fd)


def _write_piece(root: Path, entry: fmt.Entry, place: int, data: bytes | memoryview) -> None:
    mode = 0o755 if entry.kind == fmt.EXECUTABLE else 0o644
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(root, entry.path), flags, mode)
    try:
        os.fchmod(fd, mode)  # whatever the umask is
        while len(data):
            written = os.pwrite(fd, data, place)
            data, place = data[written:], place + written
    finally:
        os.close(fd)


def _unpack(
    base: Path, reader: Reader, payload: fmt.Payload, info: PayloadInfo, progress: Progress | None
) -> None:
    import shutil  # late: a warm run unpacks nothing, and these two import the compression modules
    import tempfile

    name = f"{info.identity}-{info.arch}"
    folder = base / "store" / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    for stray in folder.glob(f"{name}.*"):  # of killed runs: nobody else works on it under the lock
        shutil.rmtree(stray)
    _check_space(base, sum(reader.index().blobs[n].size for e in payload.entries for n in e.blobs))
    work = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder))
    try:
        (work / "root").mkdir()
        write_tree(reader, payload.entries, work / "root", progress)
        (work / "payload.json").write_text(json.dumps(asdict(info)))
        _sync(work)
        target = base / "store" / name
        if target.exists():  # without a payload.json that can be read: damaged from outside
            shutil.rmtree(target)
        work.rename(target)
        _sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _check_space(base: Path, needed: int) -> None:
    stat = os.statvfs(base)
    free = stat.f_bavail * stat.f_frsize
    if free < needed + _SPARE:
        raise StoreError(
            f"not enough space to unpack: {needed >> 20} MiB are needed at {base}, {free >> 20} MiB are free",
            "free some space (`rvbundle cache prune`), or set RVBUNDLE_CACHE to a folder on a larger disk",
        )


def _sync(folder: Path) -> None:
    """Bring everything below `folder` to the disk: one syncfs is far cheaper than an fsync per file."""
    from rvbundle_runtime import syscalls

    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        syscalls.syncfs(fd)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock_path(base: Path, identity: str, arch: str) -> Path:
    return base / "store" / "locks" / f"{identity}-{arch}.lock"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def hold(unpacked: Unpacked) -> int | None:
    """Take a shared lock that keeps `prune` away; return its descriptor, to be left open.

    None where the lock file can't be opened (a read-only store, from which nothing can be pruned either).
    """
    try:
        fd = os.open(unpacked.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    fcntl.flock(fd, fcntl.LOCK_SH)
    with suppress(OSError):  # a read-only store has no history
        os.utime(unpacked.lock)
    return fd


@dataclass(frozen=True)
class Stored:
    """A line of `cache ls`: sizes in bytes on disk, `used` the time of the last unpacking or run."""

    key: str
    name: str
    version: str
    size: int
    used: float


def list_stored(base: Path) -> list[Stored]:
    """Return what lies in the store at `base`, the most recently used first."""
    found = []
    for folder in (base / "store").glob("*-*"):
        identity, _, arch = folder.name.rpartition("-")
        unpacked = find(base, identity, arch)
        if unpacked:
            size = disk_usage(folder)
            marks = [p for p in (unpacked.lock, folder / "payload.json") if p.exists()]
            used = marks[0].stat().st_mtime
            found.append(Stored(folder.name, unpacked.info.name, unpacked.info.version, size, used))
    return sorted(found, key=lambda stored: -stored.used)


def disk_usage(folder: Path) -> int:
    """Return the bytes that a folder takes on disk."""
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            total += os.lstat(os.path.join(place, file)).st_blocks * 512
    return total


def prune(base: Path, keys: set[str] | None = None) -> tuple[list[Stored], list[Stored]]:
    """Remove the payloads `keys` (all where None) and what killed runs left; return (removed, in use)."""
    removed, busy = [], []
    known = {stored.key: stored for stored in list_stored(base)}
    for folder in sorted((base / "store").glob("*-*")):
        if keys is not None and folder.name not in keys:
            continue
        stored = known.get(folder.name)
        with translated(base, "write into"):
            gone = _remove_unless_held(base, folder.name, folder)
        if gone:
            removed += [stored] if stored else []
        elif stored:
            busy.append(stored)
    for stray in sorted((base / "store" / "tmp").glob("*-*.*")) if keys is None else ():
        with translated(base, "write into"):
            _remove_unless_held(base, stray.name.partition(".")[0], stray)
    return removed, busy


def _remove_unless_held(base: Path, key: str, folder: Path) -> bool:
    """Remove a folder of the payload `key` unless a run or an unpacking holds it; tell whether it went."""
    import shutil

    lock = base / "store" / "locks" / f"{key}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "payload.json").unlink(missing_ok=True)  # from here on it is absent, whatever happens
        shutil.rmtree(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


@contextmanager
def translated(base: Path, doing: str) -> Iterator[None]:
    """Turn an OSError of the cache's file system into a StoreError that says what to do.

    `doing` is what can't be done, such as "unpack into".
    """
    hints = {
        errno.ENOSPC: "free some space (`rvbundle cache prune`), or set RVBUNDLE_CACHE to another folder",
        errno.EDQUOT: "your disk quota is used up: set RVBUNDLE_CACHE to another folder",
        errno.EROFS: "set RVBUNDLE_CACHE to a folder that can be written",
        errno.EACCES: "set RVBUNDLE_CACHE to a folder that you own",
        errno.EPERM: "set RVBUNDLE_CACHE to a folder that you own",
        errno.ENOTDIR: "set RVBUNDLE_CACHE to a folder",
        errno.EEXIST: "set RVBUNDLE_CACHE to a folder",
    }
    try:
        yield
    except OSError as error:
        text = f"can't {doing} {base}: {error.strerror}"
        if error.filename and not Path(os.fsdecode(error.filename)).is_relative_to(base):
            raise StoreError(f"{os.fsdecode(error.filename)}: {error.strerror}") from None
        raise StoreError(text, hints.get(error.errno or 0, "")) from None


def why_unusable(base: Path) -> str:
    """Return why payloads can't be unpacked into `base` and run from there; "" if they can.

    The nearest existing parent decides: it must belong to this user or be unreachable for others to
    change, be writable, and allow execution.
    """
    place = base
    while True:
        try:
            place.stat()
            break
        except FileNotFoundError:
            place = place.parent
        except OSError as error:
            return f"{place} can't be used: {error.strerror}"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} can't be written"
    stat = os.statvfs(place)
    if stat.f_flag & os.ST_RDONLY:
        return f"{place} is on a read-only file system"
    if stat.f_flag & os.ST_NOEXEC:
        return f"{place} is on a file system mounted noexec"
    if place == base and base.stat().st_uid != os.getuid():
        return f"{base} belongs to another user"
    return ""
