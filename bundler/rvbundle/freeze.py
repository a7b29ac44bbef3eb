"""The freeze stage: the inventory of an environment as a plain, relocatable tree.

    TREE/usr/bin/python3.11 (python3, python, sh)      TREE/usr/lib/python3.11/...  (with site-packages)
    TREE/usr/lib/<libdir>/*.so                         TREE/bin, lib, lib64 -> usr/...

What the agent could ever use is in it. What of it is hot is decided later (`split.py`).
"""

import configparser
import fnmatch
import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import rvbundle_runtime
from rvbundle import blas, elf, licences, process
from rvbundle.compiler import Job, compile_sources
from rvbundle.debian import TRIPLETS
from rvbundle.environment import Environment, Interpreter
from rvbundle.foreign import PACKAGES, ForeignEnvironment, debian_name
from rvbundle.libraries import SystemLibraries, close_over_libraries
from rvbundle.lock import normalized
from rvbundle.stages import digest_of_files
from rvbundle_runtime import families
from rvbundle_runtime.blas import OPENBLAS
from rvbundle_runtime.errors import FreezeError
from rvbundle_runtime.knownbad import known_bad

BOOT_MODULE = "_rvbundle_boot"
# Distributions whose own test suites read docstrings (of modules that do not mention them).
_DOCSTRINGS_ARE_USED = ("numpy", "python3-numpy")
_INSIDE = Path(__file__).parent / "inside"
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
# Imported before the boot module can prefer bytecode: a source in the tree would be compiled each time.
_BEFORE_BOOT = ("encodings", "sitecustomize.py")
_SITECUSTOMIZE = """\
\"\"\"Adds the payload's package folder: this Python's own site module looks elsewhere.\"\"\"

import os
import site

site.addsitedir(os.path.join(os.path.dirname(os.__file__), "site-packages"))
"""
# Folders of a payload that the sandbox mounts things on.
MOUNT_POINTS = ("app", "usr/share/zoneinfo")

SOURCE, BYTECODE, EXTENSION, LIBRARY = "source", "bytecode", "extension", "library"
PROGRAM, METADATA, DATA, TAIL, LINK, DIRECTORY = "program", "metadata", "data", "tail", "link", "directory"


@dataclass(frozen=True)
class FrozenFile:
    """One path of the tree, relative to its root.

    `role` is one of the constants above; `place` is where its bytes lie, relative to the stage's folder;
    `target` is a link's text; `package` the distribution that it belongs to ("" for none).
    """

    path: str
    role: str
    place: str
    executable: bool
    size: int
    sha256: str
    package: str
    target: str = ""


