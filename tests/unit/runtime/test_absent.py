import struct
from dataclasses import replace

import pytest

from rvbundle_runtime import absent
from rvbundle_runtime.absent import RUN, AbsentLibrary, AbsentSegment
from rvbundle_runtime.errors import ImageError

TEXT = AbsentSegment(0x11000, 0x10000, 0x30000, 5, ((0x12000, 0x15000), (0x20000, 0x3F000)))
RODATA = AbsentSegment(0x1000, 0x1000, 0x5000, 1, ())
LIBRARIES = (
    AbsentLibrary("usr/lib/libb.so", 5 * RUN + 1, (RODATA, TEXT)),
    AbsentLibrary("usr/lib/liba.so", RUN, (TEXT,)),
    AbsentLibrary("usr/lib/libü.so", 0, ()),
)
DAMAGED = "the table of absent pages is damaged ("
VERSION = "the table of absent pages is of another version"


def test_round_trip() -> None:
    """In the order of their paths, each with the number of its first run."""
    assert absent.load(absent.dump(LIBRARIES)) == (
        replace(LIBRARIES[1], first_run=0),
        replace(LIBRARIES[0], first_run=1),
        replace(LIBRARIES[2], first_run=7),
    )


def test_the_order_given_and_first_runs_given_do_not_matter() -> None:
    other = [replace(library, first_run=99) for library in reversed(LIBRARIES)]
    assert absent.dump(other) == absent.dump(LIBRARIES)


def test_what_was_read_gives_the_same_bytes() -> None:
    data = absent.dump(LIBRARIES)
    assert absent.dump(absent.load(data)) == data


def test_byte_by_byte() -> None:
    library = AbsentLibrary("a/x.so", RUN + 5, (replace(TEXT, ranges=((0x12000, 0x13000),)),))
    assert absent.dump([library]) == (
        struct.pack("<8sIIQ", b"RVABSNT1", 1, 65536, 2)
        + struct.pack("<QIIQQQ", 24 + 40 + 40 + 16, 6, 1, 24 + 40, 0, RUN + 5)
        + struct.pack("<QQQIIQ", 0x11000, 0x10000, 0x30000, 5, 1, 24 + 40 + 40)
        + struct.pack("<QQ", 0x12000, 0x13000)
        + b"a/x.so"
    )


def test_no_libraries() -> None:
    assert absent.load(absent.dump([])) == ()
    assert absent.dump([]) == b"RVABSNT1" + struct.pack("<IIQ", 0, 65536, 0)


@pytest.mark.parametrize(("size", "runs"), [(0, 0), (1, 1), (RUN, 1), (RUN + 1, 2), (10 * RUN, 10)], ids=str)
def test_runs_of_a_library(size: int, runs: int) -> None:
    assert AbsentLibrary("x", size, ()).runs == runs


def test_run_count() -> None:
    assert absent.run_count(LIBRARIES) == 7
    assert absent.run_count(()) == 0


@pytest.mark.parametrize(
    "data",
    [
        b"RVABSNT2" + absent.dump(LIBRARIES)[8:],
        bytes(1000),
        b"\x7fELF" + bytes(100),
        b"RVABSNT1" + struct.pack("<IIQ", 0, 4096, 0),
    ],
    ids=["newer", "zeros", "foreign", "another size of runs"],
)
def test_another_version(data: bytes) -> None:
    with pytest.raises(ImageError) as caught:
        absent.load(data)
    assert caught.value.message == VERSION


@pytest.mark.parametrize("size", [0, 1, 23, 24, 63, 64, 143, 144, 150])
def test_cut_tables(size: int) -> None:
    data = absent.dump(LIBRARIES)
    with pytest.raises(ImageError) as caught:
        absent.load(data[:size])
    assert caught.value.message.startswith(DAMAGED)


def test_cut_anywhere() -> None:
    data = absent.dump(LIBRARIES)
    for size in range(len(data)):
        with pytest.raises(ImageError) as caught:
            absent.load(data[:size])
        assert caught.value.message.startswith(DAMAGED)


def patched(offset: int, value: bytes) -> bytes:
    data = bytearray(absent.dump(LIBRARIES))
    data[offset : offset + len(value)] = value
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        patched(8, struct.pack("<I", 0xFFFFFFFF)),
        patched(24 + 12, struct.pack("<I", 0xFFFFFFFF)),
        patched(24 + 16, struct.pack("<Q", (1 << 63) - 1)),
        patched(24 + 16, struct.pack("<Q", 1 << 63)),
        patched(24 + 16, struct.pack("<Q", (1 << 64) - 1)),
        patched(24, struct.pack("<Q", 1 << 40)),
        patched(24, struct.pack("<QI", 1 << 63, 0xFFFFFFFF)),
        patched(24 + 3 * 40 + 28, struct.pack("<I", 0xFFFFFFFF)),
        patched(24 + 3 * 40 + 32, struct.pack("<Q", 1 << 63)),
        patched(len(absent.dump(LIBRARIES)) - 5, b"\xff"),
    ],
    ids=[
        "libraries",
        "segments",
        "place of segments",
        "place beyond any file",
        "last place",
        "place of a path",
        "path beyond any file",
        "ranges",
        "place of ranges",
        "path that is no UTF-8",
    ],
)
def test_damaged_tables(data: bytes) -> None:
    with pytest.raises(ImageError) as caught:
        absent.load(data)
    assert caught.value.message.startswith(DAMAGED)
