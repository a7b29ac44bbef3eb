"""The search, with measurements made up: (candidate's label) -> seconds, refusal or a fault of the gate."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rvbundle_runtime.backends import Backend, Setting
from rvbundle_runtime.tuning import Candidate, Space, Trial, Tuned, search

SLOW = Backend("slow", "x86_64", ("native",), "", "")
FAST, WIDE = replace(SLOW, name="fast"), replace(SLOW, name="wide")
HALF = replace(SLOW, name="half", precision="bf16")
ONE, TWO = Setting(1), Setting(2)


def run(
    seconds: Mapping[str, float | str],
    wrong: Mapping[str, str] | None = None,
    budget: float = 1000.0,
    each: float = 1.0,
    space: Space | None = None,
) -> tuple[Tuned, list[str]]:
    """Search with a clock that goes on by `each` seconds with every measurement."""
    asked: list[str] = []
    now = 0.0

    def measure(candidate: Candidate) -> Trial:
        nonlocal now
        now += each
        asked.append(candidate.label())
        value = seconds.get(candidate.label(), 10.0)
        return Trial(refused=value) if isinstance(value, str) else Trial(value)

    def gate(candidate: Candidate) -> str:
        asked.append(f"gate {candidate.label()}")
        return (wrong or {}).get(candidate.label(), "")

    space = space or Space(Candidate(SLOW, Setting()), (SLOW, FAST, WIDE), (ONE, TWO))
    return search(space, measure, gate, lambda: budget - now), asked


def test_the_fastest_row_with_the_best_threads_wins() -> None:
    tuned, asked = run({"slow": 1.0, "fast": 0.5, "wide": 0.8, "fast, 1 thread": 0.4, "fast, 2 threads": 0.6})
    assert tuned.winner == Candidate(FAST, ONE)
    assert tuned.why == "measured: 400 ms against 1 s of slow (2.50 times as fast)"
    assert tuned.finished
    assert asked[:2] == ["slow", "gate slow"]
    assert asked[-1] == "gate fast, 1 thread"
    assert asked.count("slow") == asked.count("fast, 1 thread") == 3  # in turns
    assert [line.candidate.label() for line in tuned.lines] == [
        *("fast, 1 thread", "fast", "fast, 2 threads", "wide", "slow")
    ]
    assert [line.verdict for line in tuned.lines] == ["chosen", "", "", "", "without a search"]


@pytest.mark.parametrize(("ratio", "wins"), [(0.951, False), (0.949, True)])
def test_a_winner_is_more_than_five_percent_faster(ratio: float, wins: bool) -> None:
    tuned, _ = run({"slow": 1.0, "fast": ratio})
    assert (tuned.winner.row == FAST) is wins
    if not wins:
        assert tuned.why == "measured: 1 s, and nothing that is right was faster by more than 5%"


def test_what_computes_wrongly_loses_to_the_next() -> None:
    tuned, _ = run({"slow": 1.0, "fast": 0.1, "wide": 0.5}, {"fast": "computes wrongly: gemm"})
    assert tuned.winner == Candidate(WIDE, Setting())
    refused = [line for line in tuned.lines if line.candidate.row == FAST and line.verdict]
    assert refused[0].verdict == "computes wrongly: gemm"
    assert tuned.lines[-1] == refused[0]


@pytest.mark.parametrize("fault", ["it was ended by SIGILL", "it did not end within 20 s"])
def test_what_crashes_or_hangs_loses(fault: str) -> None:
    tuned, asked = run({"slow": 1.0, "fast": fault, "wide": 0.9})
    assert tuned.winner == Candidate(WIDE, Setting())
    assert asked.count("fast") == 1  # never again
    assert tuned.lines[-1].verdict == fault
    assert tuned.lines[-1].seconds is None


def test_the_base_may_be_wrong_itself() -> None:
    tuned, _ = run({"slow": 0.1, "fast": 1.0}, {"slow": "computes wrongly: syrk"})
    assert tuned.winner == Candidate(FAST, Setting())
    assert tuned.why == (
        "measured: 1 s; slow, which a run takes without a search, is wrong here: computes wrongly: syrk"
    )


def test_the_base_that_can_not_be_measured_ends_it() -> None:
    tuned, asked = run({"slow": "it ended with exit code 1"})
    assert asked == ["slow"]
    assert tuned.winner == tuned.base
    assert tuned.why == "what a run takes without a search can't be measured: it ended with exit code 1"


def test_noise_is_found_out_in_turns() -> None:
    """A single lucky measurement does not win: the base is measured again beside it."""
    found = iter([0.5, 1.0, 1.0])

    def measure(candidate: Candidate) -> Trial:
        return Trial(next(found) if candidate.row == FAST else 1.0)

    space = Space(Candidate(SLOW, Setting()), (SLOW, FAST), ())
    assert search(space, measure, lambda _: "", lambda: 1000.0).winner.row == SLOW


def test_time_is_kept() -> None:
    tuned, asked = run({"slow": 1.0, "fast": 0.5}, budget=25.0, each=10.0)
    assert [label for label in asked if not label.startswith("gate")] == ["slow", "fast"]
    assert not tuned.finished
    assert tuned.winner.row == FAST


@pytest.mark.parametrize(
    ("precision", "seconds", "winner"),
    [
        ("float32", 0.1, "slow"),
        ("auto", 0.89, "half"),
        ("auto", 0.91, "slow"),
    ],
)
def test_reduced_precision_must_be_ten_percent_faster(precision: str, seconds: float, winner: str) -> None:
    space = Space(Candidate(SLOW, Setting()), (SLOW, HALF), (), precision)
    tuned, asked = run({"slow": 1.0, "half": seconds}, space=space)
    assert tuned.winner.row.name == winner
    assert ("half" in asked) is (precision == "auto")


def test_reduced_precision_that_was_asked_for_is_searched_alone() -> None:
    space = Space(Candidate(HALF, Setting()), (SLOW, HALF), (ONE,), "bf16")
    tuned, asked = run({"half": 1.0, "half, 1 thread": 0.5, "slow": 0.01}, space=space)
    assert tuned.winner == Candidate(HALF, ONE)
    assert "slow" not in asked
