"""The architecture's rules about imports, checked in the source."""

import ast
import functools
import sys
from pathlib import Path

import pytest

from rvbundle_runtime.measured import SCRIPTS

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime/rvbundle_runtime"
BUNDLER = ROOT / "bundler/rvbundle"
GUEST = sorted((RUNTIME / "guest").glob("*.py"))
RUN_SIDE = sorted(p for p in RUNTIME.rglob("*.py") if p not in GUEST)
INSIDE = sorted((BUNDLER / "inside").glob("*.py"))
HOOKS = sorted((BUNDLER / "hooks").glob("*.py"))  # PyInstaller's own extension files
BUILD_SIDE = sorted(p for p in BUNDLER.rglob("*.py") if p not in INSIDE and p not in HOOKS)
# They import what the recipe's environment may have, by names that they are given or that may not be there.
BY_NAME = {BUNDLER / "inside/exercise.py", BUNDLER / "inside/inventory.py"}
# Private modules that importlib is made of: not in sys.stdlib_module_names of every version.
FROZEN = {"_frozen_importlib", "_frozen_importlib_external"}
# Started as a program with the others beside it; what it measures may use torch and numpy.
MEASURING = {name.removesuffix(".py") for name in SCRIPTS}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_bytes(), str(path))))


def imports(path: Path) -> set[str]:
    """Return the top-level names of all that a source imports, wherever it does."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            found.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            by_name = name in ("__import__", "import_module")
            assert path in BY_NAME or not by_name, f"{path}:{node.lineno}: an import by name"
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_folders_are_where_this_file_believes() -> None:
    assert (len(GUEST) >= 2, len(RUN_SIDE) >= 12, len(INSIDE) >= 4, len(BUILD_SIDE) >= 25) == (True,) * 4


@pytest.mark.parametrize("path", RUN_SIDE, ids=name)
def test_run_side_needs_the_standard_library_and_a_decoder(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"rvbundle_runtime", "zstandard", "compression"}
    assert imports(path) - allowed == set()


def test_only_the_decoders_module_imports_a_decoder() -> None:
    users = {p.name for p in RUN_SIDE if imports(p) & {"zstandard", "compression"}}
    assert users == {"zstd.py"}


@pytest.mark.parametrize("path", GUEST, ids=name)
def test_guest_needs_nothing_and_runs_on_python_3_9(path: Path) -> None:
    theirs = {"torch", "numpy", *MEASURING} if path.stem in MEASURING else set()
    assert imports(path) - set(sys.stdlib_module_names) - FROZEN - theirs == set()
    ast.parse(path.read_bytes(), str(path), feature_version=(3, 9))


@pytest.mark.parametrize("path", [RUNTIME / "guest" / name for name in SCRIPTS], ids=name)
def test_measurements_import_torch_and_numpy_only_where_they_are_asked_for(path: Path) -> None:
    tree = ast.parse(path.read_bytes())
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    top |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert top
    assert not {name.partition(".")[0] for name in top} & {"torch", "numpy"}


def test_all_of_a_measurements_files_are_named() -> None:
    assert {f"{name}.py" for name in MEASURING} == {path.name for path in GUEST if path.name[:1] != "_"}


@pytest.mark.parametrize("path", INSIDE, ids=name)
def test_scripts_for_the_recipes_python(path: Path) -> None:
    theirs = {"exercise.py": {"measure", "numpy", "torch"}, "analysis.py": {"PyInstaller"}}.get(
        path.name, set()
    )
    assert imports(path) - set(sys.stdlib_module_names) - theirs == set()
    ast.parse(path.read_bytes(), str(path), feature_version=(3, 9))


def test_exercises_need_nothing_that_may_not_be_there() -> None:
    """numpy and torch are only imported by the functions that were told that they are there."""
    tree = ast.parse((BUNDLER / "inside/exercise.py").read_bytes())
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert top == {"json", "os", "sys"}
    assert not any(isinstance(node, ast.ImportFrom) for node in tree.body)


@pytest.mark.parametrize(
    ("module", "users"),
    [
        ("lief", {"elf.py"}),
        ("subprocess", {"process.py", "emulators.py"}),
        ("PyInstaller", {"analysis.py"}),
        ("ctypes", {"filewatch.py", "syscalls.py"}),
        ("typer", {"cli.py"}),
    ],
)
def test_one_module_each(module: str, users: set[str]) -> None:
    every = [*RUN_SIDE, *GUEST, *BUILD_SIDE, *INSIDE]
    assert {p.name for p in every if module in imports(p)} == users


@functools.cache
def calls(path: Path) -> set[str]:
    """Return the dotted names of what a source calls."""
    return {ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call)}


STARTERS = {
    "os.fork",
    "pty.fork",
    "os.execve",
    "os.execv",
    "os.execvp",
    "os.system",
    "os.popen",
    "os.posix_spawn",
    "os.spawnv",
}


def test_only_these_start_processes_without_subprocess() -> None:
    users = {p.name: calls(p) & STARTERS for p in [*RUN_SIDE, *GUEST, *BUILD_SIDE, *INSIDE]}
    assert {path: found for path, found in users.items() if found} == {
        "binfmt.py": {"os.fork"},
        "checkup.py": {"os.fork"},
        "exercise.py": {"os.fork"},
        "host.py": {"os.fork"},
        "measuring.py": {"os.fork"},
        "supervisor.py": {"os.fork", "os.execve", "os.posix_spawn"},
        "trials.py": {"os.fork"},
    }


def test_nothing_below_the_command_line_ends_the_process() -> None:
    allowed = {"__main__.py", "run_tree.py"}  # programs
    users = {p.name for p in [*RUN_SIDE, *BUILD_SIDE] if calls(p) & {"sys.exit", "exit", "quit"}}
    assert users - allowed == set()


def test_nothing_changes_the_current_folder_but_the_sandbox() -> None:
    assert {p.name for p in [*RUN_SIDE, *BUILD_SIDE] if "os.chdir" in calls(p)} == {
        "sandbox.py",
        "supervisor.py",
    }


def test_a_warm_start_imports_neither_typer_nor_decoder() -> None:
    """What `rvbundle run` imports before it looks at the image."""
    seen: set[str] = set()
    queue = ["rvbundle_runtime.launch"]
    external = set()
    while queue:
        module = queue.pop()
        if module in seen:
            continue
        seen.add(module)
        tree = ast.parse((ROOT / "runtime" / f"{module.replace('.', '/')}.py").read_bytes())
        for node in tree.body:  # the top level only: what stands in functions is late
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rvbundle_runtime"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    known = (ROOT / "runtime" / f"{inner.replace('.', '/')}.py").exists()
                    queue.append(inner if known else str(node.module))
                queue = [m for m in queue if m != "rvbundle_runtime"]
            elif isinstance(node, ast.Import):
                external |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                external.add(str(node.module))
    assert "rvbundle_runtime.store" in seen
    assert not external & {
        "typer",
        "rich",
        "zstandard",
        "asyncio",
        "subprocess",
        "argparse",
        "concurrent.futures",
    }
