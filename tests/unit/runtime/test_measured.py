"""What a payload says that it measured: read with care."""

import copy
import json
from typing import Any

import pytest

from rvbundle_runtime.errors import ToolError
from rvbundle_runtime.measured import (
    RESULT_MAX,
    TEXT_MAX,
    Check,
    KernelTime,
    WorkloadTime,
    from_json,
    from_result,
)

RESULT: dict[str, Any] = {
    "finished": True,
    "gate": [{"check": "torch gemm", "error": 0.25, "bound": 1.0, "passed": True}],
    "kernels": [{"name": "gemm 64x64x64", "seconds": 1e-5}, {"name": "conv2d: no", "seconds": None}],
    "workload": {
        "stdout": "a\nb\x1b\n",
        "code": 0,
        "first": 2.5,
        "again": [3, 1.0, 2],
        "cpu": 4.5,
        "note": "",
    },
    "layers": [[4, 64, 1], [64, 2, 1]],
    "convolutions": [[4, 32, 8, 8, 4, 4, 84, 84, 1]],
    "versions": {"python": "3.11.2", "torch": "2.13.0"},
    "libraries": {"ATen": "AVX2"},
    "threads": 2,
    "profile": None,
    "errors": [],
}


def changed(*keys: str | int, to: object) -> dict[str, Any]:
    """Return RESULT with one value replaced."""
    result = copy.deepcopy(RESULT)
    inner: Any = result
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return result


def test_a_whole_result() -> None:
    measured = from_result(from_json(json.dumps(RESULT).encode()))
    assert measured.finished
    assert measured.right
    assert measured.wrong == ()
    assert measured.gate == (Check("torch gemm", 0.25, 1.0, True),)
    assert measured.kernels == (KernelTime("gemm 64x64x64", 1e-5), KernelTime("conv2d: no", None))
    assert measured.workload == WorkloadTime("a\nb\x1b\n", 0, 2.5, (3.0, 1.0, 2.0), 4.5, "")
    assert measured.workload.seconds == 2.0
    assert measured.layers == ((4, 64, 1), (64, 2, 1))
    assert measured.convolutions == ((4, 32, 8, 8, 4, 4, 84, 84, 1),)
    assert measured.versions == (("python", "3.11.2"), ("torch", "2.13.0"))
    assert measured.libraries == (("ATen", "AVX2"),)
    assert measured.threads == 2


def test_a_result_that_ended_early() -> None:
    early = {"finished": False, "gate": [], "kernels": [], "workload": None, "layers": [], "convolutions": []}
    measured = from_result(
        {**early, "versions": {}, "libraries": {}, "threads": None, "errors": ["gate: no"]}
    )
    assert not measured.finished
    assert not measured.right  # nothing was checked
    assert measured.workload is None
    assert measured.threads is None
    assert measured.errors == ("gate: no",)


def test_no_later_runs_no_median() -> None:
    measured = from_result(changed("workload", "again", to=[]))
    assert measured.workload is not None
    assert measured.workload.seconds is None


def test_a_check_that_failed() -> None:
    measured = from_result(
        changed("gate", 0, to={"check": "x", "error": None, "bound": 1.0, "passed": False})
    )
    assert not measured.right
    assert [check.check for check in measured.wrong] == ["x"]


def test_control_characters_do_not_reach_a_terminal() -> None:
    measured = from_result(changed("kernels", 0, "name", to="a\x1b[2Jb\nc"))
    assert measured.kernels[0].name == "a?[2Jb?c"


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "text",
        {},
        changed("finished", to=1),
        changed("gate", to={}),
        changed("gate", 0, to=None),
        changed("gate", 0, "passed", to="yes"),
        changed("gate", 0, "error", to=1.5),  # passed, with an error above the bound
        changed("gate", 0, "error", to=None),
        changed("gate", 0, "check", to=7),
        changed("gate", to=[RESULT["gate"][0]] * 1001),
        changed("kernels", 0, "seconds", to=-1.0),
        changed("kernels", 0, "seconds", to=float("inf")),
        changed("kernels", 0, "seconds", to=float("nan")),
        changed("kernels", 0, "seconds", to=True),
        changed("kernels", 0, "seconds", to=10**400),
        changed("kernels", 0, "name", to="x" * 1001),
        changed("workload", to=[]),
        changed("workload", "stdout", to=None),
        changed("workload", "stdout", to="x" * (TEXT_MAX + 1)),
        changed("workload", "code", to=1.5),
        changed("workload", "first", to="1"),
        changed("workload", "again", to=[None]),
        changed("workload", "cpu", to=None),
        changed("layers", to=[[1, 2]]),
        changed("layers", to=[[1, 2, 0]]),
        changed("layers", to=[[1, 2, -3]]),
        changed("convolutions", to=[[1, 2, 3]]),
        changed("versions", to={"torch": 2}),
        changed("libraries", to=[]),
        changed("threads", to="2"),
        changed("errors", to=[1]),
    ],
    ids=str,
)
def test_a_wrong_shape_is_an_error(value: object) -> None:
    with pytest.raises(ToolError, match="can't be used"):
        from_result(value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b'{"a": NaN}', b"[-Infinity]", b"[" * 100_000, b" " * (RESULT_MAX + 1)]
)
def test_no_json_is_an_error(data: bytes) -> None:
    with pytest.raises(ToolError, match="can't be used"):
        from_json(data)
