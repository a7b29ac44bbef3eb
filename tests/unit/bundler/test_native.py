from pathlib import Path

import pytest

from rvbundle import native
from rvbundle_runtime import nativefiles
from rvbundle_runtime.errors import ToolError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nativefiles, "__file__", str(tmp_path / "nativefiles.py"))
    return tmp_path


def test_a_compiled_library(folder: Path) -> None:
    place = folder / "native/riscv64/guard.so"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"")
    assert native.library("riscv64", native.GUARD) == place
    assert native.exists("riscv64", native.GUARD)
    assert not native.exists("riscv64", native.TRACER)
    assert not native.exists("x86_64", native.GUARD)


def test_one_that_was_not_compiled(folder: Path) -> None:
    with pytest.raises(ToolError) as caught:
        native.library("s390x", native.TRACER)
    assert caught.value.message == "this installation of rvbundle has no tracer.so for s390x"
    assert caught.value.hint == ("install it again: pip compiles it (from a source tree: pip install -e .)")
