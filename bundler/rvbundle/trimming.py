"""The trim stage: which pages of each hot library go into the image, and how the rest lies in the cold pack.

`trim.py` plans one library; here is decided which libraries are trimmed at all, and how what was planned
becomes items of the two files and rows of the guard's table. Nothing is written.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rvbundle import freeze, native, trim
from rvbundle.freeze import Frozen
from rvbundle.pack import Chunk, Parts
from rvbundle.pages import PAGE, numbers
from rvbundle.split import Placed, Split
from rvbundle.trace import Trace
from rvbundle.trim import TrimPlan
from rvbundle_runtime import filters
from rvbundle_runtime.absent import RUN, AbsentLibrary, AbsentSegment

WINDOW = RUN  # bytes of a library's file whose cold part is one blob of the cold pack
GAP = 0  # absent pages between two kept ones that are kept too; measured: 1 costs 4 %, and starts no faster
_LARGEST_KERNEL_PAGE = {"aarch64": 65536}  # kernels of arm64 come with pages of 4, 16 and 64 KiB
_SMALLEST_GAIN = 32 << 10  # bytes: for less, a library is left whole
_SMALLEST_TABLE = 16 << 10  # bytes: smaller ones are not worth a blob of their own
_FILTERS = {".eh_frame_hdr": filters.UNWIND_TABLE, ".dynsym": filters.SYMBOLS}
_HEADER = 64  # bytes of an ELF header: the trimmed file has one of its own
# What the guard itself rests on, or picks its code by processor where no variable can hold it back.
_NEVER = ("ld-", "ld.", "libc.", "libgcc_s.", "libm.", "libmvec.", "libpthread.", "libdl.", "librt.")


@dataclass(frozen=True)
class Trimmed:
    """A library of which only some pages are in the image."""

    path: str
    source: Path
    plan: TrimPlan
    hot: tuple[Chunk, ...]
    cold: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """The size in bytes of the trimmed, sparse file."""
        return max(self.plan.size, self.plan.table_offset + len(self.plan.table))

    @property
    def hot_size(self) -> int:
        """The bytes of it that are in the image."""
        return sum(chunk.size for chunk in self.hot)

    def report(self) -> dict[str, Any]:
        """Return what reports say of it: sizes in bytes; of each section name, offset, size, what is hot."""
        hot = self.plan.sections
        sections = [[n, r.start, r.stop - r.start, hot[n][0]] for n, r in self.plan.places if n]
        return {
            "size": self.plan.size,
            "hot": self.hot_size,
            "sections": sections,
            "notes": list(self.plan.notes),
        }

    def absent(self) -> AbsentLibrary:
        """Return its row of the guard's table."""
        segments = tuple(
            AbsentSegment(s.vaddr, s.offset, s.filesz, s.prot, tuple((r.start, r.stop) for r in s.absent))
            for s in trim.restore_table(self.plan)
        )
        return AbsentLibrary(self.path, self.plan.size, segments)


@dataclass(frozen=True)
class Trims:
    """All trimmed libraries by path, and why others of some size are whole."""

    trimmed: Mapping[str, Trimmed]
    whole: Mapping[str, str]


def trim_libraries(
    frozen: Frozen, split: Split, trace: Trace, runs: Mapping[str, frozenset[int]], level: str
) -> Trims:
    """Plan every hot library; `runs` are those that recorded runs had to restore (see `absent.py`)."""
    whole: dict[str, str] = {}
    chosen: list[Placed] = []
    for placed in split.placed:
        if placed.file.role in (freeze.LIBRARY, freeze.EXTENSION) and placed.hot:
            why = _why_whole(placed, frozen, trace, level)
            if why is None:
                chosen.append(placed)
            elif placed.file.size >= _SMALLEST_GAIN:
                whole[placed.file.path] = why

    def work(placed: Placed) -> Trimmed | str:
        path = placed.file.path
        return _trim(path, frozen, trace, runs.get(path, frozenset()))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(work, chosen))
    whole |= {p.file.path: r for p, r in zip(chosen, results, strict=True) if isinstance(r, str)}
    return Trims({r.path: r for r in results if isinstance(r, Trimmed)}, whole)


def _why_whole(placed: Placed, frozen: Frozen, trace: Trace, level: str) -> str | None:
    path = placed.file.path
    if level != "traced":
        return f'[trim] level = "{level}"'
    if placed.kept:
        return placed.reason
    if trace.note:
        return trace.note
    if os.path.basename(path).startswith(_NEVER):
        return "part of the C library"
    if not native.exists(frozen.arch, native.GUARD):
        return f"there is no guard for {frozen.arch}"
    if path in trace.whole:
        return trace.whole[path]
    if path not in trace.pages:
        return "no trace loaded it, or it is small"
    return None


