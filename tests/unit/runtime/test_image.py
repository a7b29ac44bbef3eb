import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from rvbundle import inspection
from rvbundle_runtime import format as fmt
from rvbundle_runtime import store
from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.image import Reader

from ..images import ARCH, SMALL, SMALL_TREE, build, forge, item, read_index, tree

NO_IMAGE = "this is no rvbundle image, or its end is missing"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "demo-1.0.rvb"
    build(path)
    return path


def read_everything(path: Path) -> None:
    with Reader(path) as reader:
        for number in range(len(reader.index().blobs)):
            reader.read_blob(number)


def blob_of(reader: Reader, path: str) -> int:
    return next(e.blob for e in reader.index().payloads[0].entries if e.path == path)


def test_what_was_packed_is_read(image: Path) -> None:
    with Reader(image) as reader:
        assert reader.bound_to == ""
        index = reader.index()
        assert (index.name, index.version, index.created_by, index.env) == (
            "demo",
            "1.0",
            "a test",
            {"GREETING": "hello"},
        )
        payload = index.payloads[0]
        assert (payload.arch, payload.argv) == (ARCH, ("/usr/bin/agent", "--now"))
        assert [e.path for e in payload.entries] == sorted(i.path for i in SMALL)
        for packed in SMALL:
            if isinstance(packed.content, bytes):
                assert reader.read_blob(blob_of(reader, packed.path)) == packed.content
        # Equal contents are one blob, and the agent's files have a frame of their own.
        assert blob_of(reader, "usr/lib/data.txt") == blob_of(reader, "usr/lib/copy.txt")
        frames = {
            path: index.blobs[blob_of(reader, path)].frame for path in ("app/train.py", "usr/bin/agent")
        }
        assert len(set(frames.values())) == 2


def test_identity_is_the_digest_of_the_compressed_index(image: Path) -> None:
    with Reader(image) as reader:
        start = reader.footer.index_offset
        data = image.read_bytes()[start : start + reader.footer.index_size]
        assert reader.identity == hashlib.sha256(data).hexdigest()


def test_cold_pack_names_its_image(tmp_path: Path) -> None:
    build(tmp_path / "x.cold.rvb", bound_to="ab" * 32)
    with Reader(tmp_path / "x.cold.rvb") as reader:
        assert reader.bound_to == "ab" * 32


def test_blob_larger_than_frames(tmp_path: Path) -> None:
    content = os.urandom(64) * (9 << 14)  # 9 MiB: three frames
    build(tmp_path / "x.rvb", [item("a", b"first"), item("b", content), item("c", b"last")])
    with Reader(tmp_path / "x.rvb") as reader:
        assert [f.raw_size for f in reader.index().frames] == [4 << 20, 4 << 20, (1 << 20) + 9]
        assert list(reader.extents(blob_of(reader, "b"))) == [
            (0, 5, 4 << 20),
            (1, 0, 4 << 20),
            (2, 0, (1 << 20) + 5),
        ]
        assert reader.read_blob(blob_of(reader, "b")) == content
        assert reader.read_blob(blob_of(reader, "c")) == b"last"
    inspection.verify(tmp_path / "x.rvb")


@pytest.mark.parametrize(
    "prefix", [b"#!/bin/sh\nexec rvbundle\n", b"\x7fELF" + bytes(5000)], ids=["sh", "elf"]
)
def test_anything_may_stand_before_the_header(image: Path, prefix: bytes) -> None:
    with Reader(image) as reader:
        identity = reader.identity
    image.write_bytes(prefix + image.read_bytes())
    with Reader(image) as reader:
        assert reader.identity == identity
    read_everything(image)


def test_offsets_beyond_4_gib(tmp_path: Path, image: Path) -> None:
    data = image.read_bytes()
    with (tmp_path / "big.rvb").open("wb") as file:  # sparse: takes no space
        file.seek((4 << 30) + 12345)
        file.write(data)
    with Reader(tmp_path / "big.rvb") as reader:
        store.write_tree(reader, reader.index().payloads[0].entries, tmp_path / "out")
    inspection.verify(tmp_path / "big.rvb")


