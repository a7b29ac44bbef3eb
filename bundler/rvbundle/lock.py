"""The lock: name, version and SHA-256 of every wheel, so that a build can be repeated."""

import hashlib
import json
import os
import re
import tempfile
import tomllib
import urllib.parse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rvbundle import process
from rvbundle.debian import Package
from rvbundle.recipe import Recipe
from rvbundle.stages import write_atomically
from rvbundle_runtime.errors import EnvironmentSetupError, LockError

_FORMAT = 1
_DRY_RUN = ("install", "--dry-run", "--ignore-installed", "--prefer-binary", "--quiet")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class LockedPackage:
    """One wheel; `pure` tells whether it is for every machine ("-none-any" in its name)."""

    name: str
    version: str
    sha256: str
    pure: bool = False


@dataclass(frozen=True)
class LockedDebian:
    """What a payload takes from a suite of Debian's.

    `packages` are its own, `python` what makes its bytecode on the machine `builder`, `emulators` what runs
    its workloads there.
    """

    arch: str
    suite: str
    builder: str
    packages: tuple[Package, ...]
    python: tuple[Package, ...]
    emulators: tuple[Package, ...]


@dataclass(frozen=True)
class Lock:
    """What an environment is made of, and for which request."""

    python: str
    requires: tuple[str, ...]
    packages: tuple[LockedPackage, ...]
    debian: tuple[LockedDebian, ...] = ()

    def digest(self) -> str:
        """Return a SHA-256 (hex) of all that decides the environment of this machine's payload."""
        return hashlib.sha256(dumps(replace(self, debian=())).encode()).hexdigest()

    def debian_for(self, arch: str) -> LockedDebian:
        """Return what the payload `arch` takes from Debian; raises KeyError."""
        return {part.arch: part for part in self.debian}[arch]


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
            *(["pure = true"] if package.pure else []),
        ]
    for part in lock.debian:
        lines += ["", "[[debian]]"]
        lines += [f"{name} = {quoted(getattr(part, name))}" for name in _DEBIAN_TEXTS]
        for name in _DEBIAN_LISTS:
            rows = [quoted([p.name, p.version, p.sha256]) for p in getattr(part, name)]
            lines += [f"{name} = [", *(f"    {row}," for row in rows), "]"]
    return "\n".join(lines) + "\n"


_DEBIAN_TEXTS, _DEBIAN_LISTS = ("arch", "suite", "builder"), ("packages", "python", "emulators")


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
            LockedPackage(str(p["name"]), str(p["version"]), str(p["sha256"]), bool(p.get("pure")))
            for p in value.get("package", [])
        )
        debian = tuple(_load_debian(part) for part in value.get("debian", []))
        lock = Lock(str(value["python"]), tuple(map(str, value["requires"])), packages, debian)
    except tomllib.TOMLDecodeError as error:
        raise LockError(f"{path}: damaged: not valid TOML: {error}", again) from None
    except KeyError as error:
        raise LockError(f"{path}: damaged: {error} is missing", again) from None
    except (TypeError, AttributeError, ValueError):
        raise LockError(f"{path}: damaged: a value has the wrong type", again) from None
    taken = [p for part in debian for p in (*part.packages, *part.python, *part.emulators)]
    for name, digest in [*((p.name, p.sha256) for p in packages), *((p.name, p.sha256) for p in taken)]:
        if not _HEX.fullmatch(digest):
            raise LockError(f"{path}: {name} has no SHA-256 digest", again)
    return lock


def _load_debian(value: dict[str, Any]) -> LockedDebian:
    texts = [str(value[name]) for name in _DEBIAN_TEXTS]
    lists = [
        tuple(Package(str(name), str(version), str(digest)) for name, version, digest in value[key])
        for key in _DEBIAN_LISTS
    ]
    return LockedDebian(texts[0], texts[1], texts[2], *lists)


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
    if {(part.arch, part.suite) for part in lock.debian} != set(recipe.debian.items()):
        raise LockError(
            f"{recipe.lock_path} was made for other payloads than those in {recipe.path.name}",
            _again(recipe.lock_path),
        )
    for part in lock.debian:
        if part.builder != os.uname().machine:
            raise LockError(
                f"{recipe.lock_path} was made on a machine of another architecture ({part.builder})",
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
    file = urllib.parse.urlsplit(info["url"]).path
    return LockedPackage(normalized(name), version, digest, file.endswith("-none-any.whl"))


def normalized(name: str) -> str:
    """Return a distribution's name in its normal form (packaging.python.org, "Name format")."""
    return re.sub(r"[-_.]+", "-", name).lower()


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
