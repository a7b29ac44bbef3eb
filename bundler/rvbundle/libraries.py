"""Which shared libraries an inventory needs from outside itself, found the way ld.so finds them."""

import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rvbundle import elf, process
from rvbundle.debian import TRIPLETS
from rvbundle_runtime.blas import reference_libraries
from rvbundle_runtime.errors import FreezeError

# glibc loads these by name when threads are cancelled or names are looked up: nothing links them.
_LOADED_BY_LIBC = ("libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2")
_CACHE_LINE = re.compile(r"\s+(\S+) \(([^)]*)\) => (\S+)")
_ALTERNATIVES = ("openblas-pthread", "openblas-openmp", "blas", "lapack")
_CACHE_ABI = {"x86_64": "x86-64", "aarch64": "AArch64", "riscv64": "double-float"}


@dataclass(frozen=True)
class SystemLibraries:
    """A machine's libraries: {soname: path}, and where ld.so looks by default (`libdir`, no slash).

    `root` is where its file system begins: not / for packages that are unpacked in a folder. `others` are
    libraries {soname: (path in the tree, source)} that a program finds by a variable only, where `paths` has
    another of that name: these come with it.
    """

    arch: str
    libdir: str
    paths: dict[str, Path]
    root: Path = Path("/")
    others: Mapping[str, tuple[str, Path]] = field(default_factory=dict)

    @staticmethod
    def of_this_machine() -> "SystemLibraries":
        """Ask ldconfig for what ld.so knows; raises FreezeError if there is no glibc."""
        arch = os.uname().machine
        ldconfig = next(
            (p for p in ("/sbin/ldconfig", "/usr/sbin/ldconfig") if os.path.exists(p)), "ldconfig"
        )
        listing = process.run([ldconfig, "-p"]).stdout.decode()
        paths: dict[str, Path] = {}
        for name, facts, path in _CACHE_LINE.findall(listing):
            if "libc6" in facts and _CACHE_ABI.get(arch, "") in facts:
                paths.setdefault(name, Path(path))
        libc = paths.get("libc.so.6")
        if libc is None:
            raise FreezeError("this machine has no glibc that ldconfig knows of")
        libdir = str(libc.parent).lstrip("/")
        return SystemLibraries(arch, libdir if libdir.startswith("usr/") else f"usr/{libdir}", paths)

    @staticmethod
    def of_root(arch: str, root: Path) -> "SystemLibraries":
        """List the libraries of Debian's packages unpacked at `root`; raises FreezeError without glibc."""
        libdir = f"usr/lib/{TRIPLETS[arch]}"
        paths: dict[str, Path] = {}
        # What update-alternatives would link to comes first: the reference BLAS has the same name.
        for folder in (*(f"{libdir}/{name}" for name in _ALTERNATIVES), libdir, "usr/lib"):
            for path in sorted((root / folder).glob("*.so*")):
                if path.is_file():
                    paths.setdefault(path.name, path)
        if "libc.so.6" not in paths:
            raise FreezeError(f"there is no glibc among the packages for {arch}")
        return SystemLibraries(arch, libdir, paths, root, _not_chosen(libdir, paths, root))


def _not_chosen(libdir: str, paths: Mapping[str, Path], root: Path) -> dict[str, tuple[str, Path]]:
    """Return the reference BLAS where another one is found by default."""
    found = {}
    for path in reference_libraries(libdir):
        name, source = os.path.basename(path), root / path
        if source.is_file() and paths[name] != source:
            found[name] = (path, source)
    return found


@dataclass(frozen=True)
class Closure:
    """Libraries to add as (tree path, source); who needs whom; what could not be found."""

    added: tuple[tuple[str, Path], ...]
    needed: dict[str, tuple[str, ...]]
    interpreter_path: str
    notes: list[str]


def close_over_libraries(files: Iterable[tuple[str, Path]], system: SystemLibraries) -> Closure:
    """Follow DT_NEEDED from `files`, given as (tree path, source), until nothing is missing."""
    known = dict(files)
    by_source = {os.path.realpath(source): path for path, source in known.items()}
    by_name: dict[str, str] = {}
    for path in known:
        by_name.setdefault(os.path.basename(path), path)
    added: dict[str, Path] = {}
    needed: dict[str, tuple[str, ...]] = {}
    unresolved: dict[str, str] = {}
    foreign = []
    loader = ""
    queue = deque(known.items())
    for name in _LOADED_BY_LIBC:
        if name in system.paths:
            _add(name, system.paths[name], system, added, queue, by_source)
    while queue:
        path, source = queue.popleft()
        if not elf.is_elf(source):
            continue
        facts = elf.read_facts(source)
        if facts.machine != system.arch:
            foreign.append(f"{path} ({facts.machine})")
            continue
        if facts.interpreter and not loader:
            loader = facts.interpreter
        found = []
        for name in facts.needed:
            place = _find(name, source, facts, by_source, by_name, system)
            if place is None:
                unresolved.setdefault(name, path)
            elif isinstance(place, str):
                found.append(place)
            else:
                found.append(_add(name, place, system, added, queue, by_source))
        needed[path] = tuple(found)
    if loader:
        added[_merged(loader)] = Path(os.path.realpath(system.root / loader.lstrip("/")))
        added.pop(f"{system.libdir}/{os.path.basename(loader)}", None)
    here = system.root == Path("/")
    where, machine = ("on this machine", "this machine") if here else ("among the packages", system.arch)
    notes = [f"{name} is nowhere {where} ({path} names it)" for name, path in unresolved.items()]
    notes += [f"not for {machine}: {text}" for text in foreign]
    return Closure(tuple(sorted(added.items())), needed, loader, notes)


def _merged(path: str) -> str:
    """Return an absolute library path as it is in a tree with merged /usr."""
    text = path.lstrip("/")
    return text if text.startswith("usr/") else f"usr/{text}"


def _add(
    name: str,
    source: Path,
    system: SystemLibraries,
    added: dict[str, Path],
    queue: deque[tuple[str, Path]],
    by_source: dict[str, str],
) -> str:
    path = f"{system.libdir}/{name}"
    places = [(path, source), *([system.others[name]] if name in system.others else [])]
    for place, library in places:
        real = Path(os.path.realpath(library))
        if place not in added:
            added[place] = real
            by_source.setdefault(str(real), place)
            queue.append((place, real))
    return path


def _find(
    name: str,
    source: Path,
    facts: elf.ElfFacts,
    by_source: dict[str, str],
    by_name: dict[str, str],
    system: SystemLibraries,
) -> str | Path | None:
    """Return the tree path of a library that is there, the source of one to add, or None."""
    for folder in facts.search:
        origin = str(source.parent)
        place = folder.replace("$ORIGIN", origin).replace("${ORIGIN}", origin)
        if folder.startswith("/"):
            place = str(system.root / folder.lstrip("/"))
        candidate = os.path.realpath(os.path.join(place, name))
        if os.path.isfile(candidate):
            return by_source.get(candidate) or Path(candidate)
    # Packages load their own libraries before the extensions that need them (torch does).
    if name in by_name:
        return by_name[name]
    return system.paths.get(name)
