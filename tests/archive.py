"""A small Debian archive in a folder, signed by a key of its own: what apt takes it for by all its checks."""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SUITE = "rvtest"  # not a name of Debian's: apt's lists of the real ones may lie in the tests' cache


@dataclass(frozen=True)
class Key:
    """A key pair of GnuPG's in a folder."""

    home: Path

    def _gpg(self, *words: str | Path) -> None:
        command = ["gpg", "--batch", "--quiet", "--yes", "--homedir", self.home, "--passphrase", "", *words]
        subprocess.run(command, check=True, capture_output=True)

    def export(self, file: Path) -> Path:
        """Write the public key, as apt wants a keyring."""
        self._gpg("--output", file, "--export")
        return file

    def sign(self, release: Path) -> None:
        """Write InRelease beside the Release file."""
        self._gpg("--output", release.with_name("InRelease"), "--clearsign", release)


@contextmanager
def new_key() -> Iterator[Key]:
    """Make a key; it is gone at the end of the block, and so is GnuPG's agent."""
    # Below /tmp, since the agent's socket must have a short path.
    with tempfile.TemporaryDirectory(prefix="rv-", dir="/tmp") as folder:
        key = Key(Path(folder))
        key._gpg("--quick-generate-key", "A test <test@rvbundle.example>", "rsa2048", "sign", "never")
        try:
            yield key
        finally:
            subprocess.run(["gpgconf", "--homedir", folder, "--kill", "all"], check=True)


def make_archive(folder: Path, debs: Mapping[str, Iterable[Path]], suite: str = SUITE) -> Path:
    """Make an archive in `folder` of packages {Debian's name of an architecture: files}.

    Returns its Release file, which is still to be signed.
    """
    dists = folder / "dists" / suite
    sums = []
    for arch, files in debs.items():
        index = dists / f"main/binary-{arch}/Packages"
        index.parent.mkdir(parents=True)
        index.write_text("\n".join(_publish(folder, file) for file in files))
        data = index.read_bytes()
        sums.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {index.relative_to(dists)}\n")
    release = dists / "Release"
    release.write_text(
        f"Origin: A test\nSuite: {suite}\nCodename: {suite}\nDate: Sat, 01 Jan 2022 00:00:00 UTC\n"
        f"Architectures: {' '.join(debs)}\nComponents: main\nSHA256:\n{''.join(sums)}"
    )
    return release


def _publish(folder: Path, file: Path) -> str:
    """Copy a package into the archive; return its paragraph of the index."""
    target = folder / "pool" / file.name
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, target)
    data = target.read_bytes()
    control = subprocess.run(["dpkg-deb", "--field", target], check=True, capture_output=True, text=True)
    return (
        f"{control.stdout}Filename: pool/{file.name}\nSize: {len(data)}\n"
        f"SHA256: {hashlib.sha256(data).hexdigest()}\n"
    )


def environment(folder: Path, keyring: Path) -> dict[str, str]:
    """Return the variables that make rvbundle use an archive."""
    return {"RVBUNDLE_DEBIAN_MIRROR": f"file://{folder}", "RVBUNDLE_DEBIAN_KEYRING": str(keyring)}
