"""The split stage, pure: which file is hot (in the image), which is cold, and why."""

import fnmatch
import os
from collections import defaultdict
from dataclasses import dataclass

from rvbundle import freeze
from rvbundle.analysis import Reach
from rvbundle.freeze import Frozen, FrozenFile, module_name, modules_matching
from rvbundle.licences import COMMON, DOC
from rvbundle.recipe import Recipe
from rvbundle.trace import Trace
from rvbundle_runtime.blas import reference_libraries

COLD_LIST = "usr/lib/rvbundle/cold.txt"

# Data files that programs do not read at run time. Patterns are for paths relative to site-packages or
# the standard library (fnmatch: * also matches /); a file that a trace opened stays hot all the same.
COLD_DATA: tuple[tuple[str, str], ...] = (
    ("*.h", "a header"),
    ("*.hpp", "a header"),
    ("*.cuh", "a header"),
    ("*.a", "a static library"),
    ("*.lib", "a static library"),
    ("*.o", "an object file"),
    ("*.pyi", "a type stub"),
    ("*.pxd", "a Cython interface"),
    ("*.pyx", "a Cython source"),
    ("*.c", "a source file"),
    ("*.cc", "a source file"),
    ("*.cpp", "a source file"),
    ("*.cu", "a source file"),
    ("*.f", "a source file"),
    ("*.f90", "a source file"),
    ("*.cmake", "a build file"),
    ("*.pc", "a build file"),
    ("*.in", "a build file"),
    ("*.md", "documentation"),
    ("*.rst", "documentation"),
    ("*/tests/*", "a test"),
    ("*/test/*", "a test"),
    ("test/*", "a test"),
    ("*/testing/*", "a test"),
    ("torch/bin/*", "a program for building and testing torch"),
    ("torch/share/*", "a build file"),
    ("torch/include/*", "a header"),
    ("*/include/*", "a header"),
    ("config-3.*/*", "a build file"),
    ("ensurepip/*", "an installer"),
    ("idlelib/*", "a program for the desktop"),
    ("turtledemo/*", "a program for the desktop"),
    ("lib2to3/*", "a program for developers"),
)
# Exceptions: files whose mere presence is checked for, which no trace can see.
HOT_DATA = ("torch/bin/torch_shm_manager",)
_ALWAYS_HOT_LIBRARIES = ("libgcc_s.so", "libnss_", "libc.so", "ld-linux", "ld-", "libpthread.so", "libdl.so")


# Modules that Python itself imports when something goes wrong, or for a name in an unusual encoding:
# without them an error would be followed by a second one. Small, so always hot.
HOT_MODULES = frozenset(
    "traceback linecache tokenize token textwrap contextlib collections collections.abc keyword operator "
    "reprlib functools types re re._casefix re._compiler re._constants re._parser enum copyreg "
    "importlib importlib.util importlib.machinery importlib._abc importlib._bootstrap "
    "importlib._bootstrap_external warnings encodings.ascii encodings.latin_1 encodings.idna stringprep "
    "unicodedata faulthandler signal".split()
)
_DATA_ROLES = (freeze.DATA, freeze.PROGRAM)  # a package's own programs are data to us


@dataclass(frozen=True)
class Placed:
    """A file with its side and the reason for it. `kept`: the recipe wants it in the image, and whole."""

    file: FrozenFile
    hot: bool
    reason: str
    kept: bool = False


@dataclass(frozen=True)
class Split:
    """All files placed, and the text of the list of what is cold (for the import finder)."""

    placed: tuple[Placed, ...]
    cold_list: str


def split(
    recipe: Recipe, frozen: Frozen, trace: Trace, reach: Reach, recorded: frozenset[str] = frozenset()
) -> Split:
    """Place every file of `frozen`; `recorded` are paths that runs had to restore."""
    placer = _Placer(recipe, frozen, trace, reach, recorded)
    placed = tuple(placer.place(file) for file in frozen.files)
    return Split(placed, cold_list(frozen, placed))


