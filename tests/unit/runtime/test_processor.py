from dataclasses import replace
from typing import Any

import pytest

from rvbundle_runtime import processor
from rvbundle_runtime.machine import parse_cpu_list
from rvbundle_runtime.processor import (
    Cluster,
    Processor,
    clusters,
    combine,
    from_hwcap,
    from_hwprobe,
    parse_cpuinfo,
)
from tests.unit.runtime import machines

XEON = """\
processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 85
model name	: Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz
stepping	: 4
cache size	: 28160 KB
fpu		: yes
flags		: fpu sse sse2 ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes avx f16c abm bmi1 avx2 bmi2 \
avx512f avx512dq avx512cd avx512bw avx512vl
vmx flags	: vnmi preemption_timer
bugs		: cpu_meltdown spectre_v1
bogomips	: 4800.00

processor	: 1
vendor_id	: GenuineIntel
flags		: fpu another
"""
ARM = """\
processor	: 0
BogoMIPS	: 108.00
Features	: fp asimd evtstrm crc32 cpuid asimdhp
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x0

processor	: 1
BogoMIPS	: 108.00
Features	: fp asimd
CPU implementer	: 0x41
CPU variant	: 0x0
"""
U74 = """\
processor	: 0
hart		: 2
isa		: rv64imafdc_zicntr_zicsr_zifencei_zihpm
mmu		: sv39
uarch		: sifive,bullet0
"""
MIXED = """\
processor	: 0
isa		: rv64imafdcv_zba_zvfh_zvl128b_zvl256b
uarch		: big

processor	: 1
isa		: rv64imafdcv_zba_zvl128b
uarch		: big

processor	: 2
isa		: rv64imac
uarch		: small
"""


def riscv(isa: str, *lines: str) -> str:
    return "\n".join(["processor : 0", f"isa : {isa}", *lines]) + "\n\n"


OLD_T_HEAD = ("mvendorid : 0x5b7", "marchid : 0x0", "mimpid : 0x0")
NEW_T_HEAD = ("mvendorid : 0x5b7", "marchid : 0x80000000090c0d00")


def test_x86() -> None:
    found = parse_cpuinfo(XEON)
    assert (found.vendor, found.name) == ("GenuineIntel", "Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz")
    assert found.ids == (("family", 6), ("model", 85), ("stepping", 4))
    assert {"fpu", "avx2", "avx512vl"} <= found.flags
    assert not {"another", "vnmi", "spectre_v1"} & found.flags


def test_arm_has_what_all_its_processors_have() -> None:
    ids = (("implementer", 0x41), ("variant", 0))
    assert parse_cpuinfo(ARM) == Processor("0x41", frozenset({"fp", "asimd"}), "", ids)
    assert "asimdhp" in parse_cpuinfo(ARM, {0}).flags
    assert parse_cpuinfo(ARM, {7}) == parse_cpuinfo(ARM)


def test_riscv() -> None:
    expected = frozenset("i m a f d c zicntr zicsr zifencei zihpm".split())
    assert parse_cpuinfo(U74) == Processor("", expected, "sifive,bullet0")


@pytest.mark.parametrize(
    ("cpus", "has", "lacks", "vlen"),
    [
        (None, {"i", "m", "a", "c"}, {"v", "zba"}, 0),
        ({0}, {"v", "zvfh"}, set(), 256),
        ({0, 1}, {"v", "zba"}, {"zvfh"}, 128),
        ({2}, {"i"}, {"f", "v"}, 0),
    ],
    ids=["all", "one", "two alike", "the small one"],
)
def test_riscv_has_what_the_harts_that_count_have(
    cpus: set[int] | None, has: set[str], lacks: set[str], vlen: int
) -> None:
    found = parse_cpuinfo(MIXED, cpus)
    assert has <= found.flags
    assert not lacks & found.flags
    assert found.vlen == vlen


def test_the_line_of_the_hart_says_more_than_that_of_all() -> None:
    text = riscv("rv64imac", "hart isa : rv64imafdcv")
    assert {"v", "d"} <= parse_cpuinfo(text).flags


@pytest.mark.parametrize(
    ("isa", "expected"),
    [
        ("rv64imafdc", "i m a f d c"),
        ("rv64gc", "i m a f d c"),
        ("rv64imafdcvsu", "i m a f d c v"),
        ("RV64IMAC_Zicsr", "i m a c zicsr"),
        ("rv64imafdcvh_zve64d", "i m a f d c v h zve64d"),
        ("", ""),
    ],
)
def test_isa_strings(isa: str, expected: str) -> None:
    assert parse_cpuinfo(riscv(isa)).flags == frozenset(expected.split())


