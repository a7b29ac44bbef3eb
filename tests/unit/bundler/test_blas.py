from pathlib import Path

import pytest

from rvbundle import blas

CONFIG = b"\0\0OpenBLAS 0.3.29 NO_LAPACKE DYNAMIC_ARCH\0"


def put(folder: Path, name: str, data: bytes = b"") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("libopenblas.so.0", CONFIG, {"openblas": "0.3.29"}),
        (
            "libscipy_openblas64_-32a4b2a6.so",
            b"x\0OpenBLAS 0.3.31.188.0  USE64BITINT\0",
            {"openblas": "0.3.31"},
        ),
        ("libopenblas.so.0", b"OpenBLAS warning: precompiled\0OpenBLAS : Program\0", {}),
        ("libopenblas.so.0", b"", {}),
        ("libother.so", CONFIG, {}),
        ("pyopenblas.so", CONFIG, {}),
    ],
    ids=["of Debian", "of a wheel", "no version", "empty", "another library", "no library"],
)
def test_openblas(tmp_path: Path, name: str, data: bytes, expected: dict[str, str]) -> None:
    assert blas.versions([(f"usr/lib/x/{name}", put(tmp_path, name, data))]) == expected


def test_of_several_the_first(tmp_path: Path) -> None:
    scipy = put(tmp_path / "scipy", "libscipy_openblas-b.so", b"\0OpenBLAS 0.3.30 \0")
    numpy = put(tmp_path / "numpy", "libscipy_openblas64_-a.so", CONFIG)
    files = [("scipy.libs/libscipy_openblas-b.so", scipy), ("numpy.libs/libscipy_openblas64_-a.so", numpy)]
    assert blas.versions(files) == {"openblas": "0.3.29"}


def test_reference(tmp_path: Path) -> None:
    real = put(tmp_path / "blas", "libblas.so.3.12.1")
    link = tmp_path / "blas/libblas.so.3"
    link.symlink_to(real.name)
    ours = put(tmp_path / "openblas", "libblas.so.3")
    core = put(tmp_path / "openblas", "libopenblas.so.0", CONFIG)
    files = [("usr/lib/x/libblas.so.3", ours), ("usr/lib/x/libopenblas.so.0", core)]
    assert blas.versions(files) == {"openblas": "0.3.29"}
    files.append(("usr/lib/x/blas/libblas.so.3", link))
    assert blas.versions(files) == {"openblas": "0.3.29", "reference": "3.12.1"}
    assert blas.versions([("usr/lib/x/libblas.so.3", real)]) == {"reference": "3.12.1"}
    assert blas.versions([]) == {}
