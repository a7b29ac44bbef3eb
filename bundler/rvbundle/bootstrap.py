"""The bootstrap of a self-running file: a Python for one architecture that runs `rvbundle_runtime`.

    lib/ld.so, lib/*.so*        the C library and what else the programs need, all of Debian's suite SUITE
    bin/python3                 started by lib/ld.so, so that nothing of the host is needed but its kernel
    lib/python3.X/              the standard library as far as it is needed, a zstd decoder, rvbundle_runtime
    start.pyc                   what is executed
    share/doc/, share/common-licenses/          the licences' texts
    emulators/                  see EMULATORS; only where the image has payloads that need one
    manifest                    SHA-256, mode and path of every other file; its own SHA-256 is the identity

Only bytecode, without column numbers, the standard library's also without docstrings: that is 40 % less.
Assertions stay: nobody starts a bootstrap a thousand times a second, and they guard against nonsense.
OpenSSL stays out (3 MB): hashlib has its own SHA-256.
"""

import hashlib
import io
import json
import os
import shutil
import struct
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import rvbundle_runtime
from rvbundle import debian, elf, hostpython, licences, process
from rvbundle.compiler import Job, compile_sources
from rvbundle.debian import Archive, Package
from rvbundle.environment import Interpreter
from rvbundle.licences import Licence, Origin
from rvbundle.stages import Key, StageCache, digest_of_files
from rvbundle_runtime import nativefiles
from rvbundle_runtime.bootstraps import BLOCK, MANIFEST
from rvbundle_runtime.errors import EnvironmentSetupError
from rvbundle_runtime.launchers import box64
from rvbundle_runtime.measured import SCRIPTS

SUITE = "trixie"
QEMU, BOX64 = "qemu", "box64"
EMULATORS = {QEMU: "qemu-user", BOX64: "box64"}  # the package that each is in
_RUNTIME = Path(rvbundle_runtime.__file__).parent
_OURS = "rvbundle_runtime"
_MUSL_TEXT = "share/doc/musl/copyright"
# What a foreign payload needs of us beside an emulator: see `runtime/native`.
_NATIVE = (nativefiles.EMULATE, nativefiles.PROBE, nativefiles.BLAS)
_PACKAGES = (*hostpython.PYTHON, "libgcc-s1")
_OPTIONAL = ("python3-zstandard",)  # newer Pythons have a decoder of their own
# Modules that no import statement which is followed names, and who asks for them.
_ASKED_FOR = (
    "encodings",  # the interpreter at its start
    "encodings.aliases",
    "encodings.ascii",  # open(encoding="ascii")
    "encodings.latin_1",
    "encodings.utf_8",
    "os",
    "concurrent.futures.thread",  # concurrent.futures.__getattr__
    "traceback",  # for faults of ours, should there be one
    "linecache",
    "tokenize",
)
# Modules that are imported only if they are there.
_LEFT_OUT = (
    "_hashlib",  # OpenSSL
    "bz2",  # shutil
    "lzma",
    "_bz2",
    "_lzma",
    "_py_abc",  # stand-ins for modules that are built in
    "_pydatetime",
    "_pydecimal",
    "_pyio",
    "_strptime",
    "importlib._bootstrap",  # built in
    "importlib._bootstrap_external",
    "ntpath.nt",
    "zstandard.backend_cffi",  # zstandard's other half, which CPython does not use
)


@dataclass(frozen=True)
class Bootstrap:
    """A bootstrap packed as `archive` (a tar.gz, a whole number of blocks of BLOCK bytes).

    `digest` is the SHA-256 (hex) of its manifest; `need` the KiB that it takes when unpacked. `licences` say
    what it is made of; a `where` of theirs is a path in it.
    """

    arch: str
    archive: Path
    digest: str
    need: int
    packages: tuple[Package, ...]
    emulators: tuple[str, ...]
    licences: tuple[Licence, ...]

    @property
    def size(self) -> int:
        """The bytes of the packed bootstrap."""
        return self.archive.stat().st_size


def resolved(cache: StageCache, archive: Archive, names: Sequence[str]) -> tuple[Package, ...]:
    """Return `names` and all that they need; what the suite had when it was first asked, until a prune.

    Raises EnvironmentSetupError (see `debian.resolve`).
    """
    key: Key = {"suite": archive.suite, "arch": archive.arch, "names": sorted(names), "for": list(_OPTIONAL)}

    def make(folder: Path) -> None:
        found = debian.resolve(archive, sorted(names), _OPTIONAL)
        (folder / "packages.json").write_text(json.dumps([vars(package) for package in found], indent=1))

    rows = json.loads((cache.get("packages", key, make).folder / "packages.json").read_text())
    return tuple(Package(**row) for row in rows)


