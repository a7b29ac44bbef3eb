"""Bytecode with and without docstrings and columns: what goes, what stays, that the code runs the same."""

import marshal
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from rvbundle.compiler import Job, compile_sources
from rvbundle.environment import Interpreter

PYTHON = Interpreter(
    Path(sys.executable), "3.11.7", "3.11", Path("/s"), Path("/b"), str(sys.implementation.cache_tag), True
)


def compile_one(folder: Path, text: str, *, drop: bool = True, columns: bool = True) -> types.CodeType:
    (folder / "x.py").write_text(text)
    job = Job(folder / "x.py", folder / "x.pyc", "/usr/x.py", drop)
    assert compile_sources(PYTHON, [job], columns) == set()
    code = marshal.loads((folder / "x.pyc").read_bytes()[16:])
    assert isinstance(code, types.CodeType)
    return code


def run(code: types.CodeType) -> dict[str, object]:
    space: dict[str, object] = {"__name__": "x"}
    exec(code, space)
    return space


def docs(space: dict[str, object]) -> dict[str, str | None]:
    """Return the docstrings of the module and of all functions and classes in it, by their names."""
    found = {"": space.get("__doc__")}
    queue = list(space.values())
    while queue:
        value = queue.pop()
        if isinstance(value, types.FunctionType | type) and value.__module__ == "x":
            found[value.__qualname__] = value.__doc__
            queue += list(vars(value).values())
        elif isinstance(value, list):
            queue += value
    return found  # type: ignore[return-value]


EVERYTHING = '''\
"""Module."""
import functools
def function(a, b=2):
    """Function."""
    return a + b
async def coroutine():
    """Coroutine."""
def generator():
    """Generator."""
    yield 1
class Class:
    """Class."""
    value = 5
    def method(self):
        """Method."""
        return self.value
    @property
    def attribute(self):
        """Property."""
        return 7
    class Inner:
        """Inner."""
        def deep(self):
            """Deep."""
            return "deep"
def outer():
    """Outer."""
    def inner():
        """Closure."""
        return free
    free = 3
    return inner
inside = [outer()]
RESULT = [function(1), list(generator()), Class().method(), Class().attribute]
RESULT += [Class.Inner().deep(), inside[0]()]
'''


def test_all_docstrings_become_empty(tmp_path: Path) -> None:
    """Not None: whoever handles a docstring as text still can."""
    space = run(compile_one(tmp_path, EVERYTHING))
    names = "function coroutine generator Class Class.method Class.Inner Class.Inner.deep outer"
    assert docs(space) == dict.fromkeys(["", *names.split(), "outer.<locals>.inner"], "")
    assert vars(space["Class"])["attribute"].__doc__ == ""
    assert space["RESULT"] == [3, [1], 5, 7, "deep", 3]


def test_without_dropping_they_stay(tmp_path: Path) -> None:
    space = run(compile_one(tmp_path, EVERYTHING, drop=False))
    assert docs(space) == {
        "": "Module.",
        "function": "Function.",
        "coroutine": "Coroutine.",
        "generator": "Generator.",
        "Class": "Class.",
        "Class.method": "Method.",
        "Class.Inner": "Inner.",
        "Class.Inner.deep": "Deep.",
        "outer": "Outer.",
        "outer.<locals>.inner": "Closure.",
    }
    assert space["RESULT"] == [3, [1], 5, 7, "deep", 3]