@pytest.mark.parametrize(
    ("text", "vectors"),
    [
        (riscv("rv64imafdcv", *OLD_T_HEAD), "xtheadvector"),
        (riscv("rv64imafdcv", "cpu-vector : 0.7.1"), "xtheadvector"),
        (riscv("rv64imafdcvsu", "vector version : 0.7.1"), "xtheadvector"),
        (riscv("rv64imafdc_xtheadvector"), "xtheadvector"),
        (riscv("rv64imafdc", *OLD_T_HEAD), ""),
        (riscv("rv64imafdcv", *NEW_T_HEAD), "v"),
        (riscv("rv64imafdcv", "mvendorid : 0x710", "marchid : 0x0"), "v"),
    ],
    ids=["SG2042", "TH1520", "C910", "by name", "without", "SG2044", "another maker"],
)
@pytest.mark.parametrize("hwcap", [0, 1 << 21 | 0x112D])
def test_vectors_of_the_old_version_are_no_vectors(text: str, vectors: str, hwcap: int) -> None:
    """A kernel that knows no other name for them says "v", in its bits too."""
    for found in (parse_cpuinfo(text), combine("riscv64", text, hwcap if vectors else hwcap & ~(1 << 21))):
        assert found.flags & {"v", "xtheadvector"} == ({vectors} if vectors else set())
        assert found.vlen == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Processor()),
        ("\n\n\n", Processor()),
        ("no colon", Processor()),
        (":", Processor()),
        ("vendor_id\t: \nflags\t\t:\n", Processor()),
        ("vendor_id\t: A: B\nflags : x", Processor("A: B", frozenset({"x"}))),
        ("flags : x y", Processor("", frozenset({"x", "y"}))),
        ("CPU implementer : what\n", Processor()),
        ("stepping : unknown\nmodel name : Z", Processor(name="Z")),
        ("\nprocessor : 0\nisa : rv64i\n\nprocessor : 1\nisa : rv6", Processor("", frozenset("i"))),
    ],
    ids=[
        *("empty", "blank", "no colon", "only a colon", "no values", "colon in a value", "no vendor"),
        *("a number that is none", "stepping unknown", "cut"),
    ],
)
def test_odd_texts(text: str, expected: Processor) -> None:
    assert parse_cpuinfo(text) == expected


def test_a_text_that_was_cut() -> None:
    """Only the first bytes of a long one are read."""
    assert parse_cpuinfo(XEON[:100]).vendor == "GenuineIntel"
    assert parse_cpuinfo(XEON[: XEON.index("avx512dq")]).flags >= {"fpu", "avx2", "avx512f"}


def test_auxv() -> None:
    data = b"".join(n.to_bytes(8, "little") for n in (6, 4096, 16, 0x112D, 26, 1 << 63, 0, 0))
    assert processor.parse_auxv(data) == (0x112D, 1 << 63)
    assert processor.parse_auxv(data[:33]) == (0x112D, 0)
    assert processor.parse_auxv(b"") == (0, 0)


@pytest.mark.parametrize(
    ("arch", "hwcap", "hwcap2", "expected"),
    [
        ("aarch64", 1 << 1 | 1 << 10 | 1 << 20 | 1 << 22, 0, "asimd asimdhp asimddp sve"),
        ("aarch64", 1 << 47, 1 << 1 | 1 << 13 | 1 << 14 | 1 << 23, "smesmop4 sve2 i8mm bf16 sme"),
        ("aarch64", 1 << 32, 1 << 31 | 1 << 32 | 1 << 63, "gcs wfxt ebf16 poe"),
        ("riscv64", 0x20112D, 0, "i m a f d c v"),
        ("riscv64", 0x112D, 7, "i m a f d c"),
        ("x86_64", 0x178BFBFF, 2, ""),
    ],
)
def test_hwcap(arch: str, hwcap: int, hwcap2: int, expected: str) -> None:
    assert from_hwcap(arch, hwcap, hwcap2) == frozenset(expected.split())


def test_hwprobe() -> None:
    """The numbers are those of qemu-riscv64 10.0, `-cpu rv64,v=true,zvfh=true` and `-cpu rv64`."""
    found = from_hwprobe({0: 0, 1: 0, 2: 0, 3: 1, 4: 0x1F00000FF, 5: 3})
    expected = "i m a f d c v zba zbb zbs zbc zicboz zfhmin zvfh zvfhmin zfa"
    assert found.flags >= frozenset(expected.split())
    assert (found.vendor, found.ids) == ("0x0", (("mvendorid", 0), ("marchid", 0), ("mimpid", 0)))
    assert "v" not in from_hwprobe({3: 1, 4: 0x1200000FB}).flags
    assert from_hwprobe({}) == Processor()


@pytest.mark.parametrize(
    ("bit", "name"),
    [
        *((0, "d"), (1, "c"), (2, "v"), (3, "zba"), (5, "zbs"), (26, "zvkt"), (27, "zfh"), (30, "zvfh")),
        *((31, "zvfhmin"), (32, "zfa"), (41, "zve64d"), (52, "zfbfmin"), (53, "zvfbfmin"), (54, "zvfbfwma")),
        (63, "zicfilp"),
    ],
)
def test_bits_of_hwprobe(bit: int, name: str) -> None:
    assert name in from_hwprobe({4: 1 << bit}).flags
    assert name not in from_hwprobe({4: ~(1 << bit) & (1 << 64) - 1 ^ 1 << 2}).flags


