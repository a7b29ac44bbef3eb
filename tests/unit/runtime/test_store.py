import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rvbundle_runtime import store
from rvbundle_runtime.errors import HostError, ImageError, StoreError
from rvbundle_runtime.families import Family
from rvbundle_runtime.image import Reader

from ..images import ARCH, SMALL_TREE, build, chunk, forge, item, sparse, tree


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "demo-1.0.rvb"
    build(path)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def ensure(base: Path, image: Path) -> store.Unpacked:
    with Reader(image) as reader:
        return store.ensure(base, reader, ARCH)


def key_of(image: Path) -> str:
    with Reader(image) as reader:
        return f"{reader.identity}-{ARCH}"


def test_unpacked_tree_is_the_packed_one(base: Path, image: Path) -> None:
    unpacked = ensure(base, image)
    assert unpacked.fresh
    assert unpacked.root == base / "store" / key_of(image) / "root"
    assert tree(unpacked.root) == SMALL_TREE
    assert (unpacked.info.name, unpacked.info.version, unpacked.info.arch, unpacked.info.argv) == (
        "demo",
        "1.0",
        ARCH,
        ("/usr/bin/agent", "--now"),
    )
    assert (unpacked.info.network, unpacked.info.env) == (False, {"GREETING": "hello"})


def test_second_time_nothing_is_unpacked(base: Path, image: Path) -> None:
    first = ensure(base, image)
    (first.root / "app/train.py").write_text("print(2)\n")  # would be replaced by an unpacking
    second = ensure(base, image)
    assert second == replace(first, fresh=False)
    assert (first.root / "app/train.py").read_text() == "print(2)\n"


def test_families_and_trims_are_remembered(base: Path, tmp_path: Path) -> None:
    family = Family("avx2", ("avx2",), {"A": "1"}, ("AVX512F",), "GenuineIntel")
    identity = build(
        tmp_path / "x.rvb",
        [item("usr/x", b"x"), sparse("usr/a.so", 9, chunk(b"a", (0, 1)))],
        families=(family,),
    )
    unpacked = ensure(base, tmp_path / "x.rvb")
    assert (unpacked.info.families, unpacked.info.trimmed) == ((family,), True)
    found = store.find(base, identity, ARCH)
    assert found == replace(unpacked, fresh=False)
    build(tmp_path / "y.rvb")
    plain = ensure(base, tmp_path / "y.rvb")
    assert (plain.info.families, plain.info.trimmed) == ((), False)


def test_blas_is_remembered(base: Path, tmp_path: Path) -> None:
    versions = {"openblas": "0.3.29", "reference": "3.12.1"}
    identity = build(tmp_path / "x.rvb", blas=versions)
    assert ensure(base, tmp_path / "x.rvb").info.blas == versions
    found = store.find(base, identity, ARCH)
    assert found
    assert found.info.blas == versions


def test_what_was_unpacked_before_blas_was_told_stays(base: Path, image: Path) -> None:
    unpacked = ensure(base, image)
    place = unpacked.root.parent / "payload.json"
    value = json.loads(place.read_text())
    del value["blas"]
    place.write_text(json.dumps(value))
    again = ensure(base, image)
    assert (again.fresh, again.info.blas) == (False, {})


