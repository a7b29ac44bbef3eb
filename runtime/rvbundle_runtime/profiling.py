"""A profile of an agent's run, from the result of guest/measure.py: checked, and as a table of text. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rvbundle_runtime.measured import items, line, malformed, number, record, texts, whole

_NAME_WIDTH = 70  # in the tables; what is longer is cut in the middle
_KINDS = {"operators": "operator", "functions": "function"}


@dataclass(frozen=True)
class Operator:
    """An operator of torch, or a function of Python if the agent does not use torch.

    `own`: seconds in it; `total`: with what it called.
    """

    name: str
    calls: int
    own: float
    total: float


@dataclass(frozen=True)
class Kernel:
    """A kernel of a numeric library, with its shape: calls and seconds in all of them."""

    library: str
    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Where the seconds of a run went.

    `kind`: what `operators` are, "operators" or "functions". `python`: seconds in Python's own code.
    `kernels`: as far as the libraries tell of them; their time is part of an operator's. `families`: pairs
    of a library and the instruction family that it used.
    """

    kind: str
    total: float
    python: float
    operators: tuple[Operator, ...]
    kernels: tuple[Kernel, ...]
    families: tuple[tuple[str, str], ...]


def from_result(value: object) -> Profile:
    """Return the profile in a measurement's result; raises ToolError if there is none or it is malformed."""
    result = record(value, "the result")
    if result.get("profile") is None:
        raise malformed("it has no profile")
    profile = record(result["profile"], "profile")
    kind = profile.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise malformed("profile.kind is unknown")
    return Profile(
        kind,
        number(profile.get("total"), "profile.total"),
        number(profile.get("python"), "profile.python"),
        tuple(items(profile.get("operators"), "profile.operators", _operator)),
        tuple(items(profile.get("kernels"), "profile.kernels", _kernel)),
        texts(result.get("libraries"), "libraries"),
    )


def _operator(value: object, where: str) -> Operator:
    operator = record(value, where)
    return Operator(
        line(operator.get("name"), f"{where}.name"),
        whole(operator.get("calls"), f"{where}.calls"),
        number(operator.get("self"), f"{where}.self"),
        number(operator.get("total"), f"{where}.total"),
    )


def _kernel(value: object, where: str) -> Kernel:
    kernel = record(value, where)
    return Kernel(
        line(kernel.get("library"), f"{where}.library"),
        line(kernel.get("name"), f"{where}.name"),
        whole(kernel.get("calls"), f"{where}.calls"),
        number(kernel.get("seconds"), f"{where}.seconds"),
    )


def profile_lines(profile: Profile) -> list[str]:
    """Return the profile as lines of text: what it is made of, by operator, by kernel, and the families."""
    word = _KINDS[profile.kind]
    share = _share(profile.python, profile.total)
    lines = [
        f"one run, profiled: {profile.total:.3f} s, {share} of them in Python's own code",
        "",
        f"{'share':>6}  {'own s':>9}  {'total s':>9}  {'calls':>9}  {word}",
    ]
    lines += [
        f"{_share(o.own, profile.total):>6}  {o.own:9.4f}  {o.total:9.4f}  {o.calls:9}  {_short(o.name)}"
        for o in profile.operators
    ]
    if profile.kernels:
        lines += ["", f"{'share':>6}  {'seconds':>9}  {'calls':>9}  kernel"]
        lines += [
            f"{_share(k.seconds, profile.total):>6}  {k.seconds:9.4f}  {k.calls:9}  {_short(_kernel_text(k))}"
            for k in profile.kernels
        ]
    else:
        lines += ["", "no kernel of a numeric library has told of itself"]
    return [*lines, "", _families_line(profile.families)]


def _kernel_text(kernel: Kernel) -> str:
    return f"{kernel.library} {kernel.name}"


def _families_line(families: Sequence[tuple[str, str]]) -> str:
    if not families:
        return "instruction families: not known"
    return "instruction families: " + "; ".join(f"{library}: {family}" for library, family in families)


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "–"


def _short(name: str) -> str:
    if len(name) <= _NAME_WIDTH:
        return name
    half = (_NAME_WIDTH - 1) // 2
    return f"{name[: _NAME_WIDTH - 1 - half]}…{name[-half:]}"
