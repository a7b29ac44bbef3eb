"""How `rvbundle tune` searches: what is measured in which order, and what must be true of a winner. Pure.

A candidate is a row of the table with a number of threads. The search goes one dimension at a time: rows
first, then threads, then reduced precision; at the end the best is measured against what a run would take
without a search, in turns, since on a busy machine only what is measured side by side can be compared.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rvbundle_runtime.backends import Backend, Setting
from rvbundle_runtime.options import AUTO, BF16, FLOAT32

MARGIN = 0.05  # a winner must be faster by more: what is less may be noise
BF16_MARGIN = 0.10  # reduced precision must be worth it
PAIRS = 3  # turns that the last comparison takes, time permitting


@dataclass(frozen=True)
class Candidate:
    """A row of the table and a setting of threads."""

    row: Backend
    setting: Setting

    def label(self) -> str:
        """Return what people read, such as "nehalem, 1 thread"."""
        setting = self.setting
        if not setting.threads:
            return self.row.name
        passive = ", passive" if setting.wait else ""
        return f"{self.row.name}, {setting.threads} thread{'s' * (setting.threads > 1)}{passive}"


@dataclass(frozen=True)
class Trial:
    """What came of measuring a candidate: seconds of the agent's workload, or why there are none."""

    seconds: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Line:
    """A line of the table at the end: `seconds` is a median, `times` how often it was measured."""

    candidate: Candidate
    seconds: float | None
    times: int
    verdict: str


@dataclass(frozen=True)
class Tuned:
    """The outcome: `winner` may be `base`, what a run takes without a search; `why` says it in words."""

    base: Candidate
    winner: Candidate
    why: str
    lines: tuple[Line, ...]
    finished: bool


Measure = Callable[[Candidate], Trial]
Gate = Callable[[Candidate], str]


@dataclass(frozen=True)
class Space:
    """What is searched: the candidate to beat, the rows that fit (`base`'s too), settings of threads."""

    base: Candidate
    rows: tuple[Backend, ...]
    settings: tuple[Setting, ...]
    precision: str = FLOAT32


class _Search:
    def __init__(self, space: Space, measure: Measure, gate: Gate, left: Callable[[], float]) -> None:
        self.space = space
        self.measure = measure
        self.gate = gate
        self.left = left
        self.seconds: dict[Candidate, list[float]] = {}
        self.refused: dict[Candidate, str] = {}
        self.longest = 0.0
        self.finished = True

    def try_(self, candidate: Candidate) -> None:
        """Measure once more, if there is time for it."""
        if candidate in self.refused:
            return
        before = self.left()
        if self.seconds and before < self.longest:
            self.finished = False
            return
        trial = self.measure(candidate)
        self.longest = max(self.longest, before - self.left())
        if trial.seconds is None:
            self.refused[candidate] = trial.refused
        else:
            self.seconds.setdefault(candidate, []).append(trial.seconds)

    def median(self, candidate: Candidate) -> float:
        """Return its median in seconds; infinity for what was not measured, or was refused."""
        if candidate in self.refused or candidate not in self.seconds:
            return float("inf")
        return statistics.median(self.seconds[candidate])

    def best(self, among: Iterable[Candidate]) -> Candidate:
        return min(among, key=self.median)


def search(space: Space, measure: Measure, gate: Gate, left: Callable[[], float]) -> Tuned:
    """Find the best candidate. `left()` are the seconds that remain; at least the base is measured.

    `measure` runs the agent's workload and compares its output with the recorded one; `gate` returns why a
    candidate computes wrongly, "" if it does not: it is asked only of one that would win.
    """
    state = _Search(space, measure, gate, left)
    base = space.base
    state.try_(base)
    if base in state.refused:
        why = f"what a run takes without a search can't be measured: {state.refused[base]}"
        return Tuned(base, base, why, _lines(state, base), finished=False)
    wrong = gate(base)
    if wrong:
        state.refused[base] = wrong
    same = [row for row in space.rows if row.precision == base.row.precision]
    rows = [base, *(Candidate(row, base.setting) for row in same if row != base.row)]
    for candidate in rows[1:]:
        state.try_(candidate)
    best = state.best(rows)
    settings = [replace(best, setting=setting) for setting in space.settings]
    for candidate in settings:
        if candidate not in state.seconds:
            state.try_(candidate)
    winner = _confirm(state, base, [*rows, *settings], MARGIN)
    if space.precision == AUTO:
        reduced = [Candidate(row, winner.setting) for row in space.rows if row.precision == BF16]
        for candidate in reduced:
            state.try_(candidate)
        winner = _confirm(state, winner, reduced, BF16_MARGIN)
    return Tuned(base, winner, _why(state, winner), _lines(state, winner), state.finished)


def _confirm(state: _Search, base: Candidate, others: Iterable[Candidate], margin: float) -> Candidate:
    """Return the one that stands: a challenger must win in turns, by more than `margin`, and be right."""
    others = [candidate for candidate in others if candidate != base]

    def wins() -> bool:
        return state.median(best) < state.median(base) * (1 - margin)

    while others:
        best = state.best(others)
        for _ in range(PAIRS - 1):
            if wins():
                state.try_(base)
                state.try_(best)
        if not wins():
            break
        wrong = state.gate(best)
        if not wrong:
            return best
        state.refused[best] = wrong
    return base


def _why(state: _Search, winner: Candidate) -> str:
    base = state.space.base
    ours, theirs = state.median(winner), state.median(base)
    if base in state.refused:
        rest = f"{base.label()}, which a run takes without a search, is wrong here: {state.refused[base]}"
        return rest if winner == base else f"measured: {ms(ours)}; {rest}"
    if winner == base:
        return f"measured: {ms(theirs)}, and nothing that is right was faster by more than {MARGIN:.0%}"
    times = f"{theirs / ours:.2f} times as fast"
    return f"measured: {ms(ours)} against {ms(theirs)} of {base.label()} ({times})"


def ms(seconds: float) -> str:
    """Return a time as people read it: three digits, in milliseconds or seconds."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _lines(state: _Search, winner: Candidate) -> tuple[Line, ...]:
    """Return what was found of each candidate, the fastest first, those that were refused last."""
    found = []
    for candidate in {**state.seconds, **state.refused}:
        seconds = statistics.median(state.seconds[candidate]) if candidate in state.seconds else None
        verdict = state.refused.get(candidate, "")
        if candidate == winner:
            verdict = "chosen"
        elif candidate == state.space.base and not verdict:
            verdict = "without a search"
        times = len(state.seconds.get(candidate, ()))
        found.append(Line(candidate, seconds, times, verdict))
    return tuple(sorted(found, key=lambda line: (line.candidate in state.refused, line.seconds or 0.0)))
