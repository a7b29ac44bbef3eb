"""`rvbundle tune`: measure the candidates on the agent's own workload, check them, and keep the best.

`tuning.py` decides what is measured, `measuring.py` runs it, guest/measure.py is what runs.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rvbundle_runtime import backends, decisions, golden, launch, plan, tuning
from rvbundle_runtime.backends import Setting, Table
from rvbundle_runtime.choice import Choice
from rvbundle_runtime.decision import Decision, Situation, Wanted
from rvbundle_runtime.errors import HostError, StoreError, ToolError
from rvbundle_runtime.golden import Workload
from rvbundle_runtime.host import CachePlace, Host
from rvbundle_runtime.image import Reader
from rvbundle_runtime.measured import Measured, from_result
from rvbundle_runtime.measuring import Laboratory, laboratory
from rvbundle_runtime.options import AUTO, BF16, FLOAT32, RunOptions
from rvbundle_runtime.store import PayloadInfo
from rvbundle_runtime.tuning import Candidate, Space, Trial, Tuned

SECONDS_VARIABLE = "RVBUNDLE_TUNE_SECONDS"  # says so where no option can: slow boards, self-running files
SECONDS, EMULATED_SECONDS = 60.0, 900.0  # how long the search may take: natively, emulated
_FIRST_LIMIT, _EMULATED_FIRST_LIMIT = 600.0, 7200.0  # seconds until a first measurement counts as hanging
_LIMIT_FACTOR, _LIMIT_MORE = 3.0, 10.0  # later ones: so many times the first one's time, and seconds
_REPEATS, _EMULATED_REPEATS = 50, 3
_REPEAT_SECONDS, _EMULATED_REPEAT_SECONDS = 1.5, 60.0
_KERNEL_SECONDS, _EMULATED_KERNEL_SECONDS = 0.6, 20.0
MODULES = ("torch", "numpy")


@dataclass
class _Bench:
    """Measures candidates in a laboratory; remembers what is asked for twice."""

    lab: Laboratory
    table: Table
    workload: Workload | None
    show: Callable[[str], None]
    limit: float
    layers: dict[str, Any] = field(default_factory=dict)  # that the agent was seen to have
    first: float = 0.0
    found: dict[Candidate, Measured] = field(default_factory=dict)

    def measure(self, candidate: Candidate) -> Trial:
        """Run the workload under a candidate."""
        self.show(f"measuring {candidate.label()}")
        measured, failed = self._run(candidate, gate=False)
        if failed or measured is None:
            return Trial(refused=failed)
        self.found.setdefault(candidate, measured)
        difference = self._difference(measured)
        if difference:
            return Trial(refused=f"prints something else than when it was traced:{difference}")
        return Trial(seconds=_seconds(measured))

    def gate(self, candidate: Candidate) -> str:
        """Return why a candidate computes wrongly; "" if every check passes."""
        self.show(f"checking {candidate.label()}")
        measured, failed = self._run(candidate, gate=True)
        if failed or measured is None:
            return failed
        if modules(self.lab.prepared.situation.info) and not measured.gate:
            return "nothing could be checked"
        wrong = measured.wrong
        if wrong:
            error = "" if wrong[0].error is None else f", {wrong[0].error:.3g} times the bound"
            return f"computes wrongly: {wrong[0].check}{error} ({len(wrong)} of {len(measured.gate)} checks)"
        return ""

    def _run(self, candidate: Candidate, gate: bool) -> tuple[Measured | None, str]:
        lab = self.lab
        decision = backends.settle(self.table, lab.prepared.situation, candidate.row, candidate.setting)
        workload = None if gate else self.workload
        asked = request(lab, workload, gate=gate, precision=candidate.row.precision, **self.layers)
        answer = lab.run(decision, asked, self._limit(), {})
        if not self.first and not gate:
            self.first = answer.seconds
        if answer.failed or answer.value is None:
            return None, answer.failed
        try:
            measured = from_result(answer.value)
        except ToolError as error:  # the agent's process has written nonsense: that is no candidate to take
            return None, error.message
        if not gate and not self.layers:  # the same sizes for all candidates
            self.layers = {name: answer.value.get(name) for name in ("layers", "convolutions")}
        return measured, ""

    def _limit(self) -> float:
        return min(self.limit, self.first * _LIMIT_FACTOR + _LIMIT_MORE) if self.first else self.limit

    def _difference(self, measured: Measured) -> str:
        if not self.workload or not self.workload.golden or measured.workload is None:
            return ""
        text = golden.compare(self.workload.stdout, measured.workload.stdout, self.workload.tolerance)
        return f"\n{text}" if text else ""


def request(
    lab: Laboratory,
    workload: Workload | None,
    *,
    gate: bool = False,
    profile: bool = False,
    precision: str = FLOAT32,
    layers: Any = None,
    convolutions: Any = None,
) -> dict[str, Any]:
    """Return what guest/measure.py is asked for."""
    situation = lab.prepared.situation
    native = situation.launch.native
    asked = {
        "argv": [*lab.agent(), *workload.args] if workload else [],
        "seconds": _REPEAT_SECONDS if native else _EMULATED_REPEAT_SECONDS,
        "repeats": _REPEATS if native else _EMULATED_REPEATS,
    }
    return {
        "modules": list(modules(situation.info)),
        "gate": gate,
        "precision": precision,
        "kernels": not gate and not profile,
        "kernel_seconds": _KERNEL_SECONDS if native else _EMULATED_KERNEL_SECONDS,
        "workload": asked if workload else None,
        "layers": layers,
        "convolutions": convolutions,
        "profile": profile,
        "cold": situation.cold,
    }


def _seconds(measured: Measured) -> float:
    """Return what a candidate is judged by: the agent's workload once imports are done, else its layers."""
    if measured.workload and measured.workload.seconds is not None:
        return measured.workload.seconds
    return sum(kernel.seconds or 0.0 for kernel in measured.kernels)