@dataclass(frozen=True)
class Frozen:
    """The inventory. `needed` maps a library or extension to the paths of the libraries that it needs.

    `numpy_dispatch` are the processor features that the environment's numpy has kernels for; `blas` the
    versions of its BLAS libraries by name (rvbundle_runtime/blas.py); `emulators` is the folder of what runs
    its programs on this machine, None where they are native.
    """

    folder: Path
    python: str
    python_version: str
    arch: str
    libdir: str
    packages: tuple[tuple[str, str], ...]
    files: tuple[FrozenFile, ...]
    needed: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]
    numpy_dispatch: tuple[str, ...] = ()
    blas: Mapping[str, str] = field(default_factory=dict)
    emulators: Path | None = None

    @property
    def tree(self) -> Path:
        """The tree itself."""
        return self.folder / "tree"

    @property
    def stdlib(self) -> str:
        """The standard library's path in the tree."""
        return f"usr/lib/python{self.python}"

    def digest(self) -> str:
        """Return a SHA-256 (hex) of the tree's content: the same wherever it was made."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.path}\0{file.role}\0{file.sha256}\0{file.target}\0".encode())
        return digest.hexdigest()

    def inner(self, path: str) -> str:
        """Return a path of the tree relative to the entry of sys.path that it lies below, if any."""
        for folder in ("/site-packages/", "/lib-dynload/", "/"):
            if path.startswith(self.stdlib + folder):
                return path[len(self.stdlib + folder) :]
        return path

    def modules(self) -> dict[str, Path | None]:
        """Return {dotted name: source} of every module in the tree; None where there is no source."""
        found: dict[str, Path | None] = {}
        for file in self.files:
            if file.role == SOURCE:
                found[module_name(self.inner(file.path))] = self.folder / file.place
            elif file.role in (BYTECODE, EXTENSION):
                found.setdefault(module_name(self.inner(file.path)), None)
        return found


@dataclass(frozen=True)
class Planned:
    """A file that will be in the tree: where it comes from and what it is."""

    path: str
    source: Path
    role: str
    package: str = ""
    executable: bool = False


def module_name(inner: str) -> str:
    """Return the dotted name of the module at a path relative to an entry of sys.path."""
    folder, _, name = inner.rpartition("/")
    stem = name.partition(".")[0]
    parts = [*(folder.split("/") if folder else []), *([] if stem == "__init__" else [stem])]
    return ".".join(parts)


def modules_matching(pattern: str, modules: list[str]) -> set[str]:
    """Return the modules that a name or glob means, all below them, and the parents that they need."""
    kept = {pattern[:place] for place, letter in enumerate(pattern) if letter == "."} - {""}
    for module in modules:
        parts = module.split(".")
        above = [".".join(parts[: count + 1]) for count in range(len(parts))]
        if any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in above):
            kept.update(above)
    return kept


def load(folder: Path) -> Frozen:
    """Read what `freeze` wrote."""
    value: dict[str, Any] = json.loads((folder / "frozen.json").read_text())
    return Frozen(
        folder=folder,
        python=value["python"],
        python_version=value["python_version"],
        arch=value["arch"],
        libdir=value["libdir"],
        packages=tuple((n, v) for n, v in value["packages"]),
        files=tuple(FrozenFile(*row) for row in value["files"]),
        needed={path: tuple(paths) for path, paths in value["needed"].items()},
        notes=tuple(value["notes"]),
        numpy_dispatch=tuple(value["numpy_dispatch"]),
        blas=value["blas"],
    )


@dataclass(frozen=True)
class Inventory:
    """All that a tree is made of, before its libraries are followed.

    `planned` are the files of distributions, `programs` the interpreter and the shell; `stdlib` is the
    standard library's folder on this machine, `interpreter` what compiles; files below `ours` may be linked
    to rather than copied. `links` are (path, target) beside the usual ones. `origin` tells of which packages
    the files are; None: this machine's dpkg knows.
    """

    interpreter: Interpreter
    stdlib: Path
    system: SystemLibraries
    planned: tuple[Planned, ...]
    programs: tuple[Planned, ...]
    packages: tuple[tuple[str, str], ...]
    ours: Path
    notes: tuple[str, ...]
    links: tuple[tuple[str, str], ...] = ()
    numpy_dispatch: tuple[str, ...] = ()
    origin: licences.Origin | None = None


def of_environment(environment: Environment) -> Inventory:
    """Take the inventory of an environment on this machine; raises FreezeError."""
    inventory = json.loads(process.run([environment.python, "-I", _INSIDE / "inventory.py"]).stdout)
    distributions = inventory["distributions"]
    planned, notes = _distribution_files(environment, distributions)
    system = SystemLibraries.of_this_machine()
    return Inventory(
        environment.interpreter,
        environment.interpreter.stdlib,
        system,
        tuple(planned),
        tuple(_programs(environment, system)),
        tuple((d["name"], d["version"]) for d in distributions),
        environment.folder,
        tuple(notes),
        numpy_dispatch=tuple(inventory["numpy_dispatch"]),
    )


def of_foreign(environment: ForeignEnvironment) -> Inventory:
    """Take the inventory of a payload for another architecture; raises FreezeError."""
    interpreter, root = environment.interpreter, environment.root
    site = f"usr/lib/python{interpreter.short}/site-packages"
    planned = [
        _planned(f"{site}/{Path(file).relative_to(environment.site)}", Path(file), d.name)
        for d in environment.wheels
        for file in d.files
        if Path(file).is_relative_to(environment.site) and Path(file).is_file()
    ]
    theirs, links, skipped = _debian_files(environment, site)
    programs = []
    for name, target in ((f"python{interpreter.short}", f"python{interpreter.short}"), ("dash", "sh")):
        programs.append(Planned(f"usr/bin/{target}", root / "usr/bin" / name, PROGRAM, "", executable=True))
    notes = [*environment.notes]
    if skipped:
        notes.append(f"{len(skipped)} links to folders or out of packages are left out, such as {skipped[0]}")
    wheels = [(d.name, d.version) for d in environment.wheels]
    return Inventory(
        interpreter,
        root / f"usr/lib/python{interpreter.short}",
        SystemLibraries.of_root(environment.arch, root),
        (*planned, *theirs),
        tuple(programs),
        tuple(sorted([*wheels, *((p.name, p.version) for p in environment.packages.values())])),
        root.parent,
        tuple(notes),
        tuple(links),
        origin=licences.Origin(root, environment.owners, environment.packages),
    )


def _replaced(environment: ForeignEnvironment) -> set[str]:
    """Return Debian's packages whose distribution is there as a wheel: by metadata, or the usual name."""
    names = {normalized(d.name) for d in environment.wheels}
    found = {debian_name(name) for name in names}
    for path, package in environment.owners.items():
        metadata = path.removeprefix(f"{PACKAGES}/").partition("/")[0]
        if path.startswith(f"{PACKAGES}/") and metadata.endswith((".dist-info", ".egg-info")):
            name = metadata.partition("-")[0].removesuffix(".egg-info")
            found |= {package} if normalized(name) in names else set()
    return found


