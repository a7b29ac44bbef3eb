from dataclasses import asdict, replace
from typing import Any

import pytest

from rvbundle_runtime import families
from rvbundle_runtime.families import Family, environment, to_trace, why_not
from rvbundle_runtime.processor import Processor, parse_cpuinfo

from .models import ZVL128B, ZVL256B

XEON = """\
processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 85
model name	: Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz
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
"""
RISCV = """\
processor	: 0
hart		: 2
isa		: rv64imafdc_zicntr_zicsr_zifencei_zihpm
mmu		: sv39
uarch		: sifive,bullet0
"""
INTEL = parse_cpuinfo(XEON)
HASWELL = Processor("GenuineIntel", frozenset("sse4_2 popcnt avx avx2 fma bmi1 bmi2 f16c movbe abm".split()))
NEHALEM = Processor("GenuineIntel", frozenset("sse4_2 popcnt".split()))
ZEN = replace(HASWELL, vendor="AuthenticAMD")
V256 = Processor("", frozenset("imafdcv"), vlen=256)
V128 = replace(V256, vlen=128)
NUMPY = ("AVX", "F16C", "FMA3", "AVX2", "AVX512F", "AVX512CD", "AVX512_SKX")


def names(found: tuple[Family, ...]) -> list[str]:
    return [family.name for family in found]


@pytest.mark.parametrize(
    ("arch", "processor", "expected"),
    [
        ("x86_64", INTEL, ["avx2", "baseline"]),
        ("x86_64", HASWELL, ["avx2", "baseline"]),
        ("x86_64", NEHALEM, ["baseline"]),
        ("x86_64", Processor("GenuineIntel", HASWELL.flags - {"fma"}), ["baseline"]),
        ("x86_64", Processor(), []),
        ("aarch64", Processor(), ["armv8"]),
        ("aarch64", parse_cpuinfo(ARM), ["armv8"]),
        ("riscv64", Processor(), ["generic"]),
        ("riscv64", parse_cpuinfo(RISCV), ["generic"]),
        ("riscv64", V256, ["zvl256b", "zvl128b", "generic"]),
        ("riscv64", V128, ["zvl128b", "generic"]),
        ("riscv64", replace(V256, vlen=0), ["generic"]),
        ("riscv64", replace(V256, vlen=64), ["generic"]),
        ("riscv64", replace(V256, vlen=1024), ["zvl256b", "zvl128b", "generic"]),
        ("riscv64", Processor("", frozenset(), 256), ["generic"]),
        ("s390x", INTEL, []),
    ],
    ids=[
        *("avx-512", "avx2", "old", "avx2 without fma", "nothing known"),
        *("some arm", "arm", "some riscv", "riscv", "256 bits", "128 bits", "vectors of unknown length"),
        *("64 bits", "1024 bits", "no vectors", "another"),
    ],
)
def test_families_to_trace(arch: str, processor: Processor, expected: list[str]) -> None:
    assert names(to_trace(arch, processor, NUMPY)) == expected


def test_what_a_traced_family_holds() -> None:
    avx2, baseline = to_trace("x86_64", INTEL, NUMPY)
    assert (avx2.vendor, baseline.vendor) == ("GenuineIntel", "")
    assert avx2.env["ATEN_CPU_CAPABILITY"] == "avx2"
    assert avx2.env["OPENBLAS_CORETYPE"] == "Haswell"
    assert baseline.env["ATEN_CPU_CAPABILITY"] == "default"
    assert baseline.env["MKL_CBWR"] == "COMPATIBLE"
    assert set(avx2.needs) >= {"avx2", "fma"}


