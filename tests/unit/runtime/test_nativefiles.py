import os
from pathlib import Path

import pytest

from rvbundle_runtime import nativefiles


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nativefiles, "__file__", str(tmp_path / "nativefiles.py"))
    return tmp_path


def test_what_was_compiled(folder: Path) -> None:
    place = folder / "native/riscv64/probe"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"")
    assert nativefiles.path("riscv64", nativefiles.PROBE) == str(place)
    assert nativefiles.path("riscv64", nativefiles.EMULATE) == ""
    assert nativefiles.path("x86_64", nativefiles.PROBE) == ""


@pytest.mark.parametrize("arch", ["x86_64", "aarch64", "riscv64"])
def test_what_an_installation_has(arch: str) -> None:
    assert nativefiles.path(arch, nativefiles.EMULATE)
    assert nativefiles.path(arch, nativefiles.BLAS)
    for program in (nativefiles.PROBE, nativefiles.STARTER, nativefiles.BLAS_WORKER):
        assert os.access(nativefiles.path(arch, program), os.X_OK)
