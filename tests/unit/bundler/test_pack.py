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

from ..images import ARCH, SMALL, SMALL_TREE, build, chunk, folder, item, link, ranges, sparse, tree


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
        effort = packing.Effort(level, 4 << 20)
        packing.pack(tmp_path / f"{level}.rvb", meta, [(payload, items)], effort, tmp_path / "frames")
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
    effort = packing.Effort(3, fmt.FRAME_RAW_MAX)
    build(tmp_path / "x.rvb", [item("a", os.urandom(fmt.FRAME_RAW_MAX))], effort=effort)
    with Reader(tmp_path / "x.rvb") as reader:
        (frame,) = reader.index().frames
    assert fmt.FRAME_RAW_MAX < frame.size <= fmt.FRAME_COMPRESSED_MAX


def test_frames_declare_their_size(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb")
    with Reader(tmp_path / "x.rvb") as reader:
        for number, frame in enumerate(reader.index().frames):
            assert zstandard.frame_content_size(reader.compressed_frame(number)) == frame.raw_size


def raw_sizes(path: Path) -> list[int]:
    with Reader(path) as reader:
        return [frame.raw_size for frame in reader.index().frames]


def test_the_agent_comes_last(tmp_path: Path) -> None:
    items = [item("app/a.py", b"1", group=packing.AGENT), item("z", b"22", group="zzz"), item("a", b"333")]
    build(tmp_path / "x.rvb", items)
    assert raw_sizes(tmp_path / "x.rvb") == [3, 2, 1]


def test_pages_have_a_frame_each(tmp_path: Path) -> None:
    chunks = [chunk(bytes([n]) * 10, (100 * n, 10)) for n in range(3)]
    build(tmp_path / "x.rvb", [ranges("a.so", 1000, *chunks), item("b", b"1"), item("c", b"2")])
    assert raw_sizes(tmp_path / "x.rvb") == [2, 10, 10, 10]
    inspection.verify(tmp_path / "x.rvb")


def test_filtered_chunks_are_a_group_of_their_own(tmp_path: Path) -> None:
    table = chunk(bytes(range(48)), (100, 48), filter_="8x3")
    build(tmp_path / "x.rvb", [sparse("a.so", 1000, chunk(b"x" * 7, (0, 7)), table)])
    assert raw_sizes(tmp_path / "x.rvb") == [7, 48]


@pytest.mark.parametrize("size", [1000, 999, 1 << 20])
def test_frames_are_as_large_as_the_effort_says(tmp_path: Path, size: int) -> None:
    content = os.urandom(2500)
    build(tmp_path / "x.rvb", [item("a", content)], effort=packing.Effort(1, size))
    expected = [size] * (2500 // size) + ([2500 % size] if 2500 % size else [])
    assert raw_sizes(tmp_path / "x.rvb") == expected
    with Reader(tmp_path / "x.rvb") as reader:
        assert reader.read_blob(0) == content


def test_the_efforts_keep_to_the_formats_limits() -> None:
    for effort in (packing.HOT_EFFORT, packing.COLD_EFFORT):
        assert 0 < effort.frame <= fmt.FRAME_RAW_MAX


def test_what_was_compressed_early_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [chunk(bytes([n]) * 10, (100 * n, 10)) for n in range(3)]
    items = [*SMALL, sparse("a.so", 1000, *chunks)]
    effort = packing.Effort(3, 4 << 20)
    packing.compress(items, effort, tmp_path / "frames")
    kept = sorted(p.name for p in (tmp_path / "frames").iterdir())
    assert kept
    monkeypatch.setattr(packing, "write_atomically", lambda *_: pytest.fail("compressed again"))
    build(tmp_path / "x.rvb", items, effort=effort)
    assert sorted(p.name for p in (tmp_path / "frames").iterdir()) == kept
    monkeypatch.undo()
    (tmp_path / "other").mkdir()
    build(tmp_path / "other/x.rvb", items, effort=effort)
    assert (tmp_path / "other/x.rvb").read_bytes() == (tmp_path / "x.rvb").read_bytes()


def test_other_ranges_are_another_image(tmp_path: Path) -> None:
    one = chunk(b"x" * 20, (0, 20))
    identities = {
        build(tmp_path / "x.rvb", [sparse("a.so", size, part)])
        for size, part in (
            (100, one),
            (101, one),
            (100, chunk(b"x" * 20, (1, 20))),
            (100, chunk(b"x" * 20, (0, 10), (50, 10))),
            (100, chunk(b"y" * 20, (0, 20))),
        )
    }
    assert len(identities) == 5


def stable_part(path: Path) -> bytes:
    with Reader(path) as reader:
        return fmt.dump_index(reader.index())[0]


@pytest.mark.parametrize("copy", [b"", b"the same text"], ids=["empty files", "equal files"])
def test_a_file_that_the_agent_has_too_leaves_the_stable_part_stable(tmp_path: Path, copy: bytes) -> None:
    """An empty __init__.py of the agent is the same blob as any other empty file."""
    found = []
    for text in (b"print(1)", b"print(2), and more"):
        items = [
            item("app/agent.py", text, group=packing.AGENT),
            item("app/pkg/__init__.py", copy, group=packing.AGENT),
            item("app/play.py", text * 2, group=packing.AGENT),
            item("usr/lib/py.typed", copy),
            item("usr/lib/x.py", b"x = 1", group="python"),
        ]
        build(tmp_path / "x.rvb", items)
        found.append(stable_part(tmp_path / "x.rvb"))
    assert found[0] == found[1]


OTHER = "riscv64" if ARCH != "riscv64" else "x86_64"
SHARED = [
    item("usr/lib/data.bin", b"data" * 100),
    item("usr/lib/shared.py", b"shared = 1\n", group="python"),
    item("app/agent.py", b"print(1)\n", group=packing.AGENT),
]
OURS = [
    *SHARED,
    item("usr/lib/libours.so", b"ours" * 1000, group=packing.LIBRARIES),
    item("usr/lib/ours.py", b"ours = 1\n", group="python"),
    item("app/__pycache__/agent.pyc", b"bytecode of ours", group=packing.AGENT),
]
THEIRS = [
    *SHARED,
    item("usr/lib/libtheirs.so", b"theirs" * 1000, group=packing.LIBRARIES),
    item("usr/lib/ours.py", b"theirs = 1\n", group="python"),
    sparse("usr/lib/libsparse.so", 1000, chunk(b"s" * 10, (0, 10)), chunk(b"data" * 100, (100, 400))),
    item("app/__pycache__/agent.pyc", b"bytecode of theirs", group=packing.AGENT),
    link("bin", "usr/bin"),
]


def needed_frames(reader: Reader, arch: str) -> set[int]:
    """Return the frames that hold a part of what a payload is made of."""
    (payload,) = [p for p in reader.index().payloads if p.arch == arch]
    blobs = {blob for entry in payload.entries for blob in entry.blobs}
    return {frame for blob in blobs for frame, _, _ in reader.extents(blob)}


def test_payloads_share_what_is_the_same(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", OURS, others={OTHER: THEIRS})
    inspection.verify(tmp_path / "x.rvb")
    with Reader(tmp_path / "x.rvb") as reader:
        index = reader.index()
        first, second = ({e.path: e for e in payload.entries} for payload in index.payloads)
        assert [payload.arch for payload in index.payloads] == [ARCH, OTHER]
        for shared in SHARED:
            assert first[shared.path].blob == second[shared.path].blob
        assert second["usr/lib/libsparse.so"].pieces[1].blob == first["usr/lib/data.bin"].blob
        assert first["usr/lib/ours.py"].blob != second["usr/lib/ours.py"].blob
        contents = {i.content for i in (*OURS, *THEIRS) if isinstance(i.content, bytes)} | {b"s" * 10}
        assert len(index.blobs) == len(contents)
        assert sum(frame.raw_size for frame in index.frames) == sum(map(len, contents))


def test_each_payload_is_unpacked_as_if_it_were_alone(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", OURS, others={OTHER: THEIRS})
    for arch, items in ((ARCH, OURS), (OTHER, THEIRS)):
        (tmp_path / arch).mkdir()
        build(tmp_path / arch / "alone.rvb", items, arch=arch)
        trees = []
        for image in (tmp_path / "x.rvb", tmp_path / arch / "alone.rvb"):
            with Reader(image) as reader:
                trees.append(tree(store.ensure(tmp_path / f"cache-{arch}", reader, arch).root))
        assert trees[0] == trees[1]
        assert trees[0]["app/__pycache__/agent.pyc"][2].startswith(b"bytecode of ")


def test_frames_hold_one_payload_only(tmp_path: Path) -> None:
    """Whoever unpacks one reads nothing of another but what both have."""
    build(tmp_path / "x.rvb", OURS, others={OTHER: THEIRS})
    with Reader(tmp_path / "x.rvb") as reader:
        index = reader.index()
        only: dict[int, set[str]] = {}
        used = [{b for e in payload.entries for b in e.blobs} for payload in index.payloads]
        for number, arch in enumerate((ARCH, OTHER)):
            for blob in used[number] - used[1 - number]:
                for frame, _, _ in reader.extents(blob):
                    only.setdefault(frame, set()).add(arch)
        assert all(len(archs) == 1 for archs in only.values())
        assert {arch for archs in only.values() for arch in archs} == {ARCH, OTHER}
        for blob in used[0] & used[1]:  # lies with the first
            assert all(only.get(frame, {ARCH}) == {ARCH} for frame, _, _ in reader.extents(blob))


@pytest.mark.parametrize("arch", [ARCH, OTHER])
def test_unpacking_reads_no_other_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    build(tmp_path / "x.rvb", OURS, others={OTHER: THEIRS})
    read: set[int] = set()
    original = Reader.compressed_frame

    def compressed_frame(self: Reader, number: int) -> bytes:
        read.add(number)
        return original(self, number)

    monkeypatch.setattr(Reader, "compressed_frame", compressed_frame)
    with Reader(tmp_path / "x.rvb") as reader:
        store.ensure(tmp_path / "cache", reader, arch)
        assert read == needed_frames(reader, arch)
        assert read < set(range(len(reader.index().frames)))


def test_a_second_payload_changes_no_frame_of_the_first(tmp_path: Path) -> None:
    """So a copy of the smaller image saves all of these when the larger one is fetched."""
    build(tmp_path / "alone.rvb", OURS)
    before = sorted(p.name for p in (tmp_path / "frames").iterdir())
    build(tmp_path / "both.rvb", OURS, others={OTHER: THEIRS})
    assert {p.name for p in (tmp_path / "frames").iterdir()} > set(before)
    frames = []
    for name in ("alone.rvb", "both.rvb"):
        with Reader(tmp_path / name) as reader:
            frames.append([(frame.sha256, frame.size, frame.raw_size) for frame in reader.index().frames])
    assert [frame for frame in frames[1] if frame in frames[0]] == frames[0]


def test_the_agents_frames_come_last_of_all_payloads(tmp_path: Path) -> None:
    """A changed agent moves nothing else, in either payload."""
    built = []
    for text in (b"print(1)\n", b"print(2), and more\n"):
        agent = item("app/agent.py", text, group=packing.AGENT)
        ours = [agent, *(i for i in OURS if i.path != agent.path)]
        theirs = [agent, *(i for i in THEIRS if i.path != agent.path)]
        build(tmp_path / "x.rvb", ours, others={OTHER: theirs})
        with Reader(tmp_path / "x.rvb") as reader:
            agents = {
                frame
                for payload in reader.index().payloads
                for entry in payload.entries
                if entry.path.startswith("app/")
                for frame, _, _ in reader.extents(entry.blob)
            }
            frames = reader.index().frames
            assert agents == set(range(len(frames) - 2, len(frames)))  # of both, and of the second alone
            built.append(([f.sha256 for f in frames[:-2]], stable_part(tmp_path / "x.rvb")))
    assert built[0] == built[1]


def test_what_was_compressed_for_one_payload_serves_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    effort = packing.Effort(3, 4 << 20)
    packing.compress(OURS, effort, tmp_path / "frames")
    kept = {p.name for p in (tmp_path / "frames").iterdir()}
    written: list[Path] = []
    original = packing.write_atomically

    def write(path: Path, data: bytes) -> None:
        written.append(path)
        original(path, data)

    monkeypatch.setattr(packing, "write_atomically", write)
    build(tmp_path / "x.rvb", OURS, others={OTHER: THEIRS}, effort=effort)
    assert written
    assert not kept & {path.name for path in written}


@pytest.mark.parametrize("bound_to", ["", "ab" * 32], ids=["image", "cold pack"])
def test_the_order_of_payloads_is_that_of_the_build(tmp_path: Path, bound_to: str) -> None:
    identities = set()
    for first, second in ((OURS, THEIRS), (THEIRS, OURS)):
        archs = (ARCH, OTHER) if first is OURS else (OTHER, ARCH)
        identities.add(
            build(tmp_path / "x.rvb", first, arch=archs[0], others={archs[1]: second}, bound_to=bound_to)
        )
        with Reader(tmp_path / "x.rvb") as reader:
            assert tuple(p.arch for p in reader.index().payloads) == archs
            assert reader.bound_to == bound_to
    assert len(identities) == 2