class _Placer:
    def __init__(
        self,
        recipe: Recipe,
        frozen: Frozen,
        trace: Trace,
        reach: Reach,
        recorded: frozenset[str],
    ) -> None:
        self._recorded = recorded
        self._recipe = recipe
        self._frozen = frozen
        self._opened = trace.opened_by()
        self._extra = frozenset(trace.extra)
        self._reach = reach
        self._kept_modules = {
            pattern: modules_matching(pattern, list(frozen.modules())) for pattern in recipe.keep_modules
        }
        self._stdlib = frozen.stdlib + "/"
        self._site = f"{frozen.stdlib}/site-packages/"
        self._reached_packages = {name.partition(".")[0] for name in reach.modules}

    def place(self, file: FrozenFile) -> Placed:
        own_program = file.role == freeze.PROGRAM and not file.package
        if own_program or file.role in (freeze.LINK, freeze.DIRECTORY):
            return Placed(file, True, "part of every image")
        if file.role == freeze.TAIL:
            return Placed(file, False, "symbol tables and debug sections: only debuggers read them")
        kept = self._kept(file)
        if kept is not None:
            return Placed(file, True, kept, kept=True)
        hot = self._used(file) or self._by_rule(file)
        return Placed(file, True, hot) if hot else Placed(file, False, self._why_cold(file))

    def _used(self, file: FrozenFile) -> str | None:
        if file.path in self._opened:
            return f"opened by trace {self._opened[file.path]}{self._and_reach(file)}"
        if file.path in self._extra:
            return "opened while errors were provoked and the modules of [keep] were imported"
        if file.path in self._recorded:
            return "restored in a recorded run"
        return None

    def _kept(self, file: FrozenFile) -> str | None:
        if self._recipe.trim == "none":
            return '[trim] level = "none"'
        inner = self._frozen.inner(file.path)
        for pattern in self._recipe.keep_files:
            if fnmatch.fnmatch(inner, pattern) or fnmatch.fnmatch(file.path, pattern):
                return f"[keep] files has {pattern}"
        if file.role in (freeze.BYTECODE, freeze.EXTENSION):
            module = module_name(inner)
            for pattern in self._recipe.keep_modules:
                if module in self._kept_modules[pattern]:
                    return f"[keep] modules has {pattern}"
        return None

    def _by_rule(self, file: FrozenFile) -> str | None:
        name = os.path.basename(file.path)
        inner = self._frozen.inner(file.path)
        is_module = file.role in (freeze.BYTECODE, freeze.EXTENSION)
        if is_module and not file.package and module_name(inner) in HOT_MODULES:
            return "Python imports it when something goes wrong"
        if file.package == "rvbundle" and file.role != freeze.SOURCE:
            return "part of every image"
        if file.path == f"{self._stdlib}os.pyc":
            return "the file by which Python finds its library"
        if name.startswith("_socket.") and file.path.startswith(f"{self._stdlib}lib-dynload/"):
            return "the import finder talks to the pager with it"
        if file.role == freeze.METADATA and not _for_people(file.path):
            return "metadata of an installed distribution"
        if file.role == freeze.LIBRARY and name.startswith(_ALWAYS_HOT_LIBRARIES):
            return "part of the C library"
        if file.path in reference_libraries(self._frozen.libdir):
            return "a run may choose the reference BLAS"
        if inner in HOT_DATA:
            return "its package checks that it is there"
        if file.role in _DATA_ROLES and self._cold_data(inner) is None:
            return "a data file, which programs may look for at run time"
        if self._recipe.trim == "reachable":
            return self._by_reach(file, inner)
        return None

    def _by_reach(self, file: FrozenFile, inner: str) -> str | None:
        if file.path in self._reach.data:
            return f"reachable: {self._reach.data[file.path]}"
        if file.role in (freeze.BYTECODE, freeze.EXTENSION):
            chain = self._reach.modules.get(module_name(inner))
            return None if chain is None else f"reachable: {chain}"
        if file.role == freeze.LIBRARY:
            top = inner.partition("/")[0].removesuffix(".libs").partition(".")[0]
            if top in self._reached_packages or not file.path.startswith(self._site):
                return "a library that a reachable package may load"
        return None

    def _and_reach(self, file: FrozenFile) -> str:
        """Return what the analysis says of a file that a trace opened, as the rest of a sentence."""
        if file.role not in (freeze.BYTECODE, freeze.EXTENSION):
            return ""
        chain = self._reach.modules.get(module_name(self._frozen.inner(file.path)))
        return f"; reachable: {chain}" if chain else "; the analysis did not find it"

    def _why_cold(self, file: FrozenFile) -> str:
        inner = self._frozen.inner(file.path)
        if file.role == freeze.SOURCE:
            return "a source: its bytecode is what runs"
        if file.role == freeze.METADATA:
            return "metadata that only installers and people read"
        if file.role in _DATA_ROLES:
            return f"{self._cold_data(inner)}, and no trace opened it"
        if file.role == freeze.LIBRARY:
            return "no trace loaded it"
        chain = self._reach.modules.get(module_name(inner))
        if chain is not None:
            return f"no trace imported it, though it is reachable: {chain}"
        return "no trace imported it, and nothing is known to import it"

    def _cold_data(self, inner: str) -> str | None:
        for pattern, what in COLD_DATA:
            if fnmatch.fnmatchcase(inner, pattern):
                return what
        return None