def tune(
    host: Host,
    options: RunOptions,
    place: CachePlace,
    seconds: float | None = None,
    show: Callable[[str, float], None] = lambda _text, _share: None,
) -> tuple[Tuned, dict[Candidate, Measured], Decision]:
    """Search, and keep what was found; `show(what, share of the time)` is told what is under way.

    Raises HostError if there is nothing to measure, StoreError if the result can't be kept.
    """
    prepared, held = launch.prepare_and_hold(host, replace(options, backend=None, threads=None), place, ())
    situation = prepared.situation
    native = situation.launch.native
    budget = seconds or (SECONDS if native else EMULATED_SECONDS)
    started = time.monotonic()

    def left() -> float:
        return budget - (time.monotonic() - started)

    table = backends.load_table()
    with laboratory(prepared, options) as lab:
        bench = _Bench(
            lab,
            table,
            find_workload(options.image, situation),
            lambda text: show(text, 1 - max(left(), 0.0) / budget),
            first_limit(situation),
        )
        space = make_space(table, situation, plan.wanted(options))
        tuned = tuning.search(space, bench.measure, bench.gate, left)
    if held is not None:
        os.close(held)
    decision = decide(table, situation, plan.wanted(options), tuned)
    try:
        decisions.write(place.base, decisions.key_of(situation), decision)
    except OSError as error:
        raise StoreError(
            f"the result can't be kept below {place.base}: {error.strerror}",
            f"rvbundle run --backend {decision.backend} --threads {decision.threads or 'auto'} does the same",
        ) from None
    return tuned, bench.found, decision


def modules(info: PayloadInfo) -> tuple[str, ...]:
    """Return which of MODULES a payload has: as a distribution, or as a package of Debian's."""
    return tuple(name for name in MODULES if {name, f"python3-{name}"} & info.packages.keys())


def first_limit(situation: Situation) -> float:
    """Return after how many seconds a first measurement counts as hanging."""
    return _FIRST_LIMIT if situation.launch.native else _EMULATED_FIRST_LIMIT


def find_workload(image: str, situation: Situation) -> Workload | None:
    """Return the first recorded workload of the payload; raises HostError if nothing can be measured."""
    with Reader(Path(image)) as reader:
        found = golden.from_details(reader.index().details, situation.launch.arch)
    if not found and not modules(situation.info):
        raise HostError(
            f"{image} carries no workload, and neither torch nor numpy: there is nothing to measure",
            "build it again with this rvbundle",
        )
    return found[0] if found else None


