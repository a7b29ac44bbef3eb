"""The recipe: TOML in, one frozen value out; every error names file, table, key and line."""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rvbundle.debian import ARCHITECTURES, is_suite
from rvbundle_runtime.errors import RecipeError
from rvbundle_runtime.options import FLOAT32, PRECISIONS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENTRY_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TRIM_LEVELS = ("traced", "reachable", "none")
WHEELS = "wheels"
_DEBIAN = 'a suite of Debian\'s, such as "debian:trixie" or "debian:sid"'
DEFAULT_TIMEOUT = 600.0  # seconds
_LIMITS = {"timeout": 1e6, "tolerance": 1e6}  # eleven days; a relative difference

# Every legal key, by table; the values name the types in messages.
_KEYS: dict[str, dict[str, str]] = {
    "": {
        "agent": "table",
        "python": "table",
        "trace": "list of tables",
        "trim": "table",
        "keep": "table",
        "run": "table",
        "payloads": "table",
    },
    "agent": {"name": "string", "version": "string", "entry": "string", "include": "list of strings"},
    "python": {"version": "string", "requires": "list of strings", "requirements": "string"},
    "trace": {"args": "list of strings", "golden": "boolean", "tolerance": "number", "timeout": "number"},
    "trim": {"level": "string", "docstrings": "boolean"},
    "keep": {"modules": "list of strings", "files": "list of strings"},
    "run": {"network": "boolean", "env": "table of strings", "precision": "string"},
    "payloads": dict.fromkeys(ARCHITECTURES, "string"),
}

_CHECKS: dict[str, Callable[[Any], bool]] = {
    "table": lambda v: isinstance(v, dict),
    "list of tables": lambda v: isinstance(v, list) and all(isinstance(i, dict) for i in v),
    "string": lambda v: isinstance(v, str),
    "list of strings": lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v),
    "boolean": lambda v: isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "table of strings": lambda v: isinstance(v, dict) and all(isinstance(i, str) for i in v.values()),
}


@dataclass(frozen=True)
class Workload:
    """One [[trace]]: arguments of the agent, how its output is compared, its time limit in seconds."""

    args: tuple[str, ...]
    golden: bool
    tolerance: float | None
    timeout: float


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. `sources` are the agent's files relative to `folder`, sorted.

    `debian` {architecture: suite} are the payloads beside that of the machine that builds.
    """

    path: Path
    name: str
    version: str
    entry: str
    sources: tuple[str, ...]
    python: str
    requires: tuple[str, ...]
    requirements: Path | None
    workloads: tuple[Workload, ...]
    trim: str
    docstrings: bool
    keep_modules: tuple[str, ...]
    keep_files: tuple[str, ...]
    network: bool
    env: dict[str, str]
    debian: Mapping[str, str] = field(default_factory=dict)
    precision: str = FLOAT32

    @property
    def folder(self) -> Path:
        """The folder that the recipe's paths are relative to."""
        return self.path.parent

    @property
    def file_stem(self) -> str:
        """NAME-VERSION, the common part of the names of what is built."""
        return f"{self.name}-{self.version}"

    @property
    def lock_path(self) -> Path:
        """Where `rvbundle lock` writes."""
        return self.path.with_suffix(".lock")

    def trace_path(self, arch: str) -> Path:
        """Return where the trace record of a payload is kept once there is a lock."""
        return self.path.with_suffix(f".{arch}.trace" if arch in self.debian else ".trace")