def test_only_docstrings_go(tmp_path: Path) -> None:
    def constants(code: types.CodeType) -> Iterator[object]:
        for value in code.co_consts:
            yield from constants(value) if isinstance(value, types.CodeType) else [value]

    kept = list(constants(compile_one(tmp_path, EVERYTHING, drop=False)))
    dropped = list(constants(compile_one(tmp_path, EVERYTHING)))
    assert len(kept) == len(dropped)
    gone = {a for a, b in zip(kept, dropped, strict=True) if a != b}
    assert all(isinstance(text, str) and text.endswith(".") for text in gone)
    assert len(gone) == 11


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("def f():\n    'text'\n    return 'text'\nR = f()", "text"),
        ("def f():\n    'text'\n    return ['text', 1]\nR = f()", ["text", 1]),
        ("def f(a):\n    'text'\n    return a == 'text'\nR = f('text')", True),
        ("'text'\nR = 'text'", "text"),
        ("class C:\n    'text'\n    value = 'text'\nR = C.value", "text"),
        ("f = lambda: 'text'\nR = f()", "text"),
        ("f = lambda: ('text', 'other')\nR = f()", ("text", "other")),
        ("R = ['text' for _ in range(2)]", ["text", "text"]),
        ("R = {'text' for _ in range(2)}", {"text"}),
        ("R = {'key': 'text' for _ in range(2)}", {"key": "text"}),
        ("R = list('text' for _ in range(2))", ["text", "text"]),
        ("def f():\n    return 'text'\nR = f()", "text"),
        ("def f():\n    x = 'text'\n    return x\nR = f()", "text"),
        ("def f():\n    f'{1}text'\n    return 'text'\nR = f()", "text"),
        ("def f():\n    b'text'\n    return 'text'\nR = f()", "text"),
        ("def f(*, name):\n    'name'\n    return dict(name=name)\nR = f(name='name')", {"name": "name"}),
        ("def f():\n    'key'\n    return {'key': 1, 'other': 2}\nR = f()", {"key": 1, "other": 2}),
        ("def f(x):\n    'text'\n    return x in ('text', 'more')\nR = f('text')", True),
        ("class C:\n    value = 'text'\nR = [C.value, C.value]", ["text", "text"]),
        ("if 1:\n    'no docstring'\nR = 'no docstring'", "no docstring"),
        ("class C:\n    class D:\n        'text'\n    x = 'text'\nR = C.x", "text"),
        ("def f():\n    'text'\n    def g(): return 'text'\n    return g()\nR = f()", "text"),
        (
            "def f():\n    'first'\n    "
            + "\n    ".join(f"x{n} = 'c{n}'" for n in range(300))
            + "\n    return x256\nR = f()",
            "c256",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_code_runs_the_same(tmp_path: Path, text: str, value: object) -> None:
    assert run(compile_one(tmp_path, text, drop=False))["R"] == value
    assert run(compile_one(tmp_path, text))["R"] == value


@pytest.mark.parametrize(
    "text",
    ["def f():\n    'text'\n    return 'text'\n", "class f:\n    'text'\n    value = 'text'\n"],
    ids=["function", "class"],
)
def test_a_docstring_that_the_code_uses_stays(tmp_path: Path, text: str) -> None:
    assert run(compile_one(tmp_path, text))["f"].__doc__ == "text"  # type: ignore[attr-defined]


def test_a_modules_docstring_that_its_code_uses_stays(tmp_path: Path) -> None:
    assert run(compile_one(tmp_path, "'text'\nx = 'text'\n"))["__doc__"] == "text"


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "def f():\n    pass\n",
        "def f():\n    return 1\n",
        "class f:\n    pass\n",
        "f = lambda: 1\n",
        "",
    ],
)
def test_what_has_none_still_has_none(tmp_path: Path, text: str) -> None:
    space = run(compile_one(tmp_path, text))
    assert space.get("__doc__") is None
    assert getattr(space.get("f"), "__doc__", None) is None


@pytest.mark.parametrize(
    "line",
    [
        "print(f.__doc__)",
        "f.__doc__ = 'x'",
        "import inspect; inspect.getdoc(f)",
        "getattr(f, '__doc__')",
        "# this mentions __doc__",
    ],
)
def test_a_file_that_reads_docstrings_keeps_its_own(tmp_path: Path, line: str) -> None:
    text = "'Module.'\ndef f():\n    'Function.'\nclass C:\n    'Class.'\n"
    text += f"def g():\n    {line}\n    pass\n"
    assert docs(run(compile_one(tmp_path, text))) == {
        "": "Module.",
        "f": "Function.",
        "C": "Class.",
        "g": None,
    }


