"""Whether a run may use a family of CPU kernels, given the libraries that its payload has. Pure."""

from collections.abc import Mapping

from rvbundle_runtime import families
from rvbundle_runtime.blas import OPENBLAS
from rvbundle_runtime.families import Family
from rvbundle_runtime.knownbad import known_bad
from rvbundle_runtime.processor import Processor

_LONGEST, _LONGEST_VLEN = "zvl256b", 256  # bits


def why_not(family: Family, processor: Processor, blas: Mapping[str, str]) -> str:
    """Return why `family` can't be used on `processor` with the BLAS libraries `blas`; "" if it can."""
    version = blas.get(OPENBLAS, "")
    return families.why_not(family, processor) or known_bad(OPENBLAS, version, family.name, processor.vlen)


def chooses_wrongly(arch: str, processor: Processor, blas: Mapping[str, str]) -> str:
    """Return why OpenBLAS must not choose kernels by itself: it would take some that are wrong; "" if it may.

    It takes the longest vectors that the processor has (driver/others/dynamic_riscv64.c); of a processor that
    is not known, it is taken to have them.
    """
    bad = known_bad(OPENBLAS, blas.get(OPENBLAS, ""), _LONGEST, processor.vlen)
    vectors = "v" in processor.flags or not processor.flags
    if arch != "riscv64" or not bad or not vectors or 0 < processor.vlen < _LONGEST_VLEN:
        return ""
    return f"OpenBLAS would choose {_LONGEST}, and {bad}"