def test_space_counts_the_pages_that_are_there(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trimmed library takes what it has, not its size."""
    build(tmp_path / "x.rvb", [sparse("usr/a.so", 1 << 40, chunk(bytes(2 << 20), (1 << 30, 2 << 20)))])
    monkeypatch.setattr(os, "statvfs", full_disk((18 << 20) - 4096))
    with pytest.raises(StoreError) as caught:
        ensure(base, tmp_path / "x.rvb")
    assert caught.value.message.startswith("not enough space to unpack: 2 MiB are needed")
    monkeypatch.setattr(os, "statvfs", full_disk(18 << 20))
    assert ensure(base, tmp_path / "x.rvb").fresh


def test_find(base: Path, image: Path) -> None:
    with Reader(image) as reader:
        assert store.find(base, reader.identity, ARCH) is None
        unpacked = store.ensure(base, reader, ARCH)
        assert store.find(base, reader.identity, ARCH) == replace(unpacked, fresh=False)
        assert store.find(base, reader.identity, "other") is None
        assert store.root_path(base, reader.identity, ARCH) == unpacked.root


@pytest.mark.parametrize("mask", [0o000, 0o077], ids=["open", "closed"])
def test_modes_whatever_the_umask(base: Path, image: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        root = ensure(base, image).root
    finally:
        os.umask(old)
    assert (root / "usr/bin/agent").stat().st_mode & 0o777 == 0o755
    assert (root / "app/train.py").stat().st_mode & 0o777 == 0o644


def test_progress_counts_raw_bytes_up_to_the_total(base: Path, image: Path) -> None:
    told: list[tuple[int, int]] = []
    with Reader(image) as reader:
        store.ensure(base, reader, ARCH, lambda done, total: told.append((done, total)))
    assert [total for _, total in told] == [230, 230, 230]  # 200 + 21 + 9 bytes in three frames
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (230, 230)


def test_no_payload_for_this_machine(base: Path, image: Path) -> None:
    with Reader(image) as reader, pytest.raises(HostError) as caught:
        store.ensure(base, reader, "s390x")
    assert caught.value.message == f"the image has no payload for s390x (it has: {ARCH})"
    assert not base.exists()


def break_payload_json(folder: Path) -> None:
    (folder / "payload.json").write_text("{")


def remove_payload_json(folder: Path) -> None:
    (folder / "payload.json").unlink()


def list_payload_json(folder: Path) -> None:
    (folder / "payload.json").write_text("[]")


def drop_argv(folder: Path) -> None:
    value = json.loads((folder / "payload.json").read_text())
    del value["argv"]
    (folder / "payload.json").write_text(json.dumps(value))


def set_families(value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        info = json.loads((folder / "payload.json").read_text())
        (folder / "payload.json").write_text(json.dumps({**info, "families": value}))

    change.__name__ = f"families {value}"
    return change


def set_blas(value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        info = json.loads((folder / "payload.json").read_text())
        (folder / "payload.json").write_text(json.dumps({**info, "blas": value}))

    change.__name__ = f"blas {value}"
    return change


def drop_families(folder: Path) -> None:
    """As the first version wrote it."""
    value = json.loads((folder / "payload.json").read_text())
    del value["families"]
    (folder / "payload.json").write_text(json.dumps(value))


FAMILY = {"name": "a", "needs": [], "env": {}, "numpy": [], "vendor": ""}


def add_key(folder: Path) -> None:
    value = json.loads((folder / "payload.json").read_text())
    (folder / "payload.json").write_text(json.dumps({**value, "new": 1}))


def remove_root(folder: Path) -> None:
    (folder / "root").rename(folder / "gone")


@pytest.mark.parametrize(
    "damage",
    [
        break_payload_json,
        remove_payload_json,
        list_payload_json,
        drop_argv,
        add_key,
        remove_root,
        drop_families,
        set_families(5),
        set_families([5]),
        set_families([{}]),
        set_families([{**FAMILY, "name": 5}]),
        set_families([{**FAMILY, "env": []}]),
        set_families([{**FAMILY, "env": {"A=": ""}}]),
        set_blas(5),
        set_blas(["openblas"]),
        set_blas({"openblas": 5}),
    ],
    ids=lambda f: f.__name__,
)
def test_damaged_from_outside_is_unpacked_anew(
    base: Path, image: Path, damage: Callable[[Path], None]
) -> None:
    unpacked = ensure(base, image)
    (unpacked.root / "app/stray").write_text("")
    damage(unpacked.root.parent)
    again = ensure(base, image)
    assert again.fresh
    assert tree(again.root) == SMALL_TREE


def test_stale_folder_of_a_killed_run(base: Path, image: Path) -> None:
    key = key_of(image)
    stale = base / "store/tmp" / f"{key}.killed"
    other = base / "store/tmp" / "0000-riscv64.running"
    for folder in (stale, other):
        (folder / "root/usr").mkdir(parents=True)
        (folder / "root/usr/half").write_text("half")
    assert tree(ensure(base, image).root) == SMALL_TREE
    assert [p.name for p in (base / "store/tmp").iterdir()] == [other.name]


def test_interrupted_unpacking_leaves_nothing(base: Path, image: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with Reader(image) as reader, pytest.raises(KeyboardInterrupt):
        store.ensure(base, reader, ARCH, interrupt)
    assert sorted(p.name for p in (base / "store").iterdir()) == ["locks", "tmp"]
    assert list((base / "store/tmp").iterdir()) == []
    assert tree(ensure(base, image).root) == SMALL_TREE


def test_damaged_frame_leaves_nothing(base: Path, image: Path) -> None:
    data = bytearray(image.read_bytes())
    data[20] ^= 1
    image.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        ensure(base, image)
    assert caught.value.message == f"{image}: frame 0 is damaged (its digest is not what the image says)"
    assert list((base / "store/tmp").iterdir()) == []
    assert store.list_stored(base) == []


def test_two_threads_at_once(base: Path, image: Path) -> None:
    barrier = threading.Barrier(4)
    results = []

    def run() -> None:
        with Reader(image) as reader:
            barrier.wait()
            results.append(store.ensure(base, reader, ARCH))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r.fresh for r in results) == [False, False, False, True]
    assert tree(results[0].root) == SMALL_TREE


_CHILD = """
import sys
from pathlib import Path
from rvbundle_runtime import store
from rvbundle_runtime.image import Reader
print("ready", flush=True)
sys.stdin.readline()
with Reader(Path(sys.argv[2])) as reader:
    print(store.ensure(Path(sys.argv[1]), reader, sys.argv[3]).fresh)
"""


def test_two_processes_at_once(base: Path, image: Path) -> None:
    command = [sys.executable, "-c", _CHILD, str(base), str(image), ARCH]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    outputs = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        out, _ = child.communicate()
        outputs.append((child.returncode, out))
    assert sorted(outputs) == [(0, "False\n"), (0, "True\n")]
    assert tree(store.root_path(base, key_of(image).partition("-")[0], ARCH)) == SMALL_TREE


def test_a_faster_run_is_not_repeated(base: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run finishes between the look and the lock."""
    found = store.find
    calls = []

    def blind_at_first(*args: object) -> store.Unpacked | None:
        calls.append(args)
        return None if len(calls) == 1 else found(*args)  # type: ignore[arg-type]

    ensure(base, image)
    monkeypatch.setattr(store, "find", blind_at_first)
    monkeypatch.setattr(store, "_unpack", lambda *_: pytest.fail("unpacked twice"))
    assert not ensure(base, image).fresh


@pytest.mark.parametrize(
    ("function", "number", "text", "hint"),
    [
        (
            "pwrite",
            errno.ENOSPC,
            "No space left on device",
            "free some space (`rvbundle cache prune`), or set RVBUNDLE_CACHE to another folder",
        ),
        (
            "pwrite",
            errno.EDQUOT,
            "Disk quota exceeded",
            "your disk quota is used up: set RVBUNDLE_CACHE to another folder",
        ),
        ("mkdir", errno.EROFS, "Read-only file system", "set RVBUNDLE_CACHE to a folder that can be written"),
        ("mkdir", errno.EACCES, "Permission denied", "set RVBUNDLE_CACHE to a folder that you own"),
        ("symlink", errno.EPERM, "Operation not permitted", "set RVBUNDLE_CACHE to a folder that you own"),
        ("rename", errno.EIO, "Input/output error", ""),
    ],
    ids=["disk full", "quota", "read-only", "denied", "no links", "anything else"],
)
def test_the_file_system_refuses(
    base: Path,
    image: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    number: int,
    text: str,
    hint: str,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, refuse)
    with pytest.raises(StoreError) as caught:
        ensure(base, image)
    monkeypatch.undo()
    assert (caught.value.message, caught.value.hint) == (f"can't unpack into {base}: {text}", hint)
    assert not list(base.glob("store/tmp/*"))
    assert store.list_stored(base) == []


def test_base_that_is_a_file(base: Path, image: Path) -> None:
    base.write_text("")
    with pytest.raises(StoreError) as caught:
        ensure(base, image)
    assert caught.value.message == f"can't unpack into {base}: Not a directory"


def full_disk(free: int) -> Callable[[object], SimpleNamespace]:
    return lambda _: SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_flag=0)


