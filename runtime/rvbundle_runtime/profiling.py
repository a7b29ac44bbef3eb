"""Where the time of a workload goes: what guest/measure.py found, checked, and as a table of text. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rvbundle_runtime.measured import checked, number, rows, text, texts

_SHOWN = 15  # lines of each table


@dataclass(frozen=True)
class Operator:
    """An operator of torch, or a function of Python: seconds of its own, and with what it calls."""

    name: str
    calls: int
    own: float
    total: float


@dataclass(frozen=True)
class Kernel:
    """A kernel of a library, with the sizes that it was called for; seconds of all its calls."""

    library: str
    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """A profile of one run. `python` are the seconds outside of operators; `note` says why there is none."""

    total: float
    python: float
    operators: tuple[Operator, ...]
    kernels: tuple[Kernel, ...]
    libraries: Mapping[str, str]
    families: Mapping[str, str]
    note: str = ""


def from_result(value: Mapping[str, Any]) -> Profile:
    """Read the profile of a result; raises SandboxError for what can't be one."""
    return checked(lambda: _read(value["profile"]))


def _read(value: Mapping[str, Any]) -> Profile:
    return Profile(
        total=number(value.get("total", 0.0)),
        python=number(value.get("python", 0.0)),
        operators=tuple(
            Operator(text(row["name"]), int(number(row["calls"])), number(row["self"]), number(row["total"]))
            for row in rows(value.get("operators", []))
        ),
        kernels=tuple(
            Kernel(text(row["library"]), text(row["name"]), int(number(row["calls"])), number(row["seconds"]))
            for row in rows(value.get("kernels", []))
        ),
        libraries=texts(value.get("libraries", {})),
        families=texts(value.get("families", {})),
        note=text(value.get("note", "")),
    )


def profile_lines(profile: Profile) -> list[str]:
    """Return the tables: by operator, by kernel, and which instructions the libraries picked kernels for."""
    if profile.note:
        return [f"the workload can't be profiled: {profile.note}"]
    lines = [f"one run of the workload, imports done: {profile.total:.3f} s", ""]
    total = profile.total
    lines += _table("by operator", [(o.name, o.calls, o.own) for o in profile.operators], total)
    if profile.operators and profile.python < total:
        lines.append(_line(profile.python, total, "", "Python and the rest"))
    lines.append("")
    kernels = [(f"{k.library} {k.name}", k.calls, k.seconds) for k in profile.kernels]
    if kernels:
        lines += _table("by kernel", kernels, total)
    else:
        lines.append("by kernel: oneDNN and MKL were not called, or do not tell")
    lines += ["", "kernels were picked for:"]
    lines += [f"  {name:<9} {what}" for name, what in {**profile.families, **profile.libraries}.items()]
    return lines


def _table(title: str, found: list[tuple[str, int, float]], total: float) -> list[str]:
    lines = [f"{title}:"]
    lines += [_line(seconds, total, f"{calls}x", name) for name, calls, seconds in found[:_SHOWN]]
    if len(found) > _SHOWN:
        rest = sum(seconds for _, _, seconds in found[_SHOWN:])
        lines.append(_line(rest, total, "", f"{len(found) - _SHOWN} others"))
    return lines


def _line(seconds: float, total: float, calls: str, name: str) -> str:
    return f"  {100 * seconds / total if total else 0:5.1f} %  {seconds:9.4f} s  {calls:>8}  {name}"