def test_dropping_gives_the_same_bytes_every_time(tmp_path: Path) -> None:
    found = []
    for others in (0, 5):
        folder = tmp_path / str(others)
        folder.mkdir()
        jobs = []
        for n in range(others):
            (folder / f"o{n}.py").write_text(f"'''Other {n}.'''\nx = 'Module.'\n")
            jobs.append(Job(folder / f"o{n}.py", folder / f"o{n}.pyc", f"/o{n}.py", n % 2 == 0))
        (folder / "x.py").write_text(EVERYTHING)
        jobs.append(Job(folder / "x.py", folder / "x.pyc", "/usr/x.py", drop_docstrings=True))
        assert compile_sources(PYTHON, jobs) == set()
        found.append((folder / "x.pyc").read_bytes())
    assert found[0] == found[1]


def test_jobs_of_one_call_are_each_as_they_say(tmp_path: Path) -> None:
    jobs = []
    for name in ("kept", "dropped"):
        (tmp_path / f"{name}.py").write_text("'''Doc.'''\n")
        jobs.append(Job(tmp_path / f"{name}.py", tmp_path / f"{name}.pyc", "/x.py", name == "dropped"))
    compile_sources(PYTHON, jobs)
    codes = [marshal.loads(job.target.read_bytes()[16:]) for job in jobs]
    assert [run(code)["__doc__"] for code in codes] == ["Doc.", ""]


FAILS = "def f():\n    return 1\n\ndef g(x):\n    y = 2\n    return f() + (y\n        / x)\n"


def places(code: types.CodeType) -> list[tuple[int | None, ...]]:
    found = list(code.co_positions())
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            found += places(value)
    return found


def test_columns(tmp_path: Path) -> None:
    plain, bare = compile_one(tmp_path, FAILS), compile_one(tmp_path, FAILS, columns=False)
    assert any(column is not None for _, _, column, _ in places(plain))
    assert all(column is None and end is None for _, _, column, end in places(bare))
    assert [line for line, *_ in places(plain)] == [line for line, *_ in places(bare)]
    assert len(marshal.dumps(bare)) < len(marshal.dumps(plain))


@pytest.mark.parametrize("columns", [True, False])
def test_lines_of_tracebacks(tmp_path: Path, columns: bool) -> None:
    compile_one(tmp_path, FAILS, columns=columns)
    code = "import marshal, sys; s = {}; exec(marshal.load(open(sys.argv[1], 'rb')), s); s['g'](0)"
    (tmp_path / "code").write_bytes((tmp_path / "x.pyc").read_bytes()[16:])
    command = [sys.executable, "-c", code, tmp_path / "code"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 'File "/usr/x.py", line 6, in g\n' in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("columns", [True, False])
def test_nothing_to_do(columns: bool) -> None:
    assert compile_sources(PYTHON, [], columns) == set()


def test_the_whole_standard_library_without_docstrings(tmp_path: Path) -> None:
    """Code of every form: that it loads, has no docstring of its own left, and keeps all else."""
    place = Path(os.__file__).parent
    sources = sorted(
        [*place.glob("*.py"), *(place / "json").glob("*.py"), *(place / "asyncio").glob("*.py")]
    )[::3]
    jobs = [Job(path, tmp_path / f"{n}.pyc", str(path), True) for n, path in enumerate(sources)]
    assert compile_sources(PYTHON, jobs) == set()
    for job in jobs:
        if b"__doc__" in (data := job.source.read_bytes()) or b"getdoc" in data:
            continue
        dropped = marshal.loads(job.target.read_bytes()[16:])
        check_same(compile(data, job.name, "exec", dont_inherit=True), dropped)


def check_same(plain: types.CodeType, dropped: types.CodeType) -> None:
    assert plain.replace(co_consts=()) == dropped.replace(co_consts=())
    differing = 0
    for before, after in zip(plain.co_consts, dropped.co_consts, strict=True):
        if isinstance(before, types.CodeType):
            check_same(before, after)
        elif before != after:
            differing += 1
            assert after == ""
            assert isinstance(before, str)
    assert differing <= 1
