"""Trimmed toy libraries: what is kept is exact, they load, run, throw and can be debugged."""

import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from rvbundle import trim
from rvbundle.trim import Range, TrimPlan

PAGE = 4096
EVERYTHING = range(1 << 40)
FUNCTIONS = 300

C_SOURCE = """
#define HOT __attribute__((noinline, aligned(4096), visibility("default")))
static volatile int sink; char large[100000]; static int table[5000] = {1};
HOT int inner(int x) { sink = x; return sink + table[0]; }
HOT int outer(int x) { int r = inner(x); sink = r; return r * 2; }
HOT int cold(int x) { sink = x; return x - 1; }
HOT int last(int x) { large[x] = 1; sink = x; return x + large[x]; }
"""
CONSTRUCTOR = """
__attribute__((constructor, aligned(4096))) static void begin(void) { sink = 1; }
"""


def cxx_source() -> str:
    """Return a library of functions on pages of their own, each of which can catch what `thrower` throws."""
    lines = [
        "#include <stdexcept>",
        "#include <string>",
        '#define HOT extern "C" __attribute__((noinline, aligned(4096)))',
        "static volatile int sink;",
        "struct Guard { int value; ~Guard() { sink = sink + value; } };",
        'HOT void thrower(int x) { if (x < 0) throw std::runtime_error("negative"); sink = x; }',
        "HOT int middle(int x) { Guard g{x}; thrower(x); return x + 1; }",
        "HOT int deep(int x) { try { return middle(x); }"
        " catch (const std::runtime_error &e) { return -100 - (int)std::string(e.what()).size(); } }",
    ]
    for i in range(FUNCTIONS):
        kind = ("const std::runtime_error &", "const std::exception &", "...")[i % 3]
        lines.append(
            f"HOT int f{i:03}(int x) {{ Guard g{{{i}}}; try {{ thrower(x); return x + {i}; }}"
            f" catch ({kind}) {{ return -{i} - 1; }} }}"
        )
        # neighbours, so that unwind data of cold functions lies between that of the others
        lines.append(f"HOT int n{i:03}(int x) {{ Guard g{{{i}}}; return middle(x) + {i}; }}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Library:
    path: Path
    symbols: dict[str, int]

    @property
    def data(self) -> bytes:
        return self.path.read_bytes()

    def hot(self, *names: str) -> set[int]:
        """Return the pages of these functions and of those that loading and unloading run."""
        pages = {self.symbols[n] // PAGE for n in names}
        own = "frame_dummy register_tm_clones deregister_tm_clones __do_global_dtors_aux begin"
        own += " _ZN5GuardD2Ev _ZN5GuardD1Ev"
        pages |= {self.symbols[n] // PAGE for n in own.split() if n in self.symbols}
        for line in run("readelf", "-SW", self.path).splitlines():
            found = re.match(r" *\[ *\d+\] (\.plt\S*|\.init|\.fini) +\S+ +(\w+) +\w+ +(\w+)", line)
            if found:
                start, size = int(found[2], 16), int(found[3], 16)
                pages |= set(range(start // PAGE, (start + size - 1) // PAGE + 1))
        return pages


LINKS = {
    "separate": ["-Wl,-z,separate-code"],
    "noseparate": ["-Wl,-z,noseparate-code"],
    **({"gold": ["-fuse-ld=gold"]} if shutil.which("ld.gold") else {}),
    **({"lld": ["-fuse-ld=lld"]} if shutil.which("ld.lld") else {}),
    "now-hash-both": ["-Wl,-z,now", "-Wl,--hash-style=both", "-Wl,-z,max-page-size=65536"],
}


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def build(folder: Path, source: str, suffix: str, options: list[str], name: str) -> Library:
    text, out = folder / f"{name}.{suffix}", folder / f"lib{name}.so"
    text.write_text(source)
    compiler = "g++" if suffix == "cpp" else "gcc"
    run(compiler, "-O1", "-g", "-shared", "-fPIC", *options, "-o", out, text)
    return Library(out, symbols(out))


def symbols(path: Path) -> dict[str, int]:
    out = {}
    for line in run("nm", path).splitlines():
        address, _, name = line.rpartition(" ")[0][:16], "", line.rpartition(" ")[2]
        if address.strip():
            out[name] = int(address, 16)
    return out


@pytest.fixture(scope="module", params=list(LINKS))
def c_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("c")
    return build(folder, C_SOURCE + CONSTRUCTOR, "c", LINKS[request.param], "toy")


@pytest.fixture(scope="module", params=list(LINKS))
def cxx_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("cxx")
    return build(folder, cxx_source(), "cpp", LINKS[request.param], "toyxx")


def trimmed(
    library: Library, folder: Path, *names: str, gap: int = 0, cover: bool = True
) -> tuple[TrimPlan, Path]:
    plan = trim.plan(library.data, library.hot(*names), EVERYTHING, gap=gap, cover=cover)
    assert plan.reason == ""
    assert plan.notes == ()
    out = folder / library.path.name
    trim.apply(library.data, plan, out)
    return plan, out


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import ctypes, sys\nlibrary = ctypes.CDLL(sys.argv[1])\n" + code,
            *map(str, args),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def loads(plan: TrimPlan) -> list[tuple[int, ...]]:
    return [p for p in struct.iter_unpack("<IIQQQQQQ", plan.table) if p[0] == 1]


def inside(ranges: tuple[Range, ...], start: int, stop: int) -> bool:
    return any(r.start <= start and stop <= r.stop for r in ranges)


def check_file(data: bytes, plan: TrimPlan, path: Path) -> None:
    """Check the trimmed file byte by byte, and that the readers of ELF files have nothing to say."""
    new = path.read_bytes()
    expected = bytearray(len(new))
    for part in plan.kept:
        expected[part.start : part.stop] = data[part.start : part.stop]
    expected[:64] = plan.headers
    expected[plan.table_offset : plan.table_offset + len(plan.table)] = plan.table
    assert new == bytes(expected)
    everything = sorted([*plan.hot, *plan.cold])
    assert everything[0].start == 0
    assert everything[-1].stop == plan.size == len(data)
    assert all(a.stop == b.start for a, b in pairwise(everything))
    assert "readelf:" not in run("readelf", "-lW", path) + run("readelf", "-SW", path)
    assert "Warning" not in run("readelf", "-aW", path)
    original = path.with_name(f"{path.name}.original")
    original.write_bytes(data)
    assert run("nm", "-D", path) == run("nm", "-D", original)
    check_segments(data, plan)


def check_segments(data: bytes, plan: TrimPlan) -> None:
    """Check that what is mapped holds whole original pages, and that the absent pages are the others."""
    phoff, phnum = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    old = [p for p in struct.iter_unpack("<IIQQQQQQ", data[phoff : phoff + 56 * phnum]) if p[0] == 1]
    mapped: dict[int, set[int]] = {}  # address of a page -> file page
    for _, flags, offset, vaddr, _, filesz, _, align in loads(plan):
        assert (offset - vaddr) % align == 0
        if flags and filesz:
            first, end = offset // PAGE, -(-(offset + filesz) // PAGE)
            start = (vaddr - offset) // PAGE
            for number in range(first, end):
                mapped.setdefault(start + number, set()).add(number)
                whole = (number * PAGE, min((number + 1) * PAGE, plan.size))
                assert inside(plan.hot, *whole), f"page {number} is mapped but not all kept"
    addresses = [(p[3], p[3] + p[6]) for p in loads(plan)]
    assert addresses == sorted(addresses)
    absent = {
        n for s in trim.restore_table(plan) for r in s.absent for n in range(r.start // PAGE, r.stop // PAGE)
    }
    assert not absent & mapped.keys()
    original = {n for p in old if p[5] for n in range(p[3] // PAGE, -(-(p[3] + p[5]) // PAGE))}
    assert absent | mapped.keys() == original


def test_c_library_runs(c_library: Library, tmp_path: Path) -> None:
    plan, out = trimmed(c_library, tmp_path, "outer", "inner")
    check_file(c_library.data, plan, out)
    assert c_library.symbols["cold"] // PAGE in {
        n for s in plan.segments for r in s.absent for n in range(r.start // PAGE, r.stop // PAGE)
    }
    done = python("print(library.outer(20), library.inner(3))", out)
    assert (done.returncode, done.stdout) == (0, "42 4\n")
    assert python("library.cold(1)", out).returncode == -11
    assert python("library.last(1)", out).returncode == -11


def test_table_is_behind_every_mapped_page(c_library: Library, tmp_path: Path) -> None:
    run("strip", "-o", tmp_path / "libbare.so", c_library.path)
    bare = Library(tmp_path / "libbare.so", c_library.symbols)
    (tmp_path / "out").mkdir()
    plan, out = trimmed(bare, tmp_path / "out", "outer", "inner")
    check_file(bare.data, plan, out)
    assert all(plan.table_offset >= -(-(p[2] + p[5]) // 65536) * 65536 for p in loads(plan))
    assert python("print(library.outer(20))", out).stdout == "42\n"


def test_addresses_in_absent_pages_still_belong_to_the_library(c_library: Library, tmp_path: Path) -> None:
    code = (
        "libc = ctypes.CDLL(None)\n"
        "info = (ctypes.c_void_p * 4)()\n"
        "address = ctypes.cast(library.cold, ctypes.c_void_p)\n"
        "print(libc.dladdr(address, info) and ctypes.string_at(info[2]).decode())"
    )
    plan, out = trimmed(c_library, tmp_path, "outer", "inner")
    assert python(code, out).stdout == "cold\n"
    bare, out = trimmed(c_library, tmp_path, "outer", "inner", cover=False)
    assert len(bare.table) < len(plan.table)
    assert all(p[1] for p in loads(bare))
    check_file(c_library.data, bare, out)
    assert python("print(library.outer(20))", out).stdout == "42\n"


def test_gap_and_unwatched_pages(c_library: Library) -> None:
    data, hot = c_library.data, c_library.hot("inner", "last")
    cold = c_library.symbols["cold"]
    offset = cold - delta_of(data, cold)
    assert not inside(trim.plan(data, hot, EVERYTHING, gap=0).hot, offset, offset + 8)
    assert inside(trim.plan(data, hot, EVERYTHING, gap=2).hot, offset, offset + 8)
    watched = set(range(5000)) - {cold // PAGE}
    assert inside(trim.plan(data, hot, watched, gap=0).hot, offset, offset + 8)
    none = trim.plan(data, set(), set(), gap=0)
    assert none.cold == ()
    assert none.hot == (Range(0, len(data)),)


def delta_of(data: bytes, vaddr: int) -> int:
    phoff, phnum = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    for p in struct.iter_unpack("<IIQQQQQQ", data[phoff : phoff + 56 * phnum]):
        if p[0] == 1 and p[3] <= vaddr < p[3] + p[5]:
            return int(p[3] - p[2])
    raise AssertionError(vaddr)


# Unwinding, checked with readers that have nothing to do with the planner


def section(path: Path, name: str) -> tuple[int, int, int]:
    for line in run("readelf", "-SW", path).splitlines():
        found = re.match(r" *\[ *\d+\] (\S+) +\S+ +(\w+) +(\w+) +(\w+)", line)
        if found and found[1] == name:
            return int(found[2], 16), int(found[3], 16), int(found[4], 16)
    raise AssertionError(name)


def frames(path: Path) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (start, end, start of the CIE, first pc, end pc) of each FDE, as readelf sees it."""
    text = run("readelf", "-W", "--debug-dump=frames", path)
    text = text.partition(".debug_frame")[0]
    for found in re.finditer(r"^(\w{8}) (\w{16}) \w{8} FDE cie=(\w{8}) pc=(\w{16})\.\.(\w{16})", text, re.M):
        start, size, cie, low, high = (int(x, 16) for x in found.groups())
        yield start, start + 4 + size, cie, low, high


def leb(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[place] & 127) << shift
        shift += 7
        place += 1
        if data[place - 1] < 128:
            return value, place


def lsda_end(data: bytes, place: int) -> int:
    """Return where the tables of an LSDA end as far as they say it themselves."""
    assert data[place] == 0xFF  # landing pads count from the function's start
    place += 1
    types = 0
    if data[place] != 0xFF:
        types, place = leb(data, place + 1)
        types += place
    else:
        place += 1
    size, place = leb(data, place + 1)
    return max(types, place + size)


def check_unwind(data: bytes, library: Path, plan: TrimPlan) -> int:
    """Check by hand that all unwind data of the code that is mapped is kept; return how many functions."""
    frame, frame_at, _ = section(library, ".eh_frame")
    code = [(p[3] // PAGE * PAGE, -(-(p[3] + p[5]) // PAGE) * PAGE) for p in loads(plan) if p[1] == 5]
    checked = 0
    for start, stop, cie, low, high in frames(library):
        if not any(a < high and low < b for a, b in code):
            continue
        checked += 1
        assert inside(plan.hot, frame_at + start, frame_at + stop)
        (size,) = struct.unpack_from("<I", data, frame_at + cie)
        assert inside(plan.hot, frame_at + cie, frame_at + cie + 4 + size)
        if b"L" in data[frame_at + cie + 9 : frame_at + cie + 14]:
            field = frame_at + start + 17
            assert data[field - 1] == 4
            (value,) = struct.unpack_from("<i", data, field)
            if value:
                address = value + frame + start + 17
                place = address - delta_of(data, address)
                assert inside(plan.hot, place, lsda_end(data, place))
        for pc in {max(low, a) for a, b in code if low < b and a < high} | {high - 1}:
            if any(a <= pc < b for a, b in code):
                assert search(data, library, plan, pc) == frame + start
    return checked


def search(data: bytes, library: Path, plan: TrimPlan, pc: int) -> int:
    """Find the FDE of an address as libgcc does, and check that each word it reads is there."""
    base, offset, _ = section_cache(library)

    def word(place: int) -> int:
        assert inside(plan.hot, place, place + 4)
        return int(struct.unpack_from("<i", data, place)[0])

    def loc(index: int) -> int:
        return base + word(offset + 12 + 8 * index)

    count = word(offset + 8)
    if pc < loc(0):
        return 0
    middle = count - 1
    if pc < loc(middle):
        lo, hi = 0, middle
        while True:
            middle = (lo + hi) // 2
            if pc < loc(middle):
                hi = middle
            elif pc >= loc(middle + 1):
                lo = middle + 1
            else:
                break
    return base + word(offset + 16 + 8 * middle)


_known: dict[Path, tuple[int, int, int]] = {}


def section_cache(library: Path) -> tuple[int, int, int]:
    if library not in _known:
        _known[library] = section(library, ".eh_frame_hdr")
    return _known[library]


def test_exceptions_within_hot_functions(cxx_library: Library, tmp_path: Path) -> None:
    plan, out = trimmed(cxx_library, tmp_path, "deep", "middle", "thrower", "f007")
    check_file(cxx_library.data, plan, out)
    assert check_unwind(cxx_library.data, cxx_library.path, plan) >= 4
    for name in (".eh_frame", ".text"):
        assert plan.sections[name][1] > 0, name
    code = "print(library.deep(4), library.deep(-4), library.f007(1), library.f007(-1))"
    done = python(code, out)
    assert (done.returncode, done.stdout) == (0, "5 -108 8 -8\n")
    assert python("library.f008(1)", out).returncode == -11


def test_debuggers_can_walk_the_frames_that_are_left(cxx_library: Library, tmp_path: Path) -> None:
    names = ["f120", "n290"]
    plan, out = trimmed(cxx_library, tmp_path, "deep", "middle", "thrower", *names)
    assert plan.marks
    left = list(frames(out))  # readelf warns of nothing
    whole = set(frames(cxx_library.path))
    assert set(left) < whole
    pages = {cxx_library.symbols[n] for n in ("deep", "middle", "thrower", *names)}
    assert pages <= {low for _, _, _, low, _ in left}


@pytest.mark.parametrize("seed", range(8))
def test_random_hot_sets(cxx_library: Library, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    numbers = chance.sample(range(FUNCTIONS), chance.choice([1, 5, 30, 150, 290]))
    plan, out = trimmed(
        cxx_library, tmp_path, "thrower", *[f"f{i:03}" for i in numbers], gap=chance.choice([0, 1, 4])
    )
    check_file(cxx_library.data, plan, out)
    assert check_unwind(cxx_library.data, cxx_library.path, plan) > len(numbers)
    code = (
        "for i in map(int, sys.argv[2:]):\n"
        "    f = getattr(library, f'f{i:03}')\n"
        "    assert (f(5), f(-5)) == (5 + i, -i - 1), i\n"
    )
    done = python(code, out, *numbers)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("gdb"), reason="no gdb")
@pytest.mark.parametrize("strip", [False, True])
def test_gdb_names_functions(cxx_library: Library, tmp_path: Path, strip: bool) -> None:
    library = cxx_library
    if strip:
        run("strip", "-o", tmp_path / "libbare.so", library.path)
        library = Library(tmp_path / "libbare.so", library.symbols)
    (tmp_path / "out").mkdir()
    # functions far apart: their unwind data lies behind holes
    plan, out = trimmed(library, tmp_path / "out", "thrower", "middle", "n280")
    assert plan.marks
    code = f"import ctypes; ctypes.CDLL({str(out)!r}).n280(3)"
    command = ["gdb", "-batch", "-nx", "-iex", "set debuginfod enabled off",
               "-ex", "set breakpoint pending on", "-ex", "break thrower", "-ex", "run", "-ex", "bt",
               "--args", sys.executable, "-c", code]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    frames_seen = [m[1] for m in re.finditer(r"^#\d+ .*?(?: in )?(\w+) \(", done.stdout, re.M)]
    assert frames_seen[:3] == ["thrower", "middle", "n280"], done.stdout + done.stderr
    assert len(frames_seen) > 6, done.stdout  # and on into Python
    assert "internal-error" not in done.stderr


def test_landing_pads_are_kept(tmp_path: Path) -> None:
    """Pads that the compiler has split off lie on pages that a trace without a throw never saw."""
    library = build(tmp_path, cxx_source(), "cpp", ["-O2"], "split")
    parts = {n.partition(".")[0]: a // PAGE for n, a in library.symbols.items() if n.endswith(".cold")}
    assert "deep" in parts
    used = library.hot("deep", "middle", "thrower") - {parts["deep"], parts["middle"]}
    used.add(parts["thrower"])  # there it throws, and gets there by a jump
    own = {a for n, a in library.symbols.items() if n.startswith("_ZN") and "." not in n}
    used |= {a // PAGE for a in own}  # std::string's, which the handler in `deep` calls
    used -= {parts["deep"], parts["middle"]}
    answers = {}
    for pads in (True, False):
        plan = trim.plan(library.data, used, EVERYTHING, gap=0, pads=pads)
        out = tmp_path / f"lib{pads}.so"
        trim.apply(library.data, plan, out)
        check_file(library.data, plan, out)
        check_unwind(library.data, library.path, plan)
        done = python("print(library.deep(4), flush=True)\nprint(library.deep(-4))", out)
        answers[pads] = (done.returncode, done.stdout)
    assert answers == {True: (0, "5\n-108\n"), False: (-11, "5\n")}


# Other forms of unwind data


def test_frames_of_hand_written_forms(tmp_path: Path) -> None:
    """Signal frames, functions without unwind data, end marks in the middle, 8-byte pointers."""
    asm = tmp_path / "odd.s"
    asm.write_text(
        """
        .text
        .p2align 12
        .globl plain
        .type plain,@function
plain:  movl $5, %eax
        ret
        .size plain, .-plain
        .p2align 12
        .globl signal
        .type signal,@function
signal: .cfi_startproc
        .cfi_signal_frame
        movl $6, %eax
        ret
        .cfi_endproc
        .size signal, .-signal
        .section .note.GNU-stack,"",@progbits
        """
    )
    extra = tmp_path / "more.c"
    extra.write_text(C_SOURCE)
    out = tmp_path / "libodd.so"
    run("gcc", "-shared", "-fPIC", "-O1", "-o", out, asm, extra)
    library = Library(out, symbols(out))
    (tmp_path / "out").mkdir()
    plan, new = trimmed(library, tmp_path / "out", "plain", "signal")
    check_file(library.data, plan, new)
    check_unwind(library.data, library.path, plan)
    assert python("print(library.plain(), library.signal())", new).stdout == "5 6\n"


@pytest.fixture(scope="module")
def long_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Return a library of 20000 functions: its search table has 40 pages; two CIEs are far from the start."""
    folder = tmp_path_factory.mktemp("long")
    lines = [".text"]
    for i in range(20000):
        own = {5000: ".cfi_signal_frame", 15000: ".cfi_signal_frame", 3000: ".cfi_return_column 15"}
        own[15001] = own[3000]
        lines += [
            f".p2align 6\n.globl g{i:05}\n.type g{i:05},@function\ng{i:05}: .cfi_startproc",
            own.get(i, ""),
            f"movl ${i}, %eax\nret\n.cfi_endproc\n.size g{i:05}, .-g{i:05}",
        ]
    lines.append('.section .note.GNU-stack,"",@progbits\n')
    (folder / "long.s").write_text("\n".join(lines))
    run("gcc", "-shared", "-o", folder / "liblong.so", folder / "long.s")
    return Library(folder / "liblong.so", symbols(folder / "liblong.so"))


@pytest.mark.parametrize("numbers", [[15000], [0], [19999], [3000, 10000], [1, 777, 9999, 13333]])
def test_long_search_table(long_library: Library, tmp_path: Path, numbers: list[int]) -> None:
    names = [f"g{i:05}" for i in numbers]
    plan, out = trimmed(long_library, tmp_path, *names)
    check_file(long_library.data, plan, out)
    assert check_unwind(long_library.data, long_library.path, plan) >= len(numbers)
    for name in (".eh_frame", ".eh_frame_hdr"):
        assert plan.sections[name][1] > plan.sections[name][0] / 2, name
    left, everything = set(frames(out)), set(frames(long_library.path))
    assert left < everything
    assert {long_library.symbols[n] for n in names} <= {low for _, _, _, low, _ in left}
    done = python("print(*[getattr(library, n)() for n in sys.argv[2:]])", out, *names)
    assert done.stdout.split() == [str(i) for i in numbers]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64, 100, 257])
def test_probes_are_exactly_those_of_the_search(count: int) -> None:
    """Each single entry, in pages of 16 bytes: what the search reads is kept, and next to nothing else."""
    for target in range(count):
        reader = trim._Unwind.__new__(trim._Unwind)
        reader.count, reader.first = count, 12
        pages = trim._Pages(12 + 8 * count, 16)
        reader._keep_probes(pages, target, target)
        seen: set[int] = set()
        lo, hi = 0, count - 1
        while target < count - 1:
            middle = (lo + hi) // 2
            seen |= {middle}
            if target < middle:
                hi = middle
                continue
            seen |= {middle + 1}
            if target == middle:
                break
            lo = middle + 1
        wanted = {byte // 16 for i in seen for byte in (12 + 8 * i, 12 + 8 * i + 7)}
        kept = {n for n, flag in enumerate(pages.flags) if flag}
        assert wanted <= kept
        # the entry after the middle is read whenever the search goes on behind the middle
        assert kept <= wanted | {n + 1 for n in wanted}


def entry(*parts: bytes) -> bytes:
    body = b"".join(parts)
    body += bytes(-len(body) % 4)
    return struct.pack("<I", len(body)) + body


def word(value: int) -> bytes:
    return struct.pack("<i", value)


CIE_HEAD = b"\x01\x78\x10"  # alignment of code and data, register


@pytest.mark.parametrize(
    ("augmentation", "data", "skip", "lsda"),
    [
        ("zR", b"\x1b", 8, 0xFF),
        ("zS", b"", 16, 0xFF),
        ("zRB", b"\x1b", 8, 0xFF),
        ("zRS", b"\x1c", 16, 0xFF),
        ("zPLR", b"\x9b\0\0\0\0\x1b\x1b", 8, 0x1B),
        ("zPR", b"\x00" + bytes(8) + b"\x03", 8, 0xFF),
        ("zLR", b"\x1c\x04", 16, 0x1C),
        ("", b"", 16, 0xFF),
    ],
)
def test_cie_forms(augmentation: str, data: bytes, skip: int, lsda: int) -> None:
    size = bytes([len(data)]) if augmentation else b""
    for version in (1, 3):
        raw = entry(word(0), bytes([version]), augmentation.encode() + b"\0", CIE_HEAD, size, data)
        cie = trim._read_cie(raw, 0, 8, len(raw))
        assert (cie.skip, cie.lsda, cie.augmented) == (skip, lsda, bool(augmentation))
    for odd in ("eh", "zX"):
        raw = entry(word(0), b"\x01", odd.encode() + b"\0", CIE_HEAD, bytes(20))
        with pytest.raises(trim._OddUnwindError):
            trim._read_cie(raw, 0, 8, len(raw))


def test_eh_frame_with_end_marks_and_long_entries() -> None:
    cie = entry(word(0), b"\x01zLR\0", CIE_HEAD, b"\x02\x1b\x1b")
    raw = bytearray(cie)
    places = []
    for index in range(3):
        raw += bytes(4)  # an end mark
        places.append(len(raw))
        field = len(raw) + (12 if index == 1 else 4)
        body = (
            word(field)
            + word(0x1000)
            + word(16)
            + b"\x04"
            + word(0 if index == 2 else 0x100 * (index + 1))
            + bytes(3)
        )
        if index == 1:
            raw += word(-1) + struct.pack("<Q", len(body)) + body
        else:
            raw += word(len(body)) + body
    reader = trim._Unwind.__new__(trim._Unwind)
    reader.frame = trim._Section(".eh_frame", 1, 2, 0x5000, 0, len(raw))
    reader._read_frames(memoryview(raw))
    assert [e for e in reader.entries if e] == places
    field = places[0] + 17
    assert reader.pointers == [0, 0x5000 + field + 0x100, 0x5000 + places[1] + 25 + 0x200, 0]
    assert {c.start for c in reader.owners} == {0}


# Left whole


def whole(data: bytes, reason: str, grain: int = PAGE) -> None:
    plan = trim.plan(data, set(), EVERYTHING, grain=grain)
    assert reason in plan.reason
    assert plan.hot == (Range(0, len(data)),)
    assert (plan.cold, plan.table, plan.segments, plan.headers) == ((), b"", (), data[:64])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(tmp_path_factory.mktemp("plain"), C_SOURCE, "c", LINKS["separate"], "plain").data


def patched(data: bytes, *changes: tuple[int, str, int]) -> bytes:
    out = bytearray(data)
    for place, code, value in changes:
        struct.pack_into("<" + code, out, place, value)
    return bytes(out)


def place_of(data: bytes, kind: int, nth: int = 0) -> int:
    phoff, phnum = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    places: range = range(phoff, phoff + 56 * phnum, 56)
    return [p for p in places if struct.unpack_from("<I", data, p)[0] == kind][nth]


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("64 bits", lambda d: patched(d, (4, "B", 1))),
        ("little-endian", lambda d: patched(d, (5, "B", 2))),
        ("no ELF", lambda d: d[:40]),
        ("no shared library", lambda d: patched(d, (16, "H", 2))),
        ("no section headers", lambda d: patched(d, (40, "Q", 0), (60, "H", 0))),
        ("no section headers", lambda d: d[:-100]),
        ("executable stack", lambda d: patched(d, (place_of(d, 0x6474E551) + 4, "I", 7))),
        ("out of order", lambda d: patched(d, (place_of(d, 1, 1) + 16, "Q", 0))),
        ("out of order", lambda d: patched(d, (place_of(d, 1, 2) + 16, "Q", 0x10000000))),
        ("modulo", lambda d: patched(d, (place_of(d, 1, 1) + 16, "Q", 0x1008))),
        ("overlap in the file", lambda d: patched(d, (place_of(d, 1, 1) + 8, "Q", 0))),
        ("behind the end", lambda d: patched(d, (place_of(d, 1, 1) + 32, "Q", 1 << 40))),
        ("a program", lambda d: patched(d, (place_of(d, 4), "I", 3))),
    ],
)
def test_left_whole(plain: bytes, reason: str, change: Callable[[bytes], bytes]) -> None:
    whole(change(plain), reason)


def test_whole_library_is_copied(plain: bytes, tmp_path: Path) -> None:
    data = patched(plain, (place_of(plain, 0x6474E551) + 4, "I", 7))
    trim.apply(data, trim.plan(data, set(), EVERYTHING), tmp_path / "lib.so")
    assert (tmp_path / "lib.so").read_bytes() == data


def test_text_relocations_and_programs_are_left_whole(tmp_path: Path) -> None:
    asm = tmp_path / "text.s"
    asm.write_text('.text\n.globl f\nf: movabsq $f, %rax\nret\n.section .note.GNU-stack,"",@progbits\n')
    subprocess.run(
        ["gcc", "-shared", "-Wl,-z,notext", "-o", tmp_path / "text.so", asm], check=True, capture_output=True
    )
    whole((tmp_path / "text.so").read_bytes(), "text relocations")
    main = tmp_path / "main.c"
    main.write_text("int main(void) { return 0; }\n")
    run("gcc", "-pie", "-fPIE", "-o", tmp_path / "main", main)
    whole((tmp_path / "main").read_bytes(), "a program")


def test_large_grain(c_library: Library, plain: bytes, tmp_path: Path) -> None:
    whole(plain, "PT_LOAD", grain=65536)
    if loads_align(c_library.data) < 65536:  # linked for small pages: nothing can be taken away
        whole(c_library.data, "PT_LOAD", grain=65536)
        return
    plan = trim.plan(c_library.data, c_library.hot("outer", "inner"), EVERYTHING, grain=65536, gap=0)
    assert plan.reason == ""
    out = tmp_path / "lib.so"
    trim.apply(c_library.data, plan, out)
    check_file(c_library.data, plan, out)
    assert all(p[7] >= 65536 for p in loads(plan))
    assert all(r.start % 65536 == 0 and r.stop % 65536 == 0 for s in plan.segments for r in s.absent)
    assert python("print(library.outer(20))", out).stdout == "42\n"


def loads_align(data: bytes) -> int:
    return int(struct.unpack_from("<Q", data, place_of(data, 1) + 48)[0])


def test_damaged_headers_never_raise(plain: bytes, tmp_path: Path) -> None:
    chance = random.Random(5)
    frame = trim.plan(plain, set(), EVERYTHING)
    assert frame.reason == ""
    for _ in range(400):
        data = bytearray(plain)
        for _ in range(chance.choice([1, 4, 40])):
            where = chance.choice(
                [range(64), range(64, 800), range(len(data) - 2600, len(data)), range(len(data))]
            )
            data[chance.choice(where)] = chance.randrange(256)
        plan = trim.plan(bytes(data), set(), EVERYTHING, gap=0)
        everything = sorted([*plan.hot, *plan.cold])
        assert sum(r.stop - r.start for r in everything) == len(data)


def test_plan_is_for_one_file(plain: bytes, tmp_path: Path) -> None:
    plan = trim.plan(plain, set(), EVERYTHING)
    with pytest.raises(ValueError, match="bytes"):
        trim.apply(plain + b"x", plan, tmp_path / "lib.so")


def test_ifunc_resolvers_are_kept(tmp_path: Path) -> None:
    source = (
        C_SOURCE
        + """
    static int one(int x) { return x + 1; }
    __attribute__((aligned(4096))) static void *resolve(void) { return (void *)one; }
    HOT int chosen(int x) __attribute__((ifunc("resolve")));
    static int hidden_impl(int x) { return x + 2; }
    __attribute__((aligned(4096))) static void *resolve_hidden(void) { return (void *)hidden_impl; }
    static int hidden(int x) __attribute__((ifunc("resolve_hidden")));
    HOT int call(int x) { return hidden(x) + 1; }
    """
    )
    source = source.replace("HOT int chosen", '__attribute__((visibility("default"))) int chosen')
    library = build(tmp_path, source, "c", [], "ifunc")
    (tmp_path / "out").mkdir()
    plan, out = trimmed(library, tmp_path / "out", "call", "hidden_impl", "one")
    check_file(library.data, plan, out)
    assert python("print(library.call(1), library.chosen(1))", out).stdout == "4 2\n"
