"""Which releases of numeric libraries compute nonsense with which kernels. Pure."""

from rvbundle_runtime.blas import OPENBLAS

_FIXED_AGAIN = (0, 3, 34)
_SINCE = (0, 3, 30)


def known_bad(library: str, version: str, family: str, vlen: int = 0) -> str:
    """Return why `library` in `version` must not use the kernels of `family`; "" if nothing is known.

    `vlen` are the bits of the processor's vectors, 0 if unknown. Sources: OpenBLAS#5408 (0.3.30: products of
    matrix and vector may be NaN), OpenBLAS#5811 and numpy#30995 (up to 0.3.33: A.T @ A and cholesky wrong on
    vectors of 256 bits; fixed in 0.3.34). That 0.3.34 is wrong on longer ones was seen in Debian's build
    under qemu-riscv64 10.0 with 512 and 1024 bits, where 0.3.29 is right. In between and since is not known,
    and counts as wrong.
    """
    numbers = _numbers(version)
    if library != OPENBLAS or family != "zvl256b" or not numbers or numbers < _SINCE:
        return ""
    if numbers < _FIXED_AGAIN:
        return f"OpenBLAS {version} computes nonsense with these kernels (OpenBLAS#5408, OpenBLAS#5811)"
    if vlen > 256:
        return f"OpenBLAS {version} computes nonsense with these kernels on vectors of {vlen} bits"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version; () if it does not begin with three."""
    parts = version.split(".")[:3]
    return tuple(map(int, parts)) if len(parts) == 3 and all(p.isdecimal() for p in parts) else ()
