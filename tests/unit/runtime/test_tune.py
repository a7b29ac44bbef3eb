"""What `tune` searches, what it makes of the outcome, and what it prints."""

from dataclasses import replace
from typing import Any

import pytest

from rvbundle_runtime import tune
from rvbundle_runtime.backends import Setting
from rvbundle_runtime.decision import Situation, Wanted
from rvbundle_runtime.errors import HostError
from rvbundle_runtime.measured import from_result
from rvbundle_runtime.tuning import Candidate, Line, Tuned

from .test_backends import QEMU, TABLE, WIDE, XEON, on, payload, this
from .test_measured import RESULT
from .test_plan import HOST
from .test_selection import QEMU as PROGRAM

NATIVE = on(this(WIDE), payload("x86_64"))


def names(situation: Situation, **wanted: Any) -> list[str]:
    return [row.name for row in tune.make_space(TABLE, situation, Wanted(**wanted)).rows]


def test_the_space() -> None:
    space = tune.make_space(TABLE, NATIVE, Wanted())
    assert space.base == Candidate(TABLE.backends[0], Setting())
    assert [row.name for row in space.rows] == [
        *("any", "avx2", "aten-avx2", "onednn-off", "baseline", "bf16", "bf16-fpmath")
    ]
    # "all" without waiting passively is what the libraries do by themselves: the base.
    assert [(s.threads, s.wait) for s in space.settings] == [(1, ""), (2, ""), (4, "passive"), (2, "passive")]
    assert space.precision == "float32"


def test_only_what_was_traced_without_a_cold_pack() -> None:
    assert names(on(this(WIDE), payload("x86_64", trimmed=True))) == ["avx2", "baseline"]


def test_what_is_asked_for_is_not_searched() -> None:
    space = tune.make_space(TABLE, NATIVE, Wanted(backend="avx2", threads=2))
    assert ([row.name for row in space.rows], space.settings) == (["avx2"], ())
    assert space.base.setting == Setting(2)


def test_emulated_processors_are_candidates() -> None:
    board = replace(HOST, usable=(0, 1), emulators=(PROGRAM,))
    found = names(on(board, payload("x86_64"), launch=QEMU))
    assert found[:4] == ["nehalem", "nehalem-native-blas", "haswell", "epyc"]


def test_nothing_to_choose_from() -> None:
    situation = on(this(replace(XEON, flags=frozenset())), payload("x86_64", trimmed=True))
    with pytest.raises(HostError, match="there is nothing to choose from: none that were traced fit"):
        tune.make_space(TABLE, situation, Wanted())


def row(name: str) -> Any:
    return next(row for row in TABLE.backends if row.name == name)


def tuned(winner: Candidate, lines: tuple[Line, ...] = (), why: str = "measured: so") -> Tuned:
    return Tuned(Candidate(row("any"), Setting()), winner, why, lines, finished=True)


def test_the_decision() -> None:
    made = tune.decide(TABLE, NATIVE, Wanted(), tuned(Candidate(row("avx2"), Setting(2, "passive"))))
    assert (made.backend, made.threads, made.wait, made.measured) == ("avx2", 2, "passive", True)
    assert made.env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert [(c.what, c.value, c.reason) for c in made.choices] == [
        ("backend", "avx2", "measured: so"),
        ("threads", "2", "measured: so"),
        ("precision", "float32", "the recipe asks for nothing else"),
    ]


def test_threads_that_nothing_beat_keep_their_reason() -> None:
    made = tune.decide(TABLE, NATIVE, Wanted(), tuned(Candidate(row("avx2"), Setting())))
    assert made.choices[1].reason == "each library starts one for each processor that may be used"


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ("", "measured: bf16 is not faster by 10%"),
        ("computes wrongly: gemm", "bf16 computes wrongly: gemm"),
    ],
)
def test_why_not_reduced_precision(verdict: str, reason: str) -> None:
    line = Line(Candidate(row("bf16"), Setting()), 1.0, 1, verdict)
    made = tune.decide(
        TABLE, NATIVE, Wanted(precision="auto"), tuned(Candidate(row("any"), Setting()), (line,))
    )
    assert (made.precision, made.choices[2].reason) == ("float32", reason)


def test_reduced_precision_that_won() -> None:
    made = tune.decide(TABLE, NATIVE, Wanted(precision="auto"), tuned(Candidate(row("bf16"), Setting())))
    assert (made.precision, made.choices[2].reason) == ("bf16", "measured: so; right by every check")


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"torch": "2.13.0", "numpy": "2.4.6"}, ("torch", "numpy")),
        ({"python3-numpy": "1:2.2.4+ds-1"}, ("numpy",)),
        ({"python3-torch": "2.6.0", "gymnasium": "1.4.0"}, ("torch",)),
        ({"torchvision": "1"}, ()),
    ],
)
def test_what_is_checked_and_timed(packages: dict[str, str], expected: tuple[str, ...]) -> None:
    """Payloads of Debian's packages have other names for the same."""
    assert tune.modules(payload("x86_64", packages=packages)) == expected


def test_the_table_at_the_end() -> None:
    best = Candidate(row("avx2"), Setting(1))
    lines = (
        Line(best, 0.0123, 3, "chosen"),
        Line(Candidate(row("any"), Setting()), 0.0456, 3, "without a search"),
        Line(Candidate(row("bf16"), Setting()), None, 0, "computes wrongly: gemm\nmore"),
    )
    kernels = [{"name": "gemm 4x4x4", "seconds": 0.002}, {"name": "mlp forward", "seconds": None}]
    found = {best: from_result({**RESULT, "kernels": kernels})}
    assert tune.table_lines(tuned(best, lines), found) == [
        "candidate       workload  runs  gemm  gemv  conv2d  forward  backward",
        "avx2, 1 thread   12.3 ms     3  2 ms     -       -        -         -  chosen",
        "any              45.6 ms     3     -     -       -        -         -  without a search",
        "bf16                   -     0     -     -       -        -         -  computes wrongly: gemm",
        "",
        "chosen: avx2, 1 thread (measured: so)",
    ]
    unfinished = tune.table_lines(replace(tuned(best, lines), finished=False), found)
    assert unfinished[-1].startswith("time was up before everything was measured")


def test_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bar = tune.Bar()
    bar.show("measuring any", 0.5)
    bar.clear()
    assert capsys.readouterr().err == "rvbundle: measuring any\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    live = tune.Bar()
    live.show("measuring any", 0.5)
    live.show("measuring any", 7.0)
    live.clear()
    assert capsys.readouterr().err == (
        f"\r\x1b[K[{12 * '#'}{12 * '.'}] measuring any\r\x1b[K[{24 * '#'}] measuring any\r\x1b[K"
    )
