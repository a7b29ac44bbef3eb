"""The lock: name, version and SHA-256 of every wheel, so that a build can be repeated."""

import hashlib
import json
import re
import tempfile
import tomllib
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rvbundle import process
from rvbundle.recipe import Recipe
from rvbundle.stages import write_atomically
from rvbundle_runtime.errors import EnvironmentSetupError, LockError

_FORMAT = 1
_DRY_RUN = ("install", "--dry-run", "--ignore-installed", "--prefer-binary", "--quiet")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class LockedPackage:
    """One wheel."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Lock:
    """What an environment is made of, and for which request."""

    python: str
    requires: tuple[str, ...]
    packages: tuple[LockedPackage, ...]

    def digest(self) -> str:
        """Return a SHA-256 (hex) of all that decides the environment."""
        return hashlib.sha256(dumps(self).encode()).hexdigest()


def dumps(lock: Lock) -> str:
    """Return the lock as TOML, the same text for the same lock."""
    lines = [
        "# Written by `rvbundle lock`. Every build from this file installs exactly these wheels.",
        f"format = {_FORMAT}",
        f"python = {quoted(lock.python)}",
        f"requires = {quoted(list(lock.requires))}",
    ]
    for package in lock.packages:
        lines += [
            "",
            "[[package]]",
            f"name = {quoted(package.name)}",
            f"version = {quoted(package.version)}",
            f"sha256 = {quoted(package.sha256)}",
        ]
    return "\n".join(lines) + "\n"


def quoted(value: str | list[str]) -> str:
    """Return TOML for a text or a list of texts: JSON but for U+007F, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def loads(text: str, path: Path) -> Lock:
    """Read a lock; raises LockError naming `path`."""
    again = _again(path)
    try:
        value = tomllib.loads(text)
        if value["format"] != _FORMAT:
            raise LockError(f"{path}: lock format {value['format']} is not {_FORMAT}", again)
        packages = tuple(
            LockedPackage(str(p["name"]), str(p["version"]), str(p["sha256"]))
            for p in value.get("package", [])
        )
        lock = Lock(str(value["python"]), tuple(map(str, value["requires"])), packages)
    except tomllib.TOMLDecodeError as error:
        raise LockError(f"{path}: damaged: not valid TOML: {error}", again) from None
    except KeyError as error:
        raise LockError(f"{path}: damaged: {error} is missing", again) from None
    except (TypeError, AttributeError):
        raise LockError(f"{path}: damaged: a value has the wrong type", again) from None
    for package in packages:
        if not _HEX.fullmatch(package.sha256):
            raise LockError(f"{path}: {package.name} has no SHA-256 digest", again)
    return lock


def _again(path: Path) -> str:
    return f"write it anew: rvbundle lock {path.with_suffix('.toml')}"


def read_beside(recipe: Recipe) -> Lock | None:
    """Return the lock beside the recipe, None if there is none.

    Raises LockError if it is damaged or was made for another request.
    """
    try:
        text = recipe.lock_path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LockError(f"{recipe.lock_path}: can't be read: {why}", _again(recipe.lock_path)) from None
    lock = loads(text, recipe.lock_path)
    if (lock.python, lock.requires) != (recipe.python, recipe.requires):
        raise LockError(
            f"{recipe.lock_path} was made for other requirements than those in {recipe.path.name}",
            _again(recipe.lock_path),
        )
    return lock


def write_beside(recipe: Recipe, lock: Lock) -> None:
    """Write the lock beside the recipe."""
    try:
        write_atomically(recipe.lock_path, dumps(lock).encode())
    except OSError as error:
        raise LockError(f"can't write {recipe.lock_path}: {error.strerror}") from None


def resolve(recipe: Recipe, pip: list[str | Path]) -> Lock:
    """Ask pip (by the words `pip`) what the requirements mean today; nothing is installed.

    Raises EnvironmentSetupError with pip's last lines.
    """
    if not recipe.requires:
        return Lock(recipe.python, (), ())
    with tempfile.TemporaryDirectory(prefix="rvbundle-lock-") as scratch:
        requirements = recipe.requirements or Path(scratch) / "requirements.txt"
        if recipe.requirements is None:
            requirements.write_text("\n".join(recipe.requires) + "\n")
        report = Path(scratch) / "report.json"
        done = process.run(
            [*pip, *_DRY_RUN, "--report", report, "--requirement", requirements],
            cwd=recipe.folder,  # what the requirements say of local files is relative to the recipe
            check=False,
        )
        if done.code:
            raise EnvironmentSetupError(
                f"pip could not resolve the requirements:\n{done.tail()}", _resolve_hint(done)
            )
        value = json.loads(report.read_text())
    packages = tuple(sorted((_locked(i) for i in value["install"]), key=lambda p: p.name))
    return Lock(recipe.python, recipe.requires, packages)


def _resolve_hint(done: process.Finished) -> str:
    offline = ("NewConnectionError", "Temporary failure in name resolution", "Network is unreachable")
    if any(word in done.stderr for word in offline):
        return "is there a network? With a recipe.lock and pip's cache or --find-links none is needed"
    return f"the command was: {done.command}"


def _locked(item: dict[str, Any]) -> LockedPackage:
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    info = item["download_info"]
    digest = info.get("archive_info", {}).get("hashes", {}).get("sha256")
    if digest is None:
        digest = _hash_local(info, name)
    return LockedPackage(re.sub(r"[-_.]+", "-", name).lower(), version, digest)


def _hash_local(info: dict[str, Any], name: str) -> str:
    """Hash a wheel that pip took from a folder: for those it reports no digest."""
    url = urllib.parse.urlsplit(info["url"])
    if url.scheme != "file" or "dir_info" in info:
        raise LockError(
            f"{name} comes from {url.scheme}:… without a digest: it can't be locked",
            "require a released wheel of it",
        )
    with open(urllib.parse.unquote(url.path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
