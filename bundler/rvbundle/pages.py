"""Which pages of the shared libraries a trace touched: the records of `runtime/native/tracer.c`. Pure."""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

PAGE = 4096  # the grain of the records, in bytes, whatever the kernel's page size
_HEADER = struct.Struct("<8sQQQ")  # magic, page size, first page, pages
_MAGIC = b"RVPAGES1"

Runs = tuple[tuple[int, int], ...]  # of page numbers: first and one after the last, sorted, apart


@dataclass(frozen=True)
class PageTrace:
    """The pages of one library (address as linked // PAGE): those touched, and those whose use would show."""

    touched: Runs
    watched: Runs


def parse_record(data: bytes) -> PageTrace:
    """Read a tracer's record; raises ValueError for anything else."""
    if len(data) < _HEADER.size:
        raise ValueError("too short for a record of pages")
    magic, page, first, count = _HEADER.unpack_from(data)
    size = -(-count // 8)
    if magic != _MAGIC or page != PAGE or len(data) < _HEADER.size + 2 * size:
        raise ValueError("no record of pages")
    touched = data[_HEADER.size : _HEADER.size + size]
    watched = data[_HEADER.size + size : _HEADER.size + 2 * size]
    both = bytes(a & b for a, b in zip(touched, watched, strict=True))
    return PageTrace(_runs_of_bits(both, first, count), _runs_of_bits(watched, first, count))


def _runs_of_bits(bits: bytes, first: int, count: int) -> Runs:
    set_bits = (first + n for n in range(count) if bits[n >> 3] >> (n & 7) & 1)
    return runs(set_bits)


def runs(numbers: Iterable[int]) -> Runs:
    """Return sorted numbers as runs."""
    found = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        found.append((members[0], members[-1] + 1))
    return tuple(found)


def numbers(of: Runs) -> Iterator[int]:
    """Yield the numbers of runs."""
    for start, stop in of:
        yield from range(start, stop)


def merge(traces: Iterable[PageTrace]) -> PageTrace:
    """Return what several traces of one library touched together."""
    touched: set[int] = set()
    watched: set[int] = set()
    for trace in traces:
        touched.update(numbers(trace.touched))
        watched.update(numbers(trace.watched))
    return PageTrace(runs(sorted(touched)), runs(sorted(watched)))


def dump_runs(of: Runs) -> str:
    """Return runs as a text such as "3 5-9" (the last page of a run included)."""
    return " ".join(f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in of)


def load_runs(text: str) -> Runs:
    """Read what `dump_runs` wrote; raises ValueError."""
    found = []
    for word in text.split():
        first, dash, last = word.partition("-")
        found.append((int(first), int(last if dash else first) + 1))
    if any(a >= b for a, b in found) or any(b >= c for (_, b), (c, _) in pairwise(found)):
        raise ValueError("runs of pages out of order")
    return tuple(found)