class _Reader:
    """A parsed recipe with what is needed to point at a line of it."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.lines = text.splitlines()
        try:
            self.data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            line = re.search(r"at line (\d+)", str(error))
            place = f"{path}:{line[1]}" if line else f"{path}"
            raise RecipeError(f"{place}: not valid TOML: {error}") from None

    def fail(self, table: str, key: str, text: str, hint: str = "", number: int = 0) -> RecipeError:
        line = self._line(table, key, number)
        place = f"{self.path}:{line}" if line else f"{self.path}"
        name = f"[{table}] {key}".strip() if table else key
        return RecipeError(f"{place}: {name}: {text}", hint)

    def _line(self, table: str, key: str, number: int) -> int:
        """Return the line of `key` in the `number`-th table of that name, or of the table; 0 if unknown."""
        header = re.compile(rf"\s*\[\[?\s*{re.escape(table or key)}\s*[\].]")
        assignment = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*[.=]""")
        inside = not table  # a key outside of all tables stands before the first
        found, seen = 0, -1
        for place, line in enumerate(self.lines, 1):
            if line.lstrip().startswith("["):
                matches = bool(header.match(line))
                seen += matches
                inside = matches and bool(table) and seen == number
                if matches and seen == number:
                    found = place
            elif inside and key and assignment.match(line):
                return place
        return found

    def check_keys(self, table: str, value: dict[str, Any], number: int = 0) -> None:
        legal = _KEYS[table]
        for key, item in value.items():
            if key not in legal:
                if not table and isinstance(item, dict | list):
                    place = f"{self.path}:{self._line('', key, 0)}"
                    raise RecipeError(f"{place}: [{key}]: unknown table", _nearest_table(key))
                raise self.fail(table, key, "unknown key", _nearest(key, table), number)
            if not _CHECKS[legal[key]](item):
                text = f"expected a {legal[key]}, found {_found(item, legal[key])}"
                raise self.fail(table, key, text, _how_to_write(key, item, legal[key]), number)
            if any("\0" in text for text in _strings(item)):
                raise self.fail(
                    table, key, "holds a NUL character, which no program can be given", "", number
                )

    def table(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = self.data.get(name, {})
        self.check_keys(name, value)
        return value

    def required(self, table: str, key: str) -> str:
        value = self.table(table).get(key)
        if value is None:
            where = f"add `{key} = …` to [{table}]; `rvbundle init` writes a complete example"
            raise self.fail(table, key, "missing", where)
        return str(value)


def _header(table: str) -> str:
    return f"[[{table}]]" if _KEYS[""][table] == "list of tables" else f"[{table}]"


def _type_name(value: Any) -> str:
    names = {
        dict: "a table",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return [item for item in (value, *_items(value)) if isinstance(item, str)]


def _odd_item(value: Any, expected: str) -> Any:
    """Return the first item of a list or table of strings that is no string; None if it is not that."""
    alike = isinstance(value, list if expected == "list of strings" else dict)
    wanted = expected in ("list of strings", "table of strings") and alike
    return next((item for item in _items(value) if not isinstance(item, str)), None) if wanted else None


def _found(value: Any, expected: str) -> str:
    odd = _odd_item(value, expected)
    return _type_name(value) if odd is None else f"{_type_name(odd)} in it"


def _how_to_write(key: str, value: Any, expected: str) -> str:
    odd = _odd_item(value, expected)
    if odd is not None:
        return f'write it in quotes: "{odd}"' if _type_name(odd) == "a number" else ""
    if expected == "string" and _type_name(value) == "a number":
        return f'write it in quotes: {key} = "{value}"'
    if expected == "list of strings" and isinstance(value, str):
        return f'write it in brackets: {key} = ["{value}"]'
    if expected == "boolean" and value in ("true", "false"):
        return "write true or false, without quotes"
    if expected == "list of tables" and isinstance(value, dict):
        return f"write it in double brackets: [[{key}]]"
    return ""


def _nearest_table(name: str) -> str:
    close = difflib.get_close_matches(name, _KEYS[""], 1)
    if close:
        return f"did you mean {_header(close[0])}?"
    return f"known here: {', '.join(map(_header, _KEYS['']))}"


def _nearest(key: str, table: str) -> str:
    close = difflib.get_close_matches(key, _KEYS[table], 1)
    if close:
        return f"did you mean {close[0]}?"
    for other, keys in _KEYS.items():
        if other and key in keys:
            return f"{key} belongs to [{other}]"
    return f"known here: {', '.join(_KEYS[table])}"


def load(path: Path) -> Recipe:
    """Read and check the recipe at `path` (a file, or a folder that holds a recipe.toml).

    Raises RecipeError.
    """
    if path.is_dir():
        path = path / "recipe.toml"
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        hint = "`rvbundle init` writes one for the agent in this folder"
        raise RecipeError(f"{path}: {error.strerror}", hint) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text", "save it as UTF-8") from None
    return _interpret(_Reader(path, text))


def _interpret(reader: _Reader) -> Recipe:
    reader.check_keys("", reader.data)
    name, version = reader.required("agent", "name"), reader.required("agent", "version")
    for key, value in (("name", name), ("version", version)):
        if not _NAME.fullmatch(value):
            allowed = "letters, digits and . _ - (the first a letter or digit), at most 100"
            raise reader.fail("agent", key, f"{value!r} can't be part of a file name", f"use {allowed}")
    entry = reader.required("agent", "entry")
    trim = str(reader.table("trim").get("level", "traced"))
    if trim not in TRIM_LEVELS:
        close = difflib.get_close_matches(trim, TRIM_LEVELS, 1)
        hint = f"did you mean {close[0]}?" if close else ""
        raise reader.fail("trim", "level", f"{trim!r} is none of {', '.join(TRIM_LEVELS)}", hint)
    keep, run = reader.table("keep"), reader.table("run")
    for variable in run.get("env", {}):
        if not _VARIABLE.fullmatch(variable):
            raise reader.fail("run", "env", f"{variable!r} can't be the name of a variable")
    return Recipe(
        path=reader.path,
        name=name,
        version=version,
        entry=entry,
        sources=_sources(reader, entry),
        python=_python_version(reader),
        requires=_requires(reader),
        requirements=_requirements_path(reader),
        workloads=_workloads(reader),
        trim=trim,
        docstrings=bool(reader.table("trim").get("docstrings", trim != "traced")),
        keep_modules=tuple(keep.get("modules", [])),
        keep_files=tuple(keep.get("files", [])),
        network=bool(run.get("network", False)),
        env=dict(run.get("env", {})),
        debian=_payloads(reader),
        precision=_precision(reader),
    )


def _precision(reader: _Reader) -> str:
    precision = str(reader.table("run").get("precision", FLOAT32))
    if precision not in PRECISIONS:
        raise reader.fail("run", "precision", f"{precision!r} is none of {', '.join(PRECISIONS)}")
    return precision


def _payloads(reader: _Reader) -> dict[str, str]:
    """Return {architecture: suite} of the payloads that come from Debian."""
    found: dict[str, str] = {}
    machine = os.uname().machine
    for arch, source in reader.table("payloads").items():
        kind, colon, suite = source.partition(":")
        if source == WHEELS:
            if arch != machine:
                raise reader.fail(
                    "payloads",
                    arch,
                    f"wheels are for the machine that builds ({machine})",
                    f"write {_DEBIAN}",
                )
        elif kind != "debian" or not colon or not is_suite(suite):
            raise reader.fail("payloads", arch, f"{source!r} is no source of a payload", f"write {_DEBIAN}")
        elif arch == machine:
            raise reader.fail(
                "payloads",
                arch,
                "the payload of the machine that builds is made of wheels",
                f'write {arch} = "{WHEELS}", or leave it out',
            )
        else:
            found[arch] = suite
    return found


def _python_version(reader: _Reader) -> str:
    version = reader.required("python", "version")
    if not re.fullmatch(r"3\.\d{1,2}", version):
        raise reader.fail("python", "version", f"{version!r} is no version such as 3.11")
    return version


def _requirements_path(reader: _Reader) -> Path | None:
    file = reader.table("python").get("requirements")
    return None if file is None else (reader.path.parent / file).resolve()


def _requires(reader: _Reader) -> tuple[str, ...]:
    table = reader.table("python")
    requires: list[str] = table.get("requires", [])
    path = _requirements_path(reader)
    if path is None:
        return tuple(requires)
    if requires:
        raise reader.fail("python", "requirements", "give either requires or requirements, not both")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise reader.fail("python", "requirements", f"{path}: {why}") from None
    return tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))


