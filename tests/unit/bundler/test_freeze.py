import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rvbundle import freeze
from rvbundle.compiler import Job, compile_sources
from rvbundle.contents import contents
from rvbundle.environment import Interpreter
from rvbundle.foreign import PACKAGES, Distribution, ForeignEnvironment
from rvbundle.freeze import Frozen, FrozenFile, load, plugins, role_of
from rvbundle.licences import DebianPackage
from rvbundle.pack import Item
from rvbundle.split import COLD_LIST, Placed, Split
from rvbundle.stage_agent import StagedAgent, start_words
from rvbundle.trimming import Trims
from rvbundle_runtime import format as fmt
from rvbundle_runtime import measuring

from .test_lock import recipe
from .test_split import LIB, SITE, file, frozen

PYTHON = Interpreter(
    Path(sys.executable), "3.11.7", "3.11", Path("/s"), Path("/b"), str(sys.implementation.cache_tag), True
)


@pytest.mark.parametrize(
    ("path", "content", "runnable", "role"),
    [
        (f"{SITE}/a.py", b"", False, freeze.SOURCE),
        (f"{SITE}/a.py", b"\x7fELF", True, freeze.SOURCE),
        (f"{SITE}/a-1.dist-info/RECORD", b"", False, freeze.METADATA),
        (f"{SITE}/a-1.dist-info/x.py", b"", False, freeze.METADATA),
        (f"{SITE}/a.egg-info", b"", False, freeze.METADATA),
        (f"{SITE}/a.so", b"\x7fELF", False, freeze.EXTENSION),
        (f"{SITE}/a.cpython-311-x86_64-linux-gnu.so", b"\x7fELF", True, freeze.EXTENSION),
        (f"{SITE}/a.libs/libx-1a.so.3", b"\x7fELF", True, freeze.LIBRARY),
        (f"{SITE}/torch/lib/libtorch.so", b"\x7fELF", False, freeze.LIBRARY),
        (f"{SITE}/libx.cpython-311.so", b"\x7fELF\0PyInit_libx\0", False, freeze.EXTENSION),
        (f"{SITE}/libx.so", b"\x7fELF\0PyInit_liby\0", False, freeze.LIBRARY),
        (f"{SITE}/with-dash.so", b"\x7fELF", False, freeze.LIBRARY),
        (f"{SITE}/a.so", b"INPUT(x)", False, freeze.DATA),
        (f"{SITE}/bin/tool", b"\x7fELF", True, freeze.PROGRAM),
        (f"{SITE}/bin/tool", b"\x7fELF", False, freeze.DATA),
        ("usr/bin/tool", b"#!python", True, freeze.DATA),
        (f"{SITE}/data.bin", b"", False, freeze.DATA),
        (f"{SITE}/py.typed", b"", False, freeze.DATA),
    ],
)
def test_role_of(tmp_path: Path, path: str, content: bytes, runnable: bool, role: str) -> None:
    source = tmp_path / os.path.basename(path)
    source.write_bytes(content)
    source.chmod(0o755 if runnable else 0o644)
    assert role_of(path, source) == role


@pytest.mark.parametrize(
    ("path", "inner"),
    [
        (f"{SITE}/torch/x.py", "torch/x.py"),
        (f"{LIB}/lib-dynload/_x.so", "_x.so"),
        (f"{LIB}/json/x.py", "json/x.py"),
        ("usr/lib/x/libc.so.6", "usr/lib/x/libc.so.6"),
        (f"{LIB}2/x.py", f"{LIB}2/x.py"),
    ],
)
def test_inner(path: str, inner: str) -> None:
    assert frozen().inner(path) == inner


def test_modules() -> None:
    files = (
        file(f"{SITE}/torch/__init__.py", freeze.SOURCE),
        file(f"{SITE}/torch/__init__.pyc", freeze.BYTECODE),
        file(f"{SITE}/torch/_C.cpython-311-x.so", freeze.EXTENSION),
        file(f"{LIB}/lib-dynload/_json.cpython-311-x.so", freeze.EXTENSION),
        file(f"{SITE}/x.txt", freeze.DATA),
    )
    assert frozen(*files).modules() == {
        "torch": Path(f"/f/tree/{SITE}/torch/__init__.py"),
        "torch._C": None,
        "_json": None,
    }


