from dataclasses import replace

import pytest

from rvbundle_runtime import kernels
from rvbundle_runtime.families import ZVL128B, ZVL256B, Processor

V256 = Processor("", frozenset("imafdcv"), 256)
GOOD, BAD, LATEST = ({"openblas": version} for version in ("0.3.29", "0.3.33", "0.3.34"))


def test_a_family_that_is_known_to_be_wrong() -> None:
    assert kernels.why_not(ZVL256B, V256, GOOD) == ""
    assert kernels.why_not(ZVL256B, V256, {}) == ""
    assert kernels.why_not(ZVL256B, V256, BAD).startswith("OpenBLAS 0.3.33 computes nonsense")
    assert kernels.why_not(ZVL256B, replace(V256, vlen=512), LATEST).endswith("on vectors of 512 bits")
    assert kernels.why_not(ZVL128B, V256, BAD) == ""
    few = replace(V256, vlen=128)
    assert kernels.why_not(ZVL256B, few, BAD) == "it needs vectors of 256 bits, and this processor's have 128"


@pytest.mark.parametrize(
    ("processor", "version", "family"),
    [
        (V256, "0.3.33", "zvl128b"),
        (replace(V256, vlen=1024), "0.3.34", "zvl128b"),
        (replace(V256, vlen=0), "0.3.33", "generic"),
        (Processor(), "0.3.33", "generic"),
        (V256, "0.3.29", None),
        (V256, "0.3.34", None),
        (replace(V256, vlen=128), "0.3.33", None),
        (Processor("", frozenset("imafdc")), "0.3.33", None),
        (Processor(), "", None),
    ],
    ids=[
        *("256 bits", "1024 bits", "of unknown length", "nothing known"),
        *("an older release", "the fixed one", "128 bits", "no vectors", "no openblas"),
    ],
)
def test_what_openblas_is_held_to(processor: Processor, version: str, family: str | None) -> None:
    found = kernels.instead("riscv64", processor, {"openblas": version})
    assert (found and found[0].name) == family
    if found:
        assert found[1].startswith(f"not zvl256b, which it would choose: OpenBLAS {version} ")
        assert kernels.core_only(found[0]) == {"OPENBLAS_CORETYPE": f"RISCV64_{str(family).upper()}"}


def test_other_architectures_have_no_such_kernels() -> None:
    assert kernels.instead("x86_64", V256, BAD) is None
