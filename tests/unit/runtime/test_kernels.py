from dataclasses import replace

import pytest

from rvbundle_runtime import kernels
from rvbundle_runtime.processor import Processor

from .models import ZVL128B, ZVL256B

V256 = Processor("", frozenset("imafdcv"), vlen=256)
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
    ("processor", "version", "wrong"),
    [
        (V256, "0.3.33", True),
        (replace(V256, vlen=1024), "0.3.34", True),
        (replace(V256, vlen=0), "0.3.33", True),
        (Processor(), "0.3.33", True),
        (V256, "0.3.29", False),
        (V256, "0.3.34", False),
        (replace(V256, vlen=128), "0.3.33", False),
        (Processor("", frozenset("imafdc")), "0.3.33", False),
        (Processor(), "", False),
    ],
    ids=[
        *("256 bits", "1024 bits", "of unknown length", "nothing known"),
        *("an older release", "the fixed one", "128 bits", "no vectors", "no openblas"),
    ],
)
def test_where_openblas_must_not_choose(processor: Processor, version: str, wrong: bool) -> None:
    found = kernels.chooses_wrongly("riscv64", processor, {"openblas": version})
    assert found.startswith(f"OpenBLAS would choose zvl256b, and OpenBLAS {version} ") if wrong else not found


def test_other_architectures_have_no_such_kernels() -> None:
    assert kernels.chooses_wrongly("x86_64", V256, BAD) == ""
