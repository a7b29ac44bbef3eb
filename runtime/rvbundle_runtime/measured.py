"""What guest/measure.py has written: checked, for it comes from inside a payload. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rvbundle_runtime.errors import SandboxError

_ROWS_MAX = 4096  # of any list
_TEXT_MAX = 1 << 20  # characters
_T = TypeVar("_T")


@dataclass(frozen=True)
class Check:
    """One check of the correctness gate. `error` is a share of what may be; None where it is not finite."""

    name: str
    error: float | None
    passed: bool


@dataclass(frozen=True)
class KernelTime:
    """A kernel by itself: seconds per call."""

    name: str
    seconds: float


@dataclass(frozen=True)
class WorkloadTime:
    """The agent's workload: what its first run printed, seconds of that and of the repeats, a note if any."""

    stdout: str
    first: float
    again: tuple[float, ...]
    note: str


@dataclass(frozen=True)
class Measured:
    """A result: what was not asked for is empty."""

    gate: tuple[Check, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    workload: WorkloadTime | None = None
    versions: Mapping[str, str] | None = None


def from_result(value: Mapping[str, Any]) -> Measured:
    """Read a result; raises SandboxError for what can't be one."""
    return checked(lambda: _read(value))


def checked(read: Callable[[], _T]) -> _T:
    """Return what `read` returns; raises SandboxError if the value that it reads has another shape."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SandboxError(
            f"what was measured inside the image can't be read: {type(error).__name__}: {error}",
            "the agent may have written over the result",
        ) from None


def _read(value: Mapping[str, Any]) -> Measured:
    return Measured(
        gate=tuple(
            Check(text(row["check"]), _or_none(row["error"]), row["passed"] is True)
            for row in rows(value.get("gate", []))
        ),
        kernels=tuple(
            KernelTime(text(row["name"]), number(row["seconds"])) for row in rows(value.get("kernels", []))
        ),
        workload=_workload(value["workload"]) if value.get("workload") else None,
        versions=texts(value.get("versions", {})),
    )


def _workload(value: Mapping[str, Any]) -> WorkloadTime:
    return WorkloadTime(
        stdout=str(value["stdout"])[:_TEXT_MAX],
        first=number(value["first"]),
        again=tuple(number(seconds) for seconds in rows(value["again"])),
        note=text(value["note"]),
    )


def _or_none(value: Any) -> float | None:
    return None if value is None else number(value)


def rows(value: Any) -> list[Any]:
    """Return a list of a bounded length; raises TypeError."""
    if not isinstance(value, list) or len(value) > _ROWS_MAX:
        raise TypeError("expected a list, and not too long a one")
    return value


def number(value: Any) -> float:
    """Return a finite number that is not negative; raises TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise TypeError(f"expected a finite number, found {str(value)[:40]!r}")
    return float(value)


def text(value: Any) -> str:
    """Return a text that a terminal can be given; raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {str(value)[:40]!r}")
    return "".join(c if c.isprintable() or c == " " else "?" for c in value[:1000])


def texts(value: Any) -> dict[str, str]:
    """Return a table of texts; raises TypeError."""
    if not isinstance(value, dict) or len(value) > _ROWS_MAX:
        raise TypeError("expected a table")
    return {text(name): text(what) for name, what in value.items()}