def _debian_files(
    environment: ForeignEnvironment, site: str
) -> tuple[list[Planned], list[tuple[str, str]], list[str]]:
    """Plan Debian's Python packages as if installed in `site`; also return links, and links left out.

    Debian keeps torch's libraries among the system's and links to them from the package. Links to other
    files of packages become these files; left out are those to folders (headers, tests) and out of packages.
    """
    root, libdir = environment.root, f"usr/lib/{TRIPLETS[environment.arch]}"
    replaced = _replaced(environment)
    planned, links, skipped = [], [], []
    for place, folders, files in os.walk(root / PACKAGES):
        folders.sort()
        for name in sorted(files) + [f for f in folders if Path(place, f).is_symlink()]:
            source = Path(place, name)
            inside = str(source.relative_to(root / PACKAGES))
            owner = environment.owners.get(str(source.relative_to(root)), "")
            if owner in replaced or name.endswith(".pyc"):
                continue
            if not source.is_symlink():
                planned.append(_planned(f"{site}/{inside}", source, owner))
                continue
            target, real = source.parent / os.readlink(source), Path(os.path.realpath(source))
            if not real.is_file() or not real.is_relative_to(os.path.realpath(root)):
                skipped.append(inside)
            elif os.path.normpath(target.parent) == str(root / libdir):
                library = f"{libdir}/{target.name}"
                links.append(
                    (f"{site}/{inside}", os.path.relpath(library, os.path.dirname(f"{site}/{inside}")))
                )
                planned.append(Planned(library, real, LIBRARY, owner))
            else:
                planned.append(_planned(f"{site}/{inside}", real, owner))
    return planned, links, skipped


def freeze(inventory: Inventory, docstrings: bool, folder: Path) -> None:
    """Fill `folder` with the tree of an inventory, and with what `load` reads; raises FreezeError.

    Without `docstrings` those of installed distributions are dropped where they can be.
    """
    interpreter, system = inventory.interpreter, inventory.system
    notes = list(inventory.notes)
    planned = [*_boot_files(interpreter, folder), *inventory.planned]
    planned += _stdlib_files(interpreter.short, inventory.stdlib)
    planned = list({p.path: p for p in reversed(planned)}.values())
    programs = list(inventory.programs)
    closure = close_over_libraries(
        [(p.path, p.source) for p in planned + programs if p.role in (EXTENSION, LIBRARY, PROGRAM)], system
    )
    libraries = [  # the kernel executes the dynamic loader, so it needs the permission
        Planned(path, source, LIBRARY, "", executable=os.path.basename(path).startswith("ld"))
        for path, source in closure.added
    ]
    notes += closure.notes
    origin = inventory.origin or licences.ask_dpkg(_of_the_system(inventory, programs + libraries))
    planned = [*planned, *programs, *libraries]
    licences.save(licences.collect(planned, origin, interpreter.version), folder)
    planned += [Planned(path, text, METADATA) for path, text in licences.texts(planned, origin).items()]
    planned.sort(key=lambda p: p.path)
    tails = _build_tree(planned, folder, inventory.ours)
    compiled, failures = _compile(interpreter, planned, docstrings, folder)
    links = [*_links(interpreter, closure.interpreter_path), *inventory.links]
    files = _hash_all([*planned, *compiled], tails, folder)
    files += [FrozenFile(path, LINK, "", False, 0, "", "", target) for path, target in links]
    folders = (*MOUNT_POINTS, f"usr/lib/python{interpreter.short}/lib-dynload")
    files += [FrozenFile(path, DIRECTORY, "", False, 0, "", "") for path in folders]
    notes += _content_notes(files, [name for name, _ in inventory.packages])
    if failures:
        notes.append(f"{failures} Python files are for another Python version and can't be compiled")
    _finish_tree(folder / "tree", links)
    versions = blas.versions((p.path, p.source) for p in planned if p.role == LIBRARY)
    notes += _wrong_kernels(system.arch, versions)
    frozen = Frozen(
        folder=folder,
        python=interpreter.short,
        python_version=interpreter.version,
        arch=system.arch,
        libdir=system.libdir,
        packages=inventory.packages,
        files=tuple(sorted(files, key=lambda f: (f.path, f.role))),
        needed=closure.needed,
        notes=tuple(notes),
        numpy_dispatch=inventory.numpy_dispatch,
        blas=versions,
    )
    value = asdict(replace(frozen, files=()))
    value["files"] = [list(asdict(f).values()) for f in frozen.files]
    del value["folder"], value["emulators"]
    (folder / "frozen.json").write_text(json.dumps(value))


