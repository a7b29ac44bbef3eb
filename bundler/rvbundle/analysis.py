"""The analysis stage: which modules an agent can reach, and by which chain of imports or which hook.

PyInstaller's module graph is made once per environment, over everything in it; what a given agent
reaches is a walk over that graph, so that a changed agent costs nothing.
"""

import ast
import json
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rvbundle import process
from rvbundle.environment import Environment, make_venv, pip_command
from rvbundle.stages import digest_of_files
from rvbundle_runtime.errors import FreezeError

# Pinned: the driver reaches into the module graph's internals.
PYINSTALLER = ("pyinstaller==6.22.3", "pyinstaller-hooks-contrib==2026.9")
_INSIDE = Path(__file__).parent / "inside"
# Of the standard library: what no agent imports, and what PyInstaller would collect half the library for.
_STDLIB_SKIPPED = frozenset({"test", "idlelib", "lib2to3", "turtledemo", "antigravity", "this", "__main__"})
HOOKS = Path(__file__).parent / "hooks"


@dataclass(frozen=True)
class ModuleGraph:
    """Edges between modules by name; hidden imports with their hook; data files with their module."""

    edges: dict[str, tuple[str, ...]]
    hidden: dict[str, tuple[tuple[str, str], ...]]
    data: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Reach:
    """What an agent can reach: {module: the chain that leads to it}, {path in the tree: why} for data."""

    modules: dict[str, str]
    data: dict[str, str]


def install_tools(environment: Environment, folder: Path) -> None:
    """Install PyInstaller for the recipe's Python into `folder`/tools (not into the environment)."""
    python = make_venv(environment.interpreter, folder / "venv")
    target = folder / "tools"
    done = process.run(
        [*pip_command(python), "install", "--quiet", "--target", target, *PYINSTALLER], check=False
    )
    if done.code:
        raise FreezeError(
            f"pip could not install {PYINSTALLER[0]}, which says what an agent can reach:\n{done.tail()}",
            f"the command was: {done.command}",
        )


def analyse(environment: Environment, tools: Path, folder: Path, stop: threading.Event) -> None:
    """Write the module graph of everything in `environment` to `folder`/graph.json.

    Raises FreezeError, also where `stop` ends it early.
    """
    inventory = process.run([environment.python, "-I", _INSIDE / "inventory.py"]).stdout
    value = json.loads(inventory)
    seeds = top_level_names(environment.site_packages, value["distributions"])
    seeds += sorted(set(value["stdlib"]) - _STDLIB_SKIPPED)
    with tempfile.TemporaryDirectory(prefix="rvbundle-analysis-") as scratch:
        done = process.run(
            [environment.python, "-I", _INSIDE / "analysis.py", tools / "tools", HOOKS, scratch],
            env=_analysis_env(scratch),
            stdin=json.dumps(seeds).encode(),
            stop=stop,
            check=False,
        )
    if done.code:
        raise FreezeError(
            f"PyInstaller's analysis failed:\n{done.tail()}", f"the command was: {done.command}"
        )
    json.loads(done.stdout)
    (folder / "graph.json").write_bytes(done.stdout)


def _analysis_env(scratch: str) -> dict[str, str]:
    # Hooks import packages in child processes: what the user's shell sets must not decide what they see.
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": scratch, "LANG": "C.UTF-8"}


def top_level_names(site: Path, distributions: list[dict[str, object]]) -> list[str]:
    """Return the names that the distributions can be imported by: packages and modules at the top."""
    names = set()
    for distribution in distributions:
        files = distribution["files"]
        for text in files if isinstance(files, list) else []:
            path = Path(text)
            if not path.is_relative_to(site):
                continue
            parts = path.relative_to(site).parts
            name = parts[0].partition(".")[0]
            is_module = len(parts) == 1 and path.suffix in (".py", ".so")
            is_package = len(parts) > 1 and path.suffix in (".py", ".so") and parts[0] == name
            if name.isidentifier() and (is_module or is_package):
                names.add(name)
    return sorted(names - {"test", "tests", "functorch"})


def code_digest() -> str:
    """Return a digest of our own files that decide the graph."""
    return digest_of_files([Path(__file__), *_INSIDE.glob("*.py"), *HOOKS.glob("*.py")])


def load_graph(folder: Path) -> ModuleGraph:
    """Read what `analyse` wrote."""
    value = json.loads((folder / "graph.json").read_text())
    hidden: dict[str, list[tuple[str, str]]] = {}
    for module, target, hook in value["hidden"]:
        hidden.setdefault(module, []).append((target, hook))
    return ModuleGraph(
        edges={name: tuple(targets) for name, targets in value["edges"].items()},
        hidden={name: tuple(pairs) for name, pairs in hidden.items()},
        data=tuple((module, file) for module, file in value["data"]),
    )


def imports_of(source: bytes, package: str = "") -> set[str]:
    """Return the modules that a source names in import statements, wherever they stand.

    For `from a import b` both `a` and `a.b` (which may be a module). Relative imports are resolved
    against `package`, and left out where there is none.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node.module or "", node.level, package)
            if base:
                names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def _absolute(module: str, level: int, package: str) -> str:
    if not level:
        return module
    parts = package.split(".") if package else []
    if len(parts) < level:
        return ""
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def reach(
    graph: ModuleGraph,
    sources: Iterable[tuple[str, bytes]],
    plugins: Iterable[str],
    modules: Mapping[str, Path | None],
    packages: tuple[Path, str],
) -> Reach:
    """Walk `graph` from the imports of the agent's `sources`, given as (name, text), and from `plugins`.

    `plugins` are modules that other packages load through entry points (gymnasium's environments).
    `modules` are all that the tree holds, with their sources: the graph was made without knowing the
    agent, so it may lack a submodule that only the agent imports; such a one is read here. `packages`
    is where the graph's data files lie and where that is in the tree.
    """
    chains: dict[str, str] = {}
    queue: deque[str] = deque()

    def arrive(module: str, chain: str) -> None:
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name not in chains and (name in graph.edges or name in modules):
                chains[name] = chain if name == module else f"{chain} (as a parent of {module})"
                queue.append(name)

    for name, text in sources:
        for module in sorted(imports_of(text)):
            arrive(module, name)
    for module in sorted(plugins):
        arrive(module, "entry point of a plug-in")
    while queue:
        module = queue.popleft()
        chain = _extend(chains[module], module)
        for target in graph.edges.get(module) or _read_imports(module, modules.get(module)):
            arrive(target, chain)
        for target, hook in graph.hidden.get(module, ()):
            arrive(target, f"{chain} ({hook})")
    place, in_tree = packages
    data = {
        f"{in_tree}/{Path(file).relative_to(place)}": f"data of {module} ({_extend(chains[module], module)})"
        for module, file in graph.data
        if module in chains and Path(file).is_relative_to(place)
    }
    return Reach(chains, data)


def _read_imports(module: str, source: Path | None) -> list[str]:
    if source is None:
        return []
    package = module if source.name == "__init__.py" else module.rpartition(".")[0]
    return sorted(imports_of(source.read_bytes(), package))


def _extend(chain: str, module: str) -> str:
    """Append a module to a chain, keeping the agent's end and the last steps of a long one."""
    steps = [*chain.split(" → "), module]
    if len(steps) > 6:
        steps = [*steps[:2], "…", *[s for s in steps[-3:] if s != "…"]]
    return " → ".join(steps)
