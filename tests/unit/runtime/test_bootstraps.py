"""The table of a self-running file, and bootstraps in the store."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rvbundle_runtime import bootstraps
from rvbundle_runtime.bootstraps import BLOCK, MAGIC, MANIFEST, READY, Section, Table
from rvbundle_runtime.errors import ImageError, StoreError

SCRIPT = bootstraps.padded(MAGIC + b"agent 1.0\n")
PACKED = bytes(range(256)) * (2 * BLOCK // 256)
SECTION = Section(
    arch="riscv64",
    offset=2 * BLOCK,
    size=len(PACKED),
    sha256=hashlib.sha256(PACKED).hexdigest(),
    manifest="ab" * 32,
    packages=(("libc6", "2.41"),),
    emulators=("qemu-x86_64",),
    licences=(("libc6", "2.41", "LGPL", "source", "share/doc"),),
)
TABLE = Table(2 * BLOCK + len(PACKED) + 5, "agent", "1.0", "cd" * 32, (SECTION,))


def write(folder: Path, table: Table = TABLE, script: bytes = SCRIPT) -> Path:
    """Write a self-running file whose image is five bytes."""
    path = folder / "x.run"
    path.write_bytes(script + bootstraps.dump_table(table, script) + PACKED + b"image")
    return path


def test_a_table_comes_back(tmp_path: Path) -> None:
    assert bootstraps.find_table(write(tmp_path)) == TABLE


def test_a_table_is_the_same_every_time() -> None:
    assert bootstraps.dump_table(TABLE, SCRIPT) == bootstraps.dump_table(replace(TABLE), SCRIPT)
    assert len(bootstraps.dump_table(TABLE, SCRIPT)) % BLOCK == 0


def test_a_longer_script(tmp_path: Path) -> None:
    script = bootstraps.padded(SCRIPT + b"# more\n" * 1000)
    moved = replace(SECTION, offset=len(script) + BLOCK)
    table = Table(len(script) + BLOCK + len(PACKED) + 5, "agent", "1.0", "", (moved,))
    assert bootstraps.find_table(write(tmp_path, table, script)) == table


@pytest.mark.parametrize("data", [b"", b"#!/bin/sh\necho\n", b"\x7fELF", bytes(100000)], ids=len)
def test_other_files_have_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    assert bootstraps.find_table(tmp_path / "x") is None


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"can't open .*/x: No such file or directory"):
        bootstraps.find_table(tmp_path / "x")


@pytest.mark.parametrize("offset", [*range(len(MAGIC), 2 * BLOCK, 97), 2 * BLOCK - 1])
def test_every_byte_of_the_header_counts(offset: int, tmp_path: Path) -> None:
    path = write(tmp_path)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(ImageError, match="its header is not as it was written"):
        bootstraps.find_table(path)


def test_a_table_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(SCRIPT)
    with pytest.raises(ImageError, match="its header is not as it was written"):
        bootstraps.find_table(tmp_path / "x")


def test_cut_short_and_longer(tmp_path: Path) -> None:
    path = write(tmp_path)
    os.truncate(path, TABLE.size - 1)
    with pytest.raises(ImageError, match=f"cut short: {TABLE.size - 1} bytes of {TABLE.size} are here"):
        bootstraps.find_table(path)
    path.write_bytes(write(tmp_path).read_bytes() + b"more")
    with pytest.raises(ImageError, match="4 bytes stand behind its end"):
        bootstraps.find_table(path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"size": None, "drop": "size"},
        {"bootstraps": 5},
        {"bootstraps": [{"arch": "riscv64"}]},
        {"bootstraps": [{**json.loads(json.dumps(vars(SECTION))), "more": 1}]},
    ],
    ids=str,
)
def test_a_forged_table(change: dict[str, object], tmp_path: Path) -> None:
    """Its digest is right, so somebody has made it."""
    _, _, text = bootstraps.dump_table(TABLE, SCRIPT).partition(b"\n")
    value = {**json.loads(text), **change}
    value.pop(str(value.pop("drop", "")), None)
    text = json.dumps(value).encode() + b"\n"
    table = bootstraps.padded(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    path = tmp_path / "x"
    path.write_bytes(SCRIPT + table + PACKED)
    with pytest.raises(ImageError, match="its header can't be read"):
        bootstraps.find_table(path)


def test_sections(tmp_path: Path) -> None:
    path = write(tmp_path)
    bootstraps.check_section(path, SECTION)
    with pytest.raises(ImageError, match="the bootstrap for riscv64 is damaged"):
        bootstraps.check_section(path, replace(SECTION, sha256="00" * 32))
    with pytest.raises(ImageError, match="the bootstrap for riscv64 is damaged"):
        bootstraps.check_section(path, replace(SECTION, size=10 * len(PACKED)))
    with pytest.raises(StoreError, match="can't read"):
        bootstraps.check_section(tmp_path, SECTION)


FILES = {"bin/python3": b"program", "lib/a file.so": b"library", "start.pyc": b""}


def unpacked(folder: Path) -> str:
    """Write a bootstrap as tar would; return its manifest's digest."""
    lines = []
    for name, data in sorted(FILES.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name == "bin/python3" else 0o644)
        mode = "x" if name == "bin/python3" else "-"
        lines.append(f"{hashlib.sha256(data).hexdigest()} {mode} {name}\n")
    (folder / MANIFEST).write_text("".join(lines))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def begin(base: Path, number: int = 1) -> tuple[Path, str]:
    """Unpack a bootstrap into a work folder below `base`."""
    work = base / "bootstrap" / f"tmp.x.{number}"
    work.mkdir(parents=True)
    return work, unpacked(work)