def test_what_holds_others_than_x86() -> None:
    """Kernels that every processor of the architecture can run, whoever made it."""
    (generic,) = to_trace("riscv64", parse_cpuinfo(RISCV), ())
    assert generic.env["OPENBLAS_CORETYPE"] == "RISCV64_GENERIC"
    (armv8,) = to_trace("aarch64", Processor(), None)
    assert armv8.env["OPENBLAS_CORETYPE"] == "ARMV8"
    assert armv8.numpy == ("ASIMDHP", "ASIMDDP", "ASIMDFHM", "SVE")
    assert to_trace("aarch64", Processor(), ("ASIMDHP", "SVE2"))[0].numpy == ("ASIMDHP",)
    for family in (generic, armv8):
        assert (family.needs, family.vendor) == ((), "")
        assert why_not(family, Processor()) == ""
        assert environment(family, Processor()) == family.env
        assert families.from_json(asdict(family)) == family
    env = environment(armv8, parse_cpuinfo(ARM))
    assert env["NPY_DISABLE_CPU_FEATURES"] == "ASIMDHP"
    off = {"NPY_DISABLE_CPU_FEATURES": "ASIMDHP ASIMDDP ASIMDFHM SVE"}
    assert families.held_back(armv8) == {**armv8.env, **off}
    assert families.held_back(generic) == generic.env


def test_vectors_of_riscv() -> None:
    zvl256b, zvl128b, generic = to_trace("riscv64", V256, ("RVV",))
    assert zvl256b.env["OPENBLAS_CORETYPE"] == "RISCV64_ZVL256B"
    assert zvl128b.env["OPENBLAS_CORETYPE"] == "RISCV64_ZVL128B"
    for family in (zvl256b, zvl128b):
        assert environment(family, V256) == family.env  # numpy may use them
        assert families.from_json(asdict(family)) == family
    assert environment(generic, V256) == {**generic.env, "NPY_DISABLE_CPU_FEATURES": "RVV"}
    assert environment(generic, Processor()) == generic.env  # numpy warns of what is not there


def test_numpy_is_only_told_of_features_that_it_knows() -> None:
    avx2, baseline = to_trace("x86_64", INTEL, ("AVX2", "AVX512F", "SSE42"))
    assert (avx2.numpy, baseline.numpy) == (("AVX512F",), ("AVX2", "AVX512F"))
    avx2, baseline = to_trace("x86_64", INTEL, ("X86_V3", "X86_V4"))  # numpy 2.4 and later
    assert (avx2.numpy, baseline.numpy) == (("X86_V4",), ("X86_V3", "X86_V4"))
    assert [family.numpy for family in to_trace("x86_64", INTEL, ())] == [(), ()]


AVX2, BASELINE = to_trace("x86_64", INTEL, NUMPY)


@pytest.mark.parametrize(
    ("family", "processor", "why"),
    [
        (AVX2, INTEL, ""),
        (AVX2, HASWELL, ""),
        (AVX2, NEHALEM, "this processor has no avx2, bmi1, bmi2, f16c, fma, movbe"),
        (AVX2, replace(HASWELL, flags=HASWELL.flags - {"fma"}), "this processor has no fma"),
        (AVX2, ZEN, "traced on GenuineIntel, and libraries run other code on AuthenticAMD"),
        (
            AVX2,
            replace(HASWELL, vendor=""),
            "traced on GenuineIntel, and libraries run other code on others",
        ),
        (ZVL256B, V256, ""),
        (ZVL256B, replace(V256, vlen=512), ""),
        (
            ZVL256B,
            V128,
            "it needs vectors of 256 bits, and this processor's have 128",
        ),
        (
            ZVL128B,
            replace(V128, vlen=0),
            "it needs vectors of 128 bits, and how long this processor's are is not known",
        ),
        (ZVL128B, Processor(), "this processor has no vectors"),
        (ZVL128B, V256, ""),
        (BASELINE, NEHALEM, ""),
        (BASELINE, ZEN, ""),
        (BASELINE, Processor(), "this processor has no popcnt, sse4_2"),
    ],
)
def test_why_not(family: Family, processor: Processor, why: str) -> None:
    assert why_not(family, processor) == why


