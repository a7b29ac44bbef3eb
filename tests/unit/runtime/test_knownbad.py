import pytest

from rvbundle_runtime.knownbad import known_bad

ISSUES = "computes nonsense with these kernels (OpenBLAS#5408, OpenBLAS#5811)"


@pytest.mark.parametrize("version", ["0.3.30", "0.3.31", "0.3.32", "0.3.33", "0.3.31.188.0"])
@pytest.mark.parametrize("vlen", [0, 256, 512])
def test_releases_that_are_wrong_on_256_bits(version: str, vlen: int) -> None:
    assert known_bad("openblas", version, "zvl256b", vlen) == f"OpenBLAS {version} {ISSUES}"


@pytest.mark.parametrize("vlen", [512, 1024])
@pytest.mark.parametrize("version", ["0.3.34", "0.3.35", "0.4.0"])
def test_releases_that_are_wrong_on_longer_vectors(version: str, vlen: int) -> None:
    found = known_bad("openblas", version, "zvl256b", vlen)
    assert found == f"OpenBLAS {version} computes nonsense with these kernels on vectors of {vlen} bits"


@pytest.mark.parametrize(
    ("library", "version", "family", "vlen"),
    [
        ("openblas", "0.3.29", "zvl256b", 256),
        ("openblas", "0.3.29", "zvl256b", 1024),
        ("openblas", "0.3.34", "zvl256b", 256),
        ("openblas", "0.3.34", "zvl256b", 0),
        ("openblas", "0.3.33", "zvl128b", 256),
        ("openblas", "0.3.33", "generic", 256),
        ("reference", "0.3.33", "zvl256b", 256),
        ("openblas", "", "zvl256b", 256),
        ("openblas", "0.3", "zvl256b", 256),
        ("openblas", "x.y.z", "zvl256b", 256),
        ("openblas", "0.3.x", "zvl256b", 256),
    ],
)
def test_nothing_is_known(library: str, version: str, family: str, vlen: int) -> None:
    assert known_bad(library, version, family, vlen) == ""
