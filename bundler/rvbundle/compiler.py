"""Bytecode, made by the recipe's own interpreter and the same every time."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rvbundle import process
from rvbundle.environment import Interpreter

_SCRIPT = Path(__file__).parent / "inside" / "compile_all.py"


def compile_sources(interpreter: Interpreter, jobs: Sequence[tuple[Path, Path, str]]) -> set[Path]:
    """Compile (source, destination, name in tracebacks) each; return the sources that can't be compiled."""
    done = process.run(
        [interpreter.executable, "-I", _SCRIPT],
        env={"PATH": os.defpath, "PYTHONHASHSEED": "0"},
        stdin=json.dumps([[str(s), str(d), name] for s, d, name in jobs]).encode(),
    )
    return {Path(row[0]) for row in json.loads(done.stdout)}