def make_bootstrap(
    arch: str, payloads: Sequence[str], emulators: Sequence[str], cache: StageCache
) -> Bootstrap:
    """Return the bootstrap for `arch` with `emulators` (names of EMULATORS) for programs of `payloads`.

    Raises EnvironmentSetupError: no apt, no network, no such package.
    """
    archive = hostpython.archive(cache.base.parent, SUITE, arch)
    packages = resolved(cache, archive, [*_PACKAGES, *(EMULATORS[name] for name in emulators)])
    host = hostpython.archive(cache.base.parent, SUITE, hostpython.machine())
    compiler_packages = resolved(cache, host, hostpython.PYTHON)
    foreign = sorted(set(payloads) - {arch})
    wanted = [(payload, name) for payload in foreign for name in _NATIVE]
    if foreign:  # these are programs for the machine itself
        wanted += [(arch, nativefiles.STARTER), (arch, nativefiles.BLAS_WORKER)]
    natives = {f"{a}/{n}": Path(path) for a, n in wanted if (path := nativefiles.path(a, n))}
    key: Key = {
        "packages": [package.sha256 for package in packages],
        "python": [package.sha256 for package in compiler_packages],
        "runtime": digest_of_files([*_sources().values(), *_data().values(), *natives.values()]),
        "foreign": foreign,
        "emulators": sorted(emulators),
        "code": digest_of_files(
            [Path(__file__), Path(licences.__file__), *(Path(__file__).parent / "inside").glob("*.py")]
        ),
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
    }

    def make(folder: Path) -> None:
        interpreter = hostpython.host_python(SUITE, compiler_packages, cache)
        root = folder / "root"
        carriers = {EMULATORS[name] for name in emulators}
        unpacked = [debian.unpack(archive, [p for p in packages if p.name not in carriers], root)]
        for name in emulators:  # qemu-user holds an emulator for each of 40 architectures, 14 MB each
            only = [f"{licences.DOC}/*", *(f"usr/bin/{program}" for program in _programs(name, foreign))]
            carrier = [package for package in packages if package.name == EMULATORS[name]]
            unpacked.append(debian.unpack(archive, carrier, folder / "emulators" / name, only))
        files = _Layout(arch, root, interpreter, folder / "compiled").files(natives)
        files |= _emulators(arch, folder / "emulators", root, foreign, emulators)
        described = {p.name: p for p in map(licences.of_file, debian.fetch(archive, packages))}
        origins = [Origin(u.root, u.owners, described) for u in unpacked]
        files |= _texts(files, origins)
        _write(folder, files, packages, _licences(files, origins))
        for name in ("root", "compiled", "emulators"):
            shutil.rmtree(folder / name, ignore_errors=True)

    folder = cache.get("bootstrap", key, make).folder
    value = json.loads((folder / "bootstrap.json").read_text())
    return Bootstrap(
        arch,
        folder / "bootstrap.tar.gz",
        value["digest"],
        value["need"],
        tuple(Package(**row) for row in value["packages"]),
        tuple(value["emulators"]),
        tuple(Licence(*row) for row in value["licences"]),
    )


@dataclass(frozen=True)
class _File:
    """A file to be, and the one that it was made of (None: of none of somebody else's)."""

    content: bytes
    executable: bool = False
    source: Path | None = None