def test_inventory_round_trip(tmp_path: Path) -> None:
    files = (FrozenFile("a", freeze.LINK, "", False, 0, "", "", "b"), file("b", freeze.DATA, executable=True))
    value = Frozen(
        tmp_path, "3.11", "3.11.7", "x86_64", "usr/lib", (("a", "1"),), files, {"b": ("c",)}, ("note",)
    )
    rows = asdict(value)
    rows["files"] = [list(asdict(f).values()) for f in files]
    del rows["folder"], rows["emulators"]
    (tmp_path / "frozen.json").write_text(json.dumps(rows))
    assert load(tmp_path) == value
    assert (value.tree, value.stdlib) == (tmp_path / "tree", LIB)


def entry_points(tmp_path: Path, text: str) -> Frozen:
    (tmp_path / "entry").write_text(text)
    item = FrozenFile(f"{SITE}/x-1.dist-info/entry_points.txt", freeze.METADATA, "entry", False, 1, "", "x")
    return Frozen(tmp_path, "3.11", "3.11.7", "x86_64", "usr/lib", (), (item,), {}, ())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[gymnasium.envs]\nALE = ale_py.registration:register\n", ["ale_py.registration"]),
        ("[console_scripts]\nx = a.b:main\n[gui_scripts]\ny = c:main\n", []),
        ("[a]\nX = m\nx = n : f [extra]\n[b]\nk = m\n", ["m", "n"]),
        ("[a]\nk:1 = m%s\n", ["m%s"]),
        ("", []),
        ("no section at all\n", []),
        ("[a\n", []),
    ],
    ids=["plug-in", "scripts", "several", "odd characters", "empty", "no section", "broken"],
)
def test_plugins(tmp_path: Path, text: str, found: list[str]) -> None:
    """A distribution's broken metadata is its own affair."""
    assert plugins(entry_points(tmp_path, text)) == found


def library(path: str, digest: str) -> FrozenFile:
    return FrozenFile(path, freeze.LIBRARY, path, False, 1, digest, "torch")


def test_notes_on_duplicates() -> None:
    files = [library("a/libx.so", "1"), library("b/libx.so", "1"), library("c/liby.so", "2")]
    assert freeze._content_notes(files, []) == [
        "the same library lies in a/libx.so and b/libx.so (stored once)"
    ]


def test_notes_on_two_openmps() -> None:
    files = [library("a/libgomp-1.so", "1"), library("b/libiomp5.so", "2")]
    assert freeze._content_notes(files, []) == [
        "two different OpenMP runtimes: a/libgomp-1.so and b/libiomp5.so (a process that loads both may use "
        "too many threads, or crash)"
    ]


@pytest.mark.parametrize(
    ("files", "distributions", "first"),
    [
        ([], ["nvidia-cublas", "torch"], "nvidia-cublas"),
        ([library("t/libtorch_cuda.so", "1")], [], "t/libtorch_cuda.so"),
    ],
    ids=["wheels", "library"],
)
def test_notes_on_cuda(files: list[FrozenFile], distributions: list[str], first: str) -> None:
    (note,) = freeze._content_notes(files, distributions)
    assert note.startswith(f"this is a CUDA build of torch ({first} …)")
    assert note.endswith("require a CPU build of torch, from PyTorch's own index of such builds")


def test_nothing_to_note() -> None:
    assert freeze._content_notes([library("a/libgomp.so", "1")], ["torch"]) == []


@pytest.mark.parametrize(
    ("loader", "top"),
    [
        ("/lib64/ld-linux-x86-64.so.2", ("lib64", "usr/lib64")),
        ("/lib/ld-linux-riscv64-lp64d.so.1", None),
        ("/usr/lib/ld.so", None),
    ],
)
def test_links(loader: str, top: tuple[str, str] | None) -> None:
    links = freeze._links(PYTHON, loader)
    assert ("bin", "usr/bin") in links
    assert ("lib", "usr/lib") in links
    assert ("usr/bin/python3", "python3.11") in links
    assert (links[-1] == top) if top else all(name not in ("lib64", "usr") for name, _ in links)
    for path, target in links:
        fmt.check_link(path, target)


