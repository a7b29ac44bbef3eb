"""Which libraries are trimmed, and how their bytes are dealt out to image and cold pack."""

import hashlib
import os
import random
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from rvbundle import freeze, inspection, native, trim, trimming
from rvbundle.contents import contents
from rvbundle.freeze import Frozen, FrozenFile
from rvbundle.pack import AGENT, PAGES, Chunk, Effort, Item, Parts, read_parts
from rvbundle.pages import PAGE, PageTrace, runs
from rvbundle.split import COLD_LIST, Placed, Split
from rvbundle.stage_agent import StagedAgent
from rvbundle.trace import Trace
from rvbundle.trim import Range
from rvbundle.trimming import WINDOW, Trimmed, Trims, trim_libraries
from rvbundle_runtime import absent, filters, store
from rvbundle_runtime import format as fmt
from rvbundle_runtime.absent import RUN
from rvbundle_runtime.errors import ImageError, StoreError
from rvbundle_runtime.image import Reader

from ..images import ARCH, build, chunk, item, link, ranges, sparse
from .test_split import SITE
from .test_trim import C_SOURCE, Library, cxx_source
from .test_trim import build as compile_library

PATH = f"{SITE}/toy/lib/libtoyxx.so"
ALL = PageTrace((), ((0, 1 << 20),))  # everything watched, nothing touched
EXTENSIONS = sorted(
    (p for p in Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so") if p.stat().st_size > 200_000),
    key=lambda p: -p.stat().st_size,
)[:4]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A library of 600 functions, each on a page of its own."""
    return compile_library(tmp_path_factory.mktemp("toy"), cxx_source(), "cpp", [], "toyxx")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A library with many relocations, symbols and unwind entries."""
    count = 1500
    lines = [f"int f{n}(int x) {{ return x + {n}; }}" for n in range(count)]
    lines.append("int (*all[])(int) = {" + ",".join(f"f{n}" for n in range(count)) + "};")
    options = ["-Wl,-z,separate-code", "-falign-functions=128"]
    return compile_library(tmp_path_factory.mktemp("tables"), "\n".join(lines), "c", options, "tables")


@pytest.fixture(scope="module")
def bare(toy: Library) -> Library:
    """The same without symbol tables, as the freeze leaves libraries."""
    path = toy.path.with_name("libbare.so")
    subprocess.run(["strip", "-o", path, toy.path], check=True)
    return Library(path, toy.symbols)


@pytest.fixture(autouse=True)
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let there be a guard for the architectures that have one."""
    path = tmp_path / "guard.so"
    path.write_bytes(b"the guard")
    monkeypatch.setattr(native, "exists", lambda arch, _: arch != "s390x")
    monkeypatch.setattr(native, "library", lambda *_: path)
    return path


def freeze_file(folder: Path, path: str, source: Path, role: str = freeze.LIBRARY) -> FrozenFile:
    place = folder / "tree" / path
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, place)
    data = source.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return FrozenFile(path, role, f"tree/{path}", False, len(data), digest, "toy")


def frozen_of(folder: Path, *files: FrozenFile, arch: str = ARCH) -> Frozen:
    return Frozen(folder, "3.11", "3.11.7", arch, "usr/lib/x", (("toy", "1"),), files, {}, ())


def traced(pages: dict[str, PageTrace], **more: object) -> Trace:
    return Trace((), pages=pages, **more)  # type: ignore[arg-type]


def touched(library: Library, *names: str) -> PageTrace:
    return PageTrace(runs(sorted(library.hot(*names))), ALL.watched)


def trim_one(
    folder: Path, source: Path, pages: PageTrace, recorded: Iterable[int] = (), arch: str = "x86_64"
) -> Trimmed:
    file = freeze_file(folder, PATH, source)
    split = Split((Placed(file, True, "opened by trace 1"),), "")
    frozen = frozen_of(folder, file, arch=arch)
    trims = trim_libraries(frozen, split, traced({PATH: pages}), {PATH: frozenset(recorded)}, "traced")
    assert trims.whole == {}
    return trims.trimmed[PATH]


def content(of: Chunk) -> bytes:
    """Return the bytes that a chunk fills its ranges with, after a check of what it says of them."""
    coded = of.content if isinstance(of.content, bytes) else read_parts(of.content, 0, of.size)
    assert hashlib.sha256(coded).hexdigest() == of.sha256
    assert len(coded) == of.size == sum(size for _, size in of.ranges)
    assert all(size > 0 for _, size in of.ranges)
    return filters.decode(of.filter, coded) if of.filter else coded


def fill(data: bytearray, chunks: Iterable[Chunk]) -> None:
    for one in chunks:
        raw, place = content(one), 0
        for offset, size in one.ranges:
            assert offset + size <= len(data)
            data[offset : offset + size] = raw[place : place + size]
            place += size


def check(trimmed: Trimmed, original: bytes, folder: Path) -> None:
    """Check all that must hold of any trimmed library."""
    hot = bytearray(trimmed.size)
    fill(hot, trimmed.hot)
    trim.apply(original, trimmed.plan, folder / "applied.so")
    assert bytes(hot) == (folder / "applied.so").read_bytes()
    whole = bytearray(hot)
    fill(whole, trimmed.cold)
    assert bytes(whole[: trimmed.plan.size]) == original
    for chunks in (trimmed.hot, trimmed.cold):
        places = sorted(pair for one in chunks for pair in one.ranges)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(places))
        assert not any(one.filter for one in trimmed.cold)
    assert trimmed.cold[0].ranges == ((0, 64),)
    windows = []
    for one in trimmed.cold[1:]:
        (window,) = {n for start, size in one.ranges for n in (start // WINDOW, (start + size - 1) // WINDOW)}
        windows.append(window)
    assert windows == sorted(set(windows))
    assert trimmed.hot_size == sum(one.size for one in trimmed.hot)
    check_absent(trimmed)


def check_absent(trimmed: Trimmed) -> None:
    """Check that the guard's table tells exactly of the pages that are cold."""
    library = trimmed.absent()
    assert library.path == trimmed.path
    assert library.size == trimmed.plan.size
    gone: set[int] = set()
    for segment in library.segments:
        shift = segment.vaddr - segment.offset
        for start, stop in segment.ranges:
            assert start % PAGE == stop % PAGE == 0
            gone.update(range((start - shift) // PAGE, (stop - shift) // PAGE))
        assert all(a < b for pair in pairwise(segment.ranges) for a, b in [(pair[0][1], pair[1][0])])
    mapped = [(s.offset, s.offset + s.size) for s in library.segments]
    cold: set[int] = set()
    for part in trimmed.plan.cold:
        pairs = [(max(part.start, a), min(part.stop, b)) for a, b in mapped]
        for first, last in pairs:
            if first < last:
                cold.update(range(first // PAGE, -(-last // PAGE)))
        assert any(a < b for a, b in pairs) or is_for_debuggers(trimmed, part)
    assert gone == cold
    assert absent.load(absent.dump([library])) == (library,)
    there = [(o, o + s) for one in trimmed.cold[1:] for o, s in one.ranges]
    reachable = {run for a, b in there for run in range(a // RUN, (b - 1) // RUN + 1)}
    assert {page * PAGE // RUN for page in gone} <= reachable


def is_for_debuggers(trimmed: Trimmed, part: Range) -> bool:
    names = {name for name, r in trimmed.plan.places if r.start < part.stop and part.start < r.stop}
    return bool(names) and all(n in (".symtab", ".strtab") or n.startswith(".debug_") for n in names)


def test_a_toy_library(toy: Library, tmp_path: Path) -> None:
    trimmed = trim_one(tmp_path, toy.path, touched(toy, "deep", "middle", "thrower", "f100"))
    check(trimmed, toy.data, tmp_path)
    assert trimmed.hot_size < len(toy.data) / 2
    assert len(trimmed.cold) > 10
    assert trimmed.source == tmp_path / "tree" / PATH


def test_what_only_debuggers_read_is_cold(toy: Library, bare: Library, tmp_path: Path) -> None:
    """Where the freeze could not take it off."""
    pages = touched(toy, "deep")
    whole, stripped = trim_one(tmp_path / "a", toy.path, pages), trim_one(tmp_path / "b", bare.path, pages)
    check(stripped, bare.data, tmp_path)
    assert whole.hot_size - stripped.hot_size < 20_000
    assert len(toy.data) - len(bare.data) > 100_000


@pytest.mark.parametrize("seed", range(6))
def test_random_pages_of_a_toy_library(toy: Library, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    end = len(toy.data) // PAGE
    some = sorted(chance.sample(range(end), chance.choice([0, 1, 20, 200])))
    trimmed = trim_one(tmp_path, toy.path, PageTrace(runs(some), ALL.watched))
    check(trimmed, toy.data, tmp_path)


@pytest.mark.parametrize("source", EXTENSIONS, ids=lambda p: p.name.partition(".")[0])
def test_the_interpreters_own_extensions(source: Path, tmp_path: Path) -> None:
    chance = random.Random(source.name)
    some = runs(sorted(chance.sample(range(source.stat().st_size // PAGE), 5)))
    file = freeze_file(tmp_path, PATH, source, freeze.EXTENSION)
    split = Split((Placed(file, True, "opened"),), "")
    frozen = frozen_of(tmp_path, file)
    trims = trim_libraries(frozen, split, traced({PATH: PageTrace(some, ALL.watched)}), {}, "traced")
    if trims.trimmed:
        check(trims.trimmed[PATH], source.read_bytes(), tmp_path)
    else:
        assert trims.whole == {PATH: "nearly all of it is used"}


def test_grain_of_the_largest_kernel_pages(toy: Library, tmp_path: Path) -> None:
    """Linked for pages of 64 KiB, as libraries for aarch64 are."""
    options = ["-Wl,-z,max-page-size=65536"]
    define = "__attribute__((noinline, aligned(4096)))"
    lines = [f"{define} int f{n}(int x) {{ return x + {n}; }}" for n in range(300)]
    library = compile_library(tmp_path, "\n".join(lines), "c", options, "wide")
    trimmed = trim_one(tmp_path, library.path, touched(library, "f100"), arch="aarch64")
    check(trimmed, library.data, tmp_path)
    for segment in trimmed.absent().segments:
        for start, stop in segment.ranges:
            inner = (start, stop) if start > segment.vaddr else (0, stop)
            ends = stop >= segment.vaddr + segment.size
            assert inner[0] % RUN == 0
            assert ends or stop % RUN == 0
    narrow = trim_one(tmp_path / "4k", library.path, touched(library, "f100"))
    assert narrow.hot_size < trimmed.hot_size


def test_tables_of_numbers_are_filtered(tables: Library, tmp_path: Path) -> None:
    pages = PageTrace(runs(sorted(tables.hot("f0"))), ALL.watched)
    trimmed = trim_one(tmp_path, tables.path, pages)
    check(trimmed, tables.data, tmp_path)
    first, *filtered = trimmed.hot
    assert first.filter == ""
    assert {filters.RELOCATIONS, filters.SYMBOLS} <= {one.filter for one in filtered}
    assert all(isinstance(one.content, bytes) and one.size >= 16 << 10 for one in filtered)
    sections = {name: (r.start, r.stop) for name, r in trimmed.plan.tables}
    for name, (start, stop) in sections.items():
        if stop - start >= 16 << 10:
            taken = {offset for one in filtered for offset, _ in one.ranges}
            assert start in taken, name


def test_small_tables_stay_where_they_are(
    toy: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trimming, "_SMALLEST_TABLE", 1 << 30)
    trimmed = trim_one(tmp_path, toy.path, touched(toy, "deep"))
    assert len(trimmed.hot) == 1
    check(trimmed, toy.data, tmp_path)


def test_a_table_that_can_not_be_filtered_stays(
    tables: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "encode", lambda *_: None)
    trimmed = trim_one(tmp_path, tables.path, PageTrace((), ALL.watched))
    assert [one.filter for one in trimmed.hot] == [""]
    check(trimmed, tables.data, tmp_path)


def test_recorded_runs_are_hot(bare: Library, tmp_path: Path) -> None:
    before = trim_one(tmp_path, bare.path, touched(bare, "deep"))
    cold = sorted({offset // RUN for one in before.cold[1:] for offset, _ in one.ranges})
    chosen = cold[1::4]
    after = trim_one(tmp_path, bare.path, touched(bare, "deep"), recorded=chosen)
    check(after, bare.data, tmp_path)
    for part in after.plan.cold:
        for run in chosen:
            assert part.stop <= run * RUN or (run + 1) * RUN <= part.start
    assert after.hot_size > before.hot_size
    assert sum(r.stop - r.start for r in after.plan.cold) > 0


def test_recorded_runs_that_are_not_there(bare: Library, tmp_path: Path) -> None:
    before = trim_one(tmp_path, bare.path, touched(bare, "deep"))
    after = trim_one(tmp_path, bare.path, touched(bare, "deep"), recorded=[10_000_000])
    assert after.plan == before.plan


def test_pages_that_could_not_be_watched_are_hot(toy: Library, tmp_path: Path) -> None:
    start = toy.symbols["f000"] // PAGE
    trimmed = trim_one(tmp_path, toy.path, PageTrace((), ((0, start), (start + 200, 1 << 20))))
    check(trimmed, toy.data, tmp_path)
    shift = next(
        s.vaddr - s.offset for s in trimmed.plan.segments if s.vaddr <= start * PAGE < s.vaddr + s.filesz
    )
    watched = Range(start * PAGE - shift, (start + 200) * PAGE - shift)
    assert not any(r.start < watched.stop and watched.start < r.stop for r in trimmed.plan.cold)


def test_report(toy: Library, tmp_path: Path) -> None:
    trimmed = trim_one(tmp_path, toy.path, touched(toy, "deep"))
    report = trimmed.report()
    assert (report["size"], report["hot"], report["notes"]) == (len(toy.data), trimmed.hot_size, [])
    rows = {row[0]: row[1:] for row in report["sections"]}
    hot, cold = trimmed.plan.sections[".text"]
    assert rows[".text"][1:] == [hot + cold, hot]
    assert cold > 0


# Which libraries stay whole


def whole_of(
    folder: Path,
    source: Path,
    *,
    path: str = PATH,
    level: str = "traced",
    arch: str = "x86_64",
    pages: PageTrace | None = ALL,
    hot: bool = True,
    kept: bool = False,
    role: str = freeze.LIBRARY,
    **trace: object,
) -> dict[str, str] | None:
    """Return {path: why it is whole}; None if it is trimmed."""
    file = freeze_file(folder, path, source, role)
    split = Split((Placed(file, hot, "the reason", kept),), "")
    record = traced({path: pages} if pages else {}, **trace)
    trims = trim_libraries(frozen_of(folder, file, arch=arch), split, record, {}, level)
    assert set(trims.trimmed) <= {path}
    return None if trims.trimmed else dict(trims.whole)


def test_a_library_is_trimmed(toy: Library, tmp_path: Path) -> None:
    assert whole_of(tmp_path, toy.path) is None
    assert whole_of(tmp_path, toy.path, role=freeze.EXTENSION) is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"level": "reachable"}, '[trim] level = "reachable"'),
        ({"level": "none"}, '[trim] level = "none"'),
        ({"kept": True}, "the reason"),
        ({"note": "they fail while watched"}, "they fail while watched"),
        ({"arch": "s390x"}, "there is no guard for s390x"),
        ({"whole": {PATH: "its PT_LOADs overlap"}}, "its PT_LOADs overlap"),
        ({"pages": None}, "no trace loaded it, or it is small"),
        ({"pages": PageTrace(((0, 1 << 20),), ((0, 1 << 20),))}, "nearly all of it is used"),
        ({"pages": PageTrace((), ())}, "nearly all of it is used"),
    ],
    ids=[
        "reachable",
        "none",
        "kept",
        "not watched",
        "no guard",
        "the tracer",
        "not loaded",
        "used",
        "unseen",
    ],
)
def test_why_a_library_is_whole(bare: Library, tmp_path: Path, options: dict[str, object], why: str) -> None:
    assert whole_of(tmp_path, bare.path, **options) == {PATH: why}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "libc.so.6",
        "ld-linux-x86-64.so.2",
        "libgcc_s.so.1",
        "libm.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
    ],
)
def test_what_the_guard_rests_on_is_whole(toy: Library, tmp_path: Path, name: str) -> None:
    path = f"usr/lib/x/{name}"
    assert whole_of(tmp_path, toy.path, path=path) == {path: "part of the C library"}


@pytest.mark.parametrize("name", ["libcurl.so.4", "libmkl.so", "libstdc++.so.6", "libcrypto.so"])
def test_others_of_like_names_are_not(toy: Library, tmp_path: Path, name: str) -> None:
    assert whole_of(tmp_path, toy.path, path=f"usr/lib/x/{name}") is None


def test_libraries_that_the_planner_refuses(toy: Library, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_bytes(b"INPUT(-lx)" * 10000)
    no_elf = "no ELF file of 64 bits, little-endian"
    assert whole_of(tmp_path, tmp_path / "text.so") == {PATH: no_elf}
    (tmp_path / "cut.so").write_bytes(toy.data[: len(toy.data) // 2])
    assert list(whole_of(tmp_path, tmp_path / "cut.so") or {}) == [PATH]
    library = compile_library(tmp_path, C_SOURCE, "c", ["-z", "execstack"], "stack")
    assert whole_of(tmp_path, library.path) == {PATH: "it asks for an executable stack"}


@pytest.mark.parametrize(
    "options", [{"hot": False}, {"role": freeze.DATA}, {"role": freeze.PROGRAM}, {"role": freeze.TAIL}]
)
def test_what_is_no_hot_library_is_not_even_named(
    toy: Library, tmp_path: Path, options: dict[str, object]
) -> None:
    assert whole_of(tmp_path, toy.path, **options) == {}  # type: ignore[arg-type]


def test_small_libraries_are_whole_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text("int f(void) { return 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "x.so", tmp_path / "x.c"], check=True)
    assert whole_of(tmp_path, tmp_path / "x.so", pages=None) == {}
    assert whole_of(tmp_path, tmp_path / "x.so") == {PATH: "nearly all of it is used"}


def test_an_empty_file_among_the_libraries(tmp_path: Path) -> None:
    """mmap refuses it, and the tracer never names it; but a record may be of another tree."""
    (tmp_path / "empty.so").write_bytes(b"")
    assert whole_of(tmp_path, tmp_path / "empty.so", pages=None) == {}


# The parts that this is made of


@pytest.mark.parametrize(
    ("start", "stop", "taken", "left"),
    [
        (0, 10, [], [(0, 10)]),
        (0, 10, [(0, 10)], []),
        (0, 10, [(0, 3)], [(3, 10)]),
        (0, 10, [(7, 3)], [(0, 7)]),
        (0, 10, [(3, 2), (7, 1)], [(0, 3), (5, 7), (8, 10)]),
        (5, 10, [(0, 7), (9, 20)], [(7, 9)]),
        (5, 10, [(0, 2), (20, 2)], [(5, 10)]),
        (5, 10, [(0, 5), (10, 5)], [(5, 10)]),
        (5, 10, [(0, 30)], []),
        (5, 5, [], []),
    ],
)
def test_without(start: int, stop: int, taken: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    assert list(trimming._without(start, stop, taken)) == left


@pytest.mark.parametrize(
    ("start", "stop", "cuts"),
    [
        (0, 10, [0]),
        (5, WINDOW, [5]),
        (5, WINDOW + 1, [5, WINDOW]),
        (WINDOW, 2 * WINDOW, [WINDOW]),
        (WINDOW - 1, 3 * WINDOW + 1, [WINDOW - 1, WINDOW, 2 * WINDOW, 3 * WINDOW]),
    ],
)
def test_cuts(start: int, stop: int, cuts: list[int]) -> None:
    assert list(trimming._cuts(start, stop)) == cuts


def test_a_window_is_whole_runs() -> None:
    assert WINDOW % RUN == 0


# From the trim to the two files and back


@pytest.fixture
def agent(tmp_path: Path) -> StagedAgent:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/play.py").write_bytes(b"print(1)\n")
    return StagedAgent(tmp_path / "agent", ("play.py",), ("/usr/bin/python3", "/app/play.py"))


def everything(folder: Path, library: Library, agent: StagedAgent) -> tuple[Trims, list[Item], list[Item]]:
    """Return the trims, the hot items and the cold items of a tree with one library, trimmed."""
    file = freeze_file(folder, PATH, library.path)
    frozen = frozen_of(folder, file)
    split = Split((Placed(file, True, "opened by trace 1"),), "D x\n")
    trims = trim_libraries(frozen, split, traced({PATH: touched(library)}), {}, "traced")
    both = contents(frozen, agent, split, trims)
    return trims, list(both.hot), list(both.cold)


def test_items_of_a_trimmed_library(toy: Library, tmp_path: Path, agent: StagedAgent) -> None:
    trims, hot, cold = everything(tmp_path, toy, agent)
    trimmed = trims.trimmed[PATH]
    by_path = {one.path: one for one in hot}
    assert sorted(by_path) == sorted(
        [PATH, "app/play.py", "etc/ld.so.preload", absent.GUARD, absent.TABLE, COLD_LIST]
    )
    library = by_path[PATH]
    assert (library.kind, library.group, library.size) == (fmt.SPARSE, "libraries", trimmed.size)
    assert (library.chunks, library.content, library.package) == (trimmed.hot, None, "toy")
    assert library.reason == "opened by trace 1; its hot pages"
    (rest,) = cold
    assert (rest.path, rest.kind, rest.group, rest.size) == (PATH, fmt.RANGES, PAGES, len(toy.data))
    assert (rest.chunks, rest.reason) == (trimmed.cold, "pages that no trace touched")
    assert by_path["etc/ld.so.preload"].content == b"/usr/lib/rvbundle/guard.so\n"
    assert by_path[absent.GUARD].content == b"the guard"
    assert by_path[absent.TABLE].content == absent.dump([trimmed.absent()])
    assert by_path["app/play.py"].group == AGENT
    assert {by_path[p].reason for p in (absent.GUARD, absent.TABLE)} == {"the guard restores pages"}


def test_no_guard_where_nothing_is_trimmed(toy: Library, tmp_path: Path, agent: StagedAgent) -> None:
    file = freeze_file(tmp_path, PATH, toy.path)
    both = contents(
        frozen_of(tmp_path, file), agent, Split((Placed(file, True, "r"),), ""), Trims({}, {PATH: "why"})
    )
    assert sorted(one.path for one in both.hot) == sorted([PATH, "app/play.py", COLD_LIST])
    assert both.cold == ()


@pytest.fixture
def image(tmp_path: Path, tables: Library, agent: StagedAgent) -> Path:
    """An image with a trimmed library, filtered tables and all, and its cold pack beside it."""
    _, hot, cold = everything(tmp_path, tables, agent)
    path = tmp_path / "demo-1.0.rvb"
    identity = build(path, hot)
    build(tmp_path / "demo-1.0.cold.rvb", cold, bound_to=identity)
    return path


def test_unpacked_as_planned(image: Path, tables: Library, tmp_path: Path, agent: StagedAgent) -> None:
    trims, _, _ = everything(tmp_path, tables, agent)
    trim.apply(tables.data, trims.trimmed[PATH].plan, tmp_path / "applied.so")
    with Reader(image) as reader:
        assert any(p.filter for e in reader.index().payloads[0].entries for p in e.pieces)
        unpacked = store.ensure(tmp_path / "cache", reader, ARCH)
    library = unpacked.root / PATH
    assert library.read_bytes() == (tmp_path / "applied.so").read_bytes()
    assert library.stat().st_size == trims.trimmed[PATH].size
    assert library.stat().st_blocks * 512 < library.stat().st_size  # holes
    assert library.stat().st_mode & 0o777 == 0o644
    assert unpacked.info.trimmed
    assert store.find(tmp_path / "cache", unpacked.info.identity, ARCH) == replace(unpacked, fresh=False)


def test_the_cold_pages_have_frames_of_their_own(image: Path) -> None:
    with Reader(image.with_name("demo-1.0.cold.rvb")) as reader:
        index = reader.index()
        (entry,) = index.payloads[0].entries
        frames = [index.blobs[piece.blob].frame for piece in entry.pieces]
    assert len(set(frames)) == len(frames) == len(index.frames)


def test_filtered_tables_share_frames_with_nothing_else(image: Path) -> None:
    with Reader(image) as reader:
        index = reader.index()
        filtered, plain = set(), set()
        for entry in index.payloads[0].entries:
            plain |= {index.blobs[entry.blob].frame} if entry.blob >= 0 else set()
            for piece in entry.pieces:
                (filtered if piece.filter else plain).update(f for f, _, _ in reader.extents(piece.blob))
    assert filtered
    assert not filtered & plain


def test_both_files_give_the_original_back(image: Path, tables: Library, tmp_path: Path) -> None:
    result = inspection.extract(image, tmp_path / "out")
    assert result.note == "whole"
    assert (tmp_path / "out" / PATH).read_bytes() == tables.data


def test_the_hot_part_alone(image: Path, tables: Library, tmp_path: Path, agent: StagedAgent) -> None:
    image.with_name("demo-1.0.cold.rvb").unlink()
    result = inspection.extract(image, tmp_path / "out")
    assert result.note.startswith("the hot part only")
    trims, _, _ = everything(tmp_path, tables, agent)
    trim.apply(tables.data, trims.trimmed[PATH].plan, tmp_path / "applied.so")
    assert (tmp_path / "out" / PATH).read_bytes() == (tmp_path / "applied.so").read_bytes()


def test_verify_and_inspect_both_files(image: Path) -> None:
    assert len(inspection.verify(image)["verified"]) == 2
    (payload,) = inspection.inspect(image, files=True)["payloads"]
    (row,) = [row for row in payload["entries"] if row["path"] == PATH]
    assert row["kind"] == "s"
    assert 0 < row["compressed"] < row["size"]


@pytest.mark.parametrize("number", [0, 1, -1], ids=["header", "first window", "last window"])
def test_verify_names_a_library_whose_cold_pages_are_damaged(image: Path, number: int) -> None:
    pack = image.with_name("demo-1.0.cold.rvb")
    with Reader(pack) as reader:
        index = reader.index()
        frame = index.frames[index.blobs[index.payloads[0].entries[0].pieces[number].blob].frame]
    data = bytearray(pack.read_bytes())
    data[frame.offset + frame.size // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        inspection.verify(image)
    assert caught.value.message.endswith(f"files that are affected:\n    {PATH}")


def test_the_same_library_packs_to_the_same_bytes(
    tables: Library, tmp_path: Path, agent: StagedAgent
) -> None:
    _, hot, cold = everything(tmp_path, tables, agent)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        build(tmp_path / folder / "x.rvb", hot)
        build(tmp_path / folder / "x.cold.rvb", reversed(cold))
    for name in ("x.rvb", "x.cold.rvb"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_source_that_became_shorter(toy: Library, tmp_path: Path, agent: StagedAgent) -> None:
    _, hot, _ = everything(tmp_path, toy, agent)
    os.truncate(tmp_path / "tree" / PATH, 100_000)
    with pytest.raises(OSError, match=r"libtoyxx\.so changed while it was packed"):
        build(tmp_path / "x.rvb", hot)


# Content that is put together, and what packs make of it


def test_parts(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    whole = b"head" + bytes(range(10, 20)) + b"" + b"mid" + bytes(range(50, 51)) + b"end"
    parts = Parts(tmp_path / "file", (b"head", (10, 20), b"", b"mid", (50, 51), (60, 60), b"end"))
    for start in range(len(whole)):
        for stop in range(start, len(whole) + 1):
            assert read_parts(parts, start, stop) == whole[start:stop]


def test_parts_of_a_file_that_became_shorter(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(15))
    with pytest.raises(OSError, match="file changed while it was packed"):
        read_parts(Parts(tmp_path / "file", ((10, 20),)), 0, 10)


def test_pieces_over_frames_and_ranges(tmp_path: Path) -> None:
    """Ranges end in the middle of frames, and frames in the middle of ranges."""
    chance = random.Random(1)
    raw = chance.randbytes(300_000)
    places, offset, left = [], 0, len(raw)
    while left:
        size = min(left, chance.randrange(1, 40_000))
        offset += chance.randrange(0, 5000)
        places.append((offset, size))
        offset, left = offset + size, left - size
    one = chunk(raw, *places)
    odd = chunk(bytes(4 * 999), (offset + 10, 4 * 999), filter_="4x2")
    build(tmp_path / "x.rvb", [sparse("a.so", offset + 9999, one, odd)], effort=Effort(1, 70_001))
    with Reader(tmp_path / "x.rvb") as reader:
        assert len(reader.index().frames) == 6
        store.write_tree(reader, reader.index().payloads[0].entries, tmp_path)
    expected = bytearray(offset + 9999)
    fill(expected, [one, odd])
    assert (tmp_path / "a.so").read_bytes() == bytes(expected)


def test_two_libraries_that_share_a_blob(tmp_path: Path) -> None:
    same = chunk(b"x" * 5000, (100, 5000))
    build(
        tmp_path / "x.rvb", [sparse("a.so", 9000, same), sparse("b.so", 9000, same), item("c", b"x" * 5000)]
    )
    with Reader(tmp_path / "x.rvb") as reader:
        assert len(reader.index().blobs) == 1
        store.write_tree(reader, reader.index().payloads[0].entries, tmp_path)
    expected = bytes(100) + b"x" * 5000 + bytes(3900)
    assert (tmp_path / "a.so").read_bytes() == (tmp_path / "b.so").read_bytes() == expected


def test_a_sparse_file_of_nothing(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", [sparse("a.so", 5000, chunk(b"x", (4999, 1)))])
    with Reader(tmp_path / "x.rvb") as reader:
        store.write_tree(reader, reader.index().payloads[0].entries, tmp_path)
    assert (tmp_path / "a.so").read_bytes() == bytes(4999) + b"x"


def test_a_table_that_can_not_be_decoded(tmp_path: Path) -> None:
    """A forged one: the digests are right, the sums do not fit."""
    coded = b"\xff\xff\xff\x7f\x01\0\0\0" * 2
    bad = Chunk(coded, 16, hashlib.sha256(coded).hexdigest(), ((8, 16),), "4x2")
    build(tmp_path / "x.rvb", [sparse("a.so", 5000, bad)])
    (tmp_path / "out").mkdir()
    with Reader(tmp_path / "x.rvb") as reader:
        with pytest.raises(ImageError) as caught:
            store.write_tree(reader, reader.index().payloads[0].entries, tmp_path / "out")
        assert caught.value.message == f"{tmp_path}/x.rvb: a table can't be decoded (sums that do not fit)"
        assert caught.value.hint == fmt.FORGED
        with pytest.raises(ImageError):
            store.ensure(tmp_path / "cache", reader, ARCH)
    assert store.list_stored(tmp_path / "cache") == []


@pytest.mark.parametrize(
    "hot",
    [
        [item("usr/a.so", b"x" * 5000)],
        [link("usr/a.so", "b"), item("usr/b", b"x" * 5000)],
        [link("usr", "other"), item("other/a.so", b"x" * 5000)],
        [item("usr/b", b"")],
    ],
    ids=["a whole file", "a link", "below a link", "nothing"],
)
def test_a_cold_pack_with_ranges_of_what_is_no_sparse_file(tmp_path: Path, hot: list[Item]) -> None:
    image = tmp_path / "demo-1.0.rvb"
    identity = build(image, hot)
    forged = ranges("usr/a.so", 5000, chunk(b"evil", (0, 4)), chunk(b"evil", (64, 4)))
    build(tmp_path / "demo-1.0.cold.rvb", [forged], bound_to=identity)
    with pytest.raises(ImageError):
        inspection.extract(image, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sparse_file_larger_than_any_file_system(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", [sparse("a.so", (1 << 62) - 1, chunk(b"x", (0, 1)))])
    with Reader(tmp_path / "x.rvb") as reader, pytest.raises((ImageError, StoreError)):
        store.ensure(tmp_path / "cache", reader, ARCH)
    assert store.list_stored(tmp_path / "cache") == []