def make_space(table: Table, situation: Situation, wanted: Wanted) -> Space:
    """Return what is to be searched; raises UsageError or HostError for what `wanted` can't have."""
    static = backends.choose(table, situation, wanted)
    fitting = backends.fitting(table, situation)
    row = next((row for row in fitting if row.name == static.backend), None)
    if row is None:
        raise HostError(f"there is nothing to choose from: {static.choices[0].reason}")
    rows = (row,) if wanted.backend else fitting
    setting = Setting(static.threads, static.wait)
    usable = len(situation.host.usable)
    settings = [s for s in backends.thread_settings(table, situation.host) if s != Setting(usable)]
    if static.threads:
        settings.append(Setting(usable) if situation.host.quota is None else setting)
    precision = backends.wanted_precision(situation, wanted)
    return Space(Candidate(row, setting), rows, () if wanted.threads else tuple(settings), precision)


def decide(table: Table, situation: Situation, wanted: Wanted, tuned: Tuned) -> Decision:
    """Return the decision that follows from a search."""
    winner = tuned.winner
    made = backends.settle(table, situation, winner.row, winner.setting)
    static = backends.choose(table, situation, replace(wanted, backend=None, threads=None))
    why_threads = tuned.why if winner.setting != tuned.base.setting else static.choices[1].reason
    why_precision = static.choices[2].reason
    if winner.row.precision == BF16 and backends.wanted_precision(situation, wanted) == AUTO:
        why_precision = f"{tuned.why}; right by every check"
    elif backends.wanted_precision(situation, wanted) == AUTO:
        tried = [line for line in tuned.lines if line.candidate.row.precision == BF16]
        why_precision = _why_not_reduced(tried) if tried else why_precision
    choices = (
        Choice("backend", winner.row.name, tuned.why),
        Choice("threads", str(winner.setting.threads or len(situation.host.usable)), why_threads),
        Choice("precision", winner.row.precision, why_precision),
    )
    return replace(made, measured=True, choices=choices)


def _why_not_reduced(tried: list[tuning.Line]) -> str:
    refused = [f"{line.candidate.row.name} {line.verdict}" for line in tried if line.verdict]
    return "; ".join(refused) or f"measured: bf16 is not faster by {tuning.BF16_MARGIN:.0%}"


def table_lines(tuned: Tuned, found: dict[Candidate, Measured]) -> list[str]:
    """Return the table at the end: a line per candidate, then what was chosen and why."""
    rows: list[tuple[str, ...]] = [("candidate", "workload", "runs", *_KERNEL_HEADS, "")]
    for line in tuned.lines:
        seconds = "-" if line.seconds is None else tuning.ms(line.seconds)
        measured = found.get(line.candidate)
        first = line.verdict.partition("\n")[0]
        rows.append((line.candidate.label(), seconds, str(line.times), *_kernels(measured), first))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    lines += ["", f"chosen: {tuned.winner.label()} ({tuned.why})"]
    if not tuned.finished:
        lines.append("time was up before everything was measured; --seconds gives more")
    return lines


_KERNEL_HEADS = ("gemm", "gemv", "conv2d", "forward", "backward")


def _kernels(measured: Measured | None) -> list[str]:
    """Return the time of the first micro-kernel of each kind, where it was measured."""
    found = []
    for head in _KERNEL_HEADS:
        times = [k.seconds for k in measured.kernels if head in k.name] if measured else []
        found.append("-" if not times or times[0] is None else tuning.ms(times[0]))
    return found


class Bar:
    """A progress bar on stderr: one line that is drawn anew on a terminal, a line for each step elsewhere."""

    WIDTH = 24

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()

    def show(self, text: str, share: float) -> None:
        """Draw it: what is under way, and the share of the time that is used up."""
        if not self.live:
            print(f"rvbundle: {text}", file=sys.stderr)
            return
        done = min(int(share * self.WIDTH), self.WIDTH)
        print(
            f"\r\x1b[K[{'#' * done}{'.' * (self.WIDTH - done)}] {text}", end="", file=sys.stderr, flush=True
        )

    def clear(self) -> None:
        """Take it away."""
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def run(host: Host, options: RunOptions, place: CachePlace, seconds: float | None = None) -> int:
    """Tune and print the table; return the exit code."""
    if seconds is None and host.environ.get(SECONDS_VARIABLE, "").isdecimal():
        seconds = float(host.environ[SECONDS_VARIABLE]) or None
    bar = Bar()
    try:
        tuned, found, _ = tune(host, options, place, seconds, bar.show)
    finally:
        bar.clear()
    for line in table_lines(tuned, found):
        print(line)
    return 0
