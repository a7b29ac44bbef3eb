"""What an agent printed when it was traced, and whether it prints the same now. Pure."""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Also a sign: "-0.5" and "0.5" are different numbers, "3-5" are two.
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)(?![\w])")
OUTPUT_MAX = 64 << 10  # characters of an output that an image carries along


@dataclass(frozen=True)
class Workload:
    """A recorded run: the agent's arguments, what it printed ("" if `golden` is False), the tolerance."""

    args: tuple[str, ...]
    golden: bool
    tolerance: float | None
    stdout: str


def to_details(workloads: tuple[Workload, ...]) -> list[dict[str, Any]]:
    """Return workloads as an image's index carries them; outputs that are too long are left out."""
    return [
        {
            "args": list(w.args),
            "golden": w.golden and len(w.stdout) <= OUTPUT_MAX,
            "tolerance": w.tolerance,
            "stdout": w.stdout if w.golden and len(w.stdout) <= OUTPUT_MAX else "",
        }
        for w in workloads
    ]


def from_details(details: Mapping[str, Any], arch: str) -> tuple[Workload, ...]:
    """Return the workloads of a payload; () for an image that carries none, or what is none."""
    try:
        return tuple(_workload(row) for row in details["workloads"][arch])
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()


def _workload(row: Mapping[str, Any]) -> Workload:
    args, tolerance = tuple(row["args"]), row["tolerance"]
    if not all(isinstance(text, str) and "\0" not in text for text in (*args, row["stdout"])):
        raise TypeError("expected texts")
    tolerance = None if tolerance is None else float(tolerance)
    return Workload(args, row["golden"] is True, tolerance, row["stdout"])


def compare(expected: str, found: str, tolerance: float | None) -> str:
    """Return "" if two outputs are the same, else a few lines that show where they differ.

    With a tolerance the texts between the numbers must be equal, and each number within that relative
    difference (math.isclose; nan equals nan).
    """
    if expected == found:
        return ""
    if tolerance is not None and _close(expected, found, tolerance):
        return ""
    lines = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "when traced", "now", lineterm="", n=0
    )
    shown = [line[:200] for line in lines][:8]
    return "\n".join(f"    {line}" for line in shown) or "    (only line ends differ)"


def _close(expected: str, found: str, tolerance: float) -> bool:
    if _NUMBER.split(expected) != _NUMBER.split(found):
        return False
    pairs = zip(_NUMBER.findall(expected), _NUMBER.findall(found), strict=True)
    return all(
        math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=0.0)
        or (math.isnan(float(a)) and math.isnan(float(b)))
        for a, b in pairs
    )
