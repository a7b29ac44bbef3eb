"""Reversible filters that let tables of numbers in libraries compress better: relocations, unwind tables.

A filter is named "WIDTHxCOLUMNS": the bytes are little-endian signed numbers of WIDTH bytes, COLUMNS of them
to a row. Each column is written by itself, as differences of one number to the next (single bytes as they
are).
"""

import sys
from array import array
from itertools import accumulate, chain, pairwise

RELOCATIONS = "8x3"  # Elf64_Rela: offset, type and symbol, addend
UNWIND_TABLE = "4x2"  # .eh_frame_hdr: a function's address, its entry's address
SYMBOLS = "1x24"  # Elf64_Sym
NAMES = (RELOCATIONS, UNWIND_TABLE, SYMBOLS)
_CODES = {4: "i", 8: "q"}


def encode(name: str, data: bytes) -> bytes | None:
    """Return `data` filtered, of the same size; None where that can't be undone."""
    width, columns = _parts(name)
    if len(data) % width:
        return None
    if width == 1:
        return b"".join(data[column::columns] for column in range(columns))
    numbers = _numbers(width, data)
    out = array(_CODES[width])
    try:
        for column in range(columns):
            values = numbers[column::columns]
            out.extend(chain(values[:1], (b - a for a, b in pairwise(values))))
    except OverflowError:  # a difference that does not fit
        return None
    return _bytes(out)


def decode(name: str, data: bytes) -> bytes:
    """Undo `encode`; raises ValueError for data that it can't have made."""
    width, columns = _parts(name)
    if len(data) % width:
        raise ValueError(f"{len(data)} bytes are no numbers of {width} bytes")
    if width == 1:
        return _interleave(data, columns)
    deltas = _numbers(width, data)
    out = array(_CODES[width], bytes(len(data)))
    place = 0
    try:
        for column in range(columns):
            count = len(range(column, len(deltas), columns))
            values = accumulate(deltas[place : place + count])
            out[column::columns] = array(_CODES[width], values)
            place += count
    except OverflowError:
        raise ValueError("sums that do not fit") from None
    return _bytes(out)


def _interleave(data: bytes, columns: int) -> bytes:
    out = bytearray(len(data))
    place = 0
    for column in range(columns):
        count = len(range(column, len(data), columns))
        out[column::columns] = data[place : place + count]
        place += count
    return bytes(out)


def _parts(name: str) -> tuple[int, int]:
    if name not in NAMES:
        raise ValueError(f"unknown filter {name!r}")
    width, _, columns = name.partition("x")
    return int(width), int(columns)


def _numbers(width: int, data: bytes) -> "array[int]":
    numbers = array(_CODES[width], data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(numbers: "array[int]") -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()