@pytest.mark.parametrize(
    ("content", "fixed"),
    [
        (b"#!/venv/bin/python3.11\nprint(1)\n", b"#!/usr/bin/python3\nprint(1)\n"),
        (b"#!/usr/bin/env python\n", b"#!/usr/bin/python3\n"),
        (b"#!/bin/sh\npython\n", None),
        (b"print(1)\n", None),
        (b"", None),
    ],
    ids=["venv", "env", "shell", "no script", "empty"],
)
def test_console_scripts(tmp_path: Path, content: bytes, fixed: bytes | None) -> None:
    (tmp_path / "source").write_bytes(content)
    assert freeze._fix_script(tmp_path / "source", tmp_path / "target") is (fixed is not None)
    if fixed is not None:
        assert (tmp_path / "target").read_bytes() == fixed
        assert (tmp_path / "target").stat().st_mode & 0o111


SOURCES = {
    "plain": "'''Doc.'''\nVALUE = 1\n",
    "many": "\n".join(
        f"def f{n}(a, b=(1, 2, 'x')):\n    return {{'k{n}': a, 'k': b}}, frozenset([1])" for n in range(50)
    ),
    "latin": "# coding: latin-1\nx = 'é'\n",
    "warns": "assert (1, 'always true')\nx = '\\d'\n",
}


def compiled(folder: Path, names: list[str]) -> dict[str, bytes]:
    folder.mkdir()
    jobs = []
    for name in names:
        (folder / f"{name}.py").write_bytes(SOURCES[name].encode("latin-1"))
        jobs.append(Job(folder / f"{name}.py", folder / f"{name}.pyc", f"/usr/{name}.py"))
    assert compile_sources(PYTHON, jobs) == set()
    return {name: (folder / f"{name}.pyc").read_bytes() for name in names}


def test_bytecode_is_the_same_every_time(tmp_path: Path) -> None:
    """Whatever else the process compiled before, and wherever the sources lie."""
    names = list(SOURCES)
    first = compiled(tmp_path / "one", names)
    second = compiled(tmp_path / "another folder", names[::-1])
    alone = compiled(tmp_path / "alone", ["many"])
    assert first == second
    assert alone["many"] == first["many"]
    assert first["plain"][4:8] == b"\1\0\0\0"  # PEP 552: checked by hash, and never


def test_bytecode_works_and_names_its_place(tmp_path: Path) -> None:
    data = compiled(tmp_path / "one", ["plain"])["plain"]
    code = "import marshal, sys; c = marshal.loads(sys.stdin.buffer.read()[16:]); print(c.co_filename); "
    code += "exec(c); print(VALUE)"
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert done.stdout == b"/usr/plain.py\n1\n"


def test_sources_for_another_python(tmp_path: Path) -> None:
    jobs = []
    for name, text in (
        ("good", b"x = 1"),
        ("bad", b"print 'x'"),
        ("nul", b"x = '\0'"),
        ("deep", b"-" * 100000 + b"1"),
    ):
        (tmp_path / name).write_bytes(text)
        jobs.append(Job(tmp_path / name, tmp_path / f"{name}.pyc", f"/{name}"))
    failed = compile_sources(PYTHON, jobs)
    assert {path.name for path in failed} >= {"bad", "nul"}
    assert "good" not in {path.name for path in failed}
    assert not (tmp_path / "bad.pyc").exists()


def test_nothing_to_compile() -> None:
    assert compile_sources(PYTHON, []) == set()


