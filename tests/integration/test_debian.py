"""Debian's packages by the apt of this machine, from a small archive of our own."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rvbundle import debian
from rvbundle.debian import Archive
from rvbundle_runtime.errors import EnvironmentSetupError
from tests.archive import SUITE, Key, environment, make_archive, new_key
from tests.debs import make_deb


@pytest.fixture(scope="module")
def key() -> Iterator[Key]:
    with new_key() as key:
        yield key


@pytest.fixture
def debs(tmp_path: Path) -> list[Path]:
    """A shell that needs a library in a version with an epoch, and something that nobody needs."""
    folder = tmp_path / "made here"
    folder.mkdir()
    return [
        make_deb(
            folder / "dash_1_riscv64.deb",
            "dash",
            {"usr/bin/dash": "dash", "usr/share/man/man1/dash.1": "manual"},
            arch="riscv64",
            depends="libx (>= 1:2)",
            script=f"touch {tmp_path}/maintainer-script-ran",
        ),
        make_deb(
            folder / "libx_1%3a2.0+b1_all.deb", "libx", {"lib/libx.so.1": "library"}, version="1:2.0+b1"
        ),
        make_deb(folder / "other_1_all.deb", "other"),
    ]


@pytest.fixture
def archive(tmp_path: Path, key: Key, debs: list[Path], monkeypatch: pytest.MonkeyPatch) -> Archive:
    key.sign(make_archive(tmp_path / "served", {"riscv64": debs}))
    for name, value in environment(tmp_path / "served", key.export(tmp_path / "keys.gpg")).items():
        monkeypatch.setenv(name, value)
    return Archive(tmp_path / "a cache", SUITE, "riscv64")


def test_what_is_needed_is_found_fetched_and_unpacked(
    tmp_path: Path, archive: Archive, debs: list[Path]
) -> None:
    packages = debian.resolve(archive, ["dash"], ["nosuch"])
    assert [(p.name, p.version) for p in packages] == [("dash", "1"), ("libx", "1:2.0+b1")]
    assert [p.sha256 for p in packages] == [hashlib.sha256(d.read_bytes()).hexdigest() for d in debs[:2]]
    assert debian.known_packages(archive, ["dash", "other", "nosuch"]) == {"dash", "other"}
    root = tmp_path / "root"
    unpacked = debian.unpack(archive, packages, root)
    assert unpacked.owners == {"usr/bin/dash": "dash", "lib/libx.so.1": "libx"}
    assert (root / "usr/lib/libx.so.1").read_text() == "library"
    assert not (root / "usr/share/man/man1/dash.1").exists()
    assert not (tmp_path / "maintainer-script-ran").exists()


def test_nothing_is_asked_of_the_archive_twice(
    tmp_path: Path, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = debian.resolve(archive, ["dash"])
    paths = debian.fetch(archive, packages)
    (tmp_path / "served").rename(tmp_path / "gone")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert debian.fetch(archive, packages) == paths


def test_a_newer_version_does_not_replace_a_locked_one(
    tmp_path: Path, archive: Archive, key: Key, debs: list[Path]
) -> None:
    """An archive such as that of sid drops the old one; the lock then can't be had, and says so."""
    packages = debian.resolve(archive, ["libx"])
    newer = make_deb(tmp_path / "libx_1%3a3.0_all.deb", "libx", version="1:3.0")
    served = tmp_path / "served"
    for path in (served / "pool").iterdir():
        path.unlink()
    for path in sorted((served / "dists").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    key.sign(make_archive(served, {"riscv64": [debs[0], newer]}))
    with pytest.raises(EnvironmentSetupError) as caught:
        debian.fetch(archive, packages)
    assert caught.value.message.startswith(
        f"libx 1:2.0+b1 as the lock has it can't be had from {SUITE}:\n    E: Version '1:2.0+b1' for 'libx' "
    )
    assert debian.resolve(archive, ["libx"])[0].version == "1:3.0"


def test_an_unsatisfied_dependency(
    tmp_path: Path, key: Key, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = make_deb(tmp_path / "odd_1_all.deb", "odd", depends="nosuch (>= 2)")
    served = tmp_path / "second"
    key.sign(make_archive(served, {"riscv64": [odd]}))
    monkeypatch.setenv("RVBUNDLE_DEBIAN_MIRROR", f"file://{served}")
    with pytest.raises(EnvironmentSetupError) as caught:
        debian.resolve(archive, ["odd"])
    assert caught.value.message == (
        f"apt could not find out what is needed from {SUITE}:\n"
        "    The following packages have unmet dependencies:\n"
        "     odd : Depends: nosuch (>= 2) but it is not installable\n"
        "    E: Unable to correct problems, you have held broken packages."
    )


def test_a_package_that_was_changed_on_its_way(tmp_path: Path, archive: Archive) -> None:
    packages = debian.resolve(archive, ["libx"])
    (file,) = (tmp_path / "served/pool").glob("libx*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(EnvironmentSetupError) as caught:
        debian.fetch(archive, packages)
    assert "libx 1:2.0+b1 as the lock has it can't be had" in caught.value.message
    assert "Hash Sum mismatch" in caught.value.message
    assert list((archive.folder / "pool").iterdir()) == []
