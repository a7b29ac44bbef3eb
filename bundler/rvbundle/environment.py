"""The environment stage: a venv that holds exactly what the lock says, made by pip."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rvbundle import lock, process
from rvbundle.lock import Lock
from rvbundle.recipe import Recipe
from rvbundle_runtime.errors import EnvironmentSetupError, ToolError

_PROBE = """
import json, os, site, sys, sysconfig
print(json.dumps({"version": "%d.%d.%d" % sys.version_info[:3], "short": "%d.%d" % sys.version_info[:2],
  "executable": sys.executable, "base_prefix": sys.base_prefix, "machine": sysconfig.get_platform(),
  "stdlib": sysconfig.get_path("stdlib"), "implementation": sys.implementation.name,
  "cache_tag": sys.implementation.cache_tag,
  "usual_site": os.path.join(sys.prefix, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")
    in site.getsitepackages()}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A CPython on this machine: `stdlib` is its library folder, `short` its version as 3.x.

    `usual_site` tells whether it looks for packages in lib/python3.x/site-packages: Debian's does not.
    """

    executable: Path
    version: str
    short: str
    stdlib: Path
    base_prefix: Path
    cache_tag: str
    usual_site: bool


@dataclass(frozen=True)
class Environment:
    """A finished venv and the interpreter that it was made with."""

    folder: Path
    interpreter: Interpreter

    @property
    def python(self) -> Path:
        """The venv's interpreter."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """The venv's package folder."""
        return self.folder / "venv" / "lib" / f"python{self.interpreter.short}" / "site-packages"


def find_interpreter(version: str, environ: Mapping[str, str]) -> Interpreter:
    """Return a CPython of `version` (3.x) on this machine.

    Looked for in this order: the one that runs rvbundle, PATH, pyenv's and uv's folders. Raises
    EnvironmentSetupError listing those found.
    """
    found: dict[str, Path] = {}
    for candidate in _candidates(environ):
        short = candidate.name.removeprefix("python")
        if short != version and short in found:
            continue
        interpreter = _probe(candidate)
        if interpreter is None:
            continue
        if interpreter.short == version:
            return interpreter
        found.setdefault(interpreter.short, interpreter.executable)
    have = ", ".join(f"{short} ({path})" for short, path in sorted(found.items())) or "none"
    raise EnvironmentSetupError(
        f"no CPython {version} on this machine; found: {have}",
        f"install it (apt install python{version}, pyenv install {version}, uv python install {version}), "
        "or change [python] version in the recipe",
    )


def _candidates(environ: Mapping[str, str]) -> list[Path]:
    paths = [Path(getattr(sys, "_base_executable", sys.executable))]
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        if folder.startswith("/") and not folder.endswith("/shims"):  # pyenv's shims run the one that is set
            paths += sorted(Path(folder).glob("python3.[0-9]*"))
    home = Path(environ.get("HOME", "/nonexistent"))
    roots = [
        Path(environ.get("PYENV_ROOT") or home / ".pyenv") / "versions",
        Path(environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python"),
    ]
    for root in roots:
        paths += sorted(root.glob("*/bin/python3.[0-9]*"))
    unique = {os.path.realpath(p): p for p in reversed(paths) if not p.name.endswith(("config", "m"))}
    return [path for path in paths if unique.get(os.path.realpath(path)) is path and "-" not in path.name]


def _probe(executable: Path) -> Interpreter | None:
    try:
        done = process.run([executable, "-I", "-c", _PROBE], timeout=30, check=False)
        value = json.loads(done.stdout)
    except (ToolError, ValueError):
        return None
    if value["implementation"] != "cpython":
        return None
    return Interpreter(
        executable,
        value["version"],
        value["short"],
        Path(value["stdlib"]),
        Path(value["base_prefix"]),
        value["cache_tag"],
        value["usual_site"],
    )


def pip_command(python: Path) -> list[str | Path]:
    """Return the words that run rvbundle's own pip for another interpreter; raises if there is none."""
    import importlib.util

    if importlib.util.find_spec("pip") is None:
        raise EnvironmentSetupError(
            "there is no pip beside rvbundle, and environments are made by pip",
            f"{sys.executable} -m ensurepip, or install rvbundle with its dependencies",
        )
    return [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input"]


def make_venv(interpreter: Interpreter, folder: Path) -> Path:
    """Make an empty venv (without pip) at `folder`; return its interpreter."""
    done = process.run(
        [interpreter.executable, "-m", "venv", "--without-pip", folder], check=False, timeout=300
    )
    if done.code:
        raise EnvironmentSetupError(
            f"{interpreter.executable} can't make a virtual environment:\n{done.tail()}",
            f"on Debian and Ubuntu: apt install python{interpreter.short}-venv",
        )
    return folder / "bin" / "python"


def resolve(recipe: Recipe, interpreter: Interpreter) -> Lock:
    """Ask pip what the requirements mean for `interpreter` today; raises EnvironmentSetupError."""
    with tempfile.TemporaryDirectory(prefix="rvbundle-resolve-") as scratch:
        return lock.resolve(recipe, pip_command(make_venv(interpreter, Path(scratch) / "venv")))


def install(recipe: Recipe, locked: Lock, interpreter: Interpreter, folder: Path) -> None:
    """Fill `folder` with a venv of the locked distributions; raises EnvironmentSetupError.

    pip checks every file against the lock's digest. Its own configuration (PIP_*, pip.conf) is honoured.
    """
    python = make_venv(interpreter, folder / "venv")
    if not locked.packages:
        return
    requirements = folder / "requirements.txt"
    requirements.write_text(
        "".join(f"{p.name} == {p.version} --hash=sha256:{p.sha256}\n" for p in locked.packages)
    )
    command = [*pip_command(python), "install", "--require-hashes", "--no-deps", "--no-compile"]
    options = _index_options(recipe)
    done = process.run([*command, *options, "--requirement", requirements], cwd=recipe.folder, check=False)
    if done.code:
        shutil.rmtree(folder / "venv", ignore_errors=True)
        raise EnvironmentSetupError(
            f"pip could not install the requirements:\n{done.tail()}", f"the command was: {done.command}"
        )


def _index_options(recipe: Recipe) -> list[str]:
    """Return the option lines of a requirements file (--index-url and its kin) as words."""
    words: list[str] = []
    for line in recipe.requires:
        if line.startswith("-"):
            words += line.split(None, 1) if "=" not in line.split()[0] else [line]
    return words
