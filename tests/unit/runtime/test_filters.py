import random
import struct
import sys
from pathlib import Path

import pytest

from rvbundle_runtime import filters
from rvbundle_runtime.filters import NAMES, RELOCATIONS, SYMBOLS, UNWIND_TABLE, decode, encode

INT32, INT64 = (1 << 31) - 1, (1 << 63) - 1


@pytest.mark.parametrize(
    ("name", "raw", "coded"),
    [
        (RELOCATIONS, b"", b""),
        (UNWIND_TABLE, b"", b""),
        (SYMBOLS, b"", b""),
        (
            UNWIND_TABLE,
            struct.pack("<6i", 100, 7, 110, 9, 105, -2),
            struct.pack("<6i", 100, 10, -5, 7, 2, -11),
        ),
        (UNWIND_TABLE, struct.pack("<3i", 100, 7, 110), struct.pack("<3i", 100, 10, 7)),
        (UNWIND_TABLE, struct.pack("<i", -1), b"\xff\xff\xff\xff"),
        (
            RELOCATIONS,
            struct.pack("<6q", 0x1000, 8, 0x50, 0x1008, 8, 0x40),
            struct.pack("<6q", 0x1000, 8, 8, 0, 0x50, -0x10),
        ),
        (RELOCATIONS, struct.pack("<4q", 1, 2, 3, 5), struct.pack("<4q", 1, 4, 2, 3)),
        (SYMBOLS, bytes(range(24)), bytes(range(24))),
        (SYMBOLS, bytes(range(26)), b"\x00\x18\x01\x19" + bytes(range(2, 24))),
    ],
)
def test_exact_bytes(name: str, raw: bytes, coded: bytes) -> None:
    assert encode(name, raw) == coded
    assert decode(name, coded) == raw


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [*range(0, 100, 8), 24 * 500, 24 * 500 + 8, 24 * 500 + 16])
def test_round_trip_of_anything(name: str, size: int) -> None:
    chance = random.Random(size)
    data = chance.randbytes(size)
    coded = encode(name, data)
    if coded is not None:  # random numbers of full width may be too far apart
        assert (len(coded), decode(name, coded)) == (size, data)
    near = (chance.randrange(-(1 << 30), 1 << 30) for _ in range(size // 8))
    small = b"".join(number.to_bytes(8, "little", signed=True) for number in near)
    coded = encode(name, small)
    if name != UNWIND_TABLE:
        assert coded is not None
    assert coded is None or decode(name, coded) == small


@pytest.mark.parametrize("size", range(1, 80))
def test_single_bytes_of_any_length(size: int) -> None:
    data = random.Random(size).randbytes(size)
    coded = encode(SYMBOLS, data)
    assert coded is not None
    assert sorted(coded) == sorted(data)
    assert decode(SYMBOLS, coded) == data


def test_a_real_table_of_relocations_compresses_better() -> None:
    zstandard = pytest.importorskip("zstandard")
    raw = b"".join(struct.pack("<QIIq", 0x30000 + 8 * n, 8, 0, 0x1000 + 0x40 * n) for n in range(5000))
    coded = encode(RELOCATIONS, raw)
    assert coded is not None
    plain = len(zstandard.ZstdCompressor(19).compress(raw))
    assert len(zstandard.ZstdCompressor(19).compress(coded)) < plain / 20
    assert decode(RELOCATIONS, coded) == raw


@pytest.mark.parametrize("name", NAMES)
def test_real_data(name: str) -> None:
    """The interpreter's own file, whatever of it is a table."""
    data = Path(sys.executable).read_bytes()[: 24 * 20000]
    data = data[: len(data) // 24 * 24]
    coded = encode(name, data)
    assert coded is None or decode(name, coded) == data


@pytest.mark.parametrize(
    ("name", "numbers", "code"),
    [
        (UNWIND_TABLE, (INT32, 0, -2, 0), "i"),
        (UNWIND_TABLE, (-INT32 - 1, 0, 1, 0), "i"),
        (UNWIND_TABLE, (0, -INT32 - 1, 0, 0), "i"),
        (RELOCATIONS, (INT64, 0, 0, -2, 0, 0), "q"),
        (RELOCATIONS, (0, 0, -INT64 - 1, 0, 0, 1), "q"),
    ],
)
def test_differences_that_do_not_fit(name: str, numbers: tuple[int, ...], code: str) -> None:
    assert encode(name, struct.pack(f"<{len(numbers)}{code}", *numbers)) is None


@pytest.mark.parametrize(
    ("name", "numbers", "code"),
    [
        (UNWIND_TABLE, (INT32, 0, 0, 0), "i"),
        (UNWIND_TABLE, (-INT32 - 1, 0, -1, 0), "i"),
        (RELOCATIONS, (INT64, 0, 0, 0, 0, 0), "q"),
        (RELOCATIONS, (-INT64 - 1, INT64, 0, -1, 0, 0), "q"),
    ],
)
def test_differences_that_just_fit(name: str, numbers: tuple[int, ...], code: str) -> None:
    raw = struct.pack(f"<{len(numbers)}{code}", *numbers)
    coded = encode(name, raw)
    assert coded is not None
    assert decode(name, coded) == raw


@pytest.mark.parametrize(
    ("name", "numbers", "code"),
    [
        (UNWIND_TABLE, (INT32, 1, 0, 0), "i"),
        (UNWIND_TABLE, (0, 0, -INT32 - 1, -1), "i"),
        (RELOCATIONS, (INT64, 1, 0, 0, 0, 0), "q"),
    ],
)
def test_sums_that_do_not_fit(name: str, numbers: tuple[int, ...], code: str) -> None:
    with pytest.raises(ValueError, match=r"^sums that do not fit$"):
        decode(name, struct.pack(f"<{len(numbers)}{code}", *numbers))


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        (UNWIND_TABLE, 3, "3 bytes are no numbers of 4 bytes"),
        (UNWIND_TABLE, 9, "9 bytes are no numbers of 4 bytes"),
        (RELOCATIONS, 12, "12 bytes are no numbers of 8 bytes"),
    ],
)
def test_odd_lengths(name: str, size: int, message: str) -> None:
    assert encode(name, bytes(size)) is None
    with pytest.raises(ValueError, match=message):
        decode(name, bytes(size))


@pytest.mark.parametrize("name", ["", "1x1", "8x3 ", "8X3", "4x2x1", "0x0"])
def test_unknown_filter(name: str) -> None:
    for work in (encode, decode):
        with pytest.raises(ValueError, match=f"^unknown filter {name!r}$"):
            work(name, b"")


def test_the_other_byte_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A big-endian machine that packs or reads: the bytes are the same."""
    raw = struct.pack(">6i", 100, 7, 110, 9, 105, -2)  # what a big-endian array makes of little-endian bytes
    monkeypatch.setattr(filters.sys, "byteorder", "big")
    assert encode(UNWIND_TABLE, raw) == struct.pack(">6i", 100, 10, -5, 7, 2, -11)
    assert decode(UNWIND_TABLE, struct.pack(">6i", 100, 10, -5, 7, 2, -11)) == raw