def _workloads(reader: _Reader) -> tuple[Workload, ...]:
    tables = reader.data.get("trace", [])
    if not tables:
        raise reader.fail(
            "",
            "trace",
            "no workload is given",
            "what a workload uses is what the image keeps at hand, and it proves that the finished image "
            'works. Add at least:\n\n    [[trace]]\n    args = ["--episodes", "3"]\n    golden = true',
        )
    found = []
    for number, table in enumerate(tables):
        reader.check_keys("trace", table, number)
        for key in ("timeout", "tolerance"):
            if key in table and not table[key] > 0:
                raise reader.fail("trace", key, f"{table[key]} is not above zero", "", number)
            if key in table and table[key] > _LIMITS[key]:
                raise reader.fail("trace", key, f"{table[key]} is above {_LIMITS[key]:g}", "", number)
        tolerance = table.get("tolerance")
        found.append(
            Workload(
                args=tuple(table.get("args", [])),
                golden=bool(table.get("golden", tolerance is not None)),
                tolerance=None if tolerance is None else float(tolerance),
                timeout=float(table.get("timeout", DEFAULT_TIMEOUT)),
            )
        )
    return tuple(found)


def _sources(reader: _Reader, entry: str) -> tuple[str, ...]:
    """Return the agent's files: the entry, the Python files beside it, and what `include` names."""
    folder = reader.path.parent
    if ":" in entry:
        if not _ENTRY_FUNCTION.fullmatch(entry):
            raise reader.fail("agent", "entry", f"{entry!r} is no package.module:function")
        top = entry.partition(":")[0].partition(".")[0]
        local = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        patterns = [f"{top}.py", f"{top}/**/*.py"] if local else []
    else:
        if not (folder / entry).is_file():
            raise reader.fail("agent", "entry", f"there is no file {entry!r} beside the recipe")
        if not (folder / entry).resolve().is_relative_to(folder.resolve()):
            raise reader.fail("agent", "entry", f"{entry!r} lies outside the recipe's folder")
        patterns = ["*.py", "*/**/*.py"]
    found = {folder / os.path.normpath(entry)} if ":" not in entry else set()
    for pattern in patterns:
        found |= {p for p in folder.glob(pattern) if _is_agents(p.relative_to(folder))}
    for pattern in reader.table("agent").get("include", []):
        found |= _included(reader, folder, pattern)
    return tuple(sorted(str(path.relative_to(folder)) for path in found if path.is_file()))


def _included(reader: _Reader, folder: Path, pattern: str) -> set[Path]:
    if pattern.startswith("/") or ".." in Path(pattern).parts:
        raise reader.fail("agent", "include", f"{pattern!r} leaves the recipe's folder")
    try:
        matches = {path for path in folder.glob(pattern) if path.is_file()}
        for path in list(folder.glob(pattern)):
            matches |= {p for p in path.rglob("*") if p.is_file()} if path.is_dir() else set()
    except (ValueError, NotImplementedError) as error:
        raise reader.fail("agent", "include", f"{pattern!r} is no glob: {error}") from None
    if not matches:
        raise reader.fail("agent", "include", f"nothing matches {pattern!r}")
    return matches


_NOT_AGENTS = {
    "__pycache__",
    "venv",
    "env",
    "node_modules",
    "build",
    "dist",
    "tests",
    "test",
    "site-packages",
}


def _is_agents(path: Path) -> bool:
    """Tell whether a Python file below the recipe belongs to the agent rather than to its workshop."""
    return not any(part in _NOT_AGENTS or part.startswith(".") for part in path.parts[:-1])
