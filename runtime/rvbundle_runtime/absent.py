"""The table of what is absent of each trimmed library, for guard, pager and launcher.

The image holds it as usr/lib/rvbundle/absent.tbl; the guard (runtime/native/guard.c) maps it into every
process. All numbers are little-endian; offsets count from the first byte of the table:

    header   8 bytes "RVABSNT1" | u32 libraries | u32 run size (65536) | u64 runs of all libraries
    library  u64 path offset | u32 path length | u32 segments | u64 offset of its segments
             | u64 first run | u64 size of its file (without what the trim adds behind its end)
    segment  u64 vaddr | u64 file offset | u64 size in the file | u32 protection | u32 ranges
             | u64 offset of its ranges
    range    u64 start | u64 stop        (addresses as linked, on page bounds, sorted)

A run is an aligned piece of 64 KiB of a library's file: what is restored at once. Bit number
`first run + file offset / 65536` (low bits first) of the file `present`, which the launcher makes and the
pager keeps, is set once all that is absent of the run lies in the library's file in the store.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rvbundle_runtime.errors import ImageError

TABLE = "usr/lib/rvbundle/absent.tbl"
GUARD = "usr/lib/rvbundle/guard.so"
RUN = 65536
_MAGIC = b"RVABSNT1"
_HEADER = struct.Struct("<8sIIQ")
_LIBRARY = struct.Struct("<QIIQQQ")
_SEGMENT = struct.Struct("<QQQIIQ")
_RANGE = struct.Struct("<QQ")


@dataclass(frozen=True)
class AbsentSegment:
    """A read-only or executable PT_LOAD: addresses as linked, `protection` as mmap wants it."""

    vaddr: int
    offset: int
    size: int
    protection: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AbsentLibrary:
    """A trimmed library: its path in the tree, the size of its file in bytes, the number of its first run."""

    path: str
    size: int
    segments: tuple[AbsentSegment, ...]
    first_run: int = 0

    @property
    def runs(self) -> int:
        """The number of runs of its file."""
        return -(-self.size // RUN)


def dump(libraries: Sequence[AbsentLibrary]) -> bytes:
    """Return the table; `first_run` of what is given does not count."""
    fixed, segments, ranges, texts = bytearray(), bytearray(), bytearray(), bytearray()
    ordered = sorted(libraries, key=lambda library: library.path)
    at_segments = _HEADER.size + len(ordered) * _LIBRARY.size
    at_ranges = at_segments + sum(len(x.segments) for x in ordered) * _SEGMENT.size
    at_texts = at_ranges + sum(len(s.ranges) for x in ordered for s in x.segments) * _RANGE.size
    run = 0
    for library in ordered:
        text = library.path.encode()
        fixed += _LIBRARY.pack(
            at_texts + len(texts),
            len(text),
            len(library.segments),
            at_segments + len(segments),
            run,
            library.size,
        )
        texts += text
        run += library.runs
        for part in library.segments:
            place = at_ranges + len(ranges)
            count = len(part.ranges)
            segments += _SEGMENT.pack(part.vaddr, part.offset, part.size, part.protection, count, place)
            ranges += b"".join(_RANGE.pack(*pair) for pair in part.ranges)
    return bytes(_HEADER.pack(_MAGIC, len(ordered), RUN, run) + fixed + segments + ranges + texts)


def load(data: bytes) -> tuple[AbsentLibrary, ...]:
    """Read a table; raises ImageError for anything else."""
    try:
        magic, count, run_size, _ = _HEADER.unpack_from(data)
        if magic != _MAGIC or run_size != RUN:
            raise ImageError("the table of absent pages is of another version")
        found = []
        for number in range(count):
            at_text, length, parts, at_parts, first_run, size = _LIBRARY.unpack_from(
                data, _HEADER.size + number * _LIBRARY.size
            )
            segments = []
            for part in range(parts):
                vaddr, offset, in_file, protection, ranges, at_ranges = _SEGMENT.unpack_from(
                    data, at_parts + part * _SEGMENT.size
                )
                pairs = _RANGE.iter_unpack(_piece(data, at_ranges, ranges * _RANGE.size))
                absent = tuple((start, stop) for start, stop in pairs)
                segments.append(AbsentSegment(vaddr, offset, in_file, protection, absent))
            path = _piece(data, at_text, length).decode()
            found.append(AbsentLibrary(path, size, tuple(segments), first_run))
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ImageError(f"the table of absent pages is damaged ({error})") from None
    return tuple(found)


def _piece(data: bytes, place: int, size: int) -> bytes:
    if place + size > len(data):
        raise struct.error("it is cut short")
    return data[place : place + size]


def run_count(libraries: Sequence[AbsentLibrary]) -> int:
    """Return how many runs all libraries have together."""
    return sum(library.runs for library in libraries)