def test_space_is_checked_first(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "x.rvb"
    build(image, [item("usr/a", bytes(2 << 20)), item("usr/b", bytes(2 << 20))])  # one blob, two files
    monkeypatch.setattr(os, "statvfs", full_disk((20 << 20) - 4096))
    with pytest.raises(StoreError) as caught:
        ensure(base, image)
    assert caught.value.message == f"not enough space to unpack: 4 MiB are needed at {base}, 19 MiB are free"
    assert caught.value.hint == (
        "free some space (`rvbundle cache prune`), or set RVBUNDLE_CACHE to a folder on a larger disk"
    )
    assert not list(base.glob("store/tmp/*"))
    monkeypatch.setattr(os, "statvfs", full_disk(20 << 20))
    assert ensure(base, image).fresh


def test_an_image_that_claims_more_than_any_disk(base: Path, image: Path, tmp_path: Path) -> None:
    """Thousands of frames that are all the same bytes: small as a file, huge once unpacked."""

    def change(value: dict) -> None:  # type: ignore[type-arg]
        frame = value["frames"][0]
        value["frames"] = [frame] * 30000
        size = frame[2] * 30000
        value["blobs"] = [["00" * 32, 0, 0, size]] * 1000
        value["payloads"][0]["entries"] = [[f"f{n}", "f", n, -1, 0] for n in range(1000)]

    path = forge(image, tmp_path / "x.rvb", change)

    def tiny(where: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=1 << 16, f_frsize=4096, f_flag=0)

    with Reader(path) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", tiny)
        with pytest.raises(StoreError) as caught:
            store.ensure(base, reader, ARCH)
    assert caught.value.message.startswith("not enough space to unpack: ")


def test_prune_removes_all(base: Path, image: Path) -> None:
    unpacked = ensure(base, image)
    (base / "store/tmp/dead-x86_64.1").mkdir()
    removed, busy = store.prune(base)
    assert [(s.key, s.name, s.version) for s in removed] == [(key_of(image), "demo", "1.0")]
    assert busy == []
    assert not unpacked.root.exists()
    assert list(base.glob("store/tmp/*")) == []
    assert store.list_stored(base) == []
    assert ensure(base, image).fresh


def test_prune_keeps_what_is_held(base: Path, image: Path) -> None:
    unpacked = ensure(base, image)
    held = store.hold(unpacked)
    assert held is not None
    removed, busy = store.prune(base)
    assert (removed, [s.key for s in busy]) == ([], [key_of(image)])
    assert tree(unpacked.root) == SMALL_TREE
    os.close(held)
    removed, busy = store.prune(base)
    assert ([s.key for s in removed], busy) == ([key_of(image)], [])


def test_two_runs_may_hold_one_payload(base: Path, image: Path) -> None:
    unpacked = ensure(base, image)
    first, second = store.hold(unpacked), store.hold(unpacked)
    assert first is not None
    assert second is not None
    os.close(first)
    assert len(store.prune(base)[1]) == 1
    os.close(second)


def test_hold_in_a_read_only_store(base: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = ensure(base, image)
    unpacked.lock.unlink()
    assert store.hold(unpacked) is None


def test_prune_only_the_named(base: Path, image: Path, tmp_path: Path) -> None:
    ensure(base, image)
    build(tmp_path / "other.rvb", [item("usr/x", b"x")], name="other")
    ensure(base, tmp_path / "other.rvb")
    (base / "store/tmp/dead-x86_64.1").mkdir()
    removed, _ = store.prune(base, {key_of(image)})
    assert [s.name for s in removed] == ["demo"]
    assert [s.name for s in store.list_stored(base)] == ["other"]
    assert (base / "store/tmp/dead-x86_64.1").exists()


def test_prune_an_empty_store(base: Path) -> None:
    assert store.prune(base) == ([], [])
    assert store.list_stored(base) == []


def test_prune_spares_an_unpacking_under_way(base: Path, image: Path) -> None:
    """It holds its lock, though nothing of it is complete yet."""
    during: list[object] = []

    def prune(done: int, total: int) -> None:
        if not during:
            during.append(store.prune(base))

    with Reader(image) as reader:
        assert tree(store.ensure(base, reader, ARCH, prune).root) == SMALL_TREE


def test_prune_removes_what_a_killed_prune_left(base: Path, image: Path) -> None:
    unpacked = ensure(base, image)
    (unpacked.root.parent / "payload.json").unlink()
    store.prune(base)
    assert not unpacked.root.exists()


def test_list_is_sorted_by_use(base: Path, image: Path, tmp_path: Path) -> None:
    ensure(base, image)
    build(tmp_path / "other.rvb", [item("usr/x", b"x")], name="other")
    ensure(base, tmp_path / "other.rvb")
    times = {"demo": 2000.0, "other": 1000.0}
    for _ in range(2):
        for stored in store.list_stored(base):
            when = times[stored.name]
            for name in (f"{stored.key}/payload.json", f"locks/{stored.key}.lock"):
                os.utime(base / "store" / name, (when, when))
        listed = store.list_stored(base)
        assert [s.name for s in listed] == sorted(times, key=lambda n: -times[n])
        times = {"demo": 1000.0, "other": 2000.0}


def test_disk_usage_counts_blocks(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with (tmp_path / "d/sparse").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "full").write_bytes(os.urandom(1 << 20))
    (tmp_path / "link").symlink_to("full")
    assert 1 << 20 <= store.disk_usage(tmp_path) < 2 << 20


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        (os.ST_RDONLY, "{} is on a read-only file system"),
        (os.ST_NOEXEC, "{} is on a file system mounted noexec"),
        (os.ST_NOEXEC | os.ST_RDONLY, "{} is on a read-only file system"),
        (0, ""),
    ],
    ids=["read-only", "noexec", "both", "fine"],
)
def test_why_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, why: str) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flag))
    assert store.why_unusable(tmp_path / "a/b") == why.format(tmp_path)


def test_unwritable_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    assert store.why_unusable(tmp_path / "a/b") == f"{tmp_path} can't be written"


def test_foreign_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert store.why_unusable(tmp_path) == f"{tmp_path} belongs to another user"
