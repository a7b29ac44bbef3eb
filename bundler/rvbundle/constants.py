"""Which pages of a library's constants hold numbers alone: these may be absent, as code may.

A system call that is handed a pointer into an absent page fails with EFAULT, and no guard can mend that.
What programs hand to the kernel is text (paths, names, messages): pages with text, and those close to it,
are always kept. What is left are tables: of kernels for other processors, of shaders, of digits of pi.
The trace watches these pages beside code and unwind data (`runtime/native/tracer.c`).
"""

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rvbundle import freeze, trim
from rvbundle.freeze import FrozenFile
from rvbundle.pages import PAGE, Runs, dump_runs
from rvbundle.trim import Data, Range

LISTS = "constants"  # the folder of the lists, among a trace's records; as in tracer.c
_TEXT = re.compile(rb"[\t\n\x20-\x7e]{6,}")  # all of a run at once: linear, whatever a table is full of
# Not every text ends with a NUL: those of Rust don't, nor does a string_view. Six such bytes in a row are
# common among numbers, sixteen are not: they cost 1 to 2 % of the pages of libtorch_cpu.so's tables.
_LONG = 16
_STRETCH = 16  # pages: shorter ones are of little use, and may be the structures of a text's neighbour
_MARGIN = 1  # pages of a stretch, at either end, that are kept
# Which rows of a table are read is for the data to say, which a trace sees less of than of code: so tables
# go only where it pays. In torch's environments, libtorch_cpu.so has 95 % of them; the rest is unicodedata,
# codecs, numpy.
_LEAST = 256  # pages of a library that may be absent
_LONGEST_NAME = 255  # bytes: NAME_MAX in limits.h


def stretches(data: Data) -> Runs:
    """Return the pages (address as linked // PAGE) of a library's constants that may be absent.

    They are what is left of each stretch of at least 16 pages without text, less one at either end. Text is
    a run of printable ASCII of 6 bytes or more that a NUL ends, or of 16 or more, whatever ends it.
    """
    found = [run for vaddr, part in trim.constants(data) for run in _without_text(data, vaddr, part)]
    return tuple(sorted(found))


def _without_text(data: Data, vaddr: int, part: Range) -> Iterator[tuple[int, int]]:
    shift = vaddr - part.start
    first, end = -(-vaddr // PAGE), (part.stop + shift) // PAGE  # whole pages
    if end - first < _STRETCH:
        return
    pages = bytearray(end - first)
    for text in _TEXT.finditer(data, part.start, part.stop):
        start, stop = text.span()
        if stop - start >= _LONG or stop == part.stop or data[stop] == 0:
            low = max((start + shift) // PAGE - first, 0)
            high = min((stop - 1 + shift) // PAGE - first + 1, len(pages))
            pages[low:high] = b"\1" * (high - low)
    for run in re.finditer(b"\0{%d,}" % _STRETCH, pages):
        yield first + run.start() + _MARGIN, first + run.end() - _MARGIN


def write_lists(tree: Path, files: Iterable[FrozenFile], records: Path) -> None:
    """Write, for the tracer, the list of each library that has 1 MiB of such pages, or more.

    `records` is the folder of a trace that has not begun.
    """
    folder = records / LISTS
    folder.mkdir()
    for file in files:
        name = f"%{file.path.replace('/', '%')}"
        if (
            file.role in (freeze.LIBRARY, freeze.EXTENSION)
            and file.size >= _LEAST * PAGE
            and len(os.fsencode(name)) <= _LONGEST_NAME  # the tracer can't record longer ones
        ):
            found = _read(tree / file.path)
            if sum(end - first for first, end in found) >= _LEAST:
                (folder / name).write_text(f"{dump_runs(found)}\n")


def _read(path: Path) -> Runs:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return stretches(data)
