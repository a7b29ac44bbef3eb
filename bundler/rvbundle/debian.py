"""Debian's packages of any architecture, by apt in folders of our own: no root, no maintainer scripts.

    FOLDER/SUITE-ARCH/{apt.conf,sources.list,lists,state}    what apt keeps
    FOLDER/pool/SHA256.deb                                   packages, by digest

apt checks the archive's signature, the index by it, and each package by the index; the lock then holds
each package's digest, so that what was taken once is taken again.
"""

import contextlib
import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rvbundle import process
from rvbundle.stages import digest_of_files
from rvbundle_runtime.errors import EnvironmentSetupError

# Debian's names of architectures, and of their folders of libraries (wiki.debian.org/Multiarch/Tuples).
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64"}
TRIPLETS = {
    "x86_64": "x86_64-linux-gnu",
    "aarch64": "aarch64-linux-gnu",
    "riscv64": "riscv64-linux-gnu",
}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_MIRROR_VARIABLE, _KEYRING_VARIABLE = "RVBUNDLE_DEBIAN_MIRROR", "RVBUNDLE_DEBIAN_KEYRING"
_SUITE = re.compile(r"[a-z][a-z0-9./-]*")
_URI = re.compile(r"'(?P<uri>[^']+)' (?P<file>\S+) \d+ SHA256:(?P<sha256>[0-9a-f]{64})")
# Debian's images for clouds name a list of mirrors: mirror+file:///etc/apt/mirrors/debian.list.
_DEBIAN = re.compile(r"[a-z+]+:/\S*/debian(?:/|\.list)?(?=\s|$)")
# What apt's own settings may say of how to reach an archive.
_KEPT_SETTINGS = re.compile(r"Acquire::(?:https?::|Retries|ForceIPv)")
_NOT_UNPACKED = ("usr/share/man", "usr/share/locale", "usr/share/lintian", "usr/share/info", "usr/include")
_MERGED = ("bin", "sbin", "lib", "lib64")  # links to folders of /usr; packages of bookworm hold /lib64
_TAR = ("--no-same-owner", "--keep-directory-symlink", "--quoting-style=literal")
_SIGNATURE = ("NO_PUBKEY", "not signed", "BADSIG", "EXPKEYSIG", "invalid signature")
_UNKNOWN = re.compile(r"Unable to locate package (\S+)|Package '?(\S+?)'? has no installation")
_UNMET = "The following packages have unmet dependencies:\n"
_CONFIGURATION = """\
APT::Architecture "{arch}";
APT::Architectures "{arch}";
APT::Install-Recommends "false";
APT::Sandbox::User "{user}";
APT::Get::AllowUnauthenticated "false";
Acquire::AllowInsecureRepositories "false";
Acquire::Languages "none";
Acquire::ForceHash "SHA256";
Dir::Etc::Parts "/dev/null";
Dir::Etc::Main "/dev/null";
Dir::Etc::SourceList "{folder}/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State "{folder}/state";
Dir::State::Lists "{folder}/lists";
Dir::State::status "{folder}/state/status";
Dir::Cache "{folder}/cache";
Dir::Log "{folder}/log";
{kept}
"""


