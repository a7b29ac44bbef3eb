import hashlib
import os
from pathlib import Path

import pytest
import zstandard

from rvbundle import inspection
from rvbundle import pack as packing
from rvbundle_runtime import format as fmt
from rvbundle_runtime import store
from rvbundle_runtime.image import Reader

from ..images import ARCH, SMALL, SMALL_TREE, build, folder, item, link, tree


def test_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        build(tmp_path / place / "x.rvb")
    assert (tmp_path / "one/x.rvb").read_bytes() == (tmp_path / "two/x.rvb").read_bytes()


def test_order_of_items_does_not_matter(tmp_path: Path) -> None:
    first = build(tmp_path / "a.rvb", SMALL)
    second = build(tmp_path / "b.rvb", tuple(reversed(SMALL)))
    assert first == second
    assert (tmp_path / "a.rvb").read_bytes() == (tmp_path / "b.rvb").read_bytes()


def test_cached_frames_give_the_same_bytes(tmp_path: Path) -> None:
    build(tmp_path / "a.rvb")
    build(tmp_path / "b.rvb")  # from the cache that the first one filled
    assert (tmp_path / "a.rvb").read_bytes() == (tmp_path / "b.rvb").read_bytes()
    assert len(list((tmp_path / "frames").iterdir())) == 3


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_damaged_cache_of_frames(tmp_path: Path, damage: str) -> None:
    """A power failure may leave such files; a cold pack made of them fails only when it is needed."""
    build(tmp_path / "a.rvb")
    for kept in (tmp_path / "frames").iterdir():
        data = bytearray(kept.read_bytes())
        data[len(data) // 2] ^= 1
        kept.write_bytes({"empty": b"", "cut": bytes(data[:-3]), "flipped": bytes(data)}[damage])
    build(tmp_path / "b.rvb")
    inspection.verify(tmp_path / "b.rvb")
    assert (tmp_path / "a.rvb").read_bytes() == (tmp_path / "b.rvb").read_bytes()


def test_frames_of_another_level_are_not_reused(tmp_path: Path) -> None:
    meta = packing.ImageMeta("demo", "1", "test", False, {}, {})
    payload = packing.PayloadMeta(ARCH, "wheels", "3.11", ("/x",), "lib", ())
    items = [item("a", os.urandom(100) * 200)]
    for level in (1, 19):
        packing.pack(tmp_path / f"{level}.rvb", meta, payload, items, level, tmp_path / "frames")
    assert len(list((tmp_path / "frames").iterdir())) == 2


def test_round_trip(tmp_path: Path) -> None:
    identity = build(tmp_path / "x.rvb")
    with Reader(tmp_path / "x.rvb") as reader:
        assert reader.identity == identity
        unpacked = store.ensure(tmp_path / "cache", reader, ARCH)
    assert tree(unpacked.root) == SMALL_TREE
    inspection.verify(tmp_path / "x.rvb")


def test_identity_depends_on_the_content(tmp_path: Path) -> None:
    identities = {
        build(tmp_path / "x.rvb", items)
        for items in (
            [item("a", b"1")],
            [item("a", b"2")],
            [item("b", b"1")],
            [item("a", b"1", kind=fmt.EXECUTABLE)],
            [item("a", b"1"), folder("b")],
            [item("a", b"1"), link("b", "a")],
            [item("a", b"1", reason="another")],
            [],
        )
    }
    assert len(identities) == 8


def test_nothing_at_all(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", [])
    inspection.verify(tmp_path / "x.rvb")
    with Reader(tmp_path / "x.rvb") as reader:
        assert (reader.index().frames, reader.index().blobs) == ((), ())


def test_only_empty_files(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", [item("a"), item("b", group="other")])
    inspection.verify(tmp_path / "x.rvb")
    with Reader(tmp_path / "x.rvb") as reader:
        store.write_tree(reader, reader.index().payloads[0].entries, tmp_path)
    assert (tmp_path / "a").read_bytes() == b""


@pytest.mark.parametrize(
    ("sizes", "frames"),
    [
        ([4 << 20], [4 << 20]),
        ([(4 << 20) + 1], [4 << 20, 1]),
        ([4 << 20, 0, 1], [4 << 20, 1]),
        ([(4 << 20) - 1, 2], [4 << 20, 1]),
        ([8 << 20, 1], [4 << 20, 4 << 20, 1]),
        ([1, 4 << 20], [4 << 20, 1]),
    ],
)
def test_frame_borders(tmp_path: Path, sizes: list[int], frames: list[int]) -> None:
    contents = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    build(tmp_path / "x.rvb", [item(f"f{n}", content) for n, content in enumerate(contents)])
    inspection.verify(tmp_path / "x.rvb")
    with Reader(tmp_path / "x.rvb") as reader:
        index = reader.index()
        assert [frame.raw_size for frame in index.frames] == frames
        for number, content in enumerate(contents):
            (entry,) = [e for e in index.payloads[0].entries if e.path == f"f{number}"]
            assert reader.read_blob(entry.blob) == content


def test_groups_never_share_a_frame(tmp_path: Path) -> None:
    """So that a changed agent leaves the frames of its libraries as they are."""
    libraries = [
        item("usr/lib/a.so", b"a" * 1000, group="libraries"),
        item("usr/lib/b.so", b"b", group="libraries"),
    ]
    frames = []
    for text in (b"print(1)", b"print(2); longer"):
        build(tmp_path / "x.rvb", [*libraries, item("app/x.py", text, group="agent")])
        with Reader(tmp_path / "x.rvb") as reader:
            frames.append({frame.sha256 for frame in reader.index().frames})
    assert len(frames[0]) == 2
    assert len(frames[0] & frames[1]) == 1


def test_packages_and_reasons(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", [item("a", b"1", package="numpy", reason="r2"), item("b", b"2", reason="r1")])
    with Reader(tmp_path / "x.rvb") as reader:
        payload = reader.index().payloads[0]
    assert payload.packages == (fmt.Package("numpy", "2.4.6"),)
    assert payload.reasons == ("r1", "r2")
    assert [(e.package, e.reason) for e in payload.entries] == [(0, 1), (-1, 0)]


def test_file_and_its_tail(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", [item("a.so", b"tail", kind=fmt.TAIL), item("a.so", b"library")])
    inspection.verify(tmp_path / "x.rvb")


def from_file(path: Path, content: bytes) -> packing.Item:
    return packing.Item(
        "a", fmt.FILE, "data", path, len(content), hashlib.sha256(content).hexdigest(), "", "", "a test"
    )


def test_content_from_files(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40000
    (tmp_path / "source").write_bytes(content)
    build(tmp_path / "x.rvb", [from_file(tmp_path / "source", content)])
    with Reader(tmp_path / "x.rvb") as reader:
        assert reader.read_blob(0) == content


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"short")
    with pytest.raises(OSError, match="source changed while it was packed"):
        build(tmp_path / "x.rvb", [from_file(tmp_path / "source", b"longer than that")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["frames", "source"]


def test_failure_leaves_the_old_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "x.rvb")
    before = (tmp_path / "x.rvb").read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        build(tmp_path / "x.rvb", [item("other", b"x")])
    monkeypatch.undo()
    assert (tmp_path / "x.rvb").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["frames", "x.rvb"]


def test_incompressible_data_stays_within_the_formats_limits(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", [item("a", os.urandom(fmt.FRAME_RAW_MAX))])
    with Reader(tmp_path / "x.rvb") as reader:
        (frame,) = reader.index().frames
    assert fmt.FRAME_RAW_MAX < frame.size <= fmt.FRAME_COMPRESSED_MAX


def test_frames_declare_their_size(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb")
    with Reader(tmp_path / "x.rvb") as reader:
        for number, frame in enumerate(reader.index().frames):
            assert zstandard.frame_content_size(reader.compressed_frame(number)) == frame.raw_size
