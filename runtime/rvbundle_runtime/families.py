"""CPU kernel families: which variants of their kernels numeric libraries pick, and how to hold them to it.

Libraries look at the processor and pick among several kernels. A trace sees only the pages of those that
were picked; so a build traces each family that its machine can run, and a run without a cold pack is held
to one of them. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rvbundle_runtime.processor import Processor


@dataclass(frozen=True)
class Family:
    """A set of kernels: the flags of /proc/cpuinfo that it needs, and what holds the libraries to it.

    `vendor` is not "" where libraries also ask who made the processor: it is then the only one on which
    the family is what was traced. `numpy` are features that numpy must not use, by its own names.
    """

    name: str
    needs: tuple[str, ...]
    env: Mapping[str, str]
    numpy: tuple[str, ...]
    vendor: str = ""


# numpy's names of what lies above a family (numpy.org/doc/stable/reference/simd/build-options.html): those
# before version 2.4 and those since.
_NUMPY_AVX512 = (
    *("AVX512F", "AVX512CD", "AVX512_SKX", "AVX512_CLX", "AVX512_CNL", "AVX512_ICL", "AVX512_SPR"),
    "X86_V4",
)
_NUMPY_AVX2 = ("AVX", "F16C", "FMA3", "AVX2", "X86_V3")
# OPENSSL_ia32cap(3): bits of CPUID leaf 1 (EDX, then ECX from bit 32), and of leaf 7 (EBX, then ECX).
# avx2 is without what only newer processors have: AVX-512, SHA, VAES, VPCLMULQDQ, GFNI.
_OPENSSL_AVX2 = ":~0x5f42f0230000"
# baseline is also without AVX, FMA, MOVBE, AES, PCLMULQDQ and XOP, and without all of leaf 7.
_OPENSSL_BASELINE = "~0x1240180200000000:0"

# glibc's manual, "Hardware Capability Tunables": libm has variants with FMA; the names are those of before
# glibc 2.33 and since.
_GLIBC_BASELINE = "glibc.cpu.hwcaps=-AVX2_Usable,-FMA_Usable,-FMA4_Usable,-AVX2,-FMA,-FMA4"

# The best first. Sources: torch's aten/src/ATen/native/DispatchStub.cpp (ATEN_CPU_CAPABILITY), oneDNN's
# "CPU Dispatcher Control", OpenBLAS's driver/others/dynamic.c (core types), Intel MKL's developer guide
# (MKL_ENABLE_INSTRUCTIONS, MKL_CBWR; it runs other code on processors of other makers).
_X86_64 = (
    Family(
        "avx2",
        ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"),
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "OPENBLAS_CORETYPE": "Haswell",
            "OPENSSL_ia32cap": _OPENSSL_AVX2,
        },
        _NUMPY_AVX512,
        vendor="same",
    ),
    Family(
        "baseline",
        ("sse4_2", "popcnt"),
        {
            "ATEN_CPU_CAPABILITY": "default",
            "GLIBC_TUNABLES": _GLIBC_BASELINE,
            "MKL_CBWR": "COMPATIBLE",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "OPENBLAS_CORETYPE": "Nehalem",
            "OPENSSL_ia32cap": _OPENSSL_BASELINE,
        },
        (*_NUMPY_AVX2, *_NUMPY_AVX512),
    ),
)
# Of these architectures one family each, which every processor can run. Sources: OpenBLAS's
# driver/others/dynamic_riscv64.c and dynamic_arm64.c, OPENSSL_riscvcap(3), OPENSSL_armcap (crypto/armcap.c:
# 1 is NEON), oneDNN's "CPU Dispatcher Control". A riscv64 core type for vectors of another length than the
# processor's computes nonsense without an error, so the vector kernels are never asked for by name.
_RISCV64 = (
    Family(
        "generic",
        (),
        {"OPENBLAS_CORETYPE": "RISCV64_GENERIC", "OPENSSL_riscvcap": "rv64gc"},
        (),
    ),
)
_NUMPY_ARM = ("ASIMDHP", "ASIMDDP", "ASIMDFHM", "SVE")
_AARCH64 = (
    Family(
        "armv8",
        (),
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "ADVANCED_SIMD",
            "OPENBLAS_CORETYPE": "ARMV8",
            "OPENSSL_armcap": "1",
        },
        _NUMPY_ARM,
    ),
)
_FAMILIES = {"x86_64": _X86_64, "riscv64": _RISCV64, "aarch64": _AARCH64}
# What numpy must find before it may be told not to use it: it warns of features that are not there.
_NUMPY_NEEDS: dict[str, tuple[str, ...]] = {
    "AVX": ("avx",),
    "F16C": ("f16c",),
    "FMA3": ("fma",),
    "AVX2": ("avx2",),
    "X86_V3": ("avx2", "fma", "bmi1", "bmi2", "abm", "f16c", "movbe"),
    "AVX512F": ("avx512f",),
    "AVX512CD": ("avx512f", "avx512cd"),
}
_NUMPY_NEEDS |= {name: (name.lower(),) for name in _NUMPY_ARM}
_NUMPY_NEEDS["AVX512_SKX"] = ("avx512f", "avx512cd", "avx512vl", "avx512bw", "avx512dq")
_NUMPY_NEEDS["X86_V4"] = _NUMPY_NEEDS["AVX512_SKX"]
_NUMPY_NEEDS["AVX512_CLX"] = (*_NUMPY_NEEDS["AVX512_SKX"], "avx512_vnni")
_NUMPY_NEEDS["AVX512_CNL"] = (*_NUMPY_NEEDS["AVX512_SKX"], "avx512ifma", "avx512vbmi")
_NUMPY_NEEDS["AVX512_ICL"] = (
    *_NUMPY_NEEDS["AVX512_CLX"],
    *("avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_bitalg", "avx512_vpopcntdq"),
)
_NUMPY_NEEDS["AVX512_SPR"] = (*_NUMPY_NEEDS["AVX512_ICL"], "avx512_fp16")


def to_trace(arch: str, processor: Processor, numpy_dispatch: tuple[str, ...] | None) -> tuple[Family, ...]:
    """Return the families of `arch` that this machine can run, the best first.

    `numpy_dispatch` are the features that the payload's numpy can pick among (None: any); it warns of others.
    """
    found = []
    for family in _FAMILIES.get(arch, ()):
        if processor.flags.issuperset(family.needs):
            vendor = processor.vendor if family.vendor else ""
            off = tuple(n for n in family.numpy if numpy_dispatch is None or n in numpy_dispatch)
            found.append(Family(family.name, family.needs, family.env, off, vendor))
    return tuple(found)


def why_not(family: Family, processor: Processor) -> str:
    """Return why `family` can't be used on `processor`; "" if it can."""
    missing = sorted(set(family.needs) - processor.flags)
    if missing:
        return f"this processor has no {', '.join(missing)}"
    if family.vendor and family.vendor != processor.vendor:
        return f"traced on {family.vendor}, and libraries run other code on {processor.vendor or 'others'}"
    return ""


