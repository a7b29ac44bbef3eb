import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rvbundle.record import Recorded, read_records
from rvbundle_runtime import emulators, launch, store, supervisor
from rvbundle_runtime.errors import HostError, ImageError, StoreError
from rvbundle_runtime.host import CachePlace, Emulator, Host
from rvbundle_runtime.options import RunOptions
from rvbundle_runtime.pager import Pager
from rvbundle_runtime.plan import ColdPack, Plan

from ..images import ARCH, build, item
from .test_plan import HOST
from .trimmed import PATH, Place, make_place

HERE = replace(HOST, arch=ARCH)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    build(tmp_path / "demo-1.0.rvb")
    return tmp_path / "demo-1.0.rvb"


@pytest.fixture
def place(tmp_path: Path) -> CachePlace:
    return CachePlace(tmp_path / "cache", "a test")


def identity(image: Path) -> str:
    with launch.Reader(image) as reader:
        return reader.identity


def cold_pack(path: Path, bound_to: str) -> Path:
    build(path, [item("usr/lib/cold", b"cold")], bound_to=bound_to)
    return path


@pytest.mark.parametrize(
    ("image", "cold"),
    [
        ("a/demo-1.0.rvb", "a/demo-1.0.cold.rvb"),
        ("demo", "demo.cold.rvb"),
        ("x.rvb.rvb", "x.rvb.cold.rvb"),
    ],
)
def test_cold_beside(image: str, cold: str) -> None:
    assert launch.cold_beside(Path(image)) == Path(cold)


def test_prepare(image: Path, place: CachePlace) -> None:
    prepared = launch.prepare(HERE, RunOptions(str(image), ("x",)), place)
    assert prepared.cold is None
    assert prepared.plan.root == str(store.root_path(place.base, identity(image), ARCH))
    assert prepared.plan.argv == ("/usr/bin/agent", "--now", "x")
    assert prepared.unpacked.fresh
    assert not launch.prepare(HERE, RunOptions(str(image)), place).unpacked.fresh


def test_entry_replaces_the_start_words(image: Path, place: CachePlace) -> None:
    prepared = launch.prepare(HERE, RunOptions(str(image), ("x",)), place, ("/usr/bin/sh",))
    assert prepared.plan.argv == ("/usr/bin/sh", "x")


def test_no_cold_pack(image: Path) -> None:
    assert launch.find_cold(image, None, identity(image)) == (
        None,
        ColdPack("", "there is no demo-1.0.cold.rvb beside the image"),
    )


def test_cold_pack_beside(image: Path) -> None:
    path = cold_pack(image.with_name("demo-1.0.cold.rvb"), identity(image))
    reader, pack = launch.find_cold(image, None, identity(image))
    assert pack == ColdPack(str(path), "found beside the image")
    assert reader is not None
    reader.close()


def test_cold_pack_that_is_named(image: Path, tmp_path: Path) -> None:
    path = cold_pack(tmp_path / "other", identity(image))
    reader, pack = launch.find_cold(image, str(path), identity(image))
    assert pack == ColdPack(str(path), "named")
    assert reader is not None
    reader.close()


def test_cold_pack_of_another_image(image: Path) -> None:
    path = cold_pack(image.with_name("demo-1.0.cold.rvb"), "ab" * 32)
    assert launch.find_cold(image, None, identity(image)) == (
        None,
        ColdPack("", "demo-1.0.cold.rvb belongs to another image", unusable=True),
    )
    with pytest.raises(ImageError) as caught:
        launch.find_cold(image, str(path), identity(image))
    assert (caught.value.message, caught.value.hint) == (
        "demo-1.0.cold.rvb belongs to another image",
        "a cold pack fits only the image that it was built with",
    )


def test_an_image_is_no_cold_pack(image: Path, tmp_path: Path) -> None:
    build(tmp_path / "second.rvb")
    with pytest.raises(ImageError) as caught:
        launch.find_cold(image, str(tmp_path / "second.rvb"), identity(image))
    assert caught.value.message == "second.rvb belongs to another image"


def test_damaged_cold_pack(image: Path) -> None:
    path = image.with_name("demo-1.0.cold.rvb")
    path.write_bytes(b"")
    reader, pack = launch.find_cold(image, None, identity(image))
    assert reader is None
    assert pack.path == ""
    assert pack.reason == (
        f"demo-1.0.cold.rvb is not usable: {path}: this is no rvbundle image, or its end is missing"
    )
    with pytest.raises(ImageError):
        launch.find_cold(image, str(path), identity(image))