def test_inventory_of_this_environment() -> None:
    script = Path(freeze.__file__).parent / "inside/inventory.py"
    done = subprocess.run([sys.executable, "-I", script], capture_output=True, check=True)
    value = json.loads(done.stdout)
    names = [d["name"].lower() for d in value["distributions"]]
    assert names == sorted(names)
    (pytest_,) = [d for d in value["distributions"] if d["name"] == "pytest"]
    assert (pytest_["version"], pytest_["editable"]) == (pytest.__version__, False)
    assert any(path.endswith("/_pytest/config/__init__.py") for path in pytest_["files"])
    assert all(os.path.isabs(path) and not path.endswith(".pyc") for path in pytest_["files"])
    assert all(isinstance(name, str) for name in value["numpy_dispatch"])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"numpy/__init__.py": ""}, []),
        (
            {"numpy/__init__.py": "", "numpy/_core/__init__.py": "", "numpy/_core/_multiarray_umath.py": ""},
            [],
        ),
        (
            {
                "numpy/__init__.py": "",
                "numpy/_core/__init__.py": "",
                "numpy/_core/_multiarray_umath.py": "__cpu_dispatch__ = ['X86_V3', 'X86_V4']",
            },
            ["X86_V3", "X86_V4"],
        ),
        (
            {
                "numpy/__init__.py": "",
                "numpy/core/__init__.py": "",
                "numpy/core/_multiarray_umath.py": "__cpu_dispatch__ = ['AVX2']",
            },
            ["AVX2"],
        ),
    ],
    ids=["no numpy", "broken", "without the list", "numpy 2", "numpy 1"],
)
def test_features_that_numpy_picks_by(tmp_path: Path, files: dict[str, str], expected: list[str]) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    script = Path(freeze.__file__).parent / "inside/inventory.py"
    code = "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-I", "-S", "-c", code, script, tmp_path]
    done = subprocess.run(command, capture_output=True, check=True)
    assert json.loads(done.stdout)["numpy_dispatch"] == expected


@pytest.mark.parametrize("docstrings", [True, False])
def test_whose_docstrings_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, docstrings: bool
) -> None:
    """Those of installed distributions; not Python's, ours, or numpy's."""
    seen: list[Job] = []

    def compile_(interpreter: object, jobs: list[Job], columns: bool) -> set[Path]:
        assert columns is False
        seen.extend(jobs)
        return {jobs[0].source}

    monkeypatch.setattr(freeze, "compile_sources", compile_)
    packages = {
        "a.py": "torch",
        "b.py": "",
        "c.py": "rvbundle",
        "d.py": "numpy",
        "e.txt": "torch",
        "f.py": "python3-numpy",
        "g.py": "python3-torch",
    }
    planned = [
        freeze.Planned(path, tmp_path / path, freeze.SOURCE if path.endswith(".py") else freeze.DATA, name)
        for path, name in packages.items()
    ]
    kept, failures = freeze._compile(PYTHON, planned, docstrings, tmp_path)
    assert {job.name: job.drop_docstrings for job in seen} == {
        "/a.py": not docstrings,
        "/b.py": False,
        "/c.py": False,
        "/d.py": False,
        "/f.py": False,
        "/g.py": not docstrings,
    }
    assert ([item.path for item in kept], failures) == (["b.pyc", "c.pyc", "d.pyc", "f.pyc", "g.pyc"], 1)
    assert {item.role for item in kept} == {freeze.BYTECODE}


