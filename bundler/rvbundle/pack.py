"""The pack stage: write an image or a cold pack. The same content always gives the same bytes."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from rvbundle.stages import write_atomically
from rvbundle_runtime import format as fmt
from rvbundle_runtime.families import Family

_READ_AHEAD = 4  # raw frames in memory at once: 4 × 16 MiB
PAGES = "pages"  # the group whose blobs have a frame each, so that one page costs one small read
TABLES = "tables"  # the group of what is filtered: it is read blob by blob
LIBRARIES = "libraries"
AGENT = "agent"  # the group whose frames come last: what changes most often moves nothing else


@dataclass(frozen=True)
class Parts:
    """Content put together: each part is bytes, or (start, stop) of the file at `path`."""

    path: Path
    parts: tuple[bytes | tuple[int, int], ...]


@dataclass(frozen=True)
class Chunk:
    """What fills the `ranges` (offset and size each) of a sparse file, filtered if `filter` is not ""."""

    content: Parts | bytes
    size: int
    sha256: str
    ranges: tuple[tuple[int, int], ...]
    filter: str = ""


@dataclass(frozen=True)
class Item:
    """Something to pack. `group` keeps kinds apart: frames never hold two groups.

    `content` is a file, bytes, or None for links and folders; `sha256` (hex) is given where known. A
    sparse file, and the ranges that one lacks, have `chunks` instead, and their `size` is the file's.
    """

    path: str
    kind: str
    group: str
    content: Path | bytes | None
    size: int
    sha256: str
    target: str
    package: str
    reason: str
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class Effort:
    """How hard to compress: zstd's level, the raw bytes of a frame at most, and other levels by group."""

    level: int
    frame: int
    groups: Mapping[str, int] = field(default_factory=dict)

    def level_of(self, group: str) -> int:
        """Return the level for frames of `group`."""
        return self.groups.get(group, self.level)


# The image travels and is unpacked whole. The cold pack is read rarely and by the frame, so that build time
# and small frames count for more. Measured on what is hot of torch (87 MB of libraries, 40 MB of bytecode):
# from 12 to 18, libraries take 9 times as long (24 s of one core) for 10 % less, bytecode (18 s) for 9 %. An
# image that is not trimmed by pages has ten times the bytes: there it would take minutes.
HOT_EFFORT = Effort(12, fmt.FRAME_RAW_MAX, {LIBRARIES: 18, TABLES: 18})
WHOLE_EFFORT = Effort(12, 4 << 20)
COLD_EFFORT = Effort(6, 4 << 20)


@dataclass(frozen=True)
class PayloadMeta:
    """What a payload's index says beside its entries."""

    arch: str
    source: str
    python: str
    argv: tuple[str, ...]
    libdir: str
    packages: tuple[tuple[str, str], ...]
    families: tuple[Family, ...] = ()
    blas: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageMeta:
    """What an index says beside its payloads; `bound_to` (hex) is the image that a cold pack belongs to."""

    name: str
    version: str
    created_by: str
    network: bool
    env: dict[str, str]
    details: dict[str, Any]
    bound_to: str = ""


def pack(
    path: Path,
    meta: ImageMeta,
    payloads: Sequence[tuple[PayloadMeta, Iterable[Item]]],
    effort: Effort,
    cache: Path,
) -> str:
    """Write payloads with their items as an image to `path`; return its identity (hex).

    What several payloads hold lies in the frames of the first of these.

    Compressed frames are kept in the folder `cache` by what they hold, so that what did not change is
    neither read nor compressed again. Raises OSError (disk full); `path` is then as it was.
    """
    ordered = [(payload, _sorted(items)) for payload, items in payloads]
    blobs, planned = _lay_out([items for _, items in ordered], effort.frame)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(fmt.pack_header())
            frames = []
            for raw_size, data in _compressed(planned, effort, cache):
                digest = hashlib.sha256(data).digest()
                frames.append(fmt.Frame(file.tell(), len(data), raw_size, digest))
                file.write(data)
            index = _index(meta, ordered, blobs, tuple(frames))
            identity = _finish(file, index, meta.bound_to, effort.level)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return identity


