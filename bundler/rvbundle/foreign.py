"""Payloads for other architectures: Debian's packages, and the recipe's own wheels where these are pure.

A requirement whose wheel is for every machine is taken as the lock has it. One with compiled code is
replaced by Debian's package of it, in the version that the suite has; the agent's golden outputs decide
whether it still does the same.
"""

import importlib.metadata
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from rvbundle import debian, hostpython, licences
from rvbundle.debian import Archive
from rvbundle.environment import Environment, Interpreter
from rvbundle.licences import DebianPackage
from rvbundle.lock import Lock, LockedDebian, LockedPackage, normalized
from rvbundle.recipe import Recipe
from rvbundle_runtime.errors import EnvironmentSetupError

# What every payload has: an interpreter with its whole library, and a shell.
_BASE = (*hostpython.PYTHON, "dash")
# The BLAS that numpy and torch pick up where it is there, and the reference implementation, which a run may
# choose instead.
_BLAS, _WANT_BLAS = ("libopenblas0-pthread", "libblas3", "liblapack3"), ("numpy", "torch", "scipy")
# Debian's names of packages where they are not python3-NAME (packages.debian.org).
_NAMES = {
    "attrs": "python3-attr",
    "dateutil": "python3-dateutil",
    "opencv-python": "python3-opencv",
    "opencv-python-headless": "python3-opencv",
    "pillow": "python3-pil",
    "pyyaml": "python3-yaml",
    "python-dateutil": "python3-dateutil",
    "scikit-learn": "python3-sklearn",
    "scikit-image": "python3-skimage",
}
PACKAGES = "usr/lib/python3/dist-packages"


@dataclass(frozen=True)
class Distribution:
    """A Python distribution of a foreign payload; `files` are absolute paths, none for one of Debian's."""

    name: str
    version: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForeignEnvironment:
    """What a foreign payload is frozen from.

    `root` holds Debian's packages unpacked, `owners` {path in it: package}, `packages` them by name;
    `wheels` are the pure distributions and `site` where they lie. `interpreter` is a Python of the payload's
    version that runs on this machine. `notes` say where it is not what the recipe asks for.
    """

    arch: str
    suite: str
    root: Path
    owners: Mapping[str, str]
    packages: Mapping[str, DebianPackage]
    site: Path
    wheels: tuple[Distribution, ...]
    interpreter: Interpreter
    notes: tuple[str, ...]


def lock_payloads(recipe: Recipe, locked: Lock, cache_base: Path) -> Lock:
    """Return `locked` with what each foreign payload takes from Debian today.

    Raises EnvironmentSetupError.
    """
    if not recipe.debian:
        return locked
    parts = [
        _lock_one(recipe, locked, arch, suite, cache_base) for arch, suite in sorted(recipe.debian.items())
    ]
    return replace(locked, debian=tuple(parts))


def _lock_one(recipe: Recipe, locked: Lock, arch: str, suite: str, cache_base: Path) -> LockedDebian:
    archive = hostpython.archive(cache_base, suite, arch)
    compiled = {p.name: debian_name(p.name) for p in locked.packages if not p.pure}
    known = debian.known_packages(archive, compiled.values())
    asked = set(filter(None, map(_asked_for, recipe.requires)))
    for name, package in sorted(compiled.items()):
        if name in asked and package not in known:
            raise EnvironmentSetupError(
                f"{name} has compiled code, and Debian's {suite} has no package {package} for {arch}",
                f"take {name} out of the requirements, or {arch} out of [payloads]; without a payload of its "
                "own such a machine runs the one for x86_64 through an emulator",
            )
    wanted = [*_BASE, *sorted(known), *(_BLAS if compiled.keys() & set(_WANT_BLAS) else [])]
    packages = debian.resolve(archive, wanted)
    builder = hostpython.machine()
    here: Archive = hostpython.archive(cache_base, suite, builder)
    return LockedDebian(
        arch,
        suite,
        builder,
        packages,
        debian.resolve(here, hostpython.PYTHON),
        debian.resolve(here, hostpython.EMULATORS),
    )


