import ctypes
import subprocess
from pathlib import Path

import pytest

from rvbundle import elf
from rvbundle_runtime.errors import FreezeError

SOURCE = """
#include <stddef.h>
static _Thread_local int counter = 40;
static int built;
static const char text[] = "some read-only data";
__attribute__((constructor)) static void begin(void) { built = 1; }
__attribute__((visibility("hidden"))) int hidden(void) { return counter; }
int answer(void) { counter += 1; return hidden() + built; }
const char *words(void) { return text; }
"""
# Variants of one library, by the options that make them.
VARIANTS = {
    "plain": [],
    "debug": ["-g"],
    "debug compressed": ["-g", "-gz"],
    "optimised": ["-O2", "-g1"],
    "old hash": ["-Wl,--hash-style=both", "-g"],
    "no build id": ["-Wl,--build-id=none", "-g"],
    "separate code": ["-Wl,-z,noseparate-code", "-g"],
    "relro": ["-Wl,-z,relro,-z,now", "-g"],
    "large pages": ["-Wl,-z,max-page-size=65536", "-g"],
    "emitted relocations": ["-Wl,--emit-relocs", "-g"],
}


def compile_library(folder: Path, name: str, *options: str, source: str = SOURCE) -> Path:
    code = folder / f"{name}.c"
    code.write_text(source)
    path = folder / f"lib{name}.so"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname," + path.name, "-o", path, code, *options]
    subprocess.run([str(word) for word in command], check=True, cwd=folder)
    return path


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("libraries")
    return {
        name: compile_library(folder, name.replace(" ", "_"), *options) for name, options in VARIANTS.items()
    }


