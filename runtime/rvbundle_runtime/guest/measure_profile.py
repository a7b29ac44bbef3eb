"""Where a run's time goes: torch's operators or Python's functions, and what the kernels' libraries tell.

oneDNN (ONEDNN_VERBOSE), MKL (MKL_VERBOSE) and OpenBLAS (OPENBLAS_VERBOSE) print lines about what they do to
the program's own stdout and stderr; `split` tells them from the program's.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any, Callable, Iterable

TOP = 30
_NAME_MAX = 200
_CORE = re.compile(r"Core: (\w+)")  # OPENBLAS_VERBOSE=2, once for each OpenBLAS that is loaded
_MKL_CALL = re.compile(r"MKL_VERBOSE ([A-Za-z_0-9]+)\((.*)\) ([0-9.]+)(ns|us|ms|s)\b")
_MKL_HEAD = re.compile(r"MKL_VERBOSE (.*MKL.*)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_ONEDNN = re.compile(r"(?:one)?dnnl?_verbose,")
_USDT = re.compile(r"USDT:.*profiler_(?:start|stop)$")  # torch's profiler on stderr


def split(text: str) -> tuple[str, list[str]]:
    """Return a program's own output, and the lines in it that are the libraries'."""
    own: list[str] = []
    theirs: list[str] = []
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\r\n")
        (theirs if is_library_line(bare) else own).append(line)
    return "".join(own), [line.rstrip("\r\n") for line in theirs]


def is_library_line(line: str) -> bool:
    """Tell whether a numeric library has printed this line."""
    return bool(
        line.startswith("MKL_VERBOSE ") or _ONEDNN.match(line) or _CORE.fullmatch(line) or _USDT.match(line)
    )


def families(lines: Iterable[str]) -> dict[str, str]:
    """Return which instruction family each library says that it uses."""
    found: dict[str, str] = {}
    for line in lines:
        core, head = _CORE.fullmatch(line), _MKL_HEAD.match(line)
        if core:
            known = found.get("OpenBLAS", "")
            if core[1] not in known.split(", "):
                found["OpenBLAS"] = f"{known}, {core[1]}" if known else core[1]
        elif head and not _MKL_CALL.match(line):
            found.setdefault("MKL", head[1])
        elif _ONEDNN.match(line) and ",cpu,isa:" in line:
            found.setdefault("oneDNN", line.partition(",cpu,isa:")[2])
    return found


def kernel_calls(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the calls that the libraries tell of, summed by kernel and shape, what took longest first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        found = _onednn_call(line) if _ONEDNN.match(line) else _mkl_call(line)
        if found:
            library, name, seconds = found
            total = sums.setdefault((library, name), [0, 0.0])
            total[0] += 1
            total[1] += seconds
    found_all: list[dict[str, Any]] = [
        {"library": library, "name": name[:_NAME_MAX], "calls": int(calls), "seconds": seconds}
        for (library, name), (calls, seconds) in sums.items()
    ]
    return sorted(found_all, key=lambda kernel: -kernel["seconds"])[:TOP]


def _onednn_call(line: str) -> tuple[str, str, float] | None:
    """Read …,exec,cpu,PRIMITIVE,IMPLEMENTATION,PROPAGATION,MEMORY,ATTRIBUTES,AUXILIARY,SHAPE,MILLISECONDS."""
    words = line.split(",")
    if "exec" not in words:
        return None
    words = words[words.index("exec") + 1 :]
    if len(words) < 6 or words[0] != "cpu":
        return None
    try:
        seconds = float(words[-1]) / 1000
    except ValueError:
        return None
    reduced = " as bf16" if "fpmath:bf16" in line else ""
    return "oneDNN", f"{words[1]} {words[2]}{reduced} ({words[-2]})", seconds


def _mkl_call(line: str) -> tuple[str, str, float] | None:
    match = _MKL_CALL.match(line)
    if not match:
        return None
    arguments = [word for word in match[2].split(",") if word and not word.startswith("0x")]
    return "MKL", f"{match[1]} ({','.join(arguments)})", float(match[3]) * _UNITS[match[4]]


def loaded_families() -> dict[str, str]:
    """Return what the libraries that are loaded say without being asked to print."""
    found = {}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        try:
            ask = getattr(torch.backends.cpu, "get_cpu_capability", None)
            found["ATen"] = str(ask() if ask else torch._C._get_cpu_capability())
        except AttributeError:  # older than torch 1.13
            found["ATen"] = "unknown"
    if numpy is not None:
        try:
            core = getattr(numpy, "_core", None) or numpy.core
            umath = core._multiarray_umath
            used = [x for x in umath.__cpu_dispatch__ if umath.__cpu_features__.get(x)]
            found["numpy"] = " ".join(used) or " ".join(umath.__cpu_baseline__) or "baseline"
        except AttributeError:
            found["numpy"] = "unknown"
    return found


def self_times(events: Iterable[tuple[int, int, int, str]]) -> dict[str, list[float]]:
    """Return calls, own and total seconds of each operator.

    `events`: (thread, start, duration, name) in nanoseconds; those of a thread lie within one another or
    apart. An operator within another of the same name counts towards the total of the outer one only.
    """
    sums: dict[str, list[float]] = {}
    stack: list[tuple[int, str]] = []  # end, name
    thread_now = None
    for thread, start, duration, name in sorted(events, key=lambda e: (e[0], e[1], -e[2])):
        if thread != thread_now:
            thread_now, stack = thread, []
        while stack and stack[-1][0] <= start:
            stack.pop()
        entry = sums.setdefault(name, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += duration / 1e9
        if not any(outer == name for _, outer in stack):
            entry[2] += duration / 1e9
        if stack:
            sums[stack[-1][1]][1] -= min(duration, stack[-1][0] - start) / 1e9
        stack.append((start + duration, name))
    return sums


def summary(sums: dict[str, list[float]], total: float) -> dict[str, Any]:
    """Return a profile from what `self_times` gives: the top operators, and what is left for Python."""
    operators: list[dict[str, Any]] = [
        {"name": name[-_NAME_MAX:], "calls": int(calls), "self": max(own, 0.0), "total": full}
        for name, (calls, own, full) in sums.items()
    ]
    operators.sort(key=lambda operator: -operator["self"])
    inside = sum(operator["self"] for operator in operators)
    return {"total": total, "operators": operators[:TOP], "python": max(total - inside, 0.0)}


def profiled(run: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return what `run` returns and its profile: by torch's operators if there is torch, else by function."""
    if "torch" in sys.modules:
        value, made = _by_operator(run)
        return value, {"kind": "operators", **made}
    value, made = _by_function(run)
    return value, {"kind": "functions", **made}