def _for_people(path: str) -> bool:
    """Tell whether metadata is a list for installers, a licence or the like."""
    if path.startswith((f"{DOC}/", f"{COMMON}/")):
        return True
    inner = path.rpartition(".dist-info/")[2]
    return inner == "RECORD" or inner.startswith(("licenses/", "sboms/"))


def cold_list(frozen: Frozen, placed: tuple[Placed, ...]) -> str:
    """Return the text of cold.txt; its format is described in the guest's boot module.

    Only a module whose winning file (package, extension, source, in Python's order) is cold is listed:
    for the others the finder sees what Python would see.
    """
    folders: dict[str, dict[str, list[Placed]]] = defaultdict(lambda: defaultdict(list))
    data: dict[str, list[str]] = defaultdict(list)
    cold = {item.file.path for item in placed if not item.hot}
    uncompiled = _uncompiled(frozen)
    for item in placed:
        folder, _, name = item.file.path.rpartition("/")
        role = item.file.role
        if role in (freeze.BYTECODE, freeze.EXTENSION) or item.file.path in uncompiled:
            stem = name.partition(".")[0]
            if stem == "__init__":
                folder, _, stem = folder.rpartition("/")
            folders[folder][stem].append(item)
        elif role in (*_DATA_ROLES, freeze.METADATA) and not item.hot and "\n" not in name:
            data[folder].append(name)
    namespaces = _cold_namespaces(frozen, placed)
    sections = []
    for folder in sorted({*folders, *data, *namespaces}):
        lines = []
        for stem, items in sorted(folders[folder].items() if folder in folders else ()):
            winner = min(items, key=_precedence)
            if not winner.hot and stem and not any(letter.isspace() for letter in stem):
                lines.append(_line(stem, winner.file, cold, frozen))
        lines += [f"n {name}" for name in sorted(namespaces.get(folder, set()) - {*folders.get(folder, ())})]
        lines += [f"d {name}" for name in sorted(data.get(folder, ()))]
        if lines:
            sections.append(f"D {folder}\n" + "".join(f"{line}\n" for line in lines))
    return "".join(sections)


def _cold_namespaces(frozen: Frozen, placed: tuple[Placed, ...]) -> dict[str, set[str]]:
    """Return {folder: names} of the packages without __init__ below it that are not in the image at all."""
    there: set[str] = set()
    gone: set[str] = set()
    roots = (f"{frozen.stdlib}/site-packages", f"{frozen.stdlib}/lib-dynload", frozen.stdlib)
    for item in placed:  # of any kind: Python takes a folder that holds but headers for a package, too
        folder = os.path.dirname(item.file.path)
        while folder.startswith(f"{frozen.stdlib}/") and folder not in roots:
            (there if item.hot else gone).add(folder)
            folder = os.path.dirname(folder)
    found: dict[str, set[str]] = defaultdict(set)
    for folder in gone - there:
        if all(part.isidentifier() for part in frozen.inner(folder).split("/")):
            parent, _, name = folder.rpartition("/")
            found[parent].add(name)
    return found


def _uncompiled(frozen: Frozen) -> set[str]:
    compiled = {f.path for f in frozen.files if f.role == freeze.BYTECODE}
    return {f.path for f in frozen.files if f.role == freeze.SOURCE and f"{f.path}c" not in compiled}


def _precedence(item: Placed) -> int:
    """Order files of one module name as Python's FileFinder looks for them."""
    if "/__init__." in item.file.path:
        return 0
    return 1 if item.file.role == freeze.EXTENSION else 2


def _line(stem: str, file: FrozenFile, cold: set[str], frozen: Frozen) -> str:
    if file.role == freeze.EXTENSION and "/__init__." not in file.path:
        name = os.path.basename(file.path)
        libraries = _cold_closure(file.path, cold, frozen)
        return " ".join(["x", stem, name, *libraries])
    if file.path.endswith("/__init__.pyc"):
        return f"p {stem}"
    return f"s {stem}" if file.role == freeze.BYTECODE else f"y {stem}"


def _cold_closure(path: str, cold: set[str], frozen: Frozen) -> list[str]:
    """Return the cold libraries among all that `path` needs, directly or not."""
    seen: set[str] = set()
    queue = list(frozen.needed.get(path, ()))
    while queue:
        library = queue.pop()
        if library not in seen:
            seen.add(library)
            queue += frozen.needed.get(library, ())
    return sorted(seen & cold)
