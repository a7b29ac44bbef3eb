"""An image with a trimmed library of made-up bytes, unpacked, and its cold pack."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from rvbundle.pack import Item
from rvbundle_runtime import absent, store
from rvbundle_runtime import format as fmt
from rvbundle_runtime.absent import RUN, TABLE, AbsentLibrary, AbsentSegment
from rvbundle_runtime.image import Reader

from ..images import ARCH, build, chunk, item, ranges, sparse

PATH, OTHER = "usr/lib/x/libtoy.so", "usr/lib/liba.so"
SIZE = 5 * RUN + 100  # six runs: 0 to 5, the last one short
WHOLE = bytes(byte ^ (n * 7 & 255) for n, byte in enumerate(bytes(range(251)) * 1400))[:SIZE]
HEADER = b"T" * 64  # of the trimmed file
# Of the first window (128 KiB): in run 0 and up to the end of run 1; of the second: runs 2 and 3 are cold up
# to 0x2a000; of the third: in runs 4 and 5.
COLD = (
    ((0x2000, 0x3000), (0x18000, 0x8000)),
    ((0x20000, 0xA000),),
    ((0x48000, 0x1000), (0x50000, 100)),
)
ABSENT = AbsentLibrary(
    PATH,
    SIZE,
    (
        AbsentSegment(
            0, 0, SIZE, 5, ((0x2000, 0x5000), (0x18000, 0x2A000), (0x48000, 0x49000), (0x50000, 0x51000))
        ),
    ),
)
FIRST = AbsentLibrary(OTHER, 3 * RUN, ())  # its runs come first: those of PATH begin with number 3


def cold_bytes(pairs: tuple[tuple[int, int], ...]) -> bytes:
    return b"".join(WHOLE[offset : offset + size] for offset, size in pairs)


def hot_ranges() -> tuple[tuple[int, int], ...]:
    found, place = [], 64
    for offset, size in sorted(pair for window in COLD for pair in window):
        if place < offset:
            found.append((place, offset - place))
        place = offset + size
    return tuple([*found, (place, SIZE - place)] if place < SIZE else found)


def trimmed_bytes() -> bytes:
    data = bytearray(WHOLE)
    data[:64] = HEADER
    for window in COLD:
        for offset, size in window:
            data[offset : offset + size] = bytes(size)
    return bytes(data)


def cold_items() -> list[Item]:
    windows = [chunk(cold_bytes(pairs), *pairs) for pairs in COLD]
    return [ranges(PATH, SIZE, chunk(WHOLE[:64], (0, 64)), *windows), item("usr/lib/other.pyc", b"cold")]


@dataclass
class Place:
    """An image with a trimmed library, unpacked, and its cold pack."""

    unpacked: store.Unpacked
    pack: Path
    boot: Path

    @property
    def library(self) -> Path:
        return self.unpacked.root / PATH

    @property
    def log(self) -> Path:
        return self.unpacked.root.parent / store.PAGES_LIST

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


def make_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Make it all below `tmp_path`; the boot's id is the text of a file there."""
    (tmp_path / "boot").write_text("first-boot\n")
    monkeypatch.setattr(store, "BOOT_ID", str(tmp_path / "boot"))
    table = absent.dump([ABSENT, FIRST])
    hot = chunk(HEADER + cold_bytes(hot_ranges()), (0, 64), *hot_ranges())
    items = [
        item("usr/bin/agent", b"#!/bin/sh\n", kind=fmt.EXECUTABLE),
        item(OTHER, b"whole"),
        item(TABLE, table),
        sparse(PATH, SIZE, hot),
    ]
    identity = build(tmp_path / "demo.rvb", items)
    build(tmp_path / "demo.cold.rvb", cold_items(), bound_to=identity)
    with Reader(tmp_path / "demo.rvb") as reader:
        unpacked = store.ensure(tmp_path / "cache", reader, ARCH)
    return Place(unpacked, tmp_path / "demo.cold.rvb", tmp_path / "boot")