def compress(items: Iterable[Item], effort: Effort, cache: Path) -> None:
    """Compress the frames of `items` into `cache`, where `pack` will find them."""
    _, frames = _lay_out([_sorted(items)], effort.frame)
    cache.mkdir(parents=True, exist_ok=True)
    for _ in _compressed(frames, effort, cache):
        pass


def _sorted(items: Iterable[Item]) -> list[Item]:
    return sorted(items, key=lambda i: (i.path, i.kind))


def _finish(file: Any, index: fmt.Index, bound_to: str, level: int) -> str:
    stable, rest = fmt.dump_index(index)
    parts = [zstandard.ZstdCompressor(level=level).compress(raw) for raw in (stable, rest)]
    data = fmt.INDEX_HEAD.pack(len(parts[0]), len(stable)) + parts[0] + parts[1]
    identity = hashlib.sha256(data).digest()
    offset = file.tell()
    size = offset + len(data) + fmt.FOOTER_SIZE
    bound = bytes.fromhex(bound_to) if bound_to else fmt.UNBOUND
    file.write(data)
    file.write(fmt.pack_footer(fmt.Footer(size, offset, len(data), len(stable) + len(rest), identity, bound)))
    return identity.hex()


@dataclass(frozen=True)
class _Source:
    content: Path | bytes | Parts
    size: int
    sha256: str


def _sources(item: Item) -> list[tuple[str, _Source]]:
    """Return everything that an item needs, with the group that it goes into."""
    if item.content is not None:
        return [(item.group, _Source(item.content, item.size, item.sha256))]
    return [(TABLES if c.filter else item.group, _Source(c.content, c.size, c.sha256)) for c in item.chunks]


@dataclass
class _Frame:
    """A frame to be: the pieces (source, start, stop) of it, and its raw size in bytes."""

    group: str
    pieces: list[tuple[_Source, int, int]] = field(default_factory=list)
    size: int = 0


def _lay_out(
    payloads: Sequence[list[Item]], frame_size: int
) -> tuple[dict[str, tuple[int, fmt.Blob]], list[_Frame]]:
    """Give every distinct content its place; return {sha256: (number, blob)} and the frames.

    A frame holds items of one group and of one payload, so that to unpack a payload reads little else.
    """
    by_group: dict[tuple[str, int], dict[str, _Source]] = {}
    seen: set[str] = set()
    numbered = [(number, item) for number, items in enumerate(payloads) for item in items]
    # The agent's last: what others have too must not lie among what changes with the agent.
    for number, item in sorted(numbered, key=lambda pair: pair[1].group == AGENT):
        for group, source in _sources(item):
            if source.sha256 not in seen:
                seen.add(source.sha256)
                by_group.setdefault((group, number), {})[source.sha256] = source
    blobs: dict[str, tuple[int, fmt.Blob]] = {}
    frames: list[_Frame] = []
    for group, number in sorted(by_group, key=lambda key: (key[0] == AGENT, key)):
        frame = _Frame(group, size=frame_size)  # a full one: the first blob begins another
        for digest, source in by_group[group, number].items():
            if source.size and (frame.size == frame_size or group == PAGES):
                frame = _Frame(group)
                frames.append(frame)
            place = (len(frames) - 1, frame.size) if source.size else (0, 0)
            blobs[digest] = (len(blobs), fmt.Blob(bytes.fromhex(digest), *place, source.size))
            start = 0
            while start < source.size:
                if frame.size == frame_size:
                    frame = _Frame(group)
                    frames.append(frame)
                stop = min(source.size, start + frame_size - frame.size)
                frame.pieces.append((source, start, stop))
                frame.size += stop - start
                start = stop
    return blobs, frames


