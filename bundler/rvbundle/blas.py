"""Which BLAS libraries a tree has, and in which versions: from the libraries themselves."""

import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path

from rvbundle_runtime.blas import OPENBLAS, REFERENCE

# What openblas_get_config() returns lies in the library as text (driver/others/openblas_get_config.c).
_OPENBLAS = re.compile(rb"\0OpenBLAS (\d+\.\d+\.\d+)[. ]")
_REFERENCE = re.compile(r"libblas\.so\.(\d+\.\d+\.\d+)")  # the file that the soname is a link to


def versions(libraries: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """Return {name: version} of the BLAS libraries among `libraries`, (path in the tree, source) each.

    Of several OpenBLAS (numpy's wheel has one, scipy's another) it is that of the first path. What torch's
    wheels link statically (MKL) is not among them.
    """
    found: dict[str, str] = {}
    for path, source in sorted(libraries):
        name = os.path.basename(path)
        if name.startswith("lib") and "openblas" in name and OPENBLAS not in found:
            version = _openblas(source)
            found |= {OPENBLAS: version} if version else {}
        elif name == "libblas.so.3" and REFERENCE not in found:
            match = _REFERENCE.fullmatch(os.path.basename(os.path.realpath(source)))
            found |= {REFERENCE: match[1]} if match else {}
    return found


def _openblas(source: Path) -> str:
    with source.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return ""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            match = _OPENBLAS.search(data)
            return match[1].decode() if match else ""