def _of_the_system(inventory: Inventory, parts: list[Planned]) -> list[Path]:
    """Return what this machine's package manager may have installed (of the standard library, an example)."""
    library = [inventory.stdlib / "os.py", inventory.stdlib / "asyncio" / "__init__.py"]
    return [*library, *(part.source for part in parts)]


def _planned(path: str, source: Path, package: str) -> Planned:
    """Plan a distribution's file; what is no module and may be executed stays so."""
    role = role_of(path, source)
    runnable = role in (DATA, PROGRAM) and bool(source.stat().st_mode & 0o100)
    return Planned(path, source, role, package, runnable)


def role_of(path: str, source: Path) -> str:
    """Return what a file of an environment is, by its name (and its first bytes)."""
    name = os.path.basename(path)
    if ".dist-info/" in path or ".egg-info/" in path or path.endswith(".egg-info"):
        return METADATA
    if name.endswith(".py"):
        return SOURCE
    if name.endswith(".so") or ".so." in name:
        if not elf.is_elf(source):
            return DATA
        return EXTENSION if name.endswith(".so") and elf.is_extension(source) else LIBRARY
    runnable = source.is_file() and source.stat().st_mode & 0o100
    return PROGRAM if runnable and elf.is_elf(source) else DATA


def _distribution_files(
    environment: Environment, distributions: list[dict[str, Any]]
) -> tuple[list[Planned], list[str]]:
    """Plan what the distributions' RECORDs list."""
    site, venv = environment.site_packages, environment.folder / "venv"
    lib = f"usr/lib/python{environment.interpreter.short}/site-packages"
    planned, missing = [], []
    for distribution in distributions:
        name = distribution["name"]
        if distribution["editable"]:
            raise FreezeError(
                f"{name} is installed in editable mode: its files are not the environment's",
                "require a wheel of it, or make it part of the agent",
            )
        for text in distribution["files"]:
            source = Path(text)
            if not source.is_file():
                missing.append(text)
            elif source.is_relative_to(venv):
                inside = source.is_relative_to(site)
                path = f"{lib}/{source.relative_to(site)}" if inside else f"usr/{source.relative_to(venv)}"
                planned.append(_planned(path, source, name))
    notes = [f"{len(missing)} recorded files are missing, such as {missing[0]}"] if missing else []
    return planned, notes


def _stdlib_files(short: str, root: Path) -> list[Planned]:
    planned = []
    for place, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _STDLIB_SKIPPED)
        for file in sorted(files):
            source = Path(place, file)
            if source.is_file() and not file.endswith(".pyc"):
                path = f"usr/lib/python{short}/{source.relative_to(root)}"
                planned.append(Planned(path, source, role_of(path, source)))
    return planned