def _by_operator(run: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    from torch.autograd import profiler  # loaded with torch; torch.profiler would bring more

    with profiler.profile() as profile:
        start = time.perf_counter()
        value = run()
        total = time.perf_counter() - start
    raw = getattr(profile, "kineto_results", None)
    events = raw.events() if raw is not None else []
    if events and hasattr(events[0], "start_ns"):
        # Several times faster than to have torch make a tree of them.
        sums = self_times(
            (event.start_thread_id(), event.start_ns(), event.duration_ns(), event.name())
            for event in events
            if "CPU" in str(event.device_type())
        )
    else:
        sums = {
            event.key: [event.count, event.self_cpu_time_total / 1e6, event.cpu_time_total / 1e6]
            for event in profile.key_averages()
        }
    return value, summary(sums, total)


def _by_function(run: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    import cProfile

    profile = cProfile.Profile()
    start = time.perf_counter()
    value = profile.runcall(run)
    total = time.perf_counter() - start
    sums: dict[str, list[float]] = {}
    inside = 0.0
    for entry in profile.getstats():
        code: Any = entry.code
        name = code if isinstance(code, str) else f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"
        if not isinstance(code, str):
            inside += entry.inlinetime
        known = sums.setdefault(name, [0, 0.0, 0.0])
        for at, more in enumerate((entry.callcount, entry.inlinetime, entry.totaltime)):
            known[at] += more
    made = summary(sums, total)
    return value, {**made, "python": min(inside, total)}