@dataclass(frozen=True)
class _Layout:
    """Where things are among the unpacked packages of `arch`, and where they go."""

    arch: str
    root: Path
    interpreter: Interpreter
    work: Path

    @property
    def libraries(self) -> Path:
        return self.root / "usr/lib" / debian.TRIPLETS[self.arch]

    def files(self, natives: Mapping[str, Path]) -> dict[str, _File]:
        """Return {path: file} of all but the emulators."""
        python = hostpython.find_python(self.root)
        if python.name != f"python{self.interpreter.short}":
            raise EnvironmentSetupError(
                f"{SUITE} has {python.name} for {self.arch}, and another for this machine: "
                f"Python {self.interpreter.short}",
                "its packages are being renewed: try again in a few hours",
            )
        modules = self._modules(python)
        stdlib = f"lib/{python.name}"
        found = self._compiled(modules, stdlib)
        binaries = [python]
        for name, path in modules.items():
            if path.suffix == ".so":
                folder = f"{stdlib}/lib-dynload" if "." not in name else f"{stdlib}/{_folder_of(name)}"
                found[f"{folder}/{path.name}"] = _File(_stripped(path), source=path)
                binaries.append(path)
        found["bin/python3"] = _File(_stripped(python), True, python)
        libraries = needed_libraries([*binaries, self.libraries / "libgcc_s.so.1"], self.libraries)
        for path in libraries:
            loader = path.name.startswith("ld-linux")
            found["lib/ld.so" if loader else f"lib/{path.name}"] = _File(_stripped(path), loader, path)
        for name, path in natives.items():
            executable = path.suffix != ".so"
            found[f"{stdlib}/{_OURS}/native/{name}"] = _File(path.read_bytes(), executable)
        if any(name.endswith(f"/{nativefiles.BLAS_WORKER}") for name in natives):
            found[_MUSL_TEXT] = _File(Path(nativefiles.place("", nativefiles.MUSL_LICENCE)).read_bytes())
        for name, path in _data().items():
            found[f"{stdlib}/{_OURS}/{name}"] = _File(path.read_bytes())
        return found

    def _modules(self, python: Path) -> dict[str, Path]:
        stdlib = self.root / "usr/lib" / python.name
        folders = [
            _RUNTIME.parent,
            stdlib,
            stdlib / "lib-dynload",
            self.root / "usr/lib/python3/dist-packages",
        ]
        question = {
            "roots": [*_sources(), *_ASKED_FOR],
            "folders": [str(folder) for folder in folders],
            "ours": [_OURS],
            "left_out": list(_LEFT_OUT),
        }
        script = Path(__file__).parent / "inside" / "imports.py"
        done = process.run([self.interpreter.executable, "-I", script], stdin=json.dumps(question).encode())
        return {name: Path(path) for name, path in json.loads(done.stdout).items()}

    def _compiled(self, modules: Mapping[str, Path], stdlib: str) -> dict[str, _File]:
        """Return the bytecode of the sources among `modules`, and of what starts it all."""
        self.work.mkdir()
        jobs = [Job(_RUNTIME / "__main__.py", self.work / "start.pyc", "start.py")]
        targets = {"start.pyc": jobs[0].target}
        for name, path in sorted(modules.items()):
            if path.suffix != ".py":
                continue
            parts = name.split(".") + (["__init__"] if path.name == "__init__.py" else [])
            inside = f"{stdlib}/{'/'.join(parts)}"
            target = self.work / f"{name}.pyc"
            # dataclasses compute a text, slowly, for a class that has no docstring: ours keep theirs.
            jobs.append(Job(path, target, f"{inside}.py", drop_docstrings=not name.startswith(_OURS)))
            targets[f"{inside}.pyc"] = target
        failed = compile_sources(self.interpreter, jobs, columns=False)
        if failed:
            raise EnvironmentSetupError(f"can't be compiled by Python {self.interpreter.short}: {failed}")
        sources = {job.target: job.source for job in jobs}
        return {path: _File(target.read_bytes(), source=sources[target]) for path, target in targets.items()}


def _folder_of(name: str) -> str:
    return name.rpartition(".")[0].replace(".", "/")


def _sources() -> dict[str, Path]:
    """Return our own modules, but for those that run inside payloads and lie there."""
    modules = {}
    for path in sorted(_RUNTIME.rglob("*.py")):
        parts = path.relative_to(_RUNTIME.parent).with_suffix("").parts
        if parts[1] != "guest":
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _data() -> dict[str, Path]:
    """Return our files that are read as they are: the table of backends, and what measures in a payload."""
    return {name: _RUNTIME / name for name in ("backends.toml", *(f"guest/{name}" for name in SCRIPTS))}


def needed_libraries(binaries: Sequence[Path], libraries: Path) -> list[Path]:
    """Return the shared libraries among `binaries`, and those in `libraries` that all of them need."""
    found: dict[str, Path] = {path.name: path for path in binaries if path.parent == libraries}
    queue = list(binaries)
    while queue:
        for soname in elf.read_facts(queue.pop()).needed:
            path = libraries / soname
            if soname not in found and path.is_file():
                found[soname] = path
                queue.append(path)
    return [found[name] for name in sorted(found)]


def _stripped(path: Path) -> bytes:
    split = elf.split_tail(path)
    return split[0] if split else path.read_bytes()


def _programs(emulator: str, foreign: Sequence[str]) -> list[str]:
    """Return the names of the programs that `emulator` is for payloads of `foreign`."""
    return [f"qemu-{payload}" for payload in foreign] if emulator == QEMU else ["box64"]