def test_exercises() -> None:
    """They provoke errors without an end of their own, and import what they are told to, or not."""
    script = Path(freeze.__file__).parent / "inside/exercise.py"
    request = {
        "modules": ["colorsys", "no_such_module", "antigravity.x", "this"],
        "traced": ["numpy", "torch"],
        "measure": measuring.GUEST,
        "errors": True,
    }
    command = [sys.executable, "-I", "-v", script, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "import 'colorsys'" in done.stderr
    assert "Traceback" not in done.stderr


def test_contents(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/play.py").write_bytes(b"print(1)\n")
    agent = StagedAgent(tmp_path / "agent", ("play.py",), ("/usr/bin/python3", "/app/play.py"))
    hot = file(f"{SITE}/a.pyc", freeze.BYTECODE)
    program = file("usr/bin/x", freeze.PROGRAM, "", executable=True)
    link_ = FrozenFile("bin", freeze.LINK, "", False, 0, "", "", "usr/bin")
    tail = file(f"{SITE}/a.so", freeze.TAIL)
    place = frozen(hot, program, link_, tail)
    placed = tuple(Placed(f, f is not tail, f.path) for f in place.files)
    both = contents(place, agent, Split(placed, "D x\ns y\n"), Trims({}, {}))
    assert both.cold == (
        Item(
            tail.path, fmt.TAIL, "tails", Path(f"/f/tree/{tail.path}"), 10, "00" * 32, "", "torch", tail.path
        ),
    )
    kinds = {i.path: (i.kind, i.group, i.target) for i in both.hot}
    assert kinds == {
        f"{SITE}/a.pyc": (fmt.FILE, "python", ""),
        "usr/bin/x": (fmt.EXECUTABLE, "libraries", ""),
        "bin": (fmt.LINK, "", "usr/bin"),
        "app/play.py": (fmt.FILE, "agent", ""),
        COLD_LIST: (fmt.FILE, "index", ""),
    }
    assert {i.path: i.content for i in both.hot}[COLD_LIST] == b"D x\ns y\n"
    assert {i.path: i.content for i in both.hot}["bin"] is None


def test_staged_agent(tmp_path: Path) -> None:
    from rvbundle import stage_agent

    folder = tmp_path / "src"
    (folder / "pkg").mkdir(parents=True)
    for path, text in (("play.py", "import pkg.x"), ("pkg/x.py", "print 'no'"), ("data.bin", "\0")):
        (folder / path).write_text(text)
    value = recipe(folder)
    value = type(value)(**{**vars(value), "sources": ("data.bin", "pkg/x.py", "play.py")})
    (tmp_path / "out").mkdir()
    stage_agent.stage(value, PYTHON, tmp_path / "out")
    staged = stage_agent.load(value, tmp_path / "out")
    tag = sys.implementation.cache_tag
    assert staged.files == (f"__pycache__/play.{tag}.pyc", "data.bin", "pkg/x.py", "play.py")
    assert staged.argv == ("/usr/bin/python3", "/app/play.py")
    assert set(stage_agent.source_digests(value)) == {"data.bin", "pkg/x.py", "play.py"}


def test_start_of_a_function(tmp_path: Path) -> None:
    from rvbundle import stage_agent

    value = recipe(tmp_path)
    value = type(value)(**{**vars(value), "entry": "pkg.main:run", "sources": ()})
    assert start_words(value) == ("/usr/bin/python3", "/app/.rvbundle-start.py")
    (tmp_path / "out").mkdir()
    stage_agent.stage(value, PYTHON, tmp_path / "out")
    text = (tmp_path / "out/app/.rvbundle-start.py").read_text()
    assert "from pkg.main import run\n" in text
    assert "sys.exit(run())" in text
    shutil.rmtree(tmp_path / "out")


PYTHON_313 = Interpreter(Path(sys.executable), "3.13.5", "3.13", Path("/s"), Path("/b"), "cpython-313", False)
LIBDIR = "usr/lib/riscv64-linux-gnu"
SITE_313 = "usr/lib/python3.13/site-packages"
THEIRS = {  # {path: (package, content or "-> " and a link's target)}
    f"{LIBDIR}/libc.so.6": ("libc6", "libc"),
    f"{LIBDIR}/libtorch.so.2.6": ("libtorch2.6", "-> libtorch.so.2.6.0"),
    f"{LIBDIR}/libtorch.so.2.6.0": ("libtorch2.6", "\x7fELF torch"),
    "usr/bin/python3.13": ("python3.13-minimal", "\x7fELF python"),
    "usr/bin/dash": ("dash", "\x7fELF dash"),
    "usr/share/numpy/version.txt": ("python3-numpy", "2.2.4"),
    f"{PACKAGES}/numpy/__init__.py": ("python3-numpy", "import numpy._core"),
    f"{PACKAGES}/numpy/tool": ("python3-numpy", "#!/bin/sh"),
    f"{PACKAGES}/numpy/include": ("python3-numpy", "-> ../../../include/numpy"),
    f"{PACKAGES}/numpy/lib": ("python3-numpy", "-> ../../../riscv64-linux-gnu"),
    f"{PACKAGES}/numpy/version.txt": ("python3-numpy", "-> ../../../../share/numpy/version.txt"),
    f"{PACKAGES}/numpy/same.py": ("python3-numpy", "-> __init__.py"),
    f"{PACKAGES}/numpy/__pycache__/x.cpython-313.pyc": ("python3-numpy", "never"),
    f"{PACKAGES}/numpy-2.2.4.dist-info/METADATA": ("python3-numpy", "Name: numpy"),
    f"{PACKAGES}/torch/lib/libtorch.so": (
        "python3-torch",
        "-> ../../../../riscv64-linux-gnu/libtorch.so.2.6",
    ),
    f"{PACKAGES}/torch/test": ("python3-torch", "-> ../../../libtorch-test"),
    f"{PACKAGES}/certs.pem": ("python3-certs", "-> /etc/hostname"),
    f"{PACKAGES}/cloudpickle/old.py": ("python3-cloudpickle", "old"),
    f"{PACKAGES}/bs4/__init__.py": ("python3-bs4", "old"),
    f"{PACKAGES}/beautifulsoup4-4.13.dist-info/METADATA": ("python3-bs4", "Name: beautifulsoup4"),
    f"{PACKAGES}/Zope.Event-5.0-py3.13.egg-info/PKG-INFO": ("python3-zope", "Name: zope.event"),
    f"{PACKAGES}/zope/event.py": ("python3-zope", "old"),
}


def fill(root: Path, files: Mapping[str, tuple[str, str]]) -> None:
    for path, (_, content) in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("-> "):
            (root / path).symlink_to(content[3:])
        else:
            (root / path).write_bytes(content.encode("latin-1"))


def wheel(site: Path, name: str, version: str, *files: str) -> Distribution:
    """Install a pure wheel: a file of it may also lie outside of `site`, or be gone ("!" before it)."""
    for file_ in files:
        if not file_.startswith("!"):
            (site / file_).parent.mkdir(parents=True, exist_ok=True)
            (site / file_).write_text(f"{name} {version}")
    return Distribution(name, version, tuple(os.path.normpath(site / f.lstrip("!")) for f in files))


@pytest.fixture
def foreign(tmp_path: Path) -> ForeignEnvironment:
    """A payload of Debian's packages, with a link to a library and others, and wheels beside them."""
    root, site = tmp_path / "f/root", tmp_path / "env/site-packages"
    fill(root, THEIRS)
    (root / PACKAGES / "numpy/tool").chmod(0o755)
    wheels = (
        wheel(
            site, "gymnasium", "1.4.0", *("gymnasium/__init__.py", "gymnasium/run.sh", "../bin/gym", "!x.py")
        ),
        wheel(site, "cloudpickle", "3.1", "cloudpickle/__init__.py"),
        wheel(site, "beautifulsoup4", "4.14", "bs4/__init__.py"),
        wheel(site, "Zope_Event", "6", "zope/event.py"),
    )
    (site / "gymnasium/run.sh").chmod(0o755)
    owners = {path: package for path, (package, _) in THEIRS.items()}
    packages = {
        "python3-numpy": DebianPackage("python3-numpy", "1:2.2.4-1", "numpy", "1:2.2.4-1"),
        "dash": DebianPackage("dash", "0.5", "dash", "0.5"),
    }
    return ForeignEnvironment(
        "riscv64", "trixie", root, owners, packages, site, wheels, PYTHON_313, ("a note",)
    )


def test_what_a_foreign_payload_is_made_of(foreign: ForeignEnvironment) -> None:
    found = freeze.of_foreign(foreign)
    root, site = foreign.root, foreign.site
    rows = {p.path: (p.source, p.role, p.package, p.executable) for p in found.planned}
    torch = root / f"{LIBDIR}/libtorch.so.2.6.0"
    assert rows == {
        f"{SITE_313}/gymnasium/__init__.py": (
            site / "gymnasium/__init__.py",
            freeze.SOURCE,
            "gymnasium",
            False,
        ),
        f"{SITE_313}/gymnasium/run.sh": (site / "gymnasium/run.sh", freeze.DATA, "gymnasium", True),
        f"{SITE_313}/cloudpickle/__init__.py": (
            site / "cloudpickle/__init__.py",
            freeze.SOURCE,
            "cloudpickle",
            False,
        ),
        f"{SITE_313}/bs4/__init__.py": (site / "bs4/__init__.py", freeze.SOURCE, "beautifulsoup4", False),
        f"{SITE_313}/zope/event.py": (site / "zope/event.py", freeze.SOURCE, "Zope_Event", False),
        **{
            f"{SITE_313}/numpy/{name}": (root / place, role, "python3-numpy", runnable)
            for name, place, role, runnable in (
                ("__init__.py", f"{PACKAGES}/numpy/__init__.py", freeze.SOURCE, False),
                ("same.py", f"{PACKAGES}/numpy/__init__.py", freeze.SOURCE, False),
                ("tool", f"{PACKAGES}/numpy/tool", freeze.DATA, True),
                ("version.txt", "usr/share/numpy/version.txt", freeze.DATA, False),
            )
        },
        f"{SITE_313}/numpy-2.2.4.dist-info/METADATA": (
            root / PACKAGES / "numpy-2.2.4.dist-info/METADATA",
            freeze.METADATA,
            "python3-numpy",
            False,
        ),
        f"{LIBDIR}/libtorch.so.2.6": (torch, freeze.LIBRARY, "python3-torch", False),
    }
    ((path, target),) = found.links
    assert path == f"{SITE_313}/torch/lib/libtorch.so"
    assert os.path.normpath(os.path.join(os.path.dirname(path), target)) == f"{LIBDIR}/libtorch.so.2.6"
    fmt.check_link(path, target)


def test_the_rest_of_a_foreign_inventory(foreign: ForeignEnvironment) -> None:
    found = freeze.of_foreign(foreign)
    root = foreign.root
    assert (found.interpreter, found.stdlib) == (PYTHON_313, root / "usr/lib/python3.13")
    assert (found.system.arch, found.system.root, found.system.libdir) == ("riscv64", root, LIBDIR)
    assert [(p.path, p.source, p.role, p.executable) for p in found.programs] == [
        ("usr/bin/python3.13", root / "usr/bin/python3.13", freeze.PROGRAM, True),
        ("usr/bin/sh", root / "usr/bin/dash", freeze.PROGRAM, True),
    ]
    assert found.packages == (
        ("Zope_Event", "6"),
        ("beautifulsoup4", "4.14"),
        ("cloudpickle", "3.1"),
        ("dash", "0.5"),
        ("gymnasium", "1.4.0"),
        ("python3-numpy", "1:2.2.4-1"),
    )
    assert found.ours == root.parent
    assert found.origin is not None
    assert found.origin.owner(root / "usr/bin/dash") == "dash"
    assert found.notes == (
        "a note",
        "4 links to folders or out of packages are left out, such as certs.pem",
    )


def test_a_foreign_payload_without_odd_links(foreign: ForeignEnvironment) -> None:
    for path in ("certs.pem", "torch/test", "numpy/include", "numpy/lib"):
        (foreign.root / PACKAGES / path).unlink()
    assert freeze.of_foreign(foreign).notes == ("a note",)


def test_a_foreign_payload_without_packages_of_python(foreign: ForeignEnvironment) -> None:
    shutil.rmtree(foreign.root / PACKAGES)
    found = freeze.of_foreign(replace(foreign, wheels=(), notes=()))
    assert (found.planned, found.links, found.notes) == ((), (), ())


def test_which_packages_wheels_replace(foreign: ForeignEnvironment) -> None:
    """By Debian's usual name of a package, and by what its metadata says."""
    assert freeze._replaced(foreign) >= {"python3-cloudpickle", "python3-bs4", "python3-zope"}
    assert not freeze._replaced(foreign) & {"python3-numpy", "python3-torch", "dash"}