def readelf(option: str, path: Path) -> str:
    done = subprocess.run(["readelf", option, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Warning" not in done.stdout
    assert "Error" not in done.stdout
    return done.stdout


def segments(path: Path) -> list[str]:
    text = readelf("-lW", path)
    return [line for line in text.split("Section to Segment")[0].splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(libraries: dict[str, Path], name: str) -> None:
    original = libraries[name].read_bytes()
    parts = elf.split_tail(libraries[name])
    assert parts is not None
    stripped, tail = parts
    assert elf.join_tail(stripped, tail) == original
    assert len(stripped) < len(original)


@pytest.mark.parametrize("name", VARIANTS)
def test_stripped_library(libraries: dict[str, Path], tmp_path: Path, name: str) -> None:
    parts = elf.split_tail(libraries[name])
    assert parts is not None
    path = tmp_path / "libstripped.so"
    path.write_bytes(parts[0])
    assert segments(path) == segments(libraries[name])
    assert elf.load_segments_aligned(parts[0])
    sections = readelf("-SW", path)
    assert ".symtab" not in sections
    assert ".debug_" not in sections
    assert ".dynsym" in sections
    assert ".text" in sections
    assert readelf("-dW", path) == readelf("-dW", libraries[name])
    names = {line.split()[-1] for line in readelf("--dyn-syms", path).splitlines() if " FUNC " in line}
    assert {"answer", "words"} <= names


@pytest.mark.parametrize("name", VARIANTS)
def test_stripped_library_still_works(libraries: dict[str, Path], tmp_path: Path, name: str) -> None:
    parts = elf.split_tail(libraries[name])
    assert parts is not None
    path = tmp_path / f"{name.replace(' ', '_')}.so"
    path.write_bytes(parts[0])
    library = ctypes.CDLL(str(path))
    assert (library.answer(), library.answer()) == (42, 43)
    library.words.restype = ctypes.c_char_p
    assert library.words() == b"some read-only data"


def test_all_that_is_loaded_keeps_its_bytes(libraries: dict[str, Path]) -> None:
    original = libraries["debug"].read_bytes()
    parts = elf.split_tail(libraries["debug"])
    assert parts is not None
    common = int.from_bytes(parts[1][:8], "little")
    assert parts[0][64:common] == original[64:common]
    assert parts[1][8:72] == original[:64]
    assert parts[1][72:] == original[common:]


def test_the_same_as_binutils_would_keep(libraries: dict[str, Path], tmp_path: Path) -> None:
    """Our strip leaves the sections that `strip` leaves, but for .comment and the like."""
    subprocess.run(["strip", "-o", tmp_path / "reference", libraries["debug"]], check=True)
    parts = elf.split_tail(libraries["debug"])
    assert parts is not None
    (tmp_path / "ours").write_bytes(parts[0])

    def loaded(path: Path) -> set[str]:
        lines = [line.split("]", 1)[1].split() for line in readelf("-SW", path).splitlines() if "] ." in line]
        return {words[0] for words in lines if words[0] not in (".comment", ".shstrtab")}

    assert loaded(tmp_path / "ours") == loaded(tmp_path / "reference")


def test_stripped_already(libraries: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    subprocess.run(["strip", "-R", ".comment", "-o", path, libraries["plain"]], check=True)
    assert elf.split_tail(path) is None
    assert not elf.read_facts(path).has_symbols


def test_twice_is_once(libraries: dict[str, Path], tmp_path: Path) -> None:
    parts = elf.split_tail(libraries["debug"])
    assert parts is not None
    (tmp_path / "x.so").write_bytes(parts[0])
    assert elf.split_tail(tmp_path / "x.so") is None


def test_facts(tmp_path: Path) -> None:
    one = compile_library(tmp_path, "one")
    two = compile_library(
        tmp_path,
        "two",
        "-L.",
        "-Wl,--no-as-needed",
        "-lone",
        "-Wl,--enable-new-dtags,-rpath,$ORIGIN:$ORIGIN/../lib",
        source="int answer(void); int twice(void) { return 2 * answer(); }",
    )
    facts = elf.read_facts(two)
    assert facts.soname == "libtwo.so"
    assert facts.needed[0] == "libone.so"
    assert facts.search == ("$ORIGIN", "$ORIGIN/../lib")
    assert facts.interpreter == ""
    assert facts.has_symbols
    assert facts.machine in ("x86_64", "aarch64", "riscv64")
    assert elf.read_facts(one).search == ()


def test_facts_of_old_rpath(tmp_path: Path) -> None:
    path = compile_library(tmp_path, "x", "-Wl,--disable-new-dtags,-rpath,/a:/b")
    assert elf.read_facts(path).search == ("/a", "/b")


def test_facts_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "p.c").write_text("int main(void) { return 0; }")
    subprocess.run(["gcc", "-o", tmp_path / "p", tmp_path / "p.c"], check=True)
    facts = elf.read_facts(tmp_path / "p")
    assert facts.interpreter.startswith("/lib")
    assert any(name.startswith("libc.so") for name in facts.needed)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\x7fELF", True), (b"\x7fELFx", True), (b"\x7fEL", False), (b"", False), (b"#!/bin/sh", False)],
)
def test_is_elf(tmp_path: Path, content: bytes, expected: bool) -> None:
    (tmp_path / "x").write_bytes(content)
    assert elf.is_elf(tmp_path / "x") is expected


def test_is_elf_of_nothing(tmp_path: Path) -> None:
    assert not elf.is_elf(tmp_path / "nothing")
    assert not elf.is_elf(tmp_path)


def corrupt(path: Path) -> list[bytes]:
    """Return damaged copies of a library: cut short, and with every byte of its tables set to extremes."""
    data = path.read_bytes()
    shoff = int.from_bytes(data[40:48], "little")
    found = [data[:size] for size in (7, 16, 40, 63, 64, 100, 500, shoff, shoff + 10, len(data) - 1)]
    places = [*range(7, 64), *range(64, 400, 3), *range(shoff, len(data), 11)]
    changes = [(place, value) for place in places for value in (b"\x00", b"\xff")]
    return found + [data[:place] + value + data[place + 1 :] for place, value in changes]


@pytest.fixture(scope="module")
def damaged(libraries: dict[str, Path]) -> list[bytes]:
    return corrupt(libraries["plain"])


def test_damaged_libraries_are_left_alone_or_come_back(damaged: list[bytes], tmp_path: Path) -> None:
    """None, FreezeError or a split that can be undone; never another error, never other bytes."""
    path = tmp_path / "libx.so"
    wrong = []
    for number, data in enumerate(damaged):
        path.write_bytes(data)
        try:
            parts = elf.split_tail(path)
            if parts is not None and elf.join_tail(*parts) != data:
                wrong.append(f"{number}: other bytes")
        except FreezeError:
            pass
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{number}: {type(error).__name__} {error}")
    assert wrong == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # lief's enumerations, about values that they lack
def test_facts_of_damaged_libraries(damaged: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    wrong = []
    for number, data in enumerate(damaged[:300]):
        path.write_bytes(data)
        try:
            elf.read_facts(path)
        except FreezeError as error:
            if not error.message.startswith(str(path)):
                wrong.append(f"{number}: {error.message}")
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{number}: {type(error).__name__} {error}")
    assert wrong == []


def test_alignment_of_damaged_libraries(damaged: list[bytes]) -> None:
    wrong = []
    for number, data in enumerate(damaged):
        try:
            elf.load_segments_aligned(data)
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{number}: {type(error).__name__} {error}")
    assert wrong == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF",
        b"\x7fELF\x01\x01\x01" + bytes(100),
        b"\x7fELF\x02\x02\x01" + bytes(100),
        b"no elf at all" * 9,
    ],
    ids=["empty", "magic", "32 bits", "big-endian", "text"],
)
def test_what_is_no_64_bit_little_endian_elf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    assert elf.split_tail(tmp_path / "x") is None


@pytest.mark.parametrize("content", [b"", b"text", b"\x7fEL"], ids=["empty", "text", "half a magic"])
def test_facts_of_what_is_no_elf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(FreezeError) as caught:
        elf.read_facts(tmp_path / "x")
    assert caught.value.message == f"{tmp_path}/x is no readable ELF file"


def test_misaligned_segment(libraries: dict[str, Path]) -> None:
    data = bytearray(libraries["plain"].read_bytes())
    assert elf.load_segments_aligned(bytes(data))
    phoff = int.from_bytes(data[32:40], "little")
    assert int.from_bytes(data[phoff : phoff + 4], "little") == 1  # PT_LOAD
    data[phoff + 16] ^= 1  # p_vaddr
    assert not elf.load_segments_aligned(bytes(data))


def test_segment_beyond_the_end(libraries: dict[str, Path]) -> None:
    data = libraries["plain"].read_bytes()
    assert not elf.load_segments_aligned(data[:0x1800])
