"""Bytecode, made by the recipe's own interpreter and the same every time."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rvbundle import process
from rvbundle.environment import Interpreter


@dataclass(frozen=True)
class Job:
    """A source to compile: where from and to, its name in tracebacks, and whether to drop its docstrings."""

    source: Path
    target: Path
    name: str
    drop_docstrings: bool = False


_SCRIPT = Path(__file__).parent / "inside" / "compile_all.py"


def compile_sources(interpreter: Interpreter, jobs: Sequence[Job], columns: bool = True) -> set[Path]:
    """Carry out the jobs; return the sources that can't be compiled.

    Without `columns`, tracebacks of these modules have line numbers but mark no part of a line: that is a
    quarter of the bytecode's size (PEP 657; Python's own switch for it).
    """
    switches = [] if columns else ["-X", "no_debug_ranges"]
    done = process.run(
        [interpreter.executable, "-I", *switches, _SCRIPT],
        env={"PATH": os.defpath, "PYTHONHASHSEED": "0"},
        stdin=json.dumps(
            [[str(job.source), str(job.target), job.name, job.drop_docstrings] for job in jobs]
        ).encode(),
    )
    return {Path(row[0]) for row in json.loads(done.stdout)}
