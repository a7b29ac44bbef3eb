"""The agent's own files as they will lie in the image: below /app, with a start script if need be."""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rvbundle.compiler import Job, compile_sources
from rvbundle.environment import Interpreter
from rvbundle.recipe import Recipe

APP = "app"
_START = ".rvbundle-start.py"
_START_TEXT = """\
import sys

from {module} import {function}

if __name__ == "__main__":
    sys.exit({function}())
"""


@dataclass(frozen=True)
class StagedAgent:
    """The agent's files in `folder` (each path of `files` relative to it) and the words that start it."""

    folder: Path
    files: tuple[str, ...]
    argv: tuple[str, ...]

    def digest(self) -> str:
        """Return a SHA-256 (hex) of the files and of how they are started."""
        digest = hashlib.sha256("\0".join(self.argv).encode())
        for path in self.files:
            content = hashlib.sha256((self.folder / path).read_bytes()).hexdigest()
            digest.update(f"\0{path}\0{content}".encode())
        return digest.hexdigest()


def source_digests(recipe: Recipe) -> dict[str, str]:
    """Return {path: SHA-256 (hex)} of the agent's files."""
    return {path: hashlib.sha256((recipe.folder / path).read_bytes()).hexdigest() for path in recipe.sources}


def start_words(recipe: Recipe) -> tuple[str, ...]:
    """Return the command that starts the agent inside the image."""
    script = _START if ":" in recipe.entry else os.path.normpath(recipe.entry)
    return ("/usr/bin/python3", f"/{APP}/{script}")


def stage(recipe: Recipe, interpreter: Interpreter, folder: Path) -> None:
    """Copy the agent's files into `folder`/app, and compile them there: the image can't be written to."""
    for path in recipe.sources:
        target = folder / APP / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(recipe.folder / path, target)
    if ":" in recipe.entry:
        module, _, function = recipe.entry.partition(":")
        text = _START_TEXT.format(module=module, function=function)
        (folder / APP).mkdir(exist_ok=True)
        (folder / APP / _START).write_text(text)
    root = folder / APP
    jobs = []
    for path in recipe.sources:
        if path.endswith(".py"):
            place = root / path
            bytecode = place.parent / "__pycache__" / f"{place.stem}.{interpreter.cache_tag}.pyc"
            bytecode.parent.mkdir(exist_ok=True)
            jobs.append(Job(place, bytecode, f"/{APP}/{path}"))
    compile_sources(interpreter, jobs)


def load(recipe: Recipe, folder: Path) -> StagedAgent:
    """Return what `stage` made."""
    root = folder / APP
    files = tuple(sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()))
    return StagedAgent(root, files, start_words(recipe))
