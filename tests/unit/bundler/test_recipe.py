import os
import posixpath
from collections.abc import Callable
from pathlib import Path

import pytest

from rvbundle.recipe import Recipe, Workload, load
from rvbundle_runtime.errors import RecipeError

MACHINE = os.uname().machine
OTHER, ANOTHER = [a for a in ("x86_64", "aarch64", "riscv64") if a != MACHINE][:2]
MINIMAL = """\
[agent]
name = "demo"
version = "1.0"
entry = "play.py"

[python]
version = "3.11"

[[trace]]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a recipe beside a play.py."""
    (tmp_path / "play.py").write_text("")

    def write(text: str) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


Write = Callable[[str], Path]


def test_minimal_recipe(write: Write) -> None:
    path = write(MINIMAL)
    assert load(path) == Recipe(
        path=path,
        name="demo",
        version="1.0",
        entry="play.py",
        sources=("play.py",),
        python="3.11",
        requires=(),
        requirements=None,
        workloads=(Workload((), False, None, 600.0),),
        trim="traced",
        docstrings=False,
        keep_modules=(),
        keep_files=(),
        network=False,
        env={},
    )


def test_full_recipe(write: Write, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/policy.pt").write_text("")
    recipe = load(
        write("""\
[agent]
name = "a.b_c-1"
version = "2024.1"
entry = "play.py"
include = ["w/*.pt"]

[python]
version = "3.9"
requires = ["torch==2.13.0", "gymnasium"]

[[trace]]
args = ["--episodes", "3"]
golden = true
timeout = 20

[[trace]]
tolerance = 1e-4

[[trace]]
tolerance = 1
golden = false

[trim]
level = "reachable"

[keep]
modules = ["torch.fft"]
files = ["*.onnx"]

[run]
network = true
env = { SEED = "1" }
""")
    )
    assert recipe.sources == ("play.py", "w/policy.pt")
    assert recipe.requires == ("torch==2.13.0", "gymnasium")
    assert recipe.workloads == (
        Workload(("--episodes", "3"), True, None, 20.0),
        Workload((), True, 1e-4, 600.0),
        Workload((), False, 1.0, 600.0),
    )
    assert (recipe.trim, recipe.keep_modules, recipe.keep_files) == ("reachable", ("torch.fft",), ("*.onnx",))
    assert (recipe.network, recipe.env, recipe.python) == (True, {"SEED": "1"}, "3.9")


def test_names_of_what_is_made(write: Write, tmp_path: Path) -> None:
    recipe = load(write(MINIMAL))
    assert recipe.file_stem == "demo-1.0"
    assert recipe.lock_path == tmp_path / "recipe.lock"
    assert recipe.trace_path(MACHINE) == tmp_path / "recipe.trace"
    assert recipe.folder == tmp_path


def test_a_folder_stands_for_its_recipe(write: Write, tmp_path: Path) -> None:
    write(MINIMAL)
    assert load(tmp_path) == load(tmp_path / "recipe.toml")


def replaced(old: str, new: str) -> str:
    assert MINIMAL.count(old) == 1
    return MINIMAL.replace(old, new)


ADD = "add `{} = …` to [{}]; `rvbundle init` writes a complete example"
NAMES = "use letters, digits and . _ - (the first a letter or digit), at most 100"
A_SUITE = 'write a suite of Debian\'s, such as "debian:trixie" or "debian:sid"'
# (recipe, line where the error points, message behind "PATH:LINE: ", hint)
BAD = [
    pytest.param(
        replaced('name = "demo"\n', ""), 1, "[agent] name: missing", ADD.format("name", "agent"), id="no name"
    ),
    pytest.param(
        replaced('version = "1.0"\n', ""),
        1,
        "[agent] version: missing",
        ADD.format("version", "agent"),
        id="no version",
    ),
    pytest.param(
        replaced('entry = "play.py"\n', ""),
        1,
        "[agent] entry: missing",
        ADD.format("entry", "agent"),
        id="no entry",
    ),
    pytest.param(
        replaced('version = "3.11"\n', ""),
        6,
        "[python] version: missing",
        ADD.format("version", "python"),
        id="no python version",
    ),
    pytest.param(
        replaced('name = "demo"', 'name = "a/b"'),
        2,
        "[agent] name: 'a/b' can't be part of a file name",
        NAMES,
        id="slash",
    ),
    pytest.param(
        replaced('name = "demo"', 'name = ".a"'),
        2,
        "[agent] name: '.a' can't be part of a file name",
        NAMES,
        id="dot",
    ),
    pytest.param(
        replaced('name = "demo"', 'name = ""'),
        2,
        "[agent] name: '' can't be part of a file name",
        NAMES,
        id="empty name",
    ),
    pytest.param(
        replaced('name = "demo"', f'name = "{"x" * 101}"'),
        2,
        f"[agent] name: '{'x' * 101}' can't be part of a file name",
        NAMES,
        id="long name",
    ),
    pytest.param(
        replaced('version = "1.0"', 'version = "1 0"'),
        3,
        "[agent] version: '1 0' can't be part of a file name",
        NAMES,
        id="space in version",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = "plya.py"'),
        4,
        "[agent] entry: there is no file 'plya.py' beside the recipe",
        "",
        id="entry missing",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = ""'),
        4,
        "[agent] entry: there is no file '' beside the recipe",
        "",
        id="empty entry",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = "a-b:main"'),
        4,
        "[agent] entry: 'a-b:main' is no package.module:function",
        "",
        id="bad function",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = "/etc/passwd"'),
        4,
        "[agent] entry: '/etc/passwd' lies outside the recipe's folder",
        "",
        id="entry outside",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = "play.py"\ninclude = ["*.pt"]'),
        5,
        "[agent] include: nothing matches '*.pt'",
        "",
        id="include nothing",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = "play.py"\ninclude = ["../x"]'),
        5,
        "[agent] include: '../x' leaves the recipe's folder",
        "",
        id="include outside",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = "play.py"\ninclude = ["/etc/*"]'),
        5,
        "[agent] include: '/etc/*' leaves the recipe's folder",
        "",
        id="include absolute",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = "play.py"\ninclude = [""]'),
        5,
        "[agent] include: '' is no glob: Unacceptable pattern: ''",
        "",
        id="include empty",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = "play.py"\ninclude = "*.pt"'),
        5,
        "[agent] include: expected a list of strings, found a string",
        'write it in brackets: include = ["*.pt"]',
        id="include no list",
    ),
    pytest.param(
        replaced('version = "3.11"', "version = 3.11"),
        7,
        "[python] version: expected a string, found a number",
        'write it in quotes: version = "3.11"',
        id="python as a number",
    ),
    pytest.param(
        replaced('version = "3.11"', 'version = "3.11.2"'),
        7,
        "[python] version: '3.11.2' is no version such as 3.11",
        "",
        id="python with patch level",
    ),
    pytest.param(
        replaced('version = "3.11"', 'version = "2.7"'),
        7,
        "[python] version: '2.7' is no version such as 3.11",
        "",
        id="python 2",
    ),
    pytest.param(
        replaced('version = "3.11"', 'version = "3.11"\nrequires = "torch"'),
        8,
        "[python] requires: expected a list of strings, found a string",
        'write it in brackets: requires = ["torch"]',
        id="requires no list",
    ),
    pytest.param(
        replaced('version = "3.11"', 'version = "3.11"\nrequires = [1]'),
        8,
        "[python] requires: expected a list of strings, found a number in it",
        'write it in quotes: "1"',
        id="requires numbers",
    ),
    pytest.param(
        replaced('version = "3.11"', 'version = "3.11"\nrequires = ["a"]\nrequirements = "r.txt"'),
        9,
        "[python] requirements: give either requires or requirements, not both",
        "",
        id="both kinds",
    ),
    pytest.param(
        MINIMAL + "[[trace]]\ntimeout = 5\n[[trace]]\ntimeout = 0\n",
        13,
        "[trace] timeout: 0 is not above zero",
        "",
        id="timeout zero in the third",
    ),
    pytest.param(
        MINIMAL + "tolerance = -1.5\n",
        10,
        "[trace] tolerance: -1.5 is not above zero",
        "",
        id="tolerance negative",
    ),
    pytest.param(
        MINIMAL + "timeout = nan\n", 10, "[trace] timeout: nan is not above zero", "", id="timeout nan"
    ),
    pytest.param(
        MINIMAL + "golden = 1\n",
        10,
        "[trace] golden: expected a boolean, found a number",
        "",
        id="golden a number",
    ),
    pytest.param(
        MINIMAL + "timeout = true\n",
        10,
        "[trace] timeout: expected a number, found a boolean",
        "",
        id="timeout a boolean",
    ),
    pytest.param(
        MINIMAL + "arg = []\n", 10, "[trace] arg: unknown key", "did you mean args?", id="near miss"
    ),
    pytest.param(
        MINIMAL + "[[trace]]\nzzz = 1\n",
        11,
        "[trace] zzz: unknown key",
        "known here: args, golden, tolerance, timeout",
        id="far miss",
    ),
    pytest.param(
        replaced('entry = "play.py"', 'entry = "play.py"\nnetwork = true'),
        5,
        "[agent] network: unknown key",
        "network belongs to [run]",
        id="in the wrong table",
    ),
    pytest.param(
        MINIMAL + "[trimm]\n", 10, "[trimm]: unknown table", "did you mean [trim]?", id="unknown table"
    ),
    pytest.param(
        MINIMAL + '[trim]\nlevel = "all"\n',
        11,
        "[trim] level: 'all' is none of traced, reachable, none",
        "",
        id="trim level",
    ),
    pytest.param(
        MINIMAL + "[run]\nenv = { A = 1 }\n",
        11,
        "[run] env: expected a table of strings, found a number in it",
        'write it in quotes: "1"',
        id="env numbers",
    ),
    pytest.param(
        MINIMAL + '[run]\nenv = { "A B" = "1" }\n',
        11,
        "[run] env: 'A B' can't be the name of a variable",
        "",
        id="env name",
    ),
    pytest.param(
        MINIMAL + '[run.env]\n"1A" = "1"\n',
        10,
        "[run] env: '1A' can't be the name of a variable",
        "",
        id="env table",
    ),
    pytest.param(
        replaced("[agent]", "[[agent]]"),
        1,
        "agent: expected a table, found a list",
        "",
        id="list for a table",
    ),
    pytest.param(
        replaced("[[trace]]", "[trace]"),
        9,
        "trace: expected a list of tables, found a table",
        "write it in double brackets: [[trace]]",
        id="table for a list",
    ),
    pytest.param(
        "name = 1\n" + MINIMAL, 1, "name: unknown key", "name belongs to [agent]", id="key outside of tables"
    ),
    pytest.param(
        MINIMAL + '[payloads]\nppc64le = "debian:trixie"\n',
        11,
        "[payloads] ppc64le: unknown key",
        "known here: x86_64, aarch64, riscv64",
        id="payload of an architecture that nobody knows",
    ),
    pytest.param(
        MINIMAL + '[payloads]\nriscv = "debian:trixie"\n',
        11,
        "[payloads] riscv: unknown key",
        "did you mean riscv64?",
        id="payload of an architecture by a part of its name",
    ),
    pytest.param(
        MINIMAL + "[payloads]\nriscv64 = true\n",
        11,
        "[payloads] riscv64: expected a string, found a boolean",
        "",
        id="payload without a source",
    ),
    pytest.param(
        MINIMAL + f'[payloads]\n{MACHINE} = "wheels"\n{OTHER} = "wheels"\n',
        12,
        f"[payloads] {OTHER}: wheels are for the machine that builds ({MACHINE})",
        A_SUITE,
        id="wheels for another machine",
    ),
    pytest.param(
        MINIMAL + f'[payloads]\n{MACHINE} = "debian:trixie"\n',
        11,
        f"[payloads] {MACHINE}: the payload of the machine that builds is made of wheels",
        f'write {MACHINE} = "wheels", or leave it out',
        id="debian for this machine",
    ),
    *(
        pytest.param(
            MINIMAL + f'[payloads]\n{OTHER} = "{source}"\n',
            11,
            f"[payloads] {OTHER}: {source!r} is no source of a payload",
            A_SUITE,
            id=f"source {source!r}",
        )
        for source in ("", "debian", "debian:", "debian:Trixie", "debian:a b", "ubuntu:noble", "trixie")
    ),
]


def test_payloads(write: Write, tmp_path: Path) -> None:
    recipe = load(write(MINIMAL + f'[payloads]\n{OTHER} = "debian:trixie"\n{ANOTHER} = "debian:sid"\n'))
    assert recipe.debian == {OTHER: "trixie", ANOTHER: "sid"}
    assert recipe.trace_path(OTHER) == tmp_path / f"recipe.{OTHER}.trace"
    assert recipe.trace_path(MACHINE) == tmp_path / "recipe.trace"


@pytest.mark.parametrize("text", ["", "[payloads]\n", f'[payloads]\n{MACHINE} = "wheels"\n'])
def test_the_payload_of_this_machine_goes_without_saying(write: Write, text: str) -> None:
    assert load(write(MINIMAL + text)) == load(write(MINIMAL))
    assert load(write(MINIMAL)).debian == {}


@pytest.mark.parametrize(("text", "line", "message", "hint"), BAD)
def test_bad_recipe(write: Write, text: str, line: int, message: str, hint: str) -> None:
    path = write(text)
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert caught.value.message == f"{path}:{line}: {message}"
    assert caught.value.hint == hint


def test_no_workload(write: Write) -> None:
    path = write(replaced("[[trace]]\n", ""))
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert caught.value.message == f"{path}: trace: no workload is given"
    assert '    [[trace]]\n    args = ["--episodes", "3"]\n    golden = true' in caught.value.hint


@pytest.mark.parametrize("value", ["inf", "1e300"])
def test_a_time_limit_beyond_all_time(write: Write, value: str) -> None:
    """What subprocess can't wait for must not pass here."""
    path = write(MINIMAL + f"timeout = {value}\n")
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert caught.value.message.startswith(f"{path}:10: [trace] timeout: ")


def test_no_toml(write: Write) -> None:
    path = write("[agent\n")
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert caught.value.message.startswith(f"{path}:1: not valid TOML: ")
    assert "line 1" in caught.value.message


def test_no_utf_8(write: Write) -> None:
    path = write("")
    path.write_bytes(b'[agent]\nname = "\xff"\n')
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert caught.value.message == f"{path}:2: not UTF-8 text"


def test_no_recipe(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "recipe.toml"):
        with pytest.raises(RecipeError) as caught:
            load(path)
        assert caught.value.message == f"{tmp_path}/recipe.toml: No such file or directory"
        assert caught.value.hint == "`rvbundle init` writes one for the agent in this folder"


def make_files(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("")


def test_sources_leave_the_workshop_out(write: Write, tmp_path: Path) -> None:
    make_files(
        tmp_path,
        "util.py",
        "pkg/__init__.py",
        "pkg/deep/x.py",
        "tests/test_x.py",
        "venv/lib/y.py",
        ".git/hook.py",
    )
    make_files(tmp_path, "pkg/__pycache__/z.py", "build/b.py", "notes.txt", "pkg/data.bin", "dist/d.py")
    assert load(write(MINIMAL)).sources == ("pkg/__init__.py", "pkg/deep/x.py", "play.py", "util.py")


@pytest.mark.parametrize("entry", ["test/play.py", "build/play.py", ".hidden/play.py", "bin/agent"])
def test_the_entry_is_always_a_source(write: Write, tmp_path: Path, entry: str) -> None:
    make_files(tmp_path, entry)
    recipe = load(write(replaced('entry = "play.py"', f'entry = "{entry}"')))
    assert entry in recipe.sources


@pytest.mark.parametrize("entry", ["pkg/../play.py", "./play.py", "pkg//inner.py"])
def test_entry_in_a_roundabout_form(write: Write, tmp_path: Path, entry: str) -> None:
    """Such a path would be refused by the image's own checks."""
    make_files(tmp_path, "pkg/inner.py")
    try:
        recipe = load(write(replaced('entry = "play.py"', f'entry = "{entry}"')))
    except RecipeError:
        return
    assert posixpath.normpath(recipe.entry) in recipe.sources
    assert recipe.sources == ("pkg/inner.py", "play.py")


def test_include_may_name_folders_and_hidden_files(write: Write, tmp_path: Path) -> None:
    make_files(tmp_path, "models/a/x.pt", "models/.y", "tests/data.json")
    text = replaced('entry = "play.py"', 'entry = "play.py"\ninclude = ["models", "tests/*.json"]')
    assert load(write(text)).sources == ("models/.y", "models/a/x.pt", "play.py", "tests/data.json")


def test_entry_function_takes_its_package(write: Write, tmp_path: Path) -> None:
    make_files(tmp_path, "agent/__init__.py", "agent/main.py", "other.py")
    recipe = load(write(replaced('entry = "play.py"', 'entry = "agent.main:run"')))
    assert recipe.sources == ("agent/__init__.py", "agent/main.py")


def test_entry_function_of_an_installed_package(write: Write) -> None:
    assert load(write(replaced('entry = "play.py"', 'entry = "installed.main:run"'))).sources == ()


def test_requirements_file(write: Write, tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text(
        "# comment\n\ntorch == 2.0  # pinned\n  numpy\n--extra-index-url https://x\n"
    )
    recipe = load(write(replaced('version = "3.11"', 'version = "3.11"\nrequirements = "r.txt"')))
    assert recipe.requirements == tmp_path / "r.txt"
    assert recipe.requires == ("torch == 2.0  # pinned", "numpy", "--extra-index-url https://x")


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file or directory"), (b"\xff\xfe", "not UTF-8 text")],
    ids=["missing", "binary"],
)
def test_bad_requirements_file(write: Write, tmp_path: Path, content: bytes | None, why: str) -> None:
    if content:
        (tmp_path / "r.txt").write_bytes(content)
    path = write(replaced('version = "3.11"', 'version = "3.11"\nrequirements = "r.txt"'))
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert caught.value.message == f"{path}:8: [python] requirements: {tmp_path}/r.txt: {why}"
