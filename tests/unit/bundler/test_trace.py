import json

import pytest

from rvbundle import trace
from rvbundle.process import Finished
from rvbundle.recipe import Workload
from rvbundle.trace import Trace, WorkloadTrace, compare
from rvbundle_runtime.errors import TraceError

from .test_split import LIB, SITE, frozen

TRACE = Trace(
    (
        WorkloadTrace(("--x",), ("torch",), ("a", "b"), "loss 0.5\n"),
        WorkloadTrace((), (), ("b", "c"), "ü\n"),
    ),
    {"lib.so": (1, 2)},
    ("default",),
)


def test_first_workload_that_opened_a_file() -> None:
    assert TRACE.opened_by() == {"a": 1, "b": 1, "c": 2}


def test_round_trip() -> None:
    text = trace.dumps(TRACE, {"tree": "x"})
    assert trace.loads(text) == (TRACE, {"tree": "x"})
    assert trace.dumps(*trace.loads(text)) == text
    assert "ü" in text


def test_digest_is_of_the_record_alone() -> None:
    assert trace.digest(TRACE) == trace.digest(trace.loads(trace.dumps(TRACE, {"any": "key"}))[0])
    assert trace.digest(TRACE) != trace.digest(Trace((), {}, ()))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        "5",
        json.dumps({"format": 2}),
        json.dumps({"format": 1}),
        json.dumps({"format": 1, "workloads": [[]]}),
        json.dumps({"format": 1, "workloads": [], "pages": [], "families": [], "key": {}}),
        json.dumps({"format": 1, "workloads": [], "pages": {}, "families": [], "key": 5}),
    ],
)
def test_no_record(text: str) -> None:
    with pytest.raises(ValueError):
        trace.loads(text)


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


def test_modules_of_what_was_opened() -> None:
    paths = (
        f"{SITE}/torch/__init__.pyc",
        f"{SITE}/torch/_C.cpython-311-x.so",
        f"{SITE}/torch/data.bin",
        f"{LIB}/lib-dynload/_json.cpython-311-x.so",
        f"{LIB}/os.py",
        f"{LIB}/os.pyc",
        "usr/lib/x/libc.so.6",
        "usr/bin/python3.11",
    )
    assert trace._modules(frozen(), paths) == ("_json", "os", "torch", "torch._C")


WORKLOAD = Workload(("--n", "3"), True, None, 2.5)


def test_success_is_no_failure() -> None:
    trace.explain_failure(Finished("cmd", 0, b"", "noise"), WORKLOAD, 1, "the frozen tree")


@pytest.mark.parametrize(
    ("done", "workload", "message", "hint"),
    [
        (
            Finished("cmd", 3, b"", "a\nlast\n"),
            WORKLOAD,
            "trace workload 2 (--n 3) ended with exit code 3 in the frozen tree; it must end with 0:\n"
            "    a\n    last",
            "it starts in an empty working folder",
        ),
        (
            Finished("cmd", -11, b"", ""),
            WORKLOAD,
            "trace workload 2 (--n 3) was ended by SIGSEGV in the frozen tree; it must end with 0",
            "it starts in an empty working folder",
        ),
        (
            Finished("cmd", -9, b"", "slow\n", timed_out=True),
            Workload((), True, None, 2.5),
            "trace workload 2 (no arguments) did not end within 2.5 s in the frozen tree:\n    slow",
            "give it less to do, or raise `timeout` in its [[trace]]",
        ),
    ],
    ids=["exit code", "signal", "timeout"],
)
def test_failures(done: Finished, workload: Workload, message: str, hint: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace.explain_failure(done, workload, 2, "the frozen tree")
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)