def _trim(path: str, frozen: Frozen, trace: Trace, runs: frozenset[int]) -> Trimmed | str:
    source = frozen.tree / path
    grain = _LARGEST_KERNEL_PAGE.get(frozen.arch, PAGE)
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        pages = trace.pages[path]
        touched = set(numbers(pages.touched)) | _pages_of_runs(data, runs, grain)
        plan = trim.plan(data, touched, set(numbers(pages.watched)), grain, GAP, symbols=False)
        if plan.reason:
            return plan.reason
        if sum(r.stop - r.start for r in plan.cold) < _SMALLEST_GAIN:
            return "nearly all of it is used"
        with memoryview(data) as view:
            return Trimmed(
                path, source, plan, _hot_chunks(source, view, plan), _cold_chunks(source, view, plan)
            )


def _pages_of_runs(data: mmap.mmap, runs: frozenset[int], grain: int) -> set[int]:
    """Return the pages (address as linked) of what recorded runs restored, by the file's own segments."""
    if not runs:
        return set()
    nothing = trim.plan(data, set(), range(1 << 40), grain, 0)
    found: set[int] = set()
    for segment in trim.restore_table(nothing):
        for run in runs:
            start = max(run * RUN, segment.offset)
            stop = min((run + 1) * RUN, segment.offset + segment.filesz)
            shift = segment.vaddr - segment.offset
            found.update(range((start + shift) // PAGE, -(-(stop + shift) // PAGE)))
    return found


def _hot_chunks(source: Path, data: memoryview, plan: TrimPlan) -> tuple[Chunk, ...]:
    """Return what the trimmed file holds; tables of numbers apart, filtered."""
    tables = list(_filtered(data, plan))
    taken = sorted(pair for chunk in tables for pair in chunk.ranges)
    parts: list[bytes | tuple[int, int]] = [plan.headers[:_HEADER]]
    ranges = [(0, _HEADER)]
    for kept in plan.kept:
        for start, stop in _without(max(kept.start, _HEADER), kept.stop, taken):
            parts.append((start, stop))
            _append(ranges, start, stop - start)
    parts.append(plan.table)
    _append(ranges, plan.table_offset, len(plan.table))
    return (_chunk(source, data, parts, ranges), *tables)


def _filtered(data: memoryview, plan: TrimPlan) -> Iterator[Chunk]:
    for section in sorted({name for name, _ in plan.tables}):
        ranges = [r for name, r in plan.tables if name == section]
        name = _FILTERS.get(section, filters.RELOCATIONS)
        raw = b"".join(data[r.start : r.stop] for r in ranges)
        coded = filters.encode(name, raw) if len(raw) >= _SMALLEST_TABLE else None
        if coded is not None and filters.decode(name, coded) == raw:
            pairs = tuple((r.start, r.stop - r.start) for r in ranges)
            yield Chunk(coded, len(coded), hashlib.sha256(coded).hexdigest(), pairs, name)


def _without(start: int, stop: int, taken: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what is left of `start` to `stop` without the ranges (offset and size, sorted) `taken`."""
    for offset, size in taken:
        if start < offset + size and offset < stop:
            if start < offset:
                yield start, offset
            start = offset + size
    if start < stop:
        yield start, stop


def _append(ranges: list[tuple[int, int]], offset: int, size: int) -> None:
    last, length = ranges[-1]
    if last + length == offset:
        ranges[-1] = (last, length + size)
    else:
        ranges.append((offset, size))


def _cold_chunks(source: Path, data: memoryview, plan: TrimPlan) -> tuple[Chunk, ...]:
    """Return the original ELF header, and the cold bytes of each window."""
    chunks = [_chunk(source, data, [(0, _HEADER)], [(0, _HEADER)])]
    windows: dict[int, list[tuple[int, int]]] = {}
    for cold in plan.cold:
        for start in _cuts(cold.start, cold.stop):
            stop = min(cold.stop, (start // WINDOW + 1) * WINDOW)
            windows.setdefault(start // WINDOW, []).append((start, stop))
    for _, pieces in sorted(windows.items()):
        chunks.append(_chunk(source, data, list(pieces), [(a, b - a) for a, b in pieces]))
    return tuple(chunks)


def _cuts(start: int, stop: int) -> Iterator[int]:
    yield start
    yield from range((start // WINDOW + 1) * WINDOW, stop, WINDOW)


def _chunk(
    source: Path, data: memoryview, parts: list[bytes | tuple[int, int]], ranges: list[tuple[int, int]]
) -> Chunk:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else data[part[0] : part[1]])
    size = sum(length for _, length in ranges)
    return Chunk(Parts(source, tuple(parts)), size, digest.hexdigest(), tuple(ranges))
