import json
from pathlib import Path

import pytest

from rvbundle import analysis
from rvbundle.analysis import ModuleGraph, imports_of, load_graph, reach, top_level_names

GRAPH = ModuleGraph(
    edges={
        "torch": ("torch.nn", "os"),
        "torch.nn": ("torch.nn.functional",),
        "torch.nn.functional": ("torch",),
        "torch.fft": ("torch",),
        "torch.hidden": ("late",),
        "late": (),
        "os": (),
        "gymnasium": (),
        "gymnasium.envs": (),
        "ale_py": ("gymnasium.envs",),
        "unused": ("os",),
    },
    hidden={"torch": (("torch.hidden", "hook-torch.py"),)},
    data=(("torch", "/x/torch/data.bin"), ("unused", "/x/unused/data.bin"), ("torch", "/y/outside.bin")),
)
PACKAGES = (Path("/x"), "usr/lib/site")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a", {"a"}),
        ("import a.b as c, d", {"a.b", "d"}),
        ("from a import b, c", {"a", "a.b", "a.c"}),
        ("from a.b import *", {"a.b", "a.b.*"}),
        ("def f():\n    import late", {"late"}),
        ("if 0:\n    try:\n        import x\n    except ImportError:\n        import y", {"x", "y"}),
        ("from . import a\nfrom .b import c", set()),
        ("", set()),
        ("import (", set()),
        ("x = '\0'", set()),
        ("# coding: nonsense-9\nimport a", set()),
    ],
    ids=[
        "plain",
        "dotted",
        "from",
        "star",
        "inside",
        "guarded",
        "relative",
        "empty",
        "broken",
        "nul",
        "coding",
    ],
)
def test_imports_of(source: str, names: set[str]) -> None:
    assert imports_of(source.encode()) == names


@pytest.mark.parametrize(
    ("source", "package", "names"),
    [
        ("from . import a", "pkg", {"pkg", "pkg.a"}),
        ("from .b import c", "pkg", {"pkg.b", "pkg.b.c"}),
        ("from .. import a", "pkg.sub", {"pkg", "pkg.a"}),
        ("from ..x.y import z", "pkg.sub", {"pkg.x.y", "pkg.x.y.z"}),
        ("from ... import a", "pkg.sub", set()),
    ],
)
def test_relative_imports(source: str, package: str, names: set[str]) -> None:
    assert imports_of(source.encode(), package) == names


def test_sources_in_other_encodings() -> None:
    assert imports_of("# -*- coding: latin-1 -*-\nimport é".encode("latin-1")) == {"é"}
    assert imports_of(b"\xef\xbb\xbfimport a") == {"a"}


def test_deep_nesting_is_no_error() -> None:
    assert imports_of(b"x = " + b"(" * 5000 + b")" * 5000) == set()
    assert imports_of(b"-" * 100_000 + b"1") == set()


def test_reach_with_chains() -> None:
    found = reach(GRAPH, [("play.py", b"import torch.nn")], [], {}, PACKAGES)
    assert found.modules == {
        "torch": "play.py (as a parent of torch.nn)",
        "torch.nn": "play.py",
        "os": "play.py (as a parent of torch.nn) → torch",
        "torch.nn.functional": "play.py → torch.nn",
        "torch.hidden": "play.py (as a parent of torch.nn) → torch (hook-torch.py)",
        "late": "play.py (as a parent of torch.nn) → torch (hook-torch.py) → torch.hidden",
    }
    assert found.data == {
        "usr/lib/site/torch/data.bin": "data of torch (play.py (as a parent of torch.nn) → torch)"
    }


def test_plugins_are_reached() -> None:
    found = reach(GRAPH, [], ["ale_py"], {}, PACKAGES)
    assert found.modules == {
        "ale_py": "entry point of a plug-in",
        "gymnasium": "entry point of a plug-in → ale_py (as a parent of gymnasium.envs)",
        "gymnasium.envs": "entry point of a plug-in → ale_py",
    }


def test_nothing_is_reached() -> None:
    assert reach(GRAPH, [("play.py", b"import missing, json")], ["gone"], {}, PACKAGES) == analysis.Reach(
        {}, {}
    )


def test_a_submodule_that_only_the_agent_imports(tmp_path: Path) -> None:
    """The graph was made without knowing the agent: what it lacks is read from its source."""
    (tmp_path / "extra.py").write_text("from . import other\nimport late\n")
    (tmp_path / "other.py").write_text("")
    modules = {"torch.extra": tmp_path / "extra.py", "torch.other": tmp_path / "other.py", "torch": None}
    found = reach(GRAPH, [("play.py", b"import torch.extra")], [], modules, PACKAGES)
    assert found.modules["torch.extra"] == "play.py"
    assert found.modules["torch.other"] == "play.py → torch.extra"
    assert found.modules["late"] == "play.py → torch.extra"


def test_a_long_chain_keeps_both_ends() -> None:
    edges = {f"m{n}": (f"m{n + 1}",) for n in range(9)} | {"m9": ()}
    found = reach(ModuleGraph(edges, {}, ()), [("play.py", b"import m0")], [], {}, PACKAGES)
    assert found.modules["m9"] == "play.py → m0 → … → m6 → m7 → m8"


def test_load_graph(tmp_path: Path) -> None:
    value = {
        "edges": {"a": ["b"], "b": []},
        "hidden": [["a", "c", "hook-a.py"], ["a", "d", "hook-a.py"]],
        "data": [["a", "/x"]],
        "missing": 3,
    }
    (tmp_path / "graph.json").write_text(json.dumps(value))
    assert load_graph(tmp_path) == ModuleGraph(
        {"a": ("b",), "b": ()}, {"a": (("c", "hook-a.py"), ("d", "hook-a.py"))}, (("a", "/x"),)
    )


def test_top_level_names() -> None:
    site = Path("/e/site-packages")
    files = [
        "six.py",
        "torch/__init__.py",
        "torch/nn/x.py",
        "_x.cpython-311-x86_64-linux-gnu.so",
        "numpy.libs/libx.so",
    ]
    files += ["torch-2.dist-info/METADATA", "tests/test_x.py", "data/x.txt", "with-dash/x.py", "ext/y.so"]
    distributions: list[dict[str, object]] = [
        {"files": [f"{site}/{file}" for file in files] + ["/e/bin/tool.py"]},
        {"files": None},
    ]
    assert top_level_names(site, distributions) == ["_x", "ext", "six", "torch"]
