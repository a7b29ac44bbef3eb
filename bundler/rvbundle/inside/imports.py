"""Which modules some sources need, found in the sources: `imports.py < question.json > modules.json`.

Run by the Python that the sources are written for: another may not be able to parse them. The question is
{"roots": names, "folders": where to look, "ours": prefix, "left_out": names}; the answer {name: file}.

Statements that run when a module is imported are followed. What stands in functions is followed in our own
modules only: in the standard library most of it is for what we never call (`concurrent.futures` would bring
multiprocessing, `ctypes.util` a compiler).
"""

import ast
import json
import os
import sys
from typing import Dict, Iterator, List, Optional, Sequence

_NEVER_TRUE = ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def find(name: str, folders: Sequence[str]) -> Optional[str]:
    """Return the file of a module: a package's `__init__.py`, a source or a shared library."""
    for folder in folders:
        place = os.path.join(folder, *name.split("."))
        for path in (os.path.join(place, "__init__.py"), f"{place}.py", f"{place}.so"):
            if os.path.isfile(path):
                return path
        parent, base = os.path.split(place)
        if os.path.isdir(parent):
            found = [f for f in sorted(os.listdir(parent)) if f.startswith(f"{base}.") and f.endswith(".so")]
            if found:
                return os.path.join(parent, found[0])
    return None


def needed(
    roots: Sequence[str], folders: Sequence[str], ours: str, left_out: Sequence[str] = ()
) -> Dict[str, str]:
    """Return {module: its file} of `roots` and of all that they import, as far as it is found.

    Not found are modules that are built into the interpreter, and those of other systems. In modules whose
    names start with `ours`, functions are followed too; names in `left_out` are passed over.
    """
    found: Dict[str, str] = {}
    queue = list(roots)
    seen = set(left_out)
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        path = find(name, folders)
        if path is None:
            continue
        found[name] = path
        queue += _parents(name)
        if path.endswith(".py"):
            with open(path, "rb") as file:
                tree = ast.parse(file.read(), path)
            package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
            queue += imported(tree.body, package, name.startswith(ours))
    return found


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def imported(body: Sequence[ast.AST], package: str, with_functions: bool) -> Iterator[str]:
    """Yield the names that statements import; `from a import b` gives `a` and `a.b`, maybe a module."""
    for node in _nodes(body, with_functions):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            yield base
            for alias in node.names:
                yield f"{base}.{alias.name}"


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _nodes(body: Sequence[ast.AST], with_functions: bool) -> Iterator[ast.AST]:
    """Yield what runs at import or, with functions, whatever may run at all."""
    for node in body:
        if isinstance(node, _FUNCTIONS) and not with_functions:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in _NEVER_TRUE:
            yield from _nodes(node.orelse, with_functions)
            continue
        yield node
        yield from _nodes(list(ast.iter_child_nodes(node)), with_functions)


def main() -> None:
    """Read the question, answer it."""
    question: Dict[str, List[str]] = json.load(sys.stdin)
    found = needed(question["roots"], question["folders"], question["ours"][0], question["left_out"])
    json.dump(found, sys.stdout, indent=0, sort_keys=True)


if __name__ == "__main__":
    main()