def test_frame_beyond_4_gib(tmp_path: Path, image: Path) -> None:
    """Offsets inside the image itself, not only those of what stands before it."""
    data = image.read_bytes()
    with Reader(image) as reader:
        footer = reader.footer
        gap = 5 << 30

        def move(value: dict[str, Any]) -> None:
            for frame in value["frames"]:
                frame[0] += gap

        forged = forge(image, tmp_path / "forged", move).read_bytes()
    index_and_footer = forged[footer.index_offset :]
    index = index_and_footer[: -fmt.FOOTER_SIZE]
    end = fmt.parse_footer(forged[-fmt.FOOTER_SIZE :], len(forged))
    moved = fmt.Footer(
        end.image_size + gap,
        end.index_offset + gap,
        end.index_size,
        end.index_raw_size,
        end.identity,
        end.bound_to,
    )
    with (tmp_path / "big.rvb").open("wb") as file:
        file.write(fmt.pack_header())
        file.seek(fmt.HEADER.size + gap)
        file.write(data[fmt.HEADER.size : footer.index_offset] + index + fmt.pack_footer(moved))
    inspection.verify(tmp_path / "big.rvb")
    with Reader(tmp_path / "big.rvb") as reader:
        assert reader.read_blob(blob_of(reader, "app/train.py")) == b"print(1)\n"


def test_truncated_anywhere(tmp_path: Path, image: Path) -> None:
    data = image.read_bytes()
    cut = tmp_path / "cut.rvb"
    for size in [*range(0, len(data), 3), len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(ImageError) as caught:
            Reader(cut)
        assert caught.value.message == f"{cut}: {NO_IMAGE}"


def test_beginning_missing(tmp_path: Path, image: Path) -> None:
    data = image.read_bytes()
    cut = tmp_path / "cut.rvb"
    for start in range(1, len(data) - fmt.FOOTER_SIZE + 1, 7):
        cut.write_bytes(data[start:])
        with pytest.raises(ImageError) as caught:
            Reader(cut)
        assert caught.value.message == (
            f"{cut}: the image is cut short: {len(data) - start} bytes of {len(data)} are here"
        )
        assert caught.value.hint == "copy the image again from its source"


def test_every_byte_flipped(tmp_path: Path, image: Path) -> None:
    data = bytearray(image.read_bytes())
    damaged = tmp_path / "damaged.rvb"
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        damaged.write_bytes(data)
        with pytest.raises(ImageError):
            inspection.verify(damaged)
        data[place] ^= 1 << place % 8


def test_every_byte_flipped_is_never_unpacked(tmp_path: Path, image: Path) -> None:
    data = bytearray(image.read_bytes())
    damaged = tmp_path / "damaged.rvb"
    wrong = []
    for place in range(0, len(data), 5):
        data[place] ^= 0x10
        damaged.write_bytes(data)
        base = tmp_path / "store"
        try:
            with Reader(damaged) as reader:
                store.ensure(base, reader, ARCH)
        except ImageError:
            pass
        else:
            wrong.append(place)
        data[place] ^= 0x10
    assert wrong == []
    assert store.list_stored(tmp_path / "store") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", NO_IMAGE),
        (b"x", NO_IMAGE),
        (b"PK\x03\x04" + bytes(1000), NO_IMAGE),
        (bytes(128), NO_IMAGE),
    ],
    ids=["empty", "one byte", "zip", "zeros"],
)
def test_foreign_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.rvb"
    path.write_bytes(content)
    with pytest.raises(ImageError) as caught:
        Reader(path)
    assert caught.value.message == f"{path}: {message}"
    assert caught.value.hint == "if it was downloaded or copied, compare its size with the original"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as caught:
        Reader(tmp_path / "nothing.rvb")
    assert caught.value.message == f"can't open {tmp_path}/nothing.rvb: No such file or directory"
    with pytest.raises(ImageError) as caught:
        Reader(tmp_path)
    assert caught.value.message == f"can't read {tmp_path}: Is a directory"


