"""Which pages of constants may be absent: libraries made up byte by byte, and the tracer's lists of them."""

import os
import random
import struct
from pathlib import Path

import pytest

from rvbundle import constants, freeze, trim
from rvbundle.constants import stretches
from rvbundle.freeze import FrozenFile
from rvbundle.pages import PAGE, load_runs
from rvbundle.trim import Range

EHDR, SHDR, PHDR = (struct.Struct(f) for f in ("<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IIQQQQQQ"))
NAMES = b"\0.text\0.rodata\0.shstrtab\0"
TEXT_AT = PAGE  # where .text is; .rodata follows
SHIFT = 0x10000  # of addresses against offsets, where .rodata has a segment of its own
LAYOUTS = pytest.mark.parametrize("separate", [False, True], ids=["one-segment", "separate"])


def library(
    rodata: bytes, *, lead: int = 0, separate: bool = False, name: bytes = b".rodata", flags: int = 2
) -> bytes:
    """Return a library with a page of code and, `lead` bytes into the next page, these constants.

    They are in one segment with the code (as Debian's riscv64 linker has it), or in one that is only read, at
    other addresses than offsets (as lld has it).
    """
    start = TEXT_AT + PAGE + lead
    vaddr = start + (SHIFT if separate else 0)
    names = NAMES.replace(b".rodata", name)
    sections_at = -(-(start + len(rodata) + len(names)) // 8) * 8
    if separate:
        loads = [(5, 0, 0, TEXT_AT + PAGE), (4, start - lead, vaddr - lead, lead + len(rodata))]
    else:
        loads = [(5, 0, 0, start + len(rodata))]
    programs = [PHDR.pack(1, f, o, v, v, size, size, PAGE) for f, o, v, size in loads]
    programs.append(PHDR.pack(0x6474E551, 6, 0, 0, 0, 0, 0, 16))
    header = EHDR.pack(
        b"\x7fELF\2\1\1" + bytes(9), 3, 62, 1, 0, 64, sections_at, 0, 64, 56, len(programs), 64, 4, 3
    )
    sections = [
        bytes(64),
        SHDR.pack(1, 1, 6, TEXT_AT, TEXT_AT, PAGE, 0, 0, 1, 0),
        SHDR.pack(7, 1, flags, vaddr, start, len(rodata), 0, 0, 1, 0),
        SHDR.pack(names.index(b".shstrtab"), 3, 0, 0, start + len(rodata), len(names), 0, 0, 1, 0),
    ]
    out = (header + b"".join(programs)).ljust(start, b"\x90") + rodata + names
    return out.ljust(sections_at, b"\0") + b"".join(sections)


def first_page(lead: int = 0, separate: bool = False) -> int:
    """Return the first page that is all in .rodata."""
    return -(-(TEXT_AT + PAGE + lead + (SHIFT if separate else 0)) // PAGE)


def table(pages: float) -> bytearray:
    """Return numbers among which is no text."""
    return bytearray(b"\xff\1\2\3" * int(pages * PAGE / 4))


@LAYOUTS
@pytest.mark.parametrize("lead", [0, 40])
def test_a_stretch_without_text_less_a_page_at_either_end(separate: bool, lead: int) -> None:
    for pages in (0.5, 1, 15, 16, 17, 300):
        data = library(table(pages), lead=lead, separate=separate)
        whole = int((lead + pages * PAGE) // PAGE) - (lead > 0)
        first = first_page(lead, separate)
        expected = ((first + 1, first + whole - 1),) if whole >= 16 else ()
        assert stretches(data) == expected, pages


@LAYOUTS
def test_pages_with_text_divide_stretches(separate: bool) -> None:
    content = table(60)
    content[20 * PAGE + 9 : 20 * PAGE + 22] = b"/etc/hostname"
    content[20 * PAGE + 22] = 0
    content[40 * PAGE - 3 : 40 * PAGE + 4] = b"across\0"  # on two pages
    first = first_page(0, separate)
    assert stretches(library(content, separate=separate)) == (
        (first + 1, first + 19),
        (first + 22, first + 38),
        (first + 42, first + 59),
    )


@pytest.mark.parametrize(
    ("text", "is_text"),
    [
        (b"sixsix\0", True),
        (b"fives\0", False),
        (b"\t\n ~a!\0", True),
        (b"sixsix\xff", False),  # nothing ends it: chance
        (b"a string_view of Rust's\xff", True),
        (b"x" * 15 + b"\xff", False),
        (b"x" * 16 + b"\xff", True),
        (b"\x7f\x1fnot\x80text\0", False),
        ("größe\0".encode(), False),
        ("Übergröße von allem\0".encode(), True),
    ],
)
@pytest.mark.parametrize("place", [20 * PAGE, 20 * PAGE + 1234, 21 * PAGE - 30])
def test_what_text_is(text: bytes, is_text: bool, place: int) -> None:
    content = table(41)
    content[place : place + len(text)] = text
    first = first_page()
    apart = ((first + 1, first + 19), (first + 22, first + 40))
    assert stretches(library(content)) == (apart if is_text else ((first + 1, first + 40),))


@pytest.mark.parametrize("at_end", [False, True])
def test_text_at_the_ends_of_the_section(at_end: bool) -> None:
    """The last one ends where the section does; pages that others share are no part of a stretch anyway."""
    content = table(20)
    place = len(content) - 6 if at_end else 0
    content[place : place + 7] = b"sixsix" if at_end else b"sixsix\0"
    first = first_page()
    assert stretches(library(content)) == ((first + 1 + (not at_end), first + 19 - at_end),)
    shared = library(content, lead=40)  # text on the page that starts in .text
    assert stretches(shared) == ((first + 2, first + 19),)


def test_a_long_run_of_printable_bytes_takes_no_time() -> None:
    """One that nothing ends: a regular expression that tries again at each byte would take hours."""
    content = table(16) + b"?" * (8 << 20) + table(16)
    first = first_page()
    assert stretches(library(content)) == (
        (first + 1, first + 15),
        (first + 16 + 2048 + 1, first + 16 + 2048 + 15),
    )


def test_only_constants() -> None:
    content = table(30)
    assert stretches(library(content))
    assert stretches(library(content, name=b".romdat")) == ()
    assert stretches(library(content, flags=3)) == ()  # writable
    assert stretches(library(content, flags=6)) == ()  # code
    assert stretches(library(content, flags=0)) == ()  # not loaded


def test_what_can_not_be_read_has_none() -> None:
    chance = random.Random(3)
    good = library(table(30))
    assert trim.constants(good) == ((2 * PAGE, Range(2 * PAGE, 32 * PAGE)),)
    for data in (b"", b"\x7fELF", b"#!/bin/sh\n" * 10000, good[: 20 * PAGE]):
        assert stretches(data) == ()
    for _ in range(500):
        data = bytearray(good)
        for _ in range(chance.choice([1, 4, 20])):
            data[chance.choice([*range(240), *range(len(good) - 256, len(good))])] = chance.randrange(256)
        stretches(bytes(data))


@LAYOUTS
def test_watched_constants_that_were_not_used_are_absent(separate: bool) -> None:
    content = table(400)
    content[200 * PAGE : 200 * PAGE + 9] = b"/dev/null"
    content[200 * PAGE + 9] = 0
    data = library(content, lead=8, separate=separate)
    watched = {n for a, b in stretches(data) for n in range(a, b)}
    first = first_page(8, separate)
    plan = trim.plan(data, {first + 100}, watched, gap=0)
    assert plan.reason == ""
    gone = {
        n - first for s in plan.segments for r in s.absent for n in range(r.start // PAGE, r.stop // PAGE)
    }
    # 64 KiB around what was used is kept: other data reads other rows of the same table
    assert gone == {*range(1, 84), *range(117, 198), *range(201, 398)}
    hot, cold = plan.sections[".rodata"]
    assert (hot, cold) == (len(content) - len(gone) * PAGE, len(gone) * PAGE)
    assert trim.plan(data, set(), set(), gap=0).cold == ()


@LAYOUTS
def test_absent_constants_at_the_largest_grain(separate: bool) -> None:
    """Of pages of 64 KiB, only those go of which every part was watched."""
    content = table(400)
    data = library(content, separate=separate)
    watched = {n for a, b in stretches(data) for n in range(a, b)}
    plan = trim.plan(data, set(), watched, grain=65536, gap=0)
    gone = [n for s in plan.segments for r in s.absent for n in range(r.start // PAGE, r.stop // PAGE)]
    assert gone == [n for n in range(0, 1024) if {*range(n // 16 * 16, n // 16 * 16 + 16)} <= watched]
    assert len(gone) >= 380


def file(tree: Path, path: str, content: bytes, role: str = freeze.LIBRARY) -> FrozenFile:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_bytes(content)
    return FrozenFile(path, role, path, False, len(content), "", "")


def test_lists_for_the_tracer(tmp_path: Path) -> None:
    tree, records = tmp_path / "tree", tmp_path / "records"
    records.mkdir()
    large, small = library(table(258)), library(table(257))
    files = (
        file(tree, "usr/lib/liblarge.so.1", large),
        file(tree, "usr/lib/libsmall.so", small),
        file(tree, "usr/lib/python3/ext.so", large, freeze.EXTENSION),
        file(tree, "usr/lib/python3/data.bin", large, freeze.DATA),
        file(tree, "usr/lib/libtext.so", b"INPUT(liblarge.so)\n" * 100_000),
        file(tree, f"usr/lib/{'x' * 246}", large),  # 255 bytes with the path
        file(tree, f"usr/lib/{'x' * 247}", large),
        file(tree, os.fsdecode(b"usr/lib/\xff.so"), large),
        FrozenFile("usr/lib/libl.so", freeze.LINK, "", False, 0, "", "", "liblarge.so.1"),
    )
    constants.write_lists(tree, files, records)
    lists = {path.name: path.read_text() for path in (records / "constants").iterdir()}
    assert lists.keys() == {
        "%usr%lib%liblarge.so.1",
        "%usr%lib%python3%ext.so",
        f"%usr%lib%{'x' * 246}",
        os.fsdecode(b"%usr%lib%\xff.so"),
    }
    assert set(lists.values()) == {"3-258\n"}
    assert load_runs("3-258") == stretches(large)