def test_a_named_cold_pack_that_is_missing(image: Path, tmp_path: Path) -> None:
    with pytest.raises(ImageError) as caught:
        launch.find_cold(image, str(tmp_path / "nothing"), identity(image))
    assert caught.value.message == f"can't open {tmp_path}/nothing: No such file or directory"


def test_running_a_cold_pack(image: Path, place: CachePlace) -> None:
    path = cold_pack(image.with_name("demo-1.0.cold.rvb"), identity(image))
    with pytest.raises(ImageError) as caught:
        launch.prepare(HERE, RunOptions(str(path)), place)
    assert caught.value.message == f"{path} is a cold pack, not an image"
    assert caught.value.hint == "run the .rvb file that lies beside it (the one without .cold)"


def test_an_image_for_another_machine(image: Path, place: CachePlace) -> None:
    with pytest.raises(HostError) as caught:
        launch.prepare(replace(HOST, arch="s390x", environ={}), RunOptions(str(image)), place)
    assert caught.value.message == (
        f"{image} has no payload for this machine (s390x), and no emulator will do; it has: {ARCH}\n"
        f"  not qemu for {ARCH}: there is no qemu-{ARCH} in PATH\n"
        f"  not box64 for {ARCH}: there is no box64 in PATH"
    )


def test_nothing_looks_for_emulators_before_a_native_run(
    image: Path, place: CachePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(emulators, "look", refuse)
    for options in ({}, {"payload": ARCH}, {"emulator": "none"}):
        prepared = launch.prepare(HERE, RunOptions(str(image), **options), place)  # type: ignore[arg-type]
        assert prepared.plan.emulation is None
    with pytest.raises(AssertionError):
        launch.prepare(HERE, RunOptions(str(image), emulator="qemu"), place)


def test_a_warm_emulated_start_reads_no_index(
    image: Path, place: CachePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (Emulator("qemu", ARCH, "/opt/qemu", "10.0.13"),)
    monkeypatch.setattr(emulators, "look", lambda host, *_: replace(host, emulators=found, binfmt_denied=""))
    options = RunOptions(str(image), emulator="qemu")
    assert launch.prepare(HERE, options, place).unpacked.fresh
    monkeypatch.delattr(launch.Reader, "index")
    assert not launch.prepare(HERE, options, place).unpacked.fresh
    with pytest.raises(HostError) as caught:
        launch.prepare(HERE, replace(options, payload="s390x"), place)
    assert caught.value.message == f"{image} has no payload for s390x; it has: {ARCH}"


def test_an_emulated_run(image: Path, place: CachePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Emulator("qemu", ARCH, "/opt/qemu", "10.0.13")
    asked = []

    def look(host: Host, guests: tuple[str, ...], base: Path) -> Host:
        asked.append((guests, base))
        return replace(host, emulators=(found,), binfmt_denied="")

    monkeypatch.setattr(emulators, "look", look)
    plan = launch.prepare(HERE, RunOptions(str(image), ("x",), emulator="qemu"), place).plan
    assert asked == [((ARCH,), place.base)]
    assert plan.argv == plan.command == ("/usr/bin/agent", "--now", "x")
    assert plan.emulation
    assert plan.emulation.children == "binfmt_misc"
    assert plan.emulation.start.files == (("/opt/qemu", "/run/rvbundle/emulator.d/qemu"),)


def test_no_execution_allowed(image: Path, place: CachePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.prepare(HERE, RunOptions(str(image)), place)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(StoreError) as caught:
        launch.prepare(HERE, RunOptions(str(image)), place)
    root = store.root_path(place.base, identity(image), ARCH)
    assert caught.value.message == (
        f"{root} is on a file system mounted noexec: nothing can be executed from it"
    )
    assert caught.value.hint == "set RVBUNDLE_CACHE to a folder on another file system"


def test_a_tree_that_something_cleaned_away_is_unpacked_anew(image: Path, place: CachePlace) -> None:
    """systemd-tmpfiles and the like remove what was long unused, file by file."""
    first = launch.prepare(HERE, RunOptions(str(image)), place)
    first.unpacked.root.rename(place.base / "gone")
    again = launch.prepare(HERE, RunOptions(str(image)), place)
    assert again.unpacked.fresh
    assert (again.unpacked.root / "usr/bin/agent").exists()


def test_an_image_without_programs(tmp_path: Path, place: CachePlace) -> None:
    build(tmp_path / "x.rvb", [item("app/x.py", b"")])
    with pytest.raises(HostError) as caught:
        launch.prepare(HERE, RunOptions(str(tmp_path / "x.rvb")), place)
    assert caught.value.message.endswith("/root holds no programs")


def test_pruned_between_finding_and_holding(
    image: Path, place: CachePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cache prune` in another terminal may come in the moment before the tree is held."""
    launch.prepare(HERE, RunOptions(str(image)), place)
    original, pruned, seen = store.hold, [], []

    def hold(unpacked: store.Unpacked) -> int | None:
        if not pruned:
            pruned.append(store.prune(place.base))
        return original(unpacked)

    def run(plan: Plan, pager: object, present: bytes) -> supervisor.Outcome:
        assert present == b""  # no library of it is trimmed
        seen.append(os.path.exists(f"{plan.root}/usr/bin/agent"))
        return supervisor.Outcome(0)

    monkeypatch.setattr(store, "hold", hold)
    monkeypatch.setattr(supervisor, "run", run)
    assert launch.run(HERE, RunOptions(str(image)), place) == 0
    assert seen == [True]


@pytest.fixture
def trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place(tmp_path, monkeypatch)


def outcome(code: int, seen: list[object]) -> object:
    def run(plan: Plan, pager: object, present: bytes) -> supervisor.Outcome:
        seen.append((plan, pager, present))
        return supervisor.Outcome(code)

    return run


def cache_of(trimmed: Place) -> CachePlace:
    return CachePlace(trimmed.unpacked.root.parents[2], "a test")


def test_a_run_of_trimmed_libraries(trimmed: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor gets the bits of what earlier runs restored, and a pager if there is a cold pack."""
    seen: list[tuple[Plan, object, bytes]] = []
    monkeypatch.setattr(supervisor, "run", outcome(7, seen))  # type: ignore[arg-type]
    trimmed.log.write_text(f"S t\nP t 2 {PATH}\n")
    image = trimmed.pack.with_name("demo.rvb")
    assert launch.run(HERE, RunOptions(str(image)), cache_of(trimmed)) == 7
    trimmed.pack.rename(trimmed.pack.with_name("elsewhere"))
    assert launch.run(HERE, RunOptions(str(image)), cache_of(trimmed)) == 7
    assert [(pager is None, present) for _, pager, present in seen] == [
        (False, bytes([1 << 5, 0])),
        (True, bytes([1 << 5, 0])),
    ]


def test_a_run_with_a_damaged_table(trimmed: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "run", lambda *_: pytest.fail("it was started"))
    (trimmed.unpacked.root / "usr/lib/rvbundle/absent.tbl").write_bytes(b"")
    with pytest.raises(ImageError) as caught:
        launch.run(HERE, RunOptions(str(trimmed.pack.with_name("demo.rvb"))), cache_of(trimmed))
    assert caught.value.message.startswith("the table of absent pages is damaged (")


def test_a_record_names_files_and_pages(
    trimmed: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = trimmed.pack.with_name("demo.rvb")

    def run(plan: Plan, pager: Pager, present: bytes) -> supervisor.Outcome:
        assert pager.restore("usr/lib/other.pyc") == (0, "")
        assert pager.restore_pages(PATH, 0, send=False) == (0, b"")
        return supervisor.Outcome(0)

    monkeypatch.setattr(supervisor, "run", run)
    options = RunOptions(str(image), record=str(tmp_path / "record.json"))
    launch.run(HERE, options, cache_of(trimmed))
    value = json.loads((tmp_path / "record.json").read_text())
    assert value == {
        "format": 2,
        "name": "demo",
        "version": "1.0",
        "image": identity(image),
        "restored": ["usr/lib/other.pyc"],
        "pages": {PATH: [0, 1]},
    }
    assert read_records([tmp_path / "record.json"]) == Recorded(
        frozenset({"usr/lib/other.pyc"}), {PATH: frozenset({0, 1})}
    )


def test_a_record_that_can_not_be_written(
    image: Path, place: CachePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "run", outcome(0, []))  # type: ignore[arg-type]
    with pytest.raises(StoreError) as caught:
        launch.run(HERE, RunOptions(str(image), record=str(tmp_path)), place)
    assert caught.value.message == f"can't write the record {tmp_path}: Is a directory"