@dataclass(frozen=True)
class Package:
    """A package of a suite, with the SHA-256 (hex) of its file."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Unpacked:
    """A folder that packages were unpacked into, and which package each of its files is of."""

    root: Path
    owners: Mapping[str, str]


@dataclass(frozen=True)
class Archive:
    """One suite for one architecture (in the kernel's words, such as riscv64), used through `folder`."""

    folder: Path
    suite: str
    arch: str

    @property
    def home(self) -> Path:
        """Where apt keeps what it knows of this suite."""
        return self.folder / f"{self.suite.replace('/', '-')}-{self.arch}"

    @property
    def configuration(self) -> Path:
        """The file that keeps apt in its folder."""
        return self.home / "apt.conf"


def code_digest() -> str:
    """Return a digest of what decides how packages are unpacked."""
    return digest_of_files([Path(__file__)])


def is_suite(text: str) -> bool:
    """Tell whether `text` can be the name of a suite."""
    return bool(_SUITE.fullmatch(text))


def resolve(archive: Archive, names: Sequence[str], optional: Sequence[str] = ()) -> tuple[Package, ...]:
    """Return `names` and all that they depend on, as the suite has them today, sorted by name.

    Of `optional` those are left out that the suite does not have. Raises EnvironmentSetupError: no apt, no
    such suite or package, no network, a signature that does not fit.
    """
    with _locked(archive):
        _configure(archive)
        _update(archive)
        known = _names(archive).intersection(optional)
        done = _apt(archive, "--print-uris", "--yes", "-q", "install", *names, *sorted(known))
        if done.code:
            raise _not_resolved(archive, done)
    return tuple(sorted(parse_uris(done.stdout.decode()), key=lambda package: package.name))


def parse_uris(text: str) -> Iterator[Package]:
    """Read what `apt-get --print-uris install` prints."""
    for found in _URI.finditer(text):
        name, version, _ = found["file"].split("_", 2)
        yield Package(name, urllib.parse.unquote(version), found["sha256"])


def known_packages(archive: Archive, names: Iterable[str]) -> frozenset[str]:
    """Return which of `names` the suite has; raises EnvironmentSetupError."""
    with _locked(archive):
        _configure(archive)
        _update(archive)
        return _names(archive).intersection(names)


def fetch(archive: Archive, packages: Sequence[Package]) -> list[Path]:
    """Return the packages' files, those not yet in the pool fetched by apt; raises EnvironmentSetupError."""
    pool = archive.folder / "pool"
    pool.mkdir(parents=True, exist_ok=True)
    if _not_in(pool, packages):
        with _locked(archive):
            missing = _not_in(pool, packages)  # another build may have fetched them meanwhile
            if missing:
                _configure(archive)
                _fetch_missing(archive, missing, pool)
    return [_in_pool(pool, package) for package in packages]


def _in_pool(pool: Path, package: Package) -> Path:
    return pool / f"{package.sha256}.deb"


def _not_in(pool: Path, packages: Iterable[Package]) -> list[Package]:
    """Return the packages that are not there, or not whole (a power failure leaves such files)."""
    paths = ((package, _in_pool(pool, package)) for package in packages)
    return [package for package, path in paths if not path.exists() or _digest(path) != package.sha256]


def _fetch_missing(archive: Archive, missing: Sequence[Package], pool: Path) -> None:
    folder = archive.home / "fetched"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    words = [f"{package.name}={package.version}" for package in missing]
    try:
        done = _apt(archive, "-qq", "download", *words, cwd=folder)
        if done.code:
            _update(archive)  # its lists may be older than the lock
            done = _apt(archive, "-qq", "download", *words, cwd=folder)
        by_digest = {_digest(path): path for path in folder.iterdir()}
        for package in missing:
            if package.sha256 in by_digest:
                by_digest[package.sha256].rename(_in_pool(pool, package))
    finally:
        shutil.rmtree(folder)
    lost = [package for package in missing if package.sha256 not in by_digest]
    if lost:
        # apt downloads nothing at all if it knows no such version of one.
        package = next((p for p in lost if f"'{p.name}'" in done.stderr), lost[0])
        raise EnvironmentSetupError(
            f"{package.name} {package.version} as the lock has it can't be had from {archive.suite}:\n"
            f"{done.tail() or '    the archive has another file of that version'}",
            "write the lock anew: rvbundle lock RECIPE",
        )


def unpack(archive: Archive, packages: Sequence[Package], root: Path, only: Sequence[str] = ()) -> Unpacked:
    """Unpack the packages into the new folder `root`, without running anything of them.

    Manuals, translations and headers are left out, and all that no pattern of `only` matches if there are
    any. Raises EnvironmentSetupError and ToolError.
    """
    files = fetch(archive, packages)
    for name in _MERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    _needed("dpkg-deb")

    def work(pair: tuple[Package, Path]) -> list[str]:
        return _unpack_one(pair[1], root, only)

    pairs = list(zip(packages, files, strict=True))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        listed = list(pool.map(work, pairs))
    owners = {path: package.name for package, paths in zip(packages, listed, strict=True) for path in paths}
    return Unpacked(root, owners)


def _unpack_one(file: Path, root: Path, only: Sequence[str]) -> list[str]:
    content = process.run(["dpkg-deb", "--fsys-tarfile", file]).stdout
    wanted: list[str] = []
    if only:
        listed = _lines(process.run(["tar", "--list", *_TAR], stdin=content))
        wanted = [
            line for line in listed if any(fnmatch.fnmatchcase(line, f"./{pattern}") for pattern in only)
        ]
        if not wanted:
            return []  # tar calls it an error
        wanted.insert(0, "--no-recursion")  # a folder would take along what is named behind it, too
    exclude = [f"--exclude=./{path}" for path in _NOT_UNPACKED]
    done = process.run(
        ["tar", "--extract", "--verbose", *_TAR, *exclude, "--directory", root, *wanted],
        stdin=content,
    )
    return [line.removeprefix("./") for line in _lines(done) if not line.endswith("/")]


def _lines(done: process.Finished) -> list[str]:
    return os.fsdecode(done.stdout).splitlines()


@contextmanager
def _locked(archive: Archive) -> Iterator[None]:
    """Keep two builds from using apt's folder at once; raises EnvironmentSetupError without apt."""
    _needed("apt-get")
    archive.home.mkdir(parents=True, exist_ok=True)
    with (archive.home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_programs(otherwise: str) -> None:
    """Raise EnvironmentSetupError unless this machine has what fetches and unpacks Debian's packages.

    `otherwise` is what to do without them.
    """
    for program in ("apt-get", "dpkg-deb"):
        _needed(program, otherwise)


def _needed(program: str, otherwise: str = "take the payload out of [payloads]") -> None:
    if shutil.which(program) is None:
        raise EnvironmentSetupError(
            f"there is no {program} on this machine, and Debian's packages are fetched by it",
            f"build on Debian or Ubuntu (a container will do), or {otherwise}",
        )


def _configure(archive: Archive) -> None:
    for name in ("lists/partial", "cache/archives/partial", "state", "log"):
        (archive.home / name).mkdir(parents=True, exist_ok=True)
    keyring = os.environ.get(_KEYRING_VARIABLE, KEYRING)
    if not Path(keyring).is_file():
        raise EnvironmentSetupError(
            f"there is no {keyring}, by which the archive's signature is checked",
            "apt install debian-archive-keyring",
        )
    arch = ARCHITECTURES[archive.arch]
    source = f"deb [arch={arch} signed-by={keyring}] {mirror(os.environ)} {archive.suite} main\n"
    settings = process.run(["apt-config", "dump"]).stdout.decode().splitlines()
    kept = "\n".join(line for line in settings if _KEPT_SETTINGS.match(line))
    # As root, apt would read and write as the user _apt, who may not enter our folder.
    text = _CONFIGURATION.format(arch=arch, folder=archive.home, kept=kept, user="root")
    (archive.home / "state/status").write_text("")
    _write_if_changed(archive.home / "sources.list", source)
    _write_if_changed(archive.configuration, text)


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def mirror(environ: Mapping[str, str], etc: Path = Path("/etc/apt")) -> str:
    """Return the address of a Debian archive: RVBUNDLE_DEBIAN_MIRROR, or the one that this machine uses.

    Raises EnvironmentSetupError where neither is known (on Ubuntu, say).
    """
    if environ.get(_MIRROR_VARIABLE):
        return environ[_MIRROR_VARIABLE]
    found: list[str] = []
    beside = (path for path in etc.glob("sources.list.d/*") if path.suffix in (".list", ".sources"))
    for path in [etc / "sources.list", *sorted(beside)]:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in path.read_text().splitlines():
                if not line.lstrip().startswith("#"):
                    found += _DEBIAN.findall(line)
    if not found:
        raise EnvironmentSetupError(
            "this machine's apt knows no Debian archive",
            f"name one: {_MIRROR_VARIABLE}=ADDRESS rvbundle build …",
        )
    return found[0]


def _apt(archive: Archive, *words: str, cwd: Path | None = None) -> process.Finished:
    return _run(archive, "apt-get", *words, cwd=cwd)


def _run(archive: Archive, *words: str, cwd: Path | None = None) -> process.Finished:
    env = {**os.environ, "APT_CONFIG": str(archive.configuration), "LC_ALL": "C.UTF-8"}
    return process.run(words, env=env, cwd=cwd, check=False)


def _update(archive: Archive) -> None:
    done = _apt(archive, "-qq", "--error-on=any", "update")
    if done.code == 0:
        return
    text = done.stderr
    if any(word in text for word in _SIGNATURE):
        raise EnvironmentSetupError(
            f"the signature of Debian's {archive.suite} does not fit this machine's keys:\n{done.tail()}",
            "a newer debian-archive-keyring may have its key; if not, the archive is not to be trusted",
        )
    if "does not have a Release file" in text or "404" in text:
        raise EnvironmentSetupError(
            f"Debian's archive has no suite {archive.suite} for {archive.arch}:\n{done.tail()}",
            "debian:trixie and debian:sid have riscv64, arm64 and amd64",
        )
    raise EnvironmentSetupError(
        f"apt could not read Debian's {archive.suite}:\n{done.tail()}", f"the command was: {done.command}"
    )


def _names(archive: Archive) -> frozenset[str]:
    return frozenset(_run(archive, "apt-cache", "pkgnames").stdout.decode().split())


def _not_resolved(archive: Archive, done: process.Finished) -> EnvironmentSetupError:
    missing = _UNKNOWN.findall(done.stderr)
    if missing:
        names = ", ".join(sorted({a or b for a, b in missing}))
        return EnvironmentSetupError(
            f"Debian's {archive.suite} has no package {names} for {archive.arch}",
            "another suite may have it (debian:sid), or take the requirement out of the recipe",
        )
    _, unmet, which = done.stdout.decode(errors="replace").partition(_UNMET)
    said = process.indent_tail(unmet + which + done.stderr)
    return EnvironmentSetupError(
        f"apt could not find out what is needed from {archive.suite}:\n{said}",
        f"the command was: {done.command}",
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