def _boot_files(interpreter: Interpreter, folder: Path) -> list[Planned]:
    """Plan the import finder and the .pth file that starts it."""
    site = f"usr/lib/python{interpreter.short}/site-packages"
    pth = folder / f"{BOOT_MODULE}.pth"
    pth.write_text(f"import {BOOT_MODULE}\n")
    boot = Path(rvbundle_runtime.__file__).parent / "guest" / f"{BOOT_MODULE}.py"
    planned = [
        # "00": .pth files are taken in order of their names, and others may import what is cold.
        Planned(f"{site}/00{BOOT_MODULE}.pth", pth, METADATA, "rvbundle"),
        Planned(f"{site}/{BOOT_MODULE}.py", boot, SOURCE, "rvbundle"),
    ]
    if not interpreter.usual_site:
        customize = folder / "sitecustomize.py"
        customize.write_text(_SITECUSTOMIZE)
        path = f"usr/lib/python{interpreter.short}/sitecustomize.py"
        planned.append(Planned(path, customize, SOURCE, "rvbundle"))
    return planned


def _programs(environment: Environment, system: SystemLibraries) -> list[Planned]:
    """Plan the interpreter itself and a shell, for `subprocess` with shell=True."""
    python = Path(os.path.realpath(environment.interpreter.executable))
    planned = [
        Planned(f"usr/bin/python{environment.interpreter.short}", python, PROGRAM, "", executable=True)
    ]
    shell = Path(os.path.realpath("/bin/sh"))
    if shell.is_file() and elf.is_elf(shell):
        planned.append(Planned("usr/bin/sh", shell, PROGRAM, "", executable=True))
    if elf.read_facts(python).machine != system.arch:
        raise FreezeError(f"{python} is not a program for this machine ({system.arch})")
    return planned


def _links(interpreter: Interpreter, loader: str) -> list[tuple[str, str]]:
    """Return the links of the tree: the merged-usr layout and the interpreter's usual names."""
    links = [(name, f"usr/{name}") for name in ("bin", "sbin", "lib")]
    links += [("usr/sbin", "bin"), ("usr/bin/python3", f"python{interpreter.short}")]
    links.append(("usr/bin/python", f"python{interpreter.short}"))
    top = loader.split("/")[1]  # "/lib64/ld-linux-x86-64.so.2" -> "lib64"
    if top not in ("lib", "usr"):
        links.append((top, f"usr/{top}"))
    return links


def _build_tree(planned: Iterable[Planned], folder: Path, ours: Path) -> dict[str, str]:
    """Put the files into the tree; return {path: place of its tail}.

    Hard links to the files of our own environment `ours`, copies of the system's: those may be changed
    in place. Unstripped libraries are written anew without their symbol tables, which go to `tails/`.
    """
    tails: dict[str, str] = {}
    for item in planned:
        target = _place(folder, item)
        target.parent.mkdir(parents=True, exist_ok=True)
        if item.role in (EXTENSION, LIBRARY) and elf.read_facts(item.source).has_symbols:
            parts = elf.split_tail(item.source)
            if parts and elf.load_segments_aligned(parts[0]):
                target.write_bytes(parts[0])
                target.chmod(0o755 if item.executable else 0o644)
                place = f"tails/{len(tails)}"
                (folder / "tails").mkdir(exist_ok=True)
                (folder / place).write_bytes(parts[1])
                tails[item.path] = place
                continue
        if item.executable and item.role == DATA and _fix_script(item.source, target):
            continue
        if item.executable or not item.source.is_relative_to(ours):
            shutil.copyfile(item.source, target)
            target.chmod(0o755 if item.executable else 0o644)
        else:
            _link_or_copy(item.source, target)
    return tails


def _place(folder: Path, item: Planned) -> Path:
    parts = item.path.split("/")
    aside = item.role == SOURCE and len(parts) > 3 and parts[3] in _BEFORE_BOOT
    return folder / ("aside" if aside else "tree") / item.path


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or a file that may not be linked
        shutil.copyfile(source, target)


def _fix_script(source: Path, target: Path) -> bool:
    """Write a console script with the payload's interpreter in its first line; False if it is none."""
    data = source.read_bytes()
    first, newline, rest = data.partition(b"\n")
    if not first.startswith(b"#!") or b"python" not in first:
        return False
    target.write_bytes(b"#!/usr/bin/python3" + newline + rest)
    target.chmod(0o755)
    return True