def environment(family: Family, processor: Processor) -> dict[str, str]:
    """Return the variables that hold the libraries to `family` on `processor`."""
    off = [name for name in family.numpy if processor.flags.issuperset(_NUMPY_NEEDS.get(name, ("?",)))]
    return {**family.env, **({"NPY_DISABLE_CPU_FEATURES": " ".join(off)} if off else {})}


def held_back(family: Family) -> dict[str, str]:
    """Return the variables that hold the libraries to `family` on a processor that has every feature."""
    off = {"NPY_DISABLE_CPU_FEATURES": " ".join(family.numpy)} if family.numpy else {}
    return {**family.env, **off}


def from_json(value: Mapping[str, Any]) -> Family:
    """Read what `dataclasses.asdict` made of a family; raises KeyError, TypeError or ValueError."""
    if not isinstance(value["needs"], list | tuple) or not isinstance(value["numpy"], list | tuple):
        raise TypeError("expected lists")
    if not isinstance(value["env"], dict):
        raise TypeError("expected a table of variables")
    texts = [value["name"], value["vendor"], *value["needs"], *value["numpy"]]
    if not all(isinstance(text, str) and "\0" not in text for text in (*texts, *value["env"].values())):
        raise TypeError("expected texts")
    if any("=" in name or "\0" in name or not name for name in value["env"]):
        raise ValueError("impossible name of a variable")
    return Family(
        value["name"], tuple(value["needs"]), dict(value["env"]), tuple(value["numpy"]), value["vendor"]
    )
