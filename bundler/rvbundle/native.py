"""Where the compiled C lies that runs inside a guest: package data, made when rvbundle is installed."""

from pathlib import Path

import rvbundle_runtime
from rvbundle_runtime.errors import ToolError

TRACER, TRACE_ALL, GUARD = "tracer.so", "traceall.so", "guard.so"


def library(arch: str, name: str) -> Path:
    """Return the path of a compiled library, one of the names above; raises ToolError without it."""
    path = Path(rvbundle_runtime.__file__).parent / "native" / arch / name
    if not path.is_file():
        raise ToolError(
            f"this installation of rvbundle has no {name} for {arch}",
            "install it again: pip compiles it (from a source tree: pip install -e .)",
        )
    return path


def exists(arch: str, name: str) -> bool:
    """Tell whether there is such a library: other architectures are never trimmed by pages."""
    return (Path(rvbundle_runtime.__file__).parent / "native" / arch / name).is_file()