def change_file(work: Path) -> str:
    (work / "bin/python3").write_bytes(b"another")
    return "bin/python3 is not as it was packed"


def remove_file(work: Path) -> str:
    (work / "lib/a file.so").unlink()
    return r"lib/a file.so can't be read \(No such file or directory\)"


def add_file(work: Path) -> str:
    (work / "lib/more").write_bytes(b"")
    return "lib/more does not belong to it"


def add_link(work: Path) -> str:
    (work / "lib/more").symlink_to("/etc/passwd")
    return "lib/more does not belong to it"


def not_executable(work: Path) -> str:
    (work / "bin/python3").chmod(0o644)
    return "bin/python3 can't be executed"


def change_manifest(work: Path) -> str:
    (work / MANIFEST).write_bytes(b"")
    return "its manifest is another"


def remove_manifest(work: Path) -> str:
    (work / MANIFEST).unlink()
    return "manifest: No such file or directory"


def link_for_file(work: Path) -> str:
    (work / "bin/python3").unlink()
    (work / "bin/python3").symlink_to("nothing")
    return "bin/python3 can't be read"


@pytest.mark.parametrize(
    "damage",
    [
        change_file,
        remove_file,
        add_file,
        add_link,
        not_executable,
        change_manifest,
        remove_manifest,
        link_for_file,
    ],
)
def test_a_damaged_bootstrap_is_not_installed(damage: Callable[[Path], str], tmp_path: Path) -> None:
    work, manifest = begin(tmp_path)
    said = damage(work)
    with pytest.raises(ImageError, match=f"the bootstrap is damaged: {said}"):
        bootstraps.install(tmp_path, work, manifest)
    assert bootstraps.list_stored(tmp_path) == []


def installed(base: Path) -> Path:
    work, manifest = begin(base)
    bootstraps.install(base, work, manifest)
    assert not work.exists()
    return base / "bootstrap" / bootstraps.folder_name(manifest)


def test_install(tmp_path: Path) -> None:
    place = installed(tmp_path)
    assert (place / "bin/python3").read_bytes() == b"program"
    assert [stored.key for stored in bootstraps.list_stored(tmp_path)] == [place.name]
    inode = place.stat().st_ino
    assert installed(tmp_path).stat().st_ino == inode  # the second is just removed


def test_one_without_its_mark_is_replaced(tmp_path: Path) -> None:
    place = installed(tmp_path)
    (place / READY).unlink()
    (place / "bin/python3").write_bytes(b"damaged")
    assert (installed(tmp_path) / "bin/python3").read_bytes() == b"program"


def test_what_killed_starts_left_is_removed_an_hour_later(tmp_path: Path) -> None:
    young, old = begin(tmp_path, 2)[0], begin(tmp_path, 3)[0]
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    installed(tmp_path)
    assert (young.exists(), old.exists()) == (True, False)


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    work, manifest = begin(tmp_path)
    (tmp_path / "bootstrap" / "lock").mkdir()
    with pytest.raises(StoreError, match="can't unpack the bootstrap into"):
        bootstraps.install(tmp_path, work, manifest)


def test_prune(tmp_path: Path) -> None:
    assert bootstraps.prune(tmp_path) == ([], [])
    place = installed(tmp_path)
    young = begin(tmp_path, 2)[0]
    old = begin(tmp_path, 3)[0]
    os.utime(old, (0, 0))
    damaged = tmp_path / "bootstrap" / "damaged"
    shutil.copytree(old, damaged)
    held = bootstraps.hold(place)
    assert held is not None
    removed, busy = bootstraps.prune(tmp_path)
    assert ([s.key for s in removed], [s.key for s in busy]) == ([], [place.name])
    assert (young.exists(), old.exists(), damaged.exists(), place.exists()) == (True, False, False, True)
    os.close(held)
    removed, busy = bootstraps.prune(tmp_path)
    assert ([s.key for s in removed], busy, place.exists()) == ([place.name], [], False)
    assert removed[0].size > 0


def test_hold_where_there_is_nothing(tmp_path: Path) -> None:
    assert bootstraps.hold(tmp_path) is None