def _compressed(frames: list[_Frame], effort: Effort, cache: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (raw size, compressed bytes) of every frame in order, compressing on all cores."""

    def work(frame: _Frame) -> bytes:
        level = effort.level_of(frame.group)
        name = "".join(f"{source.sha256} {start} {stop}\n" for source, start, stop in frame.pieces)
        digest = hashlib.sha256(name.encode()).hexdigest()
        kept = cache / f"{digest}-{level}-{zstandard.__version__}"
        data = _kept_frame(kept)
        if data is None:
            raw = b"".join(_read(source, start, stop) for source, start, stop in frame.pieces)
            data = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(raw)
            write_atomically(kept, hashlib.sha256(data).digest() + data)
        return data

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting: list[tuple[int, Future[bytes]]] = []
        for frame in frames:
            waiting.append((frame.size, pool.submit(work, frame)))
            if len(waiting) > _READ_AHEAD:
                size, future = waiting.pop(0)
                yield size, future.result()
        for size, future in waiting:
            yield size, future.result()


def _kept_frame(path: Path) -> bytes | None:
    """Return a kept frame if its digest, which stands before it, fits: a crash may have left half of it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _read(source: _Source, start: int, stop: int) -> bytes:
    if isinstance(source.content, bytes):
        return source.content[start:stop]
    if isinstance(source.content, Parts):
        return read_parts(source.content, start, stop)
    with source.content.open("rb") as file:
        file.seek(start)
        data = file.read(stop - start)
    if len(data) != stop - start:
        raise OSError(f"{source.content} changed while it was packed")
    return data


def read_parts(content: Parts, start: int, stop: int) -> bytes:
    """Return the bytes `start` to `stop` of content that is put together; raises OSError."""
    found = []
    place = 0
    with content.path.open("rb") as file:
        for part in content.parts:
            first, last = (0, len(part)) if isinstance(part, bytes) else part
            a, b = max(first, first + start - place), min(last, first + stop - place)
            if a < b and isinstance(part, bytes):
                found.append(part[a:b])
            elif a < b:
                file.seek(a)
                found.append(file.read(b - a))
            place += last - first
    data = b"".join(found)
    if len(data) != min(stop, place) - start:
        raise OSError(f"{content.path} changed while it was packed")
    return data


def _index(
    meta: ImageMeta,
    payloads: Sequence[tuple[PayloadMeta, list[Item]]],
    blobs: dict[str, tuple[int, fmt.Blob]],
    frames: tuple[fmt.Frame, ...],
) -> fmt.Index:
    return fmt.Index(
        name=meta.name,
        version=meta.version,
        created_by=meta.created_by,
        network=meta.network,
        env=meta.env,
        frames=frames,
        blobs=tuple(blob for _, blob in blobs.values()),
        payloads=tuple(_payload(payload, items, blobs) for payload, items in payloads),
        details=meta.details,
    )


def _payload(payload: PayloadMeta, items: list[Item], blobs: dict[str, tuple[int, fmt.Blob]]) -> fmt.Payload:
    packages = {name: number for number, (name, _) in enumerate(payload.packages)}
    reasons = {text: n for n, text in enumerate(sorted({item.reason for item in items}))}
    entries = tuple(
        fmt.Entry(
            path=item.path,
            kind=item.kind,
            blob=blobs[item.sha256][0] if item.content is not None else -1,
            target=item.target,
            package=packages.get(item.package, -1),
            reason=reasons[item.reason],
            size=item.size if item.chunks else 0,
            pieces=tuple(fmt.Piece(blobs[c.sha256][0], c.ranges, c.filter) for c in item.chunks),
        )
        for item in items
    )
    return fmt.Payload(
        arch=payload.arch,
        source=payload.source,
        python=payload.python,
        argv=payload.argv,
        libdir=payload.libdir,
        packages=tuple(fmt.Package(n, v) for n, v in payload.packages),
        reasons=tuple(reasons),
        entries=entries,
        families=payload.families,
        blas=payload.blas,
    )
