"""Profiles: what a payload gives back, and the tables made of it."""

import copy
from typing import Any

import pytest

from rvbundle_runtime.errors import ToolError
from rvbundle_runtime.profiling import Kernel, Operator, Profile, from_result, profile_lines

RESULT: dict[str, Any] = {
    "libraries": {"ATen": "AVX2", "OpenBLAS": "Haswell"},
    "profile": {
        "kind": "operators",
        "total": 2.0,
        "python": 0.5,
        "operators": [{"name": "aten::addmm", "calls": 30, "self": 1.2, "total": 1.25}],
        "kernels": [{"library": "MKL", "name": "SGEMM (N,N,2,3,4)", "calls": 10, "seconds": 0.25}],
    },
}


def changed(*keys: str | int, to: object) -> dict[str, Any]:
    """Return RESULT with one value replaced."""
    result = copy.deepcopy(RESULT)
    inner: Any = result
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return result


def test_from_result() -> None:
    assert from_result(RESULT) == Profile(
        "operators",
        2.0,
        0.5,
        (Operator("aten::addmm", 30, 1.2, 1.25),),
        (Kernel("MKL", "SGEMM (N,N,2,3,4)", 10, 0.25),),
        (("ATen", "AVX2"), ("OpenBLAS", "Haswell")),
    )


def test_lines() -> None:
    assert profile_lines(from_result(RESULT)) == [
        "one run, profiled: 2.000 s, 25.0 % of them in Python's own code",
        "",
        " share      own s    total s      calls  operator",
        "60.0 %     1.2000     1.2500         30  aten::addmm",
        "",
        " share    seconds      calls  kernel",
        "12.5 %     0.2500         10  MKL SGEMM (N,N,2,3,4)",
        "",
        "instruction families: ATen: AVX2; OpenBLAS: Haswell",
    ]


def test_lines_without_kernels_and_with_a_long_name() -> None:
    name = "a" * 100 + "b" * 100
    profile = Profile("functions", 0.0, 0.0, (Operator(name, 1, 0.0, 0.0),), (), ())
    lines = profile_lines(profile)
    assert "function" in lines[2]
    assert lines[3].endswith(f"{'a' * 35}…{'b' * 34}")
    assert "–" in lines[3]  # no share of nothing
    assert lines[5] == "no kernel of a numeric library has told of itself"
    assert lines[-1] == "instruction families: not known"


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"profile": None},
        changed("profile", to=[]),
        changed("profile", "kind", to="other"),
        changed("profile", "kind", to=[]),
        changed("profile", "total", to=-1),
        changed("profile", "python", to=None),
        changed("profile", "operators", to=None),
        changed("profile", "operators", 0, "calls", to=1.5),
        changed("profile", "operators", 0, "self", to="1"),
        changed("profile", "kernels", 0, "library", to=None),
        changed("profile", "kernels", 0, "seconds", to=float("nan")),
        changed("libraries", to=None),
    ],
    ids=str,
)
def test_a_wrong_shape_is_an_error(value: object) -> None:
    with pytest.raises(ToolError, match="can't be used"):
        from_result(value)