def _emulators(
    arch: str, place: Path, root: Path, foreign: Sequence[str], wanted: Sequence[str]
) -> dict[str, _File]:
    """Return the emulators' files, named as `rvbundle_runtime.emulators` looks for them."""
    found: dict[str, _File] = {}
    for name in wanted:
        for program in _programs(name, foreign):
            path = place / name / "usr/bin" / program
            if not path.is_file():
                raise EnvironmentSetupError(f"{SUITE}'s {EMULATORS[name]} for {arch} has no {program}")
            found[f"emulators/{program}"] = _File(_stripped(path), True, path)
            # A static program needs none. ld.so keeps its own name there: the program asks for that.
            folder = root / "usr/lib" / debian.TRIPLETS[arch]
            opened = [folder / library for library in box64.LIBRARIES] if name == BOX64 else []
            for library in needed_libraries([path, *filter(Path.is_file, opened)], folder):
                loader = library.name.startswith("ld-linux")
                found[f"emulators/{program}.libs/{library.name}"] = _File(_stripped(library), loader, library)
    return found


@dataclass(frozen=True)
class _Part:
    """A file as `licences` wants to see it."""

    path: str
    source: Path
    package: str = ""


def _parts(files: Mapping[str, _File]) -> list[_Part]:
    return [_Part(path, file.source) for path, file in files.items() if file.source]


def _texts(files: Mapping[str, _File], origins: Sequence[Origin]) -> dict[str, _File]:
    """Return the licences' texts: whoever gets the file gets them, with or without a cold pack."""
    found = {path: text for origin in origins for path, text in licences.texts(_parts(files), origin).items()}
    return {path.removeprefix("usr/"): _File(text.read_bytes()) for path, text in found.items()}


def _licences(files: Mapping[str, _File], origins: Sequence[Origin]) -> list[Licence]:
    found = [licences.of_rvbundle()]
    if _MUSL_TEXT in files:  # the native BLAS's worker is linked with it
        found.append(Licence("musl", "", "MIT", "", _MUSL_TEXT))
    for origin in origins:
        names = licences.owned(_parts(files), origin)
        found += licences.of_packages(origin.root, [origin.packages[name] for name in names])
    return [replace(row, where=row.where.removeprefix("usr/")) for row in sorted(found, key=licences.order)]


def _write(
    folder: Path, files: Mapping[str, _File], packages: Sequence[Package], made_of: Sequence[Licence]
) -> None:
    """Write the archive and what is known of it into `folder`."""
    lines = []
    for path, file in sorted(files.items()):
        lines.append(f"{hashlib.sha256(file.content).hexdigest()} {'x' if file.executable else '-'} {path}\n")
    manifest = "".join(lines).encode()
    everything = {**files, MANIFEST: _File(manifest)}
    (folder / "bootstrap.tar.gz").write_bytes(_tar_gz(everything))
    folders = {str(parent) for path in everything for parent in Path(path).parents}
    blocks = sum(-(-len(file.content) // 4096) for file in everything.values()) + len(folders) + 2
    value = {
        "digest": hashlib.sha256(manifest).hexdigest(),
        "need": blocks * 4,
        "packages": [vars(package) for package in packages],
        "licences": [astuple(licence) for licence in made_of],
        "emulators": sorted(
            path.removeprefix("emulators/") for path in files if os.path.dirname(path) == "emulators"
        ),
    }
    (folder / "bootstrap.json").write_text(json.dumps(value, indent=1))


def _tar_gz(files: Mapping[str, _File]) -> bytes:
    """Return a tar.gz of the files that depends on nothing but them, padded to whole blocks."""
    folders = {parent.as_posix() for path in files for parent in Path(path).parents} - {"."}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted({*folders, *files}):
            info = tarfile.TarInfo(path)
            file = files.get(path)
            info.mode = 0o755 if file is None or file.executable else 0o644
            if file is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(file.content)
                tar.addfile(info, io.BytesIO(file.content))
    return padded_gzip(out.getvalue())


def padded_gzip(data: bytes) -> bytes:
    """Return `data` as gzip (RFC 1952) of a whole number of blocks, so that dd can take it out of a file.

    Zeros behind a gzip stream are not ignored by every gzip; an extra field in its header is.
    """
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9)
    body = compressor.compress(data) + compressor.flush()
    # ID1 ID2, deflate, flags, no time, slowest, made on Unix
    head = struct.pack("<BBBBIBB", 0x1F, 0x8B, 8, 4, 0, 2, 3)
    trailer = struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
    # The extra field: its length, then one subfield: "RV", its length, zeros.
    empty = len(head) + 2 + 4 + len(body) + len(trailer)
    room = -empty % BLOCK
    extra = struct.pack("<H2sH", 4 + room, b"RV", room) + bytes(room)
    return head + extra + body + trailer
