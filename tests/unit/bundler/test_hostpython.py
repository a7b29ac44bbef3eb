import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rvbundle import debian, hostpython
from rvbundle.debian import Archive, Package
from rvbundle.stages import StageCache
from rvbundle_runtime.errors import EnvironmentSetupError

MACHINE = os.uname().machine
PACKAGES = (Package("python3-minimal", "3.13.5-1", "ab" * 32), Package("libc6", "2.41", "cd" * 32))
# It stands for ld.so: says by what it was called, or answers the question for the version.
LOADER = """\
#!/bin/sh
for word; do last=$word; done
case "$last" in
    *python_version*) echo 3.13.5 ;;
    *) for word; do echo "$word"; done ;;
esac
"""


def fill(root: Path, *names: str) -> None:
    """Make what Debian's packages of Python leave in a folder."""
    for name in names or ("python3.13",):
        (root / "usr/bin").mkdir(parents=True, exist_ok=True)
        (root / "usr/bin" / name).write_text("")
    (root / "usr/bin/python3").symlink_to((names or ("python3.13",))[0])
    loader = root / hostpython._LOADERS[MACHINE]
    loader.parent.mkdir(parents=True, exist_ok=True)
    loader.write_text(LOADER)
    loader.chmod(0o755)


@pytest.fixture
def unpacks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Let nothing be fetched; return what was unpacked."""
    calls: list[tuple[Any, ...]] = []

    def unpack(archive: Archive, packages: object, root: Path, only: tuple[str, ...] = ()) -> None:
        calls.append((archive, packages, only))
        fill(root)

    monkeypatch.setattr(debian, "unpack", unpack)
    return calls


@pytest.mark.parametrize(
    "name", ["cache", "with space", "it's 'quoted'", 'a "b"', "$HOME `x`", "{brace} %s", "back\\slash", "ü"]
)
def test_a_python_in_any_folder(tmp_path: Path, unpacks: list[object], name: str) -> None:
    """It is started through its own ld.so, and finds its library by the name that it is told."""
    found = hostpython.host_python("trixie", PACKAGES, StageCache(tmp_path / name, "demo"))
    root = found.executable.parent / "root"
    assert root.is_relative_to(tmp_path / name)
    assert (found.version, found.short, found.cache_tag) == ("3.13.5", "3.13", "cpython-313")
    assert (found.stdlib, found.base_prefix) == (root / "usr/lib/python3.13", root / "usr")
    assert not found.usual_site
    words = ("-c", "a b", "*", "$x")
    done = subprocess.run([found.executable, *words], capture_output=True, text=True, check=True)
    libraries = f"{root}/usr/lib/{debian.TRIPLETS[MACHINE]}"
    program = f"{root}/usr/bin/python3.13"
    assert done.stdout.splitlines() == [
        *("--argv0", program, "--library-path", libraries, program),
        *words,
    ]


def test_a_python_is_unpacked_once(tmp_path: Path, unpacks: list[object]) -> None:
    cache = StageCache(tmp_path, "demo")
    first = hostpython.host_python("trixie", PACKAGES, cache)
    before = first.executable.stat().st_mtime_ns
    assert hostpython.host_python("trixie", PACKAGES, cache) == first
    assert first.executable.stat().st_mtime_ns == before
    assert unpacks == [(Archive(tmp_path / "build/debian", "trixie", MACHINE), PACKAGES, ())]
    other = hostpython.host_python("trixie", (replace(PACKAGES[0], sha256="ef" * 32),), cache)
    assert other.executable != first.executable
    assert len(unpacks) == 2


def test_a_cache_that_was_moved(tmp_path: Path, unpacks: list[object]) -> None:
    """The wrapper holds a path, so it is written anew."""
    hostpython.host_python("trixie", PACKAGES, StageCache(tmp_path / "a", "demo"))
    (tmp_path / "a").rename(tmp_path / "b")
    found = hostpython.host_python("trixie", PACKAGES, StageCache(tmp_path / "b", "demo"))
    assert found.executable.is_relative_to(tmp_path / "b")
    done = subprocess.run([found.executable], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].startswith(f"{tmp_path}/b/")
    assert len(unpacks) == 1
    assert sorted(p.name for p in found.executable.parent.iterdir()) == ["key.json", "python", "root"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("python3.13",), "python3.13"),
        (("python3.9", "python3.13"), "python3.13"),
        (("python3.13-config", "python3.13", "python3.13.orig", "python3.1x"), "python3.13"),
    ],
    ids=["one", "the newest", "other names"],
)
def test_find_python(tmp_path: Path, names: tuple[str, ...], found: str) -> None:
    fill(tmp_path, *names)
    assert hostpython.find_python(tmp_path) == tmp_path / "usr/bin" / found


@pytest.mark.parametrize("names", [(), ("python3",), ("python3.13-config",), ("python2.7",)])
def test_no_python(tmp_path: Path, names: tuple[str, ...]) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    for name in names:
        (tmp_path / "usr/bin" / name).write_text("")
    with pytest.raises(EnvironmentSetupError) as caught:
        hostpython.find_python(tmp_path)
    assert caught.value.message == f"the packages hold no Python: {tmp_path}"


def test_emulators(tmp_path: Path, unpacks: list[tuple[Any, ...]]) -> None:
    """Of the packages only the programs are taken, and those of Python are another result."""
    cache = StageCache(tmp_path, "demo")
    folder = hostpython.emulators("trixie", PACKAGES, cache)
    assert folder.parts[-3:] == ("root", "usr", "bin")
    ((archive, packages, only),) = unpacks
    assert (archive, packages) == (Archive(tmp_path / "build/debian", "trixie", MACHINE), PACKAGES)
    assert only == ("usr/bin/qemu-x86_64", "usr/bin/qemu-aarch64", "usr/bin/qemu-riscv64")
    assert hostpython.emulators("trixie", PACKAGES, cache) == folder
    assert len(unpacks) == 1
    assert not hostpython.host_python("trixie", PACKAGES, cache).executable.is_relative_to(folder.parents[2])


@pytest.mark.parametrize("arch", ["x86_64", "aarch64", "riscv64"])
def test_every_architecture_can_build(arch: str) -> None:
    assert {arch} <= hostpython._LOADERS.keys() & debian.TRIPLETS.keys() & debian.ARCHITECTURES.keys()
