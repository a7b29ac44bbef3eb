import pytest

from rvbundle_runtime import golden
from rvbundle_runtime.golden import Workload, compare


@pytest.mark.parametrize(
    ("expected", "found", "tolerance"),
    [
        ("a\n", "a\n", None),
        ("", "", None),
        ("loss 0.5000", "loss 0.5001", 1e-3),
        ("loss 100", "loss 101", 0.01),
        ("x=-0.5", "x=-0.5000001", 1e-4),
        ("1e-3 and .5", "0.001 and 0.50", 1e-9),
        ("nan", "nan", 1e-9),
        ("loss nan x", "loss nan x", None),
        ("inf -inf", "inf -inf", 1e-9),
        ("3-5", "3-5", 1e-9),
        ("step 10: 1.0", "step 10: 1.0", 1e-9),
        ("v1.2.3 ok", "v1.2.3 ok", 1e-9),
        ("(1.0, 2.0)", "(1.0001, 1.9999)", 1e-3),
    ],
)
def test_same_output(expected: str, found: str, tolerance: float | None) -> None:
    assert compare(expected, found, tolerance) == ""


@pytest.mark.parametrize(
    ("expected", "found", "tolerance", "shown"),
    [
        ("a\nb\n", "a\nc\n", None, "    --- when traced\n    +++ now\n    @@ -2 +2 @@\n    -b\n    +c"),
        ("a\n", "", None, "    --- when traced\n    +++ now\n    @@ -1 +0,0 @@\n    -a"),
        ("0.5", "0.5001", None, "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -0.5\n    +0.5001"),
        ("0.5", "0.5001", 1e-5, "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -0.5\n    +0.5001"),
        ("0.5", "-0.5", 0.1, "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -0.5\n    +-0.5"),
        ("nan", "1.0", 0.5, "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -nan\n    +1.0"),
        ("1.0", "inf", 0.5, "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -1.0\n    +inf"),
        ("0.0", "1e-30", 0.5, "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -0.0\n    +1e-30"),
        (
            "loss 1",
            "lost 1",
            0.5,
            "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -loss 1\n    +lost 1",
        ),
        ("1 2", "1", 0.5, "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -1 2\n    +1"),
        (
            "loss #",
            "loss 1",
            0.5,
            "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -loss #\n    +loss 1",
        ),
        ("1 #", "# 1", 0.5, "    --- when traced\n    +++ now\n    @@ -1 +1 @@\n    -1 #\n    +# 1"),
        ("a\r\n", "a\n", None, "    (only line ends differ)"),
        ("a", "a\n", None, "    (only line ends differ)"),
    ],
    ids=[
        "line",
        "nothing",
        "exact",
        "too far",
        "sign",
        "nan",
        "inf",
        "zero",
        "text",
        "count",
        "hash",
        "hash elsewhere",
        "crlf",
        "last newline",
    ],
)
def test_different_output(expected: str, found: str, tolerance: float | None, shown: str) -> None:
    assert compare(expected, found, tolerance) == shown


def test_long_differences_are_cut() -> None:
    shown = compare("\n".join("x" * 300 for _ in range(50)), "\n".join("y" * 300 for _ in range(50)), None)
    assert len(shown.splitlines()) == 8
    assert max(map(len, shown.splitlines())) == 204


TRACED = (
    Workload(("--x",), True, None, "loss 0.5\n"),
    Workload((), True, 1e-3, "y" * (golden.OUTPUT_MAX + 1)),
    Workload(("--z",), False, None, "ignored"),
)


def test_what_an_image_carries() -> None:
    """Outputs that are too long, or that nobody compares, are left out."""
    found = golden.from_details({"workloads": {"x86_64": golden.to_details(TRACED)}}, "x86_64")
    assert found[0] == TRACED[0]
    assert [(w.args, w.golden, w.tolerance, w.stdout) for w in found[1:]] == [
        ((), False, 1e-3, ""),
        (("--z",), False, None, ""),
    ]


@pytest.mark.parametrize(
    "details",
    [
        {},
        {"workloads": None},
        {"workloads": {"riscv64": []}},
        {"workloads": {"x86_64": 5}},
        {"workloads": {"x86_64": [{"args": ["a"]}]}},
        {"workloads": {"x86_64": [{"args": [1], "golden": True, "tolerance": None, "stdout": ""}]}},
        {"workloads": {"x86_64": [{"args": ["\0"], "golden": True, "tolerance": None, "stdout": ""}]}},
        {"workloads": {"x86_64": [{"args": [], "golden": True, "tolerance": "x", "stdout": ""}]}},
    ],
)
def test_an_image_that_carries_none(details: dict[str, object]) -> None:
    assert golden.from_details(details, "x86_64") == ()
