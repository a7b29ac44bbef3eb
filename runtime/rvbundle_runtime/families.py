"""CPU kernel families: which variants of their kernels numeric libraries pick, and how to hold them to it.

Libraries look at the processor and pick among several kernels. A trace sees only the pages of those that
were picked; so a build traces each family that its machine can run, and a run without a cold pack is held
to one of them. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rvbundle_runtime import table
from rvbundle_runtime.processor import Processor


@dataclass(frozen=True)
class Family:
    """A set of kernels: the flags of /proc/cpuinfo that it needs, and what holds the libraries to it.

    `vendor` is not "" where libraries also ask who made the processor: it is then the only one on which
    the family is what was traced. `numpy` are features that numpy must not use, by its own names. `vlen` are
    the bits that the processor's vectors must at least have, 0 where these have one length only.
    """

    name: str
    needs: tuple[str, ...]
    env: Mapping[str, str]
    numpy: tuple[str, ...]
    vendor: str = ""
    vlen: int = 0


def of(arch: str) -> tuple[Family, ...]:
    """Return the families of an architecture, the best first, as backends.toml has them."""
    rows = [
        {k: v for k, v in row.items() if k != "arch"} for row in table.read()["family"] if row["arch"] == arch
    ]
    lists = [{name: tuple(row.get(name, ())) for name in ("needs", "numpy")} for row in rows]
    return tuple(Family(**{**row, **more}) for row, more in zip(rows, lists, strict=True))


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
_NUMPY_NEEDS |= {name: (name.lower(),) for name in ("ASIMDHP", "ASIMDDP", "ASIMDFHM", "SVE")}
_NUMPY_NEEDS["RVV"] = ("v",)
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
    """Return the families of `arch` that `processor` can run, the best first.

    `numpy_dispatch` are the features that the payload's numpy can pick among (None: any); it warns of others.
    """
    found = []
    for family in of(arch):
        if not lacks(family, processor):
            vendor = processor.vendor if family.vendor else ""
            off = tuple(n for n in family.numpy if numpy_dispatch is None or n in numpy_dispatch)
            found.append(replace(family, numpy=off, vendor=vendor))
    return tuple(found)


_FLAGS_IN_WORDS = {"v": "vectors"}


def lacks(family: Family, processor: Processor) -> str:
    """Return what `processor` has too little of for `family`, whoever made it; "" for nothing."""
    missing = sorted(set(family.needs) - processor.flags)
    if missing:
        return f"this processor has no {', '.join(_FLAGS_IN_WORDS.get(flag, flag) for flag in missing)}"
    if processor.vlen >= family.vlen:
        return ""
    if not processor.vlen:
        return f"it needs vectors of {family.vlen} bits, and how long this processor's are is not known"
    return f"it needs vectors of {family.vlen} bits, and this processor's have {processor.vlen}"


def why_not(family: Family, processor: Processor) -> str:
    """Return why `family` can't be used on `processor`; "" if it can."""
    missing = lacks(family, processor)
    if missing:
        return missing
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
    """Read what `dataclasses.asdict` made of a family; raises KeyError, TypeError or ValueError.

    Images of before there was `vlen` have families without it.
    """
    if not isinstance(value["needs"], list | tuple) or not isinstance(value["numpy"], list | tuple):
        raise TypeError("expected lists")
    if not isinstance(value["env"], dict):
        raise TypeError("expected a table of variables")
    vlen = value.get("vlen", 0)
    if type(vlen) is not int or vlen < 0:
        raise TypeError("expected a number of bits")
    texts = [value["name"], value["vendor"], *value["needs"], *value["numpy"]]
    if not all(isinstance(text, str) and "\0" not in text for text in (*texts, *value["env"].values())):
        raise TypeError("expected texts")
    if any("=" in name or "\0" in name or not name for name in value["env"]):
        raise ValueError("impossible name of a variable")
    return Family(
        value["name"], tuple(value["needs"]), dict(value["env"]), tuple(value["numpy"]), value["vendor"], vlen
    )