def test_refused_files_are_closed(tmp_path: Path) -> None:
    (tmp_path / "x.rvb").write_bytes(b"no image")
    before = os.listdir("/proc/self/fd")
    for path in (tmp_path / "x.rvb", tmp_path):
        with pytest.raises(ImageError):
            Reader(path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_swapped_indices_are_refused(tmp_path: Path, image: Path) -> None:
    """An index with the right form whose digest is another one."""
    path = forge(image, tmp_path / "x.rvb", identity=bytes(32))
    with Reader(path) as reader, pytest.raises(ImageError) as caught:
        reader.index()
    assert caught.value.message == f"{path}: index is damaged (its digest is not what the image says)"
    assert caught.value.hint == "copy the image again from its source"


@pytest.mark.parametrize("claimed", [0, 1, 256 << 20], ids=["zero", "one", "256 MiB"])
def test_index_of_another_raw_size(tmp_path: Path, image: Path, claimed: int) -> None:
    path = forge(image, tmp_path / "x.rvb", raw_size=claimed)
    with Reader(path) as reader, pytest.raises(ImageError) as caught:
        reader.index()
    assert caught.value.message.startswith(f"{path}: the index can't be decoded (the frame declares ")


def test_index_that_claims_to_be_huge(tmp_path: Path, image: Path) -> None:
    path = forge(image, tmp_path / "x.rvb", raw_size=1 << 40)
    with pytest.raises(ImageError) as caught:
        Reader(path)
    assert caught.value.message == f"{path}: the image claims an index of 1099511627776 bytes: too large"


def test_index_that_is_no_zstd(tmp_path: Path, image: Path) -> None:
    data = image.read_bytes()
    footer = fmt.parse_footer(data[-fmt.FOOTER_SIZE :], len(data))
    junk = b"?" * footer.index_size
    end = fmt.Footer(
        footer.image_size,
        footer.index_offset,
        footer.index_size,
        footer.index_raw_size,
        hashlib.sha256(junk).digest(),
        footer.bound_to,
    )
    path = tmp_path / "x.rvb"
    path.write_bytes(data[: footer.index_offset] + junk + fmt.pack_footer(end))
    with Reader(path) as reader, pytest.raises(ImageError) as caught:
        reader.index()
    assert caught.value.message.startswith(f"{path}: the index can't be decoded (")


def test_errors_in_the_index_name_the_file(tmp_path: Path, image: Path) -> None:
    path = forge(image, tmp_path / "x.rvb", raw=b"{}")
    with Reader(path) as reader, pytest.raises(ImageError) as caught:
        reader.index()
    assert caught.value.message.startswith(f"{path}: ")


def add(entry: list[object]) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["payloads"][0]["entries"].append(entry)


def set_frame(field: int, number: int) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        value["frames"][0][field] = number

    return change


def grow_frame(value: dict[str, Any]) -> None:
    value["frames"][0][2] += 1


def shrink_last_frame(value: dict[str, Any]) -> None:
    value["frames"][-1][2] -= 1
    value["blobs"] = [[h, f, o, 0] for h, f, o, _ in value["blobs"]]


def swap_digests(value: dict[str, Any]) -> None:
    first, second = value["blobs"][:2]
    first[0], second[0] = second[0], first[0]


FORGERIES = [
    pytest.param(add(["/etc/passwd", "f", 0, -1, 0]), "a path that leaves the tree", id="absolute path"),
    pytest.param(add(["../x", "f", 0, -1, 0]), "a path that leaves the tree", id="parent"),
    pytest.param(add(["usr/../../x", "f", 0, -1, 0]), "a path that leaves the tree", id="climbing path"),
    pytest.param(add(["evil", "l", "/etc", -1, 0]), "a link that leaves the tree", id="absolute link"),
    pytest.param(add(["evil", "l", "../..", -1, 0]), "a link that leaves the tree", id="climbing link"),
    pytest.param(add(["bin/x", "f", 0, -1, 0]), "'bin/x' lies below 'bin'", id="below a link"),
    pytest.param(add(["app/train.py", "x", 0, -1, 0]), "names a path twice", id="duplicate path"),
    pytest.param(add(["x", "f", 99, -1, 0]), "a blob that is not there", id="blob number"),
    pytest.param(add(["x", "d", 99, -1, 0]), "a blob that is not there", id="folder with a blob number"),
    pytest.param(add(["x", "f", float("inf"), -1, 0]), "can't be read", id="infinite blob number"),
    pytest.param(add(["x\ud800", "f", 0, -1, 0]), "an impossible path", id="lone surrogate"),
    pytest.param(set_frame(0, 1 << 40), "frame 0 lies outside the image", id="frame offset"),
    pytest.param(set_frame(0, 0), "frame 0 lies outside the image", id="frame over the header"),
    pytest.param(set_frame(1, 4 << 20), "frame 0 lies outside the image", id="frame size"),
    pytest.param(set_frame(2, 1 << 40), "frame 0 claims 1099511627776 bytes", id="huge frame"),
    pytest.param(set_frame(0, 17), "is damaged in 1 of 3 frames", id="shifted frame"),
    pytest.param(
        grow_frame, "is damaged in 1 of 3 frames; files that are affected:", id="frame of another raw size"
    ),
    pytest.param(
        shrink_last_frame, "is damaged in 1 of 3 frames; files that are affected:", id="blobs of nothing"
    ),
    pytest.param(swap_digests, "damaged", id="digests swapped"),
]


@pytest.mark.parametrize(("change", "message"), FORGERIES)
def test_forged_index_is_found_by_verify(
    tmp_path: Path, image: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = forge(image, tmp_path / "x.rvb", change)
    with pytest.raises(ImageError) as caught:
        inspection.verify(path)
    assert message in caught.value.message


@pytest.mark.parametrize(("change", "message"), FORGERIES[:17])
def test_forged_index_is_never_unpacked(
    tmp_path: Path, image: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = forge(image, tmp_path / "x.rvb", change)
    with Reader(path) as reader, pytest.raises(ImageError):
        store.ensure(tmp_path / "store", reader, ARCH)
    assert store.list_stored(tmp_path / "store") == []
    assert list((tmp_path / "store").glob("store/tmp/*")) == []


@pytest.mark.parametrize(
    "show",
    [
        lambda path: inspection.print_report(inspection.inspect(path, True)),
        lambda path: inspection.inspect(path, False),
        inspection.verify,
        read_everything,
    ],
    ids=["inspect --files", "inspect", "verify", "read"],
)
def test_blob_that_starts_behind_its_frame(
    tmp_path: Path, image: Path, show: Callable[[Path], object]
) -> None:
    """Either refused as damage, or read as the place it means; never another error."""

    def change(value: dict[str, Any]) -> None:
        for blob in value["blobs"]:
            before = sum(frame[2] for frame in value["frames"][: blob[1]])
            blob[1], blob[2] = 0, before + blob[2]

    path = forge(image, tmp_path / "x.rvb", change)
    try:
        show(path)
    except ImageError as error:
        assert "lies outside" in error.message  # noqa: PT017


def test_wrong_zstd_size_in_the_middle_of_a_tree(tmp_path: Path, image: Path) -> None:
    path = forge(image, tmp_path / "x.rvb", grow_frame)
    with Reader(path) as reader:
        number = next(n for n, blob in enumerate(reader.index().blobs) if blob.frame == 0)
        with pytest.raises(ImageError) as caught:
            reader.read_blob(number)
        assert f"{path}: frame 0 can't be decoded (the frame declares " in caught.value.message
        with pytest.raises(ImageError) as caught:
            store.write_tree(reader, reader.index().payloads[0].entries, tmp_path / "out")
        assert f"{path}: frame 0 can't be decoded (the frame declares " in caught.value.message


def test_frame_without_a_declared_size(tmp_path: Path, image: Path) -> None:
    content = b"print(1)\n"
    data = image.read_bytes()
    footer = fmt.parse_footer(data[-fmt.FOOTER_SIZE :], len(data))
    bare = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    begin = data[: footer.index_offset] + bare
    shifted = tmp_path / "shifted"
    moved = fmt.Footer(
        footer.image_size + len(bare),
        footer.index_offset + len(bare),
        footer.index_size,
        footer.index_raw_size,
        footer.identity,
        footer.bound_to,
    )
    index = data[footer.index_offset : -fmt.FOOTER_SIZE]
    shifted.write_bytes(begin + index + fmt.pack_footer(moved))

    def change(value: dict[str, Any]) -> None:
        value["frames"].append(
            [footer.index_offset, len(bare), len(content), hashlib.sha256(bare).hexdigest()]
        )
        value["blobs"].append(
            [hashlib.sha256(content).hexdigest(), len(value["frames"]) - 1, 0, len(content)]
        )

    path = forge(shifted, tmp_path / "x.rvb", change)
    with Reader(path) as reader, pytest.raises(ImageError) as caught:
        reader.read_blob(len(reader.index().blobs) - 1)
    assert "can't be decoded (the frame declares -1 bytes, expected 9)" in caught.value.message


def test_a_reader_keeps_few_frames(tmp_path: Path) -> None:
    items = [item(f"f{n}", bytes([n]) * 10, group=f"group{n}") for n in range(8)]
    build(tmp_path / "x.rvb", items)
    with Reader(tmp_path / "x.rvb") as reader:
        for _ in range(2):
            for number in range(8):
                assert reader.read_blob(number) == bytes([number]) * 10
        assert len(reader.index().frames) == 8


def test_closed_twice(image: Path) -> None:
    reader = Reader(image)
    reader.close()
    reader.close()
    with pytest.raises(ImageError):
        reader.index()


def test_the_small_image_is_what_the_tests_believe(tmp_path: Path, image: Path) -> None:
    (tmp_path / "out").mkdir()
    with Reader(image) as reader:
        store.write_tree(reader, reader.index().payloads[0].entries, tmp_path / "out")
    assert tree(tmp_path / "out") == SMALL_TREE


def reindexed(image: Path, target: Path, index: bytes, raw_size: int) -> Path:
    """Write `image` again with other bytes for its index, whose digest is as it should be."""
    data = image.read_bytes()
    old = fmt.parse_footer(data[-fmt.FOOTER_SIZE :], len(data))
    size = old.index_offset + len(index) + fmt.FOOTER_SIZE
    digest = hashlib.sha256(index).digest()
    end = fmt.Footer(size, old.index_offset, len(index), raw_size, digest, old.bound_to)
    target.write_bytes(data[: old.index_offset] + index + fmt.pack_footer(end))
    return target


def pack_parts(stable: bytes, rest: bytes) -> tuple[bytes, bytes]:
    first, second = (zstandard.ZstdCompressor().compress(part) for part in (stable, rest))
    return first, second


def test_an_index_is_two_frames(image: Path) -> None:
    """The first one is the same for any agent, so that an update need not carry it."""
    data = image.read_bytes()
    footer = fmt.parse_footer(data[-fmt.FOOTER_SIZE :], len(data))
    index = data[footer.index_offset : -fmt.FOOTER_SIZE]
    size, raw = fmt.INDEX_HEAD.unpack_from(index)
    first = zstandard.ZstdDecompressor().decompress(index[16 : 16 + size])
    second = zstandard.ZstdDecompressor().decompress(index[16 + size :])
    assert (len(first), len(first) + len(second)) == (raw, footer.index_raw_size)
    with Reader(image) as reader:
        assert (first, second) == fmt.dump_index(reader.index())
        assert reader.index() == fmt.load_index(first + second)


def test_a_changed_agent_changes_nothing_that_comes_before_its_frame(tmp_path: Path) -> None:
    files = []
    for text in (b"print(1)\n", b"print(2)  # and more\n"):
        changed = [i for i in SMALL if i.path != "app/train.py"]
        build(tmp_path / "x.rvb", [*changed, item("app/train.py", text, group="agent")])
        files.append((tmp_path / "x.rvb").read_bytes())
    footers = [fmt.parse_footer(data[-fmt.FOOTER_SIZE :], len(data)) for data in files]
    heads = [data[f.index_offset :] for data, f in zip(files, footers, strict=True)]
    sizes = [fmt.INDEX_HEAD.unpack_from(head)[0] for head in heads]
    assert heads[0][: 16 + sizes[0]] == heads[1][: 16 + sizes[1]]
    assert read_index(tmp_path / "x.rvb")["rest"]["frames"] != []
    last = read_index(tmp_path / "x.rvb")["rest"]["frames"][0][0]
    assert files[0][:last] == files[1][:last]


def test_an_index_in_one_frame_is_read_too(image: Path, tmp_path: Path) -> None:
    with Reader(image) as reader, Reader(forge(image, tmp_path / "x.rvb")) as other:
        assert other.index() == reader.index()


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", "it is too short"),
        (bytes(15), "it is too short"),
        (fmt.INDEX_HEAD.pack(1, 0), "its parts do not fit its size"),
        (fmt.INDEX_HEAD.pack((1 << 64) - 1, 0), "its parts do not fit its size"),
        (fmt.INDEX_HEAD.pack(0, 51), "its parts do not fit its size"),
        (fmt.INDEX_HEAD.pack(0, (1 << 64) - 1), "its parts do not fit its size"),
    ],
    ids=["empty", "short", "part behind the end", "huge part", "larger than both", "claims everything"],
)
def test_heads_of_indices_that_do_not_fit(image: Path, tmp_path: Path, head: bytes, message: str) -> None:
    path = reindexed(image, tmp_path / "x.rvb", head, 50)
    with Reader(path) as reader, pytest.raises(ImageError) as caught:
        reader.index()
    assert caught.value.message == f"{path}: the index can't be decoded ({message})"
    assert caught.value.hint == fmt.FORGED


@pytest.mark.parametrize("wrong", ["first", "second", "cut", "swapped", "none"])
def test_parts_of_an_index_that_are_wrong(image: Path, tmp_path: Path, wrong: str) -> None:
    with Reader(image) as reader:
        stable, rest = fmt.dump_index(reader.index())
    first, second = pack_parts(stable, rest)
    head = fmt.INDEX_HEAD.pack(len(first), len(stable))
    good = reindexed(image, tmp_path / "good.rvb", head + first + second, len(stable) + len(rest))
    with Reader(good) as reader:
        assert reader.index().name == "demo"
    index = {
        "first": fmt.INDEX_HEAD.pack(len(first), len(stable) - 1) + first + second,
        "second": head + first + pack_parts(b"", rest + b" ")[1],
        "cut": head + first + second[:-3],
        "swapped": fmt.INDEX_HEAD.pack(len(second), len(rest)) + second + first,
        "none": head + first,
    }[wrong]
    path = reindexed(image, tmp_path / "x.rvb", index, len(stable) + len(rest))
    with Reader(path) as reader, pytest.raises(ImageError) as caught:
        reader.index()
    assert caught.value.message.startswith(f"{path}: the ")
    assert caught.value.hint


def test_version_1_is_refused(image: Path, tmp_path: Path) -> None:
    data = image.read_bytes()
    body = bytearray(data[-fmt.FOOTER_SIZE : -fmt.FOOTER_CHECK_SIZE])
    body[8] = 1
    check = hashlib.sha256(body).digest()[: fmt.FOOTER_CHECK_SIZE]
    (tmp_path / "old.rvb").write_bytes(data[: -fmt.FOOTER_SIZE] + body + check)
    with pytest.raises(ImageError) as caught:
        Reader(tmp_path / "old.rvb")
    assert caught.value.message == (
        f"{tmp_path}/old.rvb: the image has format version 1, this rvbundle reads version 2"
    )