def _asked_for(line: str) -> str:
    """Return the normalized name of what a line of requirements asks for, "" if it is not known."""
    text = _COMMENT.sub("", line).strip()
    try:
        return normalized(Requirement(text).name)
    except InvalidRequirement:  # an option, a path or an address
        file = os.path.basename(urllib.parse.urlsplit(text.partition(";")[0].strip()).path)
        return normalized(file.partition("-")[0]) if file.endswith(".whl") else ""


_COMMENT = re.compile(r"(^|\s)#.*$")  # as pip sees it


def debian_name(name: str) -> str:
    """Return Debian's name of the package of a Python distribution (normalized name)."""
    return _NAMES.get(name, f"python3-{name}")


def unpack(part: LockedDebian, cache_base: Path, folder: Path) -> None:
    """Unpack Debian's packages of a payload into `folder`; raises EnvironmentSetupError."""
    archive = hostpython.archive(cache_base, part.suite, part.arch)
    unpacked = debian.unpack(archive, part.packages, folder / "root")
    (folder / "owners.json").write_text(json.dumps(dict(unpacked.owners)))
    described = [astuple(licences.of_file(path)) for path in debian.fetch(archive, part.packages)]
    (folder / "packages.json").write_text(json.dumps(described))


def assemble(
    part: LockedDebian, locked: Lock, folder: Path, env: Environment, interpreter: Interpreter
) -> ForeignEnvironment:
    """Put together what `unpack` made and the pure wheels of `env`, the recipe's environment on this machine.

    Raises EnvironmentSetupError if something is missing.
    """
    root = folder / "root"
    described = json.loads((folder / "packages.json").read_text())
    found = {
        normalized(d.metadata["Name"]): d
        for d in importlib.metadata.distributions(path=[str(root / PACKAGES)])
        if d.metadata["Name"]
    }
    theirs = {name: d.version for name, d in found.items()}
    pure = _pure_wheels(env, [p for p in locked.packages if p.pure])
    markers = _markers(part.arch, interpreter)
    kept, notes = choose_wheels(
        {name: (d.version, tuple(d.requires or ())) for name, d in pure.items()},
        theirs,
        markers,
        frozenset(package.name for package in locked.packages if not package.pure),
        locked.requires,
    )
    if interpreter.short != env.interpreter.short:
        notes.insert(
            0,
            f"Python {interpreter.version} of Debian's {part.suite}, where the recipe has "
            f"{env.interpreter.short}",
        )
    notes += _unfit(pure, kept, interpreter)
    for package in locked.packages:
        if package.name in theirs and package.name not in kept and _differs(theirs[package.name], package):
            notes.append(
                f"{package.name} {theirs[package.name]} of Debian's {part.suite}, where the recipe has "
                f"{package.version}"
            )
    wheels = tuple(
        Distribution(d.metadata["Name"], d.version, tuple(_files(d)))
        for n, d in sorted(pure.items())
        if n in kept
    )
    return ForeignEnvironment(
        part.arch,
        part.suite,
        root,
        json.loads((folder / "owners.json").read_text()),
        {p.name: p for p in (DebianPackage(*row) for row in described)},
        env.site_packages,
        wheels,
        interpreter,
        tuple(notes),
    )


def _unfit(
    pure: Mapping[str, importlib.metadata.Distribution], kept: Iterable[str], interpreter: Interpreter
) -> Iterator[str]:
    """Say which wheels do not want the payload's Python."""
    for name in sorted(kept):
        wanted = (pure[name].metadata.get_all("Requires-Python") or [""])[0]
        try:
            fits = SpecifierSet(wanted).contains(interpreter.version, prereleases=True)
        except InvalidSpecifier:
            continue  # says nothing that can be checked
        if not fits:
            yield (
                f"{name} {pure[name].version} asks for Python {wanted}, and Debian has {interpreter.version}"
            )


