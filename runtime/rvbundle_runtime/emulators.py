"""Emulators on this machine: finds those that may be needed, and probes each. Acts; `launchers` decide.

Nothing here is done for a payload that runs natively.
"""

import contextlib
import json
import os
import re
import signal
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rvbundle_runtime import __version__, binfmt, launchers, nativefiles
from rvbundle_runtime.host import EMULATORS_VARIABLE, Emulator, Host
from rvbundle_runtime.launchers import box64, qemu
from rvbundle_runtime.launchers.start import itself
from rvbundle_runtime.machine import DEFAULT, E_MACHINE

NO_BINFMT_VARIABLE = "RVBUNDLE_NO_BINFMT"  # "1": as on a kernel without binfmt_misc in user namespaces
# A program of a dozen system calls; far more than it takes even where the emulator is emulated itself.
PROBE_SECONDS = 10.0
NOT_EXECUTABLE = "is not executable"
_LIBS = ".libs"  # NAME.libs beside an emulator NAME holds its ld.so and its libraries, all that it needs
_CACHE = "emulators.json"
_CACHED_MAX = 64
_ELF_HEADER = struct.Struct("<18xH12xQ14xHH")  # e_machine, e_phoff, e_phentsize, e_phnum
_PT_INTERP = 3
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")
_LISTED = re.compile(r"=> (/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)


def look(host: Host, guests: Iterable[str], base: Path) -> Host:
    """Return `host` with the emulators for programs of `guests`, and with what binfmt_misc can do here.

    What passed its probe is noted in the store at `base` until the file or the kernel changes.
    """
    cache = _Cache(base / _CACHE, host.kernel)
    found = []
    for guest in guests:
        for kind, path in candidates(guest, host.environ):
            known = cache.find(kind, guest, path)
            found.append(known or examine(Emulator(kind, guest, path), host))
            cache.keep(found[-1])
    cache.write()
    return replace(host, emulators=tuple(found), binfmt_denied=_why_no_binfmt(host))


def _why_no_binfmt(host: Host) -> str:
    if host.environ.get(NO_BINFMT_VARIABLE) == "1":
        return f"{NO_BINFMT_VARIABLE} is set"
    if host.namespaces_denied:
        return "it needs a user namespace"
    if not nativefiles.path(host.arch, nativefiles.STARTER):
        return "this installation of rvbundle has no starter for it"
    return binfmt.why_denied(host.uid, host.gid)


def candidates(guest: str, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (kind, path) of each file that may be an emulator for `guest`, in the order of preference."""
    names = [(qemu.name, f"qemu-{guest}-static"), (qemu.name, f"qemu-{guest}")]
    if guest == box64.GUEST:
        names.append((box64.name, "box64"))
    folders = [environ[EMULATORS_VARIABLE]] if environ.get(EMULATORS_VARIABLE) else []
    folders += [folder for folder in environ.get("PATH", "").split(":") if folder.startswith("/")]
    found: dict[str, tuple[str, str]] = {}
    for folder in folders:
        for kind, name in names:
            path = os.path.abspath(os.path.join(folder, name))
            if os.path.isfile(path):
                found.setdefault(os.path.realpath(path), (kind, path))
    return list(found.values())


def examine(emulator: Emulator, host: Host) -> Emulator:
    """Return `emulator` with its version, the libraries that it needs, and what went wrong in its probe."""
    if not os.access(emulator.path, os.X_OK):
        return replace(emulator, probe=NOT_EXECUTABLE)
    header = read_program(emulator.path)
    if header and header.interpreter and emulator.kind == box64.name:
        emulator = _find_libraries(emulator, header.interpreter)
        if emulator.probe:
            return emulator
    asked = _run([*itself(emulator, confined=False).words, "--version"], {})
    if asked.failure:
        return replace(emulator, probe=f"{asked.failure} when asked for its version")
    versions = _VERSION.findall(asked.output)
    emulator = replace(emulator, version=versions[0] if versions else "")
    refused = qemu.refuse_version(emulator.version) if emulator.kind == qemu.name else ""
    return replace(
        emulator, probe=refused or _probe(emulator, host) or _why_not_shown(emulator, header, host)
    )


def _probe(emulator: Emulator, host: Host) -> str:
    """Run the probe of the emulated architecture; return what went wrong, "" for nothing."""
    program = nativefiles.path(emulator.guest, nativefiles.PROBE)
    if not program:
        return f"can't be probed: this installation of rvbundle has no probe for {emulator.guest}"
    trial = replace(host, emulators=(emulator,))
    launcher = launchers.ALL[emulator.kind]
    start = launcher.start(trial, emulator.guest, "/", DEFAULT)
    command = start.command(program, (program, *launcher.probe))
    done = _run(command, start.env)
    if done.crashed:  # once may be chance: box64 0.3.4 on QEMU did so in 1 of 24 runs
        done = _run(command, start.env)
    if done.failure:
        return f"{done.failure} in its probe"
    if done.output.split()[:3] != ["rvbundle", "probe", emulator.guest]:
        return f"printed something else in its probe: {done.output[:60]!r}"
    return ""


def _why_not_shown(emulator: Emulator, header: "Program | None", host: Host) -> str:
    """Return why the emulator would not start in the sandbox, where no other file of the host is visible."""
    if header is None:
        return "is a script: the sandbox can't show all that it needs"
    if header.interpreter and not emulator.loader:
        return "is linked dynamically: the sandbox has no libraries for it; a static one is needed"
    if header.machine != E_MACHINE.get(host.arch):
        return "is emulated itself, by means that the sandbox does not have"
    return ""


def _find_libraries(emulator: Emulator, interpreter: str) -> Emulator:
    """Return a dynamically linked emulator with its ld.so and libraries; `probe` says if they are missing."""
    folder = Path(emulator.path + _LIBS)
    if folder.is_dir():
        loader = folder / Path(interpreter).name
        if not loader.is_file():
            return replace(emulator, probe=f"can't be started: there is no {loader}")
        others = tuple(str(path) for path in sorted(folder.iterdir()) if path != loader)
        return replace(emulator, loader=str(loader), libraries=others, carried=True)
    listed = _run([interpreter, "--list", emulator.path], {})  # glibc's ld.so
    if listed.failure:
        return replace(emulator, probe=f"can't be started: its ld.so, {interpreter}, {listed.failure}")
    found = _LISTED.findall(listed.output)
    libc = next((Path(path).parent for path in found if Path(path).name == "libc.so.6"), None)
    more = [str(libc / name) for name in box64.LIBRARIES if libc and (libc / name).is_file()]
    return replace(emulator, loader=interpreter, libraries=tuple(dict.fromkeys((*found, *more))))


@dataclass(frozen=True)
class Program:
    """What the header of an ELF program says: e_machine, and its PT_INTERP ("" for none)."""

    machine: int
    interpreter: str


def read_program(path: str) -> Program | None:
    """Read the header of a little-endian 64-bit ELF program; None for anything else."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
                return None
            machine, place, size, count = _ELF_HEADER.unpack(head[: _ELF_HEADER.size])
            file.seek(place)
            table = file.read(size * count)
            for at in range(0, len(table) - 55, max(size, 56)):
                kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", table, at)
                if kind == _PT_INTERP:
                    file.seek(offset)
                    return Program(machine, os.fsdecode(file.read(min(length, 4096)).rstrip(b"\0")))
            return Program(machine, "")
    except OSError:
        return None


@dataclass(frozen=True)
class _Done:
    """What a program printed on stdout; `failure` is "" or how it ended."""

    output: str
    failure: str = ""
    crashed: bool = False


def _run(command: Iterable[str], env: Mapping[str, str]) -> _Done:
    """Run a program with nothing but `env` for at most PROBE_SECONDS; its children end with it."""
    import subprocess

    try:
        process = subprocess.Popen(
            list(command),
            env=dict(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        return _Done("", f"could not be started ({error.strerror})")
    with process:
        try:
            output, _ = process.communicate(timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.killpg(process.pid, signal.SIGKILL)
            return _Done("", f"did not end within {PROBE_SECONDS:g} s")
    text = output.decode("utf-8", "replace")
    if process.returncode < 0:
        return _Done(text, f"was ended by {signal_name(-process.returncode)}", crashed=True)
    return _Done(text, f"ended with exit code {process.returncode}" if process.returncode else "")


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class _Cache:
    """The emulators that passed their probes, by what would make another probe necessary."""

    def __init__(self, path: Path, kernel: str) -> None:
        """Read the cache at `path`; one that can't be read is as good as none."""
        self._path = path
        self._kernel = kernel
        try:
            value = json.loads(path.read_bytes())
            self._known = {str(key): _from_json(entry) for key, entry in value.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._known = {}
        self._changed = False

    def _key(self, kind: str, guest: str, path: str) -> str:
        stat = os.stat(path)
        return "|".join(
            (kind, guest, path, str(stat.st_size), str(stat.st_mtime_ns), self._kernel, __version__)
        )

    def find(self, kind: str, guest: str, path: str) -> Emulator | None:
        """Return what is known, if the file is still the one that was probed and its libraries are there."""
        try:
            known = self._known.get(self._key(kind, guest, path))
        except OSError:
            return None
        if known and all(map(os.path.exists, (known.loader or path, *known.libraries))):
            return known
        return None

    def keep(self, emulator: Emulator) -> None:
        """Remember an emulator that has passed. What failed is probed again: the cause may have gone."""
        if emulator.probe:
            return
        with contextlib.suppress(OSError):  # it was removed meanwhile: then the run will say so
            key = self._key(emulator.kind, emulator.guest, emulator.path)
            if self._known.get(key) != emulator:
                self._known[key] = emulator
                self._changed = True

    def write(self) -> None:
        """Write the cache if something is new."""
        if not self._changed:
            return
        kept = dict(list(self._known.items())[-_CACHED_MAX:])
        text = json.dumps({key: asdict(emulator) for key, emulator in kept.items()})
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a read-only store: it is probed each time
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(self._path)


def _from_json(value: Mapping[str, object]) -> Emulator:
    """Read what asdict made of an emulator; raises TypeError or KeyError for anything else."""
    libraries = value["libraries"]
    if not isinstance(libraries, list) or not all(isinstance(x, str) for x in (*libraries, value["path"])):
        raise TypeError("no list of paths")
    return Emulator(**{**value, "libraries": tuple(libraries)})  # type: ignore[arg-type]
