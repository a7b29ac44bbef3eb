"""The BLAS libraries of a payload: several may be there, and a variable of the guest's chooses. Pure.

What is found without a variable lies in the payload's folder of libraries. Debian has the reference
implementation in two folders below it; in a payload with OpenBLAS, it stays there.
"""

OPENBLAS, REFERENCE = "openblas", "reference"
_REFERENCE_LIBRARIES = ("blas/libblas.so.3", "lapack/liblapack.so.3")


def reference_libraries(libdir: str) -> tuple[str, ...]:
    """Return where a payload with several has the reference libraries, given its folder of libraries."""
    return tuple(f"{libdir}/{path}" for path in _REFERENCE_LIBRARIES)


def environment(library: str, libdir: str, root: str = "") -> dict[str, str]:
    """Return the variables by which a payload's programs find the BLAS `library` (OPENBLAS or REFERENCE).

    `root` is the payload's root as its programs see it: "" in the sandbox, where what lies in `libdir` is
    found without a variable.
    """
    folders = [path.rpartition("/")[0] for path in reference_libraries(libdir) if library == REFERENCE]
    folders += [libdir] if root else []
    return {"LD_LIBRARY_PATH": ":".join(f"{root}/{folder}" for folder in folders)} if folders else {}