def test_hwprobe_of_processors_that_differ() -> None:
    """The kernel answers -1 where there is no one number."""
    found = from_hwprobe({0: 0x710, 1: (1 << 64) - 1, 2: (1 << 64) - 1, 3: 1, 4: 7})
    assert (found.vendor, found.ids) == ("0x710", (("mvendorid", 0x710),))


def test_xtheadvector_by_hwprobe() -> None:
    text = riscv("rv64imafdc", *OLD_T_HEAD)
    found = combine("riscv64", text, 0x112D, 0, {0: 0x5B7, 1: 0, 2: 0, 3: 1, 4: 3, 11: 1})
    assert "xtheadvector" in found.flags
    assert "v" not in found.flags


K1 = riscv("rv64imafdcv_zvfh_zvl128b_zvl256b")


@pytest.mark.parametrize(
    ("hwcap", "pairs", "vlen", "expected"),
    [
        (0, None, 0, 256),
        (0, None, 512, 512),
        (0x20112D, None, 0, 256),
        (0x112D, None, 256, 0),
        (0x20112D, {3: 1, 4: 3}, 256, 0),
        (0x112D, {3: 1, 4: 7}, 0, 256),
        (0x20112D, {3: 1}, 1024, 1024),
    ],
    ids=[
        *("cpuinfo alone", "vlenb was read", "hwcap", "hwcap without", "hwprobe without", "hwprobe"),
        "hwprobe without the key",
    ],
)
def test_whom_to_believe_of_vectors(
    hwcap: int, pairs: dict[int, int] | None, vlen: int, expected: int
) -> None:
    found = combine("riscv64", K1, hwcap, 0, pairs, vlen)
    assert found.vlen == expected
    assert ("v" in found.flags, "zvfh" in found.flags) == (expected > 0, expected > 0)
    assert "d" in found.flags


def test_combined_of_arm() -> None:
    found = combine("aarch64", ARM, 1 << 20, 1 << 14)
    assert found == replace(parse_cpuinfo(ARM), flags=frozenset({"fp", "asimd", "asimddp", "bf16"}))


def test_ids_by_hwprobe_where_cpuinfo_has_none() -> None:
    found = combine("riscv64", riscv("rv64gc"), 0, 0, {0: 0x489, 1: 7, 2: 1, 4: 3})
    assert found.vendor == "0x489"
    assert found.ids == (("mvendorid", 0x489), ("marchid", 7), ("mimpid", 1))


@pytest.mark.parametrize(
    ("cpus", "text", "capacities", "hybrid", "expected"),
    [
        ((0, 1), XEON, {}, {}, (Cluster((0, 1), 0, "Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz"),)),
        ((0, 1), "", {}, {}, (Cluster((0, 1)),)),
        ((), "", {}, {}, ()),
        ((0, 1, 2, 3), MIXED, {}, {}, (Cluster((0, 1), 0, "big"), Cluster((2, 3), 0, "small"))),
        (
            (0, 1, 2),
            U74,
            {0: 1, 1: 9, 2: 1},
            {},
            (Cluster((1,), 9, "sifive,bullet0"), Cluster((0, 2), 1, "sifive,bullet0")),
        ),
        (
            (0, 1, 2, 3),
            "",
            {},
            {"core": (0, 1), "atom": (2, 3)},
            (Cluster((0, 1), 0, "core"), Cluster((2, 3), 0, "atom")),
        ),
        ((0, 1), "", {}, {"core": (0, 1), "atom": (2, 3)}, (Cluster((0, 1), 0, "core"),)),
        ((0, 1), "", {}, {"core": (0, 1)}, (Cluster((0, 1)),)),
    ],
    ids=[
        *("ordinary", "nothing known", "no processor", "by name", "by capacity", "hybrid"),
        *("hybrid, some offline", "one kind of hybrid"),
    ],
)
def test_clusters(
    cpus: tuple[int, ...], text: str, capacities: Any, hybrid: Any, expected: tuple[Cluster, ...]
) -> None:
    assert clusters(cpus, text, capacities, hybrid) == expected


def test_there_are_enough_machines() -> None:
    assert len(machines.ALL) >= 10
    assert {machines.load(name).arch for name in machines.ALL} == {"x86_64", "aarch64", "riscv64"}


@pytest.mark.parametrize("name", machines.ALL)
def test_facts_of_a_machine(name: str) -> None:
    machine = machines.load(name)
    host, expected = machines.to_host(machine), machine.expected
    found = host.processor
    ids = {key: int(text, 0) if isinstance(text, str) else text for key, text in expected["ids"].items()}
    assert (found.vendor, found.name, dict(found.ids)) == (expected["vendor"], expected["name"], ids)
    assert found.vlen == expected["vlen"]
    assert found.flags >= set(expected["has"])
    assert not found.flags & set(expected["lacks"])
    assert host.clusters == tuple(
        Cluster(parse_cpu_list(c["cpus"]), c["capacity"], c["name"]) for c in expected["clusters"]
    )
    assert machine.source
    assert "://" not in machine.source


def test_a_machine_with_an_unknown_fact(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "FOLDER", tmp_path)
    (tmp_path / "x.toml").write_text("cpu = 1\n")
    with pytest.raises(ValueError, match="x: \\['cpu'\\]"):
        machines.load("x")
