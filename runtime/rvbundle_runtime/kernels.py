"""Whether a run may use a family of CPU kernels, given the libraries that its payload has. Pure."""

from collections.abc import Mapping

from rvbundle_runtime import families
from rvbundle_runtime.blas import OPENBLAS
from rvbundle_runtime.families import ZVL256B, Family, Processor
from rvbundle_runtime.knownbad import known_bad

_CORE = "OPENBLAS_CORETYPE"


def why_not(family: Family, processor: Processor, blas: Mapping[str, str]) -> str:
    """Return why `family` can't be used on `processor` with the BLAS libraries `blas`; "" if it can."""
    version = blas.get(OPENBLAS, "")
    return families.why_not(family, processor) or known_bad(OPENBLAS, version, family.name, processor.vlen)


def instead(arch: str, processor: Processor, blas: Mapping[str, str]) -> tuple[Family, str] | None:
    """Return the family to hold OpenBLAS to, and why, where it would choose kernels known to be wrong.

    None where it may choose by itself. It takes the longest vectors that the processor has
    (driver/others/dynamic_riscv64.c); of a processor that is not known, it is taken to have them.
    """
    bad = known_bad(OPENBLAS, blas.get(OPENBLAS, ""), ZVL256B.name, processor.vlen)
    vectors = "v" in processor.flags or not processor.flags
    if arch != "riscv64" or not bad or not vectors or 0 < processor.vlen < ZVL256B.vlen:
        return None
    for family in families.to_trace(arch, processor, ()):
        if not why_not(family, processor, blas):
            return family, f"not {ZVL256B.name}, which it would choose: {bad}"
    return None


def core_only(family: Family) -> dict[str, str]:
    """Return the variable that holds OpenBLAS to `family`, and leaves other libraries free."""
    return {_CORE: family.env[_CORE]}