def _differs(theirs: str, ours: LockedPackage) -> bool:
    try:
        return _base(theirs) != _base(ours.version)
    except InvalidVersion:
        return theirs != ours.version


def _base(version: str) -> Version:
    """Return a version without what distributors add to it; raises InvalidVersion."""
    return Version(Version(version).base_version)


def _pure_wheels(
    env: Environment, packages: Iterable[LockedPackage]
) -> dict[str, importlib.metadata.Distribution]:
    wanted = {package.name for package in packages}
    found = importlib.metadata.distributions(path=[str(env.site_packages)])
    return {n: d for d in found if d.metadata["Name"] and (n := normalized(d.metadata["Name"])) in wanted}


def _files(distribution: importlib.metadata.Distribution) -> list[str]:
    paths = [os.path.normpath(str(distribution.locate_file(file))) for file in distribution.files or ()]
    return [path for path in paths if not path.endswith(".pyc")]


def _markers(arch: str, interpreter: Interpreter) -> dict[str, str]:
    """Return the variables of requirement markers (PEP 508) for the payload."""
    return {
        "python_version": interpreter.short,
        "python_full_version": interpreter.version,
        "platform_machine": arch,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "implementation_version": interpreter.version,
        "platform_release": "",
        "platform_version": "",
        "extra": "",
    }


def choose_wheels(
    pure: Mapping[str, tuple[str, tuple[str, ...]]],
    theirs: Mapping[str, str],
    markers: dict[str, str],
    compiled: frozenset[str] = frozenset(),
    asked: Iterable[str] = (),
) -> tuple[frozenset[str], list[str]]:
    """Decide, pure, which pure wheels go into a payload beside Debian's packages `theirs` {name: version}.

    `pure` is {name: (version, requirements)}, `compiled` are wheels for this machine alone, `asked` the
    recipe's requirements. Debian's version of a distribution is preferred, since its other packages were
    tested with it, unless the recipe or a wheel asks for another. Raises EnvironmentSetupError if a wheel
    needs what neither has.
    """
    kept = {name for name in pure if name not in theirs}
    for text in asked:
        needed = _requirement(_COMMENT.sub("", text), markers)
        if needed and (target := normalized(needed.name)) in pure and not _meets(theirs.get(target), needed):
            kept.add(target)
    notes: list[str] = []
    queue = sorted(kept)
    while queue:
        name = queue.pop()
        for text in pure[name][1]:
            needed = _requirement(text, markers)
            if needed is None:
                continue
            target = normalized(needed.name)
            if target in theirs and target not in kept:
                if _meets(theirs[target], needed):
                    continue
                if target in pure:
                    kept.add(target)
                    queue.append(target)
                    continue
                notes.append(f"{name} wants {needed}, and Debian has {target} {theirs[target]}")
            elif target in compiled:
                raise EnvironmentSetupError(
                    f"{name} needs {needed}, which has compiled code, and Debian's packages have no "
                    f"{debian_name(target)}",
                    f"another suite may have it (debian:sid), or do without {name}",
                )
            elif target not in pure:
                raise EnvironmentSetupError(
                    f"{name} needs {needed} on Python {markers['python_version']}, and neither the lock nor "
                    "Debian's packages have it",
                    f"add {needed.name} to [python] requires",
                )
    return frozenset(kept), notes


def _meets(version: str | None, needed: Requirement) -> bool:
    if version is None:
        return False
    try:
        return needed.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:  # Debian takes what upstream calls a version
        return not needed.specifier


def _requirement(text: str, markers: dict[str, str]) -> Requirement | None:
    """Return what `text` requires on the payload, None if nothing there."""
    try:
        needed = Requirement(text)
    except InvalidRequirement:
        return None  # written before there was a standard; pip has read it for this machine
    return needed if needed.marker is None or needed.marker.evaluate(dict(markers)) else None
