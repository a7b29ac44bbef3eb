"""Compare numpy's products and factors with sums that no BLAS computes, and say which BLAS it has.

`products.py` prints what is wrong, or "right"; `products.py which` the library and the kernels as well.
"""

import ctypes
import sys

import numpy as np

SIZES = ((1, 1, 1), (7, 4, 9), (16, 16, 16), (31, 33, 29), (65, 67, 63), (3, 127, 2))
TOLERANCE = {"float32": 2e-5, "float64": 1e-13}


def errors(kind, n, k, m, random):
    """Yield (what was computed, how far it is off) for matrices of n x k and k x m numbers."""
    a, b = random.randn(n, k).astype(kind), random.randn(k, m).astype(kind)
    exact_a, exact_b = a.astype("float64"), b.astype("float64")
    exact = np.einsum("ik,kj->ij", exact_a, exact_b)
    scale = 10 * k**0.5
    yield "gemm", off(a @ b, exact, scale)
    yield "gemm of transposed", off(np.asfortranarray(a) @ np.asfortranarray(b), exact, scale)
    yield "gemv", off(a @ b[:, 0], exact[:, 0], scale)
    yield "gemv of transposed", off(b.T @ a[0], exact[0], scale)
    square = np.einsum("ik,jk->ij", exact_a, exact_a)
    yield "syrk", off(a @ a.T, square, 2 * scale)
    positive = (square + n * np.eye(n)).astype(kind)
    factor = np.linalg.cholesky(positive).astype("float64")
    yield "cholesky", off(np.einsum("ik,jk->ij", factor, factor), positive, 5 * abs(positive).max())
    solution = np.linalg.solve(positive, a[:, 0]).astype("float64")
    yield "solve", off(np.einsum("ik,k->i", positive, solution), a[:, 0], 200)


def off(found, exact, scale):
    """Return the largest difference in units of `scale`; infinity for NaN."""
    difference = float(np.abs(found - exact).max()) / scale
    return difference if difference == difference else float("inf")


def library():
    """Return the path of the libblas.so.3 in this process, and the name of OpenBLAS's kernels."""
    with open("/proc/self/maps") as file:
        paths = {line.split()[-1] for line in file if "/libblas.so.3" in line}
    if not paths:
        return "built in"
    core = ""
    if not any("/blas/" in path for path in paths):
        openblas = ctypes.CDLL("libopenblas.so.0")
        openblas.openblas_get_corename.restype = ctypes.c_char_p
        core = " " + openblas.openblas_get_corename().decode()
    return " ".join(sorted(paths)) + core


def main():
    """Check every size in both kinds of numbers."""
    random = np.random.RandomState(1)
    wrong = set()
    for kind, tolerance in TOLERANCE.items():
        for n, k, m in SIZES:
            try:
                wrong |= {
                    f"{kind} {what}" for what, error in errors(kind, n, k, m, random) if error > tolerance
                }
            except np.linalg.LinAlgError as error:
                wrong.add(f"{kind} {error}")
    print("wrong: " + ", ".join(sorted(wrong)) if wrong else "right")
    if sys.argv[1:] == ["which"]:
        print(library())


main()
