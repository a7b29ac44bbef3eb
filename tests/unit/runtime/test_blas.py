import pytest

from rvbundle_runtime import blas

LIBDIR = "usr/lib/riscv64-linux-gnu"


@pytest.mark.parametrize(
    ("library", "root", "path"),
    [
        (blas.OPENBLAS, "", None),
        (blas.REFERENCE, "", f"/{LIBDIR}/blas:/{LIBDIR}/lapack"),
        (blas.OPENBLAS, "/r", f"/r/{LIBDIR}"),
        (blas.REFERENCE, "/r", f"/r/{LIBDIR}/blas:/r/{LIBDIR}/lapack:/r/{LIBDIR}"),
    ],
)
def test_the_variable_that_chooses(library: str, root: str, path: str | None) -> None:
    expected = {} if path is None else {"LD_LIBRARY_PATH": path}
    assert blas.environment(library, LIBDIR, root) == expected


def test_where_the_reference_lies() -> None:
    assert blas.reference_libraries(LIBDIR) == (
        f"{LIBDIR}/blas/libblas.so.3",
        f"{LIBDIR}/lapack/liblapack.so.3",
    )