def _compile(
    interpreter: Interpreter, planned: list[Planned], docstrings: bool, folder: Path
) -> tuple[list[Planned], int]:
    """Compile every source; return the bytecode files (at `foo.pyc` beside `foo.py`) and the failures."""
    jobs, made = [], []
    for item in planned:
        if item.role == SOURCE:
            target = folder / "tree" / f"{item.path}c"
            target.parent.mkdir(parents=True, exist_ok=True)
            drop = not docstrings and item.package not in ("", "rvbundle", *_DOCSTRINGS_ARE_USED)
            jobs.append(Job(item.source, target, f"/{item.path}", drop))
            made.append(replace(item, path=f"{item.path}c", source=target, role=BYTECODE))
    failed = compile_sources(interpreter, jobs, columns=False)
    kept = [m for job, m in zip(jobs, made, strict=True) if job.source not in failed]
    return kept, len(failed)


def _finish_tree(tree: Path, links: list[tuple[str, str]]) -> None:
    for path, target in links:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).symlink_to(target)
    for path in MOUNT_POINTS:
        (tree / path).mkdir(parents=True, exist_ok=True)


def _hash_all(planned: list[Planned], tails: dict[str, str], folder: Path) -> list[FrozenFile]:
    def describe(item: Planned) -> FrozenFile:
        place = _place(folder, item)
        size, digest = _size_and_digest(place)
        return FrozenFile(
            item.path, item.role, str(place.relative_to(folder)), item.executable, size, digest, item.package
        )

    def describe_tail(item: Planned) -> FrozenFile:
        size, digest = _size_and_digest(folder / tails[item.path])
        return FrozenFile(item.path, TAIL, tails[item.path], False, size, digest, item.package)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        files = list(pool.map(describe, planned))
        return files + list(pool.map(describe_tail, [i for i in planned if i.path in tails]))


def _size_and_digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _wrong_kernels(arch: str, versions: Mapping[str, str]) -> list[str]:
    """Say which kernels are not traced, since the OpenBLAS that is there computes nonsense with them."""
    return [
        f"kernels {family.name}: {bad}"
        for family in families.of(arch)
        if (bad := known_bad(OPENBLAS, versions.get(OPENBLAS, ""), family.name, family.vlen))
    ]


def _content_notes(files: list[FrozenFile], names: list[str]) -> list[str]:
    """Return what a user should know of the contents: duplicates, two OpenMPs, CUDA."""
    notes: list[str] = []
    same: dict[str, list[str]] = defaultdict(list)
    openmp: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if file.role not in (LIBRARY, EXTENSION):
            continue
        same[file.sha256].append(file.path)
        if os.path.basename(file.path).startswith(("libgomp", "libomp", "libiomp5")):
            openmp[file.sha256].append(file.path)
    notes += [
        f"the same library lies in {' and '.join(sorted(paths))} (stored once)"
        for paths in same.values()
        if len(paths) > 1
    ]
    if len(openmp) > 1:
        places = sorted(path for paths in openmp.values() for path in paths)
        notes.append(
            f"two different OpenMP runtimes: {' and '.join(places)} (a process that loads both may use "
            "too many threads, or crash)"
        )
    cuda = [name for name in names if name.lower().startswith("nvidia-")]
    cuda += [f.path for f in files if os.path.basename(f.path) == "libtorch_cuda.so"]
    if cuda:
        notes.append(
            f"this is a CUDA build of torch ({cuda[0]} …): gigabytes that an image for CPUs never uses; "
            "require a CPU build of torch, from PyTorch's own index of such builds"
        )
    return notes


def code_digest() -> str:
    """Return a digest of our own files that end in the tree or decide how it is made."""
    boot = Path(rvbundle_runtime.__file__).parent / "guest" / f"{BOOT_MODULE}.py"
    ours = [
        Path(__file__).with_name(f"{name}.py")
        for name in ("blas", "elf", "libraries", "compiler", "debian", "foreign", "freeze", "licences")
    ]
    return digest_of_files([*ours, boot, *_INSIDE.glob("*.py")])


def plugins(frozen: Frozen) -> list[str]:
    """Return the modules that distributions offer as entry points (not those of console scripts)."""
    found = set()
    for file in frozen.files:
        if file.role == METADATA and file.path.endswith("/entry_points.txt"):
            parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
            parser.optionxform = str  # type: ignore[assignment,method-assign]
            try:
                parser.read_string((frozen.folder / file.place).read_text(errors="replace"))
            except configparser.Error:
                continue  # as importlib.metadata does: such a file offers nothing
            for group in parser.sections():
                if group not in ("console_scripts", "gui_scripts"):
                    found |= {v.partition(":")[0].strip() for v in parser[group].values()}
    return sorted(found)
