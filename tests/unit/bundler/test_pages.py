import random
import struct
from itertools import pairwise

import pytest

from rvbundle import pages
from rvbundle.pages import PageTrace, dump_runs, load_runs, merge, numbers, parse_record, runs


def record(touched: bytes, watched: bytes, first: int = 0, count: int = 8, page: int = 4096) -> bytes:
    return struct.pack("<8sQQQ", b"RVPAGES1", page, first, count) + touched + watched


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (record(b"\x00", b"\xff"), PageTrace((), ((0, 8),))),
        (record(b"\x01", b"\xff"), PageTrace(((0, 1),), ((0, 8),))),
        (record(b"\x80", b"\xff"), PageTrace(((7, 8),), ((0, 8),))),
        (record(b"\xb5", b"\xff"), PageTrace(((0, 1), (2, 3), (4, 6), (7, 8)), ((0, 8),))),
        (record(b"\xff", b"\x0f"), PageTrace(((0, 4),), ((0, 4),))),  # only what was watched counts
        (record(b"\xff", b"\xff", count=3), PageTrace(((0, 3),), ((0, 3),))),
        (record(b"\x01", b"\x01", first=1000, count=1), PageTrace(((1000, 1001),), ((1000, 1001),))),
        (
            record(b"\x80\x01", b"\xff\x03", first=16, count=10),
            PageTrace(((23, 25),), ((16, 26),)),
        ),
        (record(b"", b"", count=0), PageTrace((), ())),
        (record(b"\x01", b"\x01") + b"more", PageTrace(((0, 1),), ((0, 1),))),
    ],
    ids=[
        "nothing",
        "first",
        "last",
        "some",
        "unwatched",
        "cut byte",
        "far",
        "two bytes",
        "no pages",
        "longer",
    ],
)
def test_records(data: bytes, expected: PageTrace) -> None:
    assert parse_record(data) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too short for a record of pages"),
        (record(b"\1", b"\1")[:31], "too short for a record of pages"),
        (record(b"\1", b"\1")[:-1], "no record of pages"),
        (record(b"\1", b""), "no record of pages"),
        (record(b"\1", b"\1", count=9), "no record of pages"),
        (record(b"\1", b"\1", count=1 << 63), "no record of pages"),
        (record(b"\1", b"\1", page=16384), "no record of pages"),
        (b"RVPAGES2" + record(b"\1", b"\1")[8:], "no record of pages"),
        (bytes(100), "no record of pages"),
    ],
    ids=["empty", "short", "cut", "half", "more pages", "huge", "another page size", "newer", "zeros"],
)
def test_no_record(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse_record(data)


@pytest.mark.parametrize(
    ("of", "text"),
    [
        ((), ""),
        (((3, 4),), "3"),
        (((3, 5),), "3-4"),
        (((0, 1), (5, 10), (11, 12)), "0 5-9 11"),
        (((1 << 40, (1 << 40) + 2),), "1099511627776-1099511627777"),
    ],
)
def test_runs_as_text(of: pages.Runs, text: str) -> None:
    assert dump_runs(of) == text
    assert load_runs(text) == of


@pytest.mark.parametrize(
    "text", ["x", "1-", "-", "-1", "1-x", "1--2", "1.5", "5-3", "3 3", "3-5 5", "5 3", "1-9 2", "3 1-2"]
)
def test_no_runs(text: str) -> None:
    with pytest.raises(ValueError):
        load_runs(text)


@pytest.mark.parametrize("text", ["3 4", "3-5 6-7"])
def test_runs_that_touch_are_out_of_order(text: str) -> None:
    """Runs are apart: the same numbers always give the same text."""
    with pytest.raises(ValueError, match=r"^runs of pages out of order$"):
        load_runs(text)


@pytest.mark.parametrize("seed", range(10))
def test_runs_of_random_numbers(seed: int) -> None:
    chance = random.Random(seed)
    chosen = sorted(chance.sample(range(200), chance.randrange(200)))
    found = runs(chosen)
    assert list(numbers(found)) == chosen
    assert all(stop < start for (_, stop), (start, _) in pairwise(found))
    assert load_runs(dump_runs(found)) == found


def test_merge() -> None:
    first = PageTrace(((0, 2), (5, 6)), ((0, 9),))
    second = PageTrace(((1, 3), (6, 7)), ((4, 12),))
    assert merge([first, second]) == PageTrace(((0, 3), (5, 7)), ((0, 12),))
    assert merge([first]) == first
    assert merge([]) == PageTrace((), ())
