"""Holes of trimmed libraries filled from a cold pack, and what is remembered of it."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rvbundle_runtime import absent, filler, store
from rvbundle_runtime import format as fmt
from rvbundle_runtime.absent import RUN, TABLE
from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.filler import Filler, initial_present
from rvbundle_runtime.image import Reader

from ..images import build, chunk, ranges
from .trimmed import COLD, FIRST, HEADER, PATH, WHOLE, Place, make_place, trimmed_bytes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place(tmp_path, monkeypatch)


@dataclass
class Run:
    """A filler at work, with the bits that it shares."""

    filler: Filler
    entry: fmt.Entry
    present: int

    def fill(self, offset: int, send: bool = False) -> bytes | None:
        return self.filler.fill(self.entry, offset, send)

    def bits(self) -> set[int]:
        data = os.pread(self.present, 100, 0)
        return {n for n in range(8 * len(data)) if data[n >> 3] >> (n & 7) & 1}


def start(place: Place, reader: Reader) -> Run:
    root = os.open(place.unpacked.root, os.O_PATH | os.O_DIRECTORY)
    entry = next(e for e in reader.index().payloads[0].entries if e.kind == fmt.RANGES)
    run = Run(Filler(reader, root, place.log), entry, os.memfd_create("present"))
    present = initial_present(place.unpacked)
    os.write(run.present, present)
    run.filler.share(run.present, len(present))
    return run


@pytest.fixture
def run(place: Place) -> Iterator[Run]:
    with Reader(place.pack) as reader:
        yield start(place, reader)


def test_the_trimmed_file_as_unpacked(place: Place) -> None:
    assert place.library.read_bytes() == trimmed_bytes()
    assert place.unpacked.info.trimmed
    assert initial_present(place.unpacked) == b"\0\0"  # 9 runs of two libraries


@pytest.mark.parametrize("offset", [0, 0x2000, 0xFFFF, 0x10000, 0x1FFFF])
def test_a_window_is_filled_at_once(place: Place, run: Run, offset: int) -> None:
    """Whatever byte of its runs is asked for; the header stays that of the trimmed file."""
    assert run.fill(offset) is None
    expected = bytearray(trimmed_bytes())
    for start_, size in COLD[0]:
        expected[start_ : start_ + size] = WHOLE[start_ : start_ + size]
    assert place.library.read_bytes() == bytes(expected)
    assert run.bits() == {3, 4}
    token = place.lines()[0].split()[1]
    assert place.lines() == [f"B {token} first-boot", f"P {token} 0 {PATH}", f"P {token} 1 {PATH}"]


def test_all_windows(place: Place, run: Run) -> None:
    for offset in (0x20000, 0x48000, 0):
        assert run.fill(offset) is None
    assert place.library.read_bytes() == HEADER + WHOLE[64:]
    assert run.bits() == {3, 4, 5, 7, 8}  # run 3 (bit 6) had nothing cold
    assert [line.split()[0] for line in place.lines()] == ["B", "P", "P", "P", "P", "P"]
    assert store.restored_runs(place.unpacked) == {PATH: frozenset({0, 1, 2, 4, 5})}


def test_a_run_that_has_nothing_cold(place: Place, run: Run) -> None:
    for offset in (3 * RUN, 3 * RUN + 5):
        with pytest.raises(ImageError) as caught:
            run.fill(offset)
        assert caught.value.message == f"the cold pack has nothing at 0x30000 of {PATH}"
    assert place.library.read_bytes() == trimmed_bytes()
    assert place.lines() == []


@pytest.mark.parametrize("offset", [6 * RUN, 1 << 40, (1 << 64) - 1])
def test_outside_the_library(run: Run, offset: int) -> None:
    with pytest.raises(ImageError) as caught:
        run.fill(offset)
    assert caught.value.message == f"the cold pack has nothing at {offset // RUN * RUN:#x} of {PATH}"


@pytest.mark.parametrize(
    ("offset", "run_"), [(0x2000, 0), (0x18000, 1), (0x20000, 2), (0x48000, 4), (0x50000, 5)]
)
def test_bytes_instead_of_a_filled_file(place: Place, run: Run, offset: int, run_: int) -> None:
    data = run.fill(offset, send=True)
    expected = bytearray(WHOLE[run_ * RUN : (run_ + 1) * RUN])
    if run_ == 0:
        expected[:64] = HEADER  # as the file has it
    assert data == bytes(expected)
    assert place.library.read_bytes() == trimmed_bytes()
    assert (run.bits(), place.lines()) == (set(), [])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_store_that_can_not_take_it(
    place: Place, run: Run, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The guard gets the bytes and keeps them in memory."""

    def refuse(fd: int, data: object, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", refuse)
    assert run.fill(0x20000) == WHOLE[0x20000:0x30000]
    assert (run.bits(), place.lines()) == (set(), [])
    monkeypatch.undo()
    assert run.fill(0x20000) is None
    assert run.bits() == {5}


def test_half_a_window_written_is_none(place: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = os.pwrite, []

    def write(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(fd, data[:0x1000], offset)

    monkeypatch.setattr(os, "pwrite", write)
    data = run.fill(0x18000)
    monkeypatch.undo()
    assert data == WHOLE[0x10000:0x20000]
    assert calls == [0x2000, 0x3000, 0x4000]  # short writes go on where they ended
    assert (run.bits(), place.lines()) == (set(), [])
    assert store.restored_runs(place.unpacked) == {}


def test_a_read_only_store(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open

    def opened(path: object, flags: int, *words: int, **more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return original(path, flags, *words, **more)  # type: ignore[arg-type]

    with Reader(place.pack) as reader:
        monkeypatch.setattr(filler.os, "open", opened)
        run = start(place, reader)
        assert run.fill(0x20000) == WHOLE[0x20000:0x30000]
        run.filler.close()
    assert not place.log.exists()


def test_what_the_last_run_filled_is_present(place: Place) -> None:
    with Reader(place.pack) as reader:
        start(place, reader).fill(0x20000)
        again = start(place, reader)
    assert initial_present(place.unpacked) == bytes([1 << 5, 0])
    assert again.bits() == {5}
    assert store.restored_runs(place.unpacked) == {PATH: frozenset({2})}


def test_what_did_not_reach_the_disk_counts_until_the_next_boot(place: Place) -> None:
    """A killed run: the page cache has it, but a crash of the machine may lose it."""
    with Reader(place.pack) as reader:
        start(place, reader).fill(0x20000)
        assert store.restored_runs(place.unpacked) == {PATH: frozenset({2})}
        place.boot.write_text("second-boot\n")
        assert store.restored_runs(place.unpacked) == {}
        assert initial_present(place.unpacked) == b"\0\0"
        second = start(place, reader)
        second.fill(0x48000)
        assert store.restored_runs(place.unpacked) == {PATH: frozenset({4, 5})}
        second.fill(0x20000)
    assert store.restored_runs(place.unpacked) == {PATH: frozenset({2, 4, 5})}


def test_what_reached_the_disk_counts_for_ever(place: Place) -> None:
    with Reader(place.pack) as reader:
        run = start(place, reader)
        run.fill(0)
        run.filler.close()
        token = place.lines()[0].split()[1]
        assert place.lines()[-1] == f"S {token}"
        place.boot.write_text("second-boot\n")
        assert store.restored_runs(place.unpacked) == {PATH: frozenset({0, 1})}
        lost = start(place, reader)
        lost.fill(0x48000)
        place.boot.write_text("third-boot\n")
        assert store.restored_runs(place.unpacked) == {PATH: frozenset({0, 1})}


def test_nothing_to_bring_to_the_disk(place: Place, run: Run) -> None:
    run.fill(0x20000, send=True)
    run.filler.close()
    assert place.lines() == []


def test_what_can_not_be_brought_to_the_disk(place: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    run.fill(0)
    monkeypatch.setattr(os, "fdatasync", refuse)
    run.filler.close()
    assert [line.split()[0] for line in place.lines()] == ["B", "P", "P"]


def test_two_fillers_of_one_store(place: Place) -> None:
    with Reader(place.pack) as reader:
        first, second = start(place, reader), start(place, reader)
        first.fill(0)
        second.fill(0x20000)
        first.filler.close()
    place.boot.write_text("second-boot\n")
    assert store.restored_runs(place.unpacked) == {PATH: frozenset({0, 1})}


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "\n\n",
        "P unknown 1 usr/lib/x/libtoy.so\n",
        "B t other-boot\nP t 1 usr/lib/x/libtoy.so\n",
        "B t\nP t 1 usr/lib/x/libtoy.so\n",
        "S t u\nP t 1 usr/lib/x/libtoy.so\n",
        "S t\nP t one usr/lib/x/libtoy.so\n",
        "S t\nP t -1 usr/lib/x/libtoy.so\n",
        "S t\nP t 1\n",
        "S t\nP t\n",
        "S t\nX t 1 usr/lib/x/libtoy.so\n",
        "S t\nP  t 1 usr/lib/x/libtoy.so\n",
    ],
)
def test_lines_that_do_not_count(place: Place, lines: str) -> None:
    place.log.write_text(lines)
    assert store.restored_runs(place.unpacked) == {}
    assert initial_present(place.unpacked) == b"\0\0"


def test_odd_digits_in_the_list(place: Place) -> None:
    """A damaged list must not stop a run."""
    place.log.write_text(f"S t\nP t ² {PATH}\nP t 1 {PATH}\n")
    assert store.restored_runs(place.unpacked) == {PATH: frozenset({1})}


def test_paths_with_spaces(place: Place) -> None:
    place.log.write_text("S t\nP t 7 usr/lib/a b.so\n")
    assert store.restored_runs(place.unpacked) == {"usr/lib/a b.so": frozenset({7})}


def test_a_torn_list(place: Place, run: Run) -> None:
    """A crash may leave half a line and bytes that are no text."""
    run.fill(0)
    run.filler.close()
    place.log.write_bytes(place.log.read_bytes() + b"\xff\0\nP 12")
    assert store.restored_runs(place.unpacked) == {PATH: frozenset({0, 1})}


def test_runs_of_what_is_not_there(place: Place) -> None:
    place.log.write_text(
        f"S t\nP t 6 {PATH}\nP t 99999999999999 {PATH}\nP t 0 usr/lib/gone.so\nP t 4 {PATH}\n"
    )
    assert initial_present(place.unpacked) == bytes([1 << 7, 0])


def test_no_boot_id(place: Place) -> None:
    place.log.write_text(f"S t\nP t 1 {PATH}\nB u ?\nP u 2 {PATH}\n")
    place.boot.unlink()
    assert store.restored_runs(place.unpacked) == {PATH: frozenset({1})}  # what is on the disk counts


def test_a_table_that_is_gone(place: Place) -> None:
    (place.unpacked.root / TABLE).unlink()
    with pytest.raises(ImageError) as caught:
        initial_present(place.unpacked)
    assert caught.value.message == f"{place.unpacked.root / TABLE}: No such file or directory"
    assert caught.value.hint == (
        "was a part of the unpacked image removed? `rvbundle cache prune --images`, then run it again"
    )


def test_a_damaged_table(place: Place, run: Run) -> None:
    (place.unpacked.root / TABLE).write_bytes(b"damaged")
    for use in (lambda: initial_present(place.unpacked), lambda: run.fill(0)):
        with pytest.raises(ImageError) as caught:
            use()
        assert caught.value.message.startswith("the table of absent pages is damaged (")
    assert place.library.read_bytes() == trimmed_bytes()


def test_a_table_without_the_library(place: Place, run: Run) -> None:
    (place.unpacked.root / TABLE).write_bytes(absent.dump([FIRST]))
    with pytest.raises(ImageError) as caught:
        run.fill(0)
    assert caught.value.message == f"{PATH} is no trimmed library of this image"
    assert place.library.read_bytes() == trimmed_bytes()


def test_a_damaged_pack(place: Place) -> None:
    with Reader(place.pack) as reader:
        entry = next(e for e in reader.index().payloads[0].entries if e.kind == fmt.RANGES)
        number = reader.index().blobs[entry.pieces[2].blob].frame
        frame = reader.index().frames[number]
    data = bytearray(place.pack.read_bytes())
    data[frame.offset + frame.size // 2] ^= 1
    place.pack.write_bytes(data)
    with Reader(place.pack) as reader:
        run = start(place, reader)
        with pytest.raises(ImageError) as caught:
            run.fill(0x20000)
        assert caught.value.message == (
            f"{place.pack}: frame {number} is damaged (its digest is not what the image says)"
        )
        assert run.fill(0) is None  # the other windows have frames of their own
        assert run.bits() == {3, 4}


def test_a_pack_whose_library_is_longer(place: Place, tmp_path: Path) -> None:
    """A forged one: what it has behind the library's end is no part of the library."""
    extra = chunk(b"x" * 100, (8 * RUN, 100))
    forged = ranges(PATH, 9 * RUN, chunk(WHOLE[:64], (0, 64)), extra)
    build(tmp_path / "forged.rvb", [forged], bound_to="ab" * 32)
    with Reader(tmp_path / "forged.rvb") as reader:
        run = start(place, reader)
        for send in (True, False):
            with pytest.raises(ImageError):
                run.fill(8 * RUN, send)
    assert place.library.read_bytes() == trimmed_bytes()


@pytest.mark.parametrize("what", ["link", "parent", "gone"])
def test_a_library_that_is_no_file(place: Place, run: Run, tmp_path: Path, what: str) -> None:
    """No link is followed out of the tree."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "libtoy.so").write_bytes(b"precious")
    if what == "parent":
        place.library.parent.rename(tmp_path / "moved")
        place.library.parent.symlink_to(outside)
    else:
        place.library.unlink()
    if what == "link":
        place.library.symlink_to(outside / "libtoy.so")
    with pytest.raises(OSError):
        run.fill(0)
    assert (outside / "libtoy.so").read_bytes() == b"precious"


def test_without_shared_bits(place: Place) -> None:
    with Reader(place.pack) as reader:
        entry = next(e for e in reader.index().payloads[0].entries if e.kind == fmt.RANGES)
        alone = Filler(reader, os.open(place.unpacked.root, os.O_PATH), place.log)
        assert alone.fill(entry, 0, send=False) is None
    assert store.restored_runs(place.unpacked) == {PATH: frozenset({0, 1})}
