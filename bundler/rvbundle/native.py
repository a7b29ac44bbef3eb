"""Where the compiled C lies that runs inside a guest: package data, made when rvbundle is installed."""

from pathlib import Path

from rvbundle_runtime import nativefiles
from rvbundle_runtime.errors import ToolError
from rvbundle_runtime.nativefiles import GUARD, TRACE_ALL, TRACER

__all__ = ["GUARD", "TRACER", "TRACE_ALL", "exists", "library"]


def library(arch: str, name: str) -> Path:
    """Return the path of a compiled library, one of the names above; raises ToolError without it."""
    path = nativefiles.path(arch, name)
    if not path:
        raise ToolError(
            f"this installation of rvbundle has no {name} for {arch}",
            "install it again: pip compiles it (from a source tree: pip install -e .)",
        )
    return Path(path)


def exists(arch: str, name: str) -> bool:
    """Tell whether there is such a library: other architectures are never trimmed by pages."""
    return bool(nativefiles.path(arch, name))