@pytest.mark.parametrize(
    ("family", "processor", "off"),
    [
        (AVX2, HASWELL, None),
        (AVX2, INTEL, "AVX512F AVX512CD AVX512_SKX"),
        (AVX2, replace(INTEL, flags=INTEL.flags - {"avx512vl"}), "AVX512F AVX512CD"),
        (AVX2, replace(INTEL, flags=INTEL.flags - {"avx512cd"}), "AVX512F"),
        (BASELINE, NEHALEM, None),
        (BASELINE, HASWELL, "AVX F16C FMA3 AVX2"),
        (BASELINE, replace(HASWELL, flags=HASWELL.flags - {"fma"}), "AVX F16C AVX2"),
        (BASELINE, INTEL, "AVX F16C FMA3 AVX2 AVX512F AVX512CD AVX512_SKX"),
    ],
)
def test_numpy_is_only_told_of_features_that_the_host_has(
    family: Family, processor: Processor, off: str | None
) -> None:
    """It warns of others on standard error."""
    env = environment(family, processor)
    assert env.get("NPY_DISABLE_CPU_FEATURES") == off
    assert {name: value for name, value in env.items() if not name.startswith("NPY_")} == family.env


def test_a_feature_of_numpy_that_we_do_not_know() -> None:
    family = Family("x", (), {"A": "1"}, ("AVX1024",))
    assert environment(family, INTEL) == {"A": "1"}


def test_the_environment_is_a_copy() -> None:
    environment(AVX2, HASWELL)["X"] = "y"
    assert "X" not in AVX2.env


def test_every_feature_that_numpy_may_be_told_of_is_known() -> None:
    several = [families.of(arch) for arch in ("x86_64", "riscv64", "aarch64")]
    told = {name for found in several for family in found for name in family.numpy}
    assert told == set(families._NUMPY_NEEDS)


@pytest.mark.parametrize("family", [AVX2, BASELINE, Family("x", (), {}, ())], ids=lambda f: f.name)
def test_json(family: Family) -> None:
    value = asdict(family)
    assert families.from_json(value) == family
    listed = {**value, "needs": list(family.needs), "numpy": list(family.numpy)}
    assert families.from_json(listed) == family


GOOD: dict[str, Any] = {"name": "a", "needs": ["f"], "env": {"A": "1"}, "numpy": ["X"], "vendor": ""}


def test_json_of_before_there_were_lengths_of_vectors() -> None:
    assert families.from_json(GOOD).vlen == 0
    assert families.from_json({**GOOD, "vlen": 256}).vlen == 256


@pytest.mark.parametrize("key", GOOD)
def test_json_without_a_key(key: str) -> None:
    with pytest.raises(KeyError):
        families.from_json({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize(
    ("key", "item", "message"),
    [
        ("name", 5, "expected texts"),
        ("name", "a\0b", "expected texts"),
        ("vendor", None, "expected texts"),
        ("needs", [5], "expected texts"),
        ("needs", ["a\0"], "expected texts"),
        ("needs", 5, None),
        ("needs", "avx2", None),
        ("numpy", [None], "expected texts"),
        ("numpy", "AVX", None),
        ("numpy", None, None),
        ("env", {"A": 5}, "expected texts"),
        ("env", {"A": "x\0y"}, "expected texts"),
        ("env", {"A=B": "x"}, "impossible name of a variable"),
        ("env", {"A\0": "x"}, "impossible name of a variable"),
        ("env", {"": "x"}, "impossible name of a variable"),
        ("env", ["A"], None),
        ("env", None, None),
        ("env", "A=1", None),
        ("vlen", "5", "expected a number"),
        ("vlen", True, "expected a number"),
        ("vlen", -1, "expected a number"),
        ("vlen", None, "expected a number"),
    ],
    ids=repr,
)
def test_bad_json(key: str, item: object, message: str | None) -> None:
    assert families.from_json(GOOD).name == "a"
    with pytest.raises((TypeError, ValueError), match=message):
        families.from_json({**GOOD, key: item})


@pytest.mark.parametrize("value", [[], None, 5, "x"], ids=repr)
def test_json_of_something_else(value: Any) -> None:
    with pytest.raises(TypeError):
        families.from_json(value)
