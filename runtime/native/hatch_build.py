"""Compiles the C for every architecture when rvbundle is installed or its wheel is built."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_HERE = Path(__file__).resolve().parent
_OUTPUT = _HERE.parent / "rvbundle_runtime" / "native"


class CompileHook(BuildHookInterface[Any]):
    """Fills rvbundle_runtime/native/ARCHITECTURE/ before hatchling collects the files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile unless all results are newer than all sources."""
        if self.target_name != "wheel":
            return  # an sdist holds the sources
        sys.path.insert(0, str(_HERE))
        import build

        if not build.is_fresh(_OUTPUT, build.TARGETS):
            build.build(_OUTPUT, build.TARGETS)
        build_data["artifacts"] += [
            "runtime/rvbundle_runtime/native/**/*.so",
            f"runtime/rvbundle_runtime/native/{build.MUSL_LICENCE}",
            *(f"runtime/rvbundle_runtime/native/**/{program}" for program in build.PROGRAMS),
        ]
