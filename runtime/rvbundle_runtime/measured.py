"""What guest/measure.py found out, checked: its result comes from a payload and may hold anything. Pure."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from rvbundle_runtime.errors import ToolError

# The files in guest/ that a measurement needs, side by side in one folder; the first is the program.
SCRIPTS = (
    "measure.py",
    "measure_gate.py",
    "measure_kernels.py",
    "measure_layers.py",
    "measure_profile.py",
    "measure_workload.py",
)
# What the program prints is in RESULT + these, while it runs and after a crash.
STDOUT_SUFFIX, STDERR_SUFFIX = ".out", ".err"

RESULT_MAX = 8 << 20  # bytes of JSON: what is below, each character as \uXXXX
TEXT_MAX = 1 << 20  # characters of a run's stdout
_LINE_MAX = 1000  # characters of a name or message
_ITEMS_MAX = 1000
_NUMBER_MAX = 1e12  # seconds, calls, sizes: far above what can be, and finite
_SIZES_OF_LAYERS = 3  # in, out, batch
_SIZES_OF_CONVOLUTIONS = 9  # channels in and out, kernel h and w, strides, padded image h and w, batch

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One check of the gate: `error` as a share of `bound`, None if there is no number for it."""

    check: str
    error: float | None
    bound: float
    passed: bool


@dataclass(frozen=True)
class KernelTime:
    """Seconds per call of one kernel; None if it failed, then `name` says how."""

    name: str
    seconds: float | None


@dataclass(frozen=True)
class WorkloadTime:
    """The runs of an agent's program: `first` with its imports, `again` without, in seconds.

    `code`, `first`: None if the first run has not come to its end. `cpu`: processor seconds of the later
    runs together. `note`: why there are no later runs.
    """

    stdout: str
    code: int | None
    first: float | None
    again: tuple[float, ...]
    cpu: float
    note: str

    @property
    def seconds(self) -> float | None:
        """The median of the later runs; None if there are none."""
        return median(self.again) if self.again else None


@dataclass(frozen=True)
class Measured:
    """A measurement; what is not `finished` holds what there was when its process ended."""

    finished: bool
    gate: tuple[Check, ...]
    kernels: tuple[KernelTime, ...]
    workload: WorkloadTime | None
    layers: tuple[tuple[int, ...], ...]
    convolutions: tuple[tuple[int, ...], ...]
    versions: tuple[tuple[str, str], ...]
    libraries: tuple[tuple[str, str], ...]
    threads: int | None
    errors: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether all checks have passed, and there were some."""
        return bool(self.gate) and all(check.passed for check in self.gate)

    @property
    def wrong(self) -> tuple[Check, ...]:
        """The checks that have not passed."""
        return tuple(check for check in self.gate if not check.passed)


def from_json(data: bytes) -> object:
    """Read a result's JSON; raises ToolError if it is none, or too large."""
    if len(data) > RESULT_MAX:
        raise malformed(f"it has {len(data)} bytes")
    try:
        return json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise malformed(f"it is no JSON: {error}") from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number")


def from_result(value: object) -> Measured:
    """Return the measurement in a result; raises ToolError if it does not have the shape that it should."""
    result = record(value, "the result")
    workload = result.get("workload")
    threads = result.get("threads")
    return Measured(
        truth(result.get("finished"), "finished"),
        tuple(items(result.get("gate"), "gate", _check)),
        tuple(items(result.get("kernels"), "kernels", _kernel)),
        None if workload is None else _workload(workload),
        tuple(items(result.get("layers"), "layers", _sizes(_SIZES_OF_LAYERS))),
        tuple(items(result.get("convolutions"), "convolutions", _sizes(_SIZES_OF_CONVOLUTIONS))),
        texts(result.get("versions"), "versions"),
        texts(result.get("libraries"), "libraries"),
        None if threads is None else whole(threads, "threads"),
        tuple(items(result.get("errors"), "errors", line)),
    )


