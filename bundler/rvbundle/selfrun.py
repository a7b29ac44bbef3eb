"""Self-running files: a script for sh, bootstraps, the cold pack and the image, one behind the other.

`rvbundle_runtime.bootstraps` says how such a file is laid out; an image is found from the end of its file,
and the cold pack right before it, so that the file is an image to every other command.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from rvbundle import debian
from rvbundle.bootstrap import BOX64, EMULATORS, QEMU, Bootstrap, make_bootstrap
from rvbundle.debian import ARCHITECTURES
from rvbundle.progress import Progress
from rvbundle.stages import StageCache
from rvbundle_runtime import bootstraps
from rvbundle_runtime.bootstraps import BLOCK, Section, Table
from rvbundle_runtime.errors import StoreError, UsageError
from rvbundle_runtime.image import Reader

_TEMPLATE = Path(__file__).parent / "selfrun.sh"
ALWAYS, NEEDED, NONE = "always", "needed", "none"
_MACHINES = {"riscv64": "riscv64", "aarch64": "aarch64 | arm64", "x86_64": "x86_64 | amd64"}  # uname -m
_BOX64_FOR = ("riscv64", "aarch64")  # where Debian has it


@dataclass(frozen=True)
class Wanted:
    """Which machines a file shall run on by itself, and with which emulators.

    `emulators` is ALWAYS (for every payload that is not for the machine), NEEDED (only where none is), NONE,
    or names of them, which are then there always.
    """

    arches: tuple[str, ...]
    emulators: str | tuple[str, ...] = NEEDED


def parse_wanted(arches: str, emulators: str) -> Wanted:
    """Read `--self-running ARCH[,ARCH]` and `--emulators`.

    Raises UsageError, and EnvironmentSetupError if this machine lacks what fetches Debian's packages.
    """
    debian.check_programs("leave --self-running out")
    names = tuple(dict.fromkeys(arches.split(",")))
    for name in names:
        if name not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UsageError(f"build: --self-running {arches}: expected some of {known}, with commas between")
    if emulators in (ALWAYS, NEEDED, NONE):
        return Wanted(names, emulators)
    chosen = tuple(dict.fromkeys(emulators.split(",")))
    for name in chosen:
        if name not in EMULATORS:
            known = ", ".join((ALWAYS, NEEDED, NONE, *EMULATORS))
            raise UsageError(f"build: --emulators {emulators}: expected one of {known}, or {QEMU},{BOX64}")
    return Wanted(names, chosen)


def emulators_for(arch: str, payloads: Sequence[str], wanted: Wanted) -> tuple[str, ...]:
    """Return which emulators the bootstrap for `arch` brings, for an image with `payloads`."""
    foreign = set(payloads) - {arch}
    if isinstance(wanted.emulators, tuple):
        chosen = wanted.emulators if foreign else ()
    elif wanted.emulators == ALWAYS:
        chosen = (QEMU,) if foreign else ()
    else:
        chosen = (QEMU,) if wanted.emulators == NEEDED and arch not in payloads else ()
    box64 = arch in _BOX64_FOR and "x86_64" in foreign
    return tuple(name for name in chosen if name != BOX64 or box64)


@dataclass(frozen=True)
class SelfRunning:
    """A file that was written: sizes in bytes, and its bootstraps."""

    path: Path
    size: int
    bootstraps: tuple[Bootstrap, ...]

    @property
    def arches(self) -> tuple[str, ...]:
        """The machines that it runs on."""
        return tuple(bootstrap.arch for bootstrap in self.bootstraps)


def write_self_running(
    image: Path, cold: Path | None, wanted: Wanted, cache_base: Path, progress: Progress
) -> SelfRunning:
    """Write NAME.run beside the image NAME.rvb, with the cold pack inside if there is one to put there.

    Raises EnvironmentSetupError (no packages for a bootstrap), StoreError (it can't be written), ImageError.
    """
    with Reader(image) as reader:
        index, identity = reader.index(), reader.identity
    payloads = tuple(payload.arch for payload in index.payloads)
    cache = StageCache(cache_base, index.name)
    made = []
    for arch in wanted.arches:
        with progress.phase(f"bootstrap for {arch}") as phase:
            made.append(make_bootstrap(arch, payloads, emulators_for(arch, payloads, wanted), cache))
            names = f", with {', '.join(made[-1].emulators)}" if made[-1].emulators else ""
            phase.result = f"{made[-1].size / (1 << 20):.1f} MiB{names}"
    target = image.with_suffix(".run")
    parts = [*(bootstrap.archive for bootstrap in made), *([cold] if cold else []), image]
    with progress.phase("self-running file"):
        head = _head(f"{index.name} {index.version}", index.name, index.version, identity, made, parts)
        _write(target, head, parts)
    return SelfRunning(target, target.stat().st_size, tuple(made))


def _head(
    title: str, name: str, version: str, identity: str, made: Sequence[Bootstrap], parts: Sequence[Path]
) -> bytes:
    """Return script and table. Where things lie depends on how long the two are, which is found by trying."""
    rest = sum(path.stat().st_size for path in parts)
    length = 0
    while True:
        table = Table(length + rest, name, version, identity, _sections(length, made))
        script = bootstraps.padded(_script(title, table, made))
        head = script + bootstraps.dump_table(table, script)
        if len(head) == length:
            break
        length = len(head)
    assert length <= bootstraps.HEAD_MAX
    return head


def _sections(offset: int, made: Sequence[Bootstrap]) -> tuple[Section, ...]:
    sections = []
    for bootstrap in made:
        data = bootstrap.archive.read_bytes()
        packages = tuple((package.name, package.version) for package in bootstrap.packages)
        digest = hashlib.sha256(data).hexdigest()
        sections.append(
            Section(
                bootstrap.arch,
                offset,
                len(data),
                digest,
                bootstrap.digest,
                packages,
                bootstrap.emulators,
                tuple(map(astuple, bootstrap.licences)),
            )
        )
        offset += len(data)
    return tuple(sections)


def _script(title: str, table: Table, made: Sequence[Bootstrap]) -> bytes:
    cases = []
    for section, bootstrap in zip(table.sections, made, strict=True):
        cases += [
            f"    {_MACHINES[section.arch]})",
            f"        rv_skip={section.offset // BLOCK} rv_count={section.size // BLOCK}",
            f"        rv_need={bootstrap.need}",
            f"        rv_manifest={section.manifest}",
            f"        rv_name={bootstraps.folder_name(section.manifest)}",
            "        ;;",
        ]
    arches = [section.arch for section in table.sections]
    values = {
        "TITLE": " ".join(title.split()),  # on one line, which is a comment
        "ARCHES": ", ".join(arches),
        "LIST": ",".join(arches),
        "SIZE": str(table.size),
        "CASES": "\n".join(cases),
    }
    text = _TEMPLATE.read_text()
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text.encode()


def _write(target: Path, head: bytes, parts: Sequence[Path]) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with temporary.open("wb") as out:
            out.write(head)
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out, 1 << 20)
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(
            f"can't write {target}: {error.strerror}", "name another folder with --output"
        ) from None
