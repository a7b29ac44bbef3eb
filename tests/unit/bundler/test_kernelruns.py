from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rvbundle.kernelruns import KernelRun, kernel_runs
from rvbundle_runtime import families
from rvbundle_runtime.processor import Processor

from .test_split import frozen

RISCV = replace(frozen(), arch="riscv64", libdir="usr/lib/r", emulators=Path("/e"))
BOTH = {"openblas": "0.3.29", "reference": "3.12.1"}
PLAIN, V128, V256 = "rv64,v=false", "rv64,v=true,vlen=128", "rv64,v=true,vlen=256"


def held(run: KernelRun) -> tuple[str, str]:
    return run.env["OPENBLAS_CORETYPE"], run.processor


def test_vectors_are_traced_on_a_processor_that_has_them() -> None:
    """The output of the first run counts: it is of what emulated runs use."""
    runs = kernel_runs(replace(RISCV, blas=BOTH), Processor("GenuineIntel", frozenset({"avx2"})), ())
    assert [family.name for family in runs.families] == ["zvl256b", "zvl128b", "generic"]
    assert [held(run) for run in runs.watched] == [
        ("RISCV64_GENERIC", PLAIN),
        ("RISCV64_GENERIC", PLAIN),
        ("RISCV64_ZVL128B", V128),
        ("RISCV64_ZVL256B", V256),
    ]
    paths = [run.env.get("LD_LIBRARY_PATH") for run in runs.watched]
    assert paths == [None, "/usr/lib/r/blas:/usr/lib/r/lapack", None, None]


@pytest.mark.parametrize(
    ("blas", "names", "count"),
    [
        ({}, ["generic"], 1),
        ({"reference": "3.12.1"}, ["generic"], 1),
        ({"openblas": "0.3.29"}, ["zvl256b", "zvl128b", "generic"], 3),
        ({"openblas": "0.3.33"}, ["zvl128b", "generic"], 2),
        ({"openblas": "0.3.34", "reference": "3.12.1"}, ["zvl256b", "zvl128b", "generic"], 4),
    ],
    ids=["no blas", "the reference alone", "openblas alone", "a wrong one", "one that is wrong elsewhere"],
)
def test_only_what_the_blas_has(blas: Mapping[str, str], names: list[str], count: int) -> None:
    runs = kernel_runs(replace(RISCV, blas=blas), Processor(), ())
    assert [family.name for family in runs.families] == names
    assert len(runs.watched) == count


def test_what_numpy_must_not_use_is_remembered_for_boards_with_vectors() -> None:
    runs = kernel_runs(replace(RISCV, blas=BOTH), Processor(), ("RVV",))
    assert runs.families[-1].numpy == ("RVV",)
    assert not any("NPY_DISABLE_CPU_FEATURES" in run.env for run in runs.watched)  # traced without vectors


def test_an_emulated_arm_is_held_back_as_well() -> None:
    """Its default processor has every feature: run natively, numpy is told not to use them."""
    runs = kernel_runs(replace(RISCV, arch="aarch64"), Processor(), ("ASIMDHP",))
    assert [run.env.get("NPY_DISABLE_CPU_FEATURES") for run in runs.watched] == [None, "ASIMDHP"]
    assert len(kernel_runs(replace(RISCV, arch="aarch64"), Processor(), ()).watched) == 1


@pytest.mark.parametrize(
    ("blas", "names"),
    [
        ({"openblas": "0.3.29"}, ["zvl256b", "zvl128b", "generic"]),
        ({"openblas": "0.3.31"}, ["zvl128b", "generic"]),
        ({}, ["generic"]),
    ],
)
def test_natively_on_a_board_with_vectors(blas: Mapping[str, str], names: list[str]) -> None:
    processor = Processor("", frozenset("imafdcv"), vlen=256)
    runs = kernel_runs(replace(RISCV, emulators=None, blas=blas), processor, ())
    assert [family.name for family in runs.families] == names
    assert {run.processor for run in runs.watched} == {""}


def test_natively_each_family_of_this_machine() -> None:
    processor = Processor("X", frozenset("avx2 fma bmi1 bmi2 f16c movbe sse4_2 popcnt".split()))
    runs = kernel_runs(frozen(), processor, ())
    assert [family.name for family in runs.families] == ["avx2", "baseline"]
    expected = tuple(KernelRun(families.environment(family, processor)) for family in runs.families)
    assert runs.watched == expected