def _check(value: object, where: str) -> Check:
    check = record(value, where)
    error = check.get("error")
    passed = truth(check.get("passed"), f"{where}.passed")
    number_or_none = None if error is None else number(error, f"{where}.error")
    bound = number(check.get("bound"), f"{where}.bound")
    if passed and (number_or_none is None or number_or_none > bound):
        raise malformed(f"{where} has passed with an error of {number_or_none}")
    return Check(line(check.get("check"), f"{where}.check"), number_or_none, bound, passed)


def _kernel(value: object, where: str) -> KernelTime:
    kernel = record(value, where)
    seconds = kernel.get("seconds")
    return KernelTime(
        line(kernel.get("name"), f"{where}.name"),
        None if seconds is None else number(seconds, f"{where}.seconds"),
    )


def _workload(value: object) -> WorkloadTime:
    workload = record(value, "workload")
    code, first = workload.get("code"), workload.get("first")
    stdout = workload.get("stdout")
    if not isinstance(stdout, str) or len(stdout) > TEXT_MAX:
        raise malformed("workload.stdout is no text, or a very long one")
    return WorkloadTime(
        stdout,
        None if code is None else whole(code, "workload.code"),
        None if first is None else number(first, "workload.first"),
        tuple(items(workload.get("again"), "workload.again", number)),
        number(workload.get("cpu"), "workload.cpu"),
        line(workload.get("note"), "workload.note"),
    )


def _sizes(count: int) -> Callable[[object, str], tuple[int, ...]]:
    def read(value: object, where: str) -> tuple[int, ...]:
        sizes = tuple(items(value, where, whole))
        if len(sizes) != count or 0 in sizes:
            raise malformed(f"{where} is no list of {count} sizes")
        return sizes

    return read


def malformed(what: str) -> ToolError:
    """Return the error for a result that is not as it should be."""
    return ToolError(
        f"what the measurement in the payload gave back can't be used: {what}",
        "the agent may have written over it; run it alone, with a recipe's trace, to see what it does",
    )


def record(value: object, where: str) -> Mapping[str, object]:
    """Return a JSON object; raises ToolError for anything else."""
    if not isinstance(value, dict) or len(value) > _ITEMS_MAX:
        raise malformed(f"{where} is no object")
    return value


def items(value: object, where: str, read: Callable[[object, str], T]) -> Sequence[T]:
    """Return a JSON list, each item read by `read`; raises ToolError for anything else."""
    if not isinstance(value, list) or len(value) > _ITEMS_MAX:
        raise malformed(f"{where} is no list of at most {_ITEMS_MAX} items")
    return [read(item, f"{where}[{at}]") for at, item in enumerate(value)]


def number(value: object, where: str) -> float:
    """Return a finite number that is not negative; raises ToolError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise malformed(f"{where} is no number")
    if not 0 <= value <= _NUMBER_MAX or not math.isfinite(value):
        raise malformed(f"{where} is out of range")
    return float(value)


def whole(value: object, where: str) -> int:
    """Return a whole number that is not negative; raises ToolError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _NUMBER_MAX:
        raise malformed(f"{where} is no whole number")
    return value


def truth(value: object, where: str) -> bool:
    """Return true or false; raises ToolError for anything else."""
    if not isinstance(value, bool):
        raise malformed(f"{where} is neither true nor false")
    return value


def line(value: object, where: str) -> str:
    """Return a short text in one line, without control characters; raises ToolError for anything else."""
    if not isinstance(value, str) or len(value) > _LINE_MAX:
        raise malformed(f"{where} is no text of at most {_LINE_MAX} characters")
    return "".join(c if c.isprintable() else "?" for c in value)


def texts(value: object, where: str) -> tuple[tuple[str, str], ...]:
    """Return an object whose values are short texts, as pairs; raises ToolError for anything else."""
    return tuple((line(k, where), line(v, f"{where}.{k[:40]}")) for k, v in record(value, where).items())
