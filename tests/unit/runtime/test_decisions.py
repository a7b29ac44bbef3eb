import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rvbundle_runtime import backends, decisions
from rvbundle_runtime.decision import Situation, Wanted
from rvbundle_runtime.decisions import decide, forget, key_of, read, write
from rvbundle_runtime.processor import Cluster, Processor
from rvbundle_runtime.selection import Launch, native_launch

from .test_plan import HOST, INFO
from .test_selection import QEMU

BOARD = replace(HOST, usable=(0, 1))
HERE = Situation(BOARD, native_launch(BOARD), INFO, cold=False)


def test_a_decision_is_kept_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decide(HERE, Wanted(), tmp_path)
    assert made.backend == "any"
    monkeypatch.setattr(backends, "load_table", lambda: pytest.fail("the table is not needed"))
    assert decide(HERE, Wanted(), tmp_path) == made


def test_explain_leaves_nothing(tmp_path: Path) -> None:
    decide(HERE, Wanted(), tmp_path, keep=False)
    assert not list(tmp_path.iterdir())


def test_what_was_asked_for_once_is_not_kept(tmp_path: Path) -> None:
    assert decide(HERE, Wanted(threads=2), tmp_path).threads == 2
    assert not list(tmp_path.iterdir())
    decide(HERE, Wanted(), tmp_path)
    assert decide(HERE, Wanted(threads=2), tmp_path).threads == 2
    assert decide(HERE, Wanted(), tmp_path).threads == 0


OTHERS: dict[str, Situation] = {
    "maker": replace(HERE, host=replace(BOARD, processor=Processor("0x489"))),
    "numbers": replace(HERE, host=replace(BOARD, processor=Processor(ids=(("marchid", 7),)))),
    "features": replace(HERE, host=replace(BOARD, processor=Processor(flags=frozenset({"v"})))),
    "vectors": replace(HERE, host=replace(BOARD, processor=Processor(vlen=256))),
    "count": replace(HERE, host=replace(BOARD, usable=(0,))),
    "quota": replace(HERE, host=replace(BOARD, quota=1.0)),
    "clusters": replace(HERE, host=replace(BOARD, clusters=(Cluster((0,)), Cluster((1,))))),
    "cold pack": replace(HERE, cold=True),
    "image": replace(HERE, info=replace(INFO, identity="cd" * 32)),
    "payload": replace(HERE, info=replace(INFO, arch="aarch64")),
    "launcher": replace(HERE, launch=Launch("riscv64", "qemu", "", "")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_situation_has_a_decision_of_its_own(name: str, tmp_path: Path) -> None:
    key = key_of(HERE)
    write(tmp_path, key, decide(HERE, Wanted(), tmp_path))
    other = key_of(OTHERS[name])
    assert other != key
    assert read(tmp_path, other) is None
    # A file that was copied under the name of another machine's does not count.
    decisions_folder = tmp_path / "backends"
    (own,) = decisions_folder.iterdir()
    Path(decisions._path(tmp_path, other)).write_bytes(own.read_bytes())
    assert read(tmp_path, other) is None


def test_the_emulators_version_counts() -> None:
    hosts = [replace(BOARD, emulators=(replace(QEMU, version=version),)) for version in ("10.0", "10.1")]
    launch = Launch("x86_64", "qemu", "", "")
    keys = [key_of(Situation(host, launch, replace(INFO, arch="x86_64"), False)) for host in hosts]
    assert [key["emulator"] for key in keys] == ["10.0", "10.1"]


def test_another_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = key_of(HERE)
    other = tmp_path / "other.toml"
    other.write_text("")
    monkeypatch.setattr("rvbundle_runtime.table.FILE", str(other))
    assert key_of(HERE)["table"] != key["table"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"format": 99}'])
def test_a_damaged_file_counts_as_none(content: bytes, tmp_path: Path) -> None:
    decide(HERE, Wanted(), tmp_path)
    (file,) = (tmp_path / "backends").iterdir()
    file.write_bytes(content)
    assert decide(HERE, Wanted(), tmp_path).backend == "any"
    assert read(tmp_path, key_of(HERE))  # written anew


def test_a_store_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "backends").write_text("in the way")
    made = decide(HERE, Wanted(), tmp_path)
    assert made.backend == "any"
    with pytest.raises(OSError):
        write(tmp_path, key_of(HERE), made)


def test_a_failed_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    made = decide(HERE, Wanted(), tmp_path, keep=False)
    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError):
        write(tmp_path, key_of(HERE), made)
    assert not list((tmp_path / "backends").iterdir())


def test_nobody_else_may_write_them(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        decide(HERE, Wanted(), tmp_path)
    finally:
        os.umask(old)
    (file,) = (tmp_path / "backends").iterdir()
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "backends", file)] == [0o700, 0o600]


def test_forget(tmp_path: Path) -> None:
    for situation in (HERE, OTHERS["image"], OTHERS["count"]):
        decide(situation, Wanted(), tmp_path)
    assert forget(tmp_path, {INFO.identity}) == 1
    assert read(tmp_path, key_of(HERE))
    assert forget(tmp_path, set()) == 2
    assert forget(tmp_path, set()) == 0
