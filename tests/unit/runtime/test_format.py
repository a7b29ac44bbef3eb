import dataclasses
import hashlib
import json
import struct

import pytest

from rvbundle_runtime import format as fmt
from rvbundle_runtime.errors import ImageError

DIGEST = hashlib.sha256(b"x").digest()
HEX = DIGEST.hex()
FOOTER = fmt.Footer(
    image_size=1000, index_offset=700, index_size=172, index_raw_size=500, identity=DIGEST, bound_to=bytes(32)
)
NEWER = "use the rvbundle that made it, or a newer one"
COPY = "copy the image again from its source"


def footer_bytes(version: int = 1, flags: int = 0, **changes: object) -> bytes:
    """Return a footer whose check is right, whatever it says."""
    footer = dataclasses.replace(FOOTER, **changes)  # type: ignore[arg-type]
    body = fmt.FOOTER_BODY.pack(
        b"RVBFOOT\n",
        version,
        flags,
        footer.image_size,
        footer.index_offset,
        footer.index_size,
        footer.index_raw_size,
        footer.identity,
        footer.bound_to,
    )
    return body + hashlib.sha256(body).digest()[:16]


def test_sizes_on_disk_are_part_of_the_format() -> None:
    assert (fmt.HEADER.size, fmt.FOOTER_SIZE) == (16, 128)


def test_header_byte_by_byte() -> None:
    assert fmt.pack_header() == b"\x89RVB\r\n\x1a\n" + struct.pack("<II", 1, 0)
    fmt.check_header(fmt.pack_header())


@pytest.mark.parametrize(
    "data",
    [b"", b"\x89RVB\n\x1a\n", fmt.pack_header()[:-1], fmt.pack_header() + b"\0", bytes(16)],
    ids=["empty", "text-mode damage", "short", "long", "zeros"],
)
def test_bad_header(data: bytes) -> None:
    with pytest.raises(ImageError) as caught:
        fmt.check_header(data)
    assert caught.value.message == "the image's header is damaged, or its beginning is missing"
    assert caught.value.hint == COPY


def test_footer_round_trip() -> None:
    data = fmt.pack_footer(FOOTER)
    assert len(data) == fmt.FOOTER_SIZE
    assert data[:8] == b"RVBFOOT\n"
    assert fmt.parse_footer(data, 1000) == FOOTER
    assert fmt.parse_footer(data, 5000) == FOOTER  # something stands before the image


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        pytest.param(
            b"",
            "this is no rvbundle image, or its end is missing",
            "if it was downloaded or copied, compare its size with the original",
            id="empty",
        ),
        pytest.param(
            fmt.pack_footer(FOOTER)[1:],
            "this is no rvbundle image, or its end is missing",
            "if it was downloaded or copied, compare its size with the original",
            id="short",
        ),
        pytest.param(
            b"PK" + fmt.pack_footer(FOOTER)[2:],
            "this is no rvbundle image, or its end is missing",
            "if it was downloaded or copied, compare its size with the original",
            id="foreign",
        ),
        pytest.param(
            footer_bytes(version=2),
            "the image has format version 2, this rvbundle reads version 1",
            NEWER,
            id="newer",
        ),
        pytest.param(
            footer_bytes(version=0),
            "the image has format version 0, this rvbundle reads version 1",
            NEWER,
            id="version zero",
        ),
        pytest.param(
            footer_bytes(flags=0x11),
            "the image uses features that this rvbundle does not know (flags 0x11)",
            NEWER,
            id="unknown flags",
        ),
        pytest.param(
            fmt.pack_footer(FOOTER)[:-1] + b"?", "the image's footer is damaged", COPY, id="damaged check"
        ),
        pytest.param(
            footer_bytes(index_raw_size=(256 << 20) + 1),
            "the image claims an index of 268435457 bytes: too large",
            fmt.FORGED,
            id="huge raw index",
        ),
        pytest.param(
            footer_bytes(index_size=2**64 - 1),
            "the image claims an index of 18446744073709551615 bytes: too large",
            fmt.FORGED,
            id="huge compressed index",
        ),
        pytest.param(
            footer_bytes(image_size=1001, index_offset=701),
            "the image is cut short: 1000 bytes of 1001 are here",
            COPY,
            id="cut short",
        ),
        pytest.param(
            footer_bytes(index_offset=701),
            "the image's footer does not fit its size: it is damaged or forged",
            COPY,
            id="index beyond its end",
        ),
        pytest.param(
            footer_bytes(index_offset=699),
            "the image's footer does not fit its size: it is damaged or forged",
            COPY,
            id="gap behind the index",
        ),
        pytest.param(
            footer_bytes(index_offset=15, image_size=15 + 172 + fmt.FOOTER_SIZE),
            "the image's footer does not fit its size: it is damaged or forged",
            COPY,
            id="index over the header",
        ),
    ],
)
def test_bad_footer(data: bytes, message: str, hint: str) -> None:
    with pytest.raises(ImageError) as caught:
        fmt.parse_footer(data, 1000)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize("path", ["a", "a/b", "usr/lib/.hidden", "a b/ü", "..a/b..", "x" * 4000])
def test_good_path(path: str) -> None:
    fmt.check_path(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "the index holds an impossible path: ''"),
        ("a\0b", "the index holds an impossible path: 'a\\x00b'"),
        ("ü" * 2048, f"the index holds an impossible path: {'ü' * 80!r}"),
        ("a\ud800", "the index holds an impossible path: 'a\\ud800'"),
        ("/etc/passwd", "the index holds a path that leaves the tree: '/etc/passwd'"),
        ("..", "the index holds a path that leaves the tree: '..'"),
        ("a/../../b", "the index holds a path that leaves the tree: 'a/../../b'"),
        ("a/..", "the index holds a path that leaves the tree: 'a/..'"),
        ("./a", "the index holds a path that leaves the tree: './a'"),
        ("a//b", "the index holds a path that leaves the tree: 'a//b'"),
        ("a/", "the index holds a path that leaves the tree: 'a/'"),
    ],
    ids=[
        "empty",
        "nul",
        "too long in bytes",
        "lone surrogate",
        "absolute",
        "parent",
        "climbs",
        "ends up",
        "dot",
        "empty part",
        "trailing slash",
    ],
)
def test_bad_path(path: str, message: str) -> None:
    with pytest.raises(ImageError) as caught:
        fmt.check_path(path)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("path", "target"),
    [("bin", "usr/bin"), ("usr/sbin", "bin"), ("a/b/c", "../../d"), ("a/b", "../c"), ("a/b", ".")],
)
def test_good_link(path: str, target: str) -> None:
    fmt.check_link(path, target)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("a", ""),
        ("a", "/etc"),
        ("a", ".."),
        ("a", "../x"),
        ("a/b", "../../x"),
        ("a/b", "c/../../../x"),
        ("a", "b\0c"),
        # Lexically inside; but with d -> "." the kernel follows d and then climbs out of the root.
        ("a", "d/.."),
        ("a", "d/d/../../etc/passwd"),
    ],
    ids=[
        "empty",
        "absolute",
        "parent",
        "beside",
        "deep",
        "down and up",
        "nul",
        "through a link",
        "through links",
    ],
)
def test_bad_link(path: str, target: str) -> None:
    with pytest.raises(ImageError) as caught:
        fmt.check_link(path, target)
    assert caught.value.message == f"the index holds a link that leaves the tree: {path!r} -> {target!r}"


def entry(
    path: str, kind: str = "f", what: int | str = 0, package: int = -1, reason: int = 0
) -> list[object]:
    return [path, kind, what, package, reason]


def index_value(*entries: list[object]) -> dict[str, object]:
    """Return an index of one frame (100 bytes raw) and two blobs (60 and 40 bytes)."""
    return {
        "name": "demo",
        "version": "1.0",
        "created_by": "a test",
        "network": False,
        "env": {"A": "1"},
        "frames": [[16, 50, 100, HEX]],
        "blobs": [[HEX, 0, 0, 60], [HEX, 0, 60, 40]],
        "payloads": [
            {
                "arch": "riscv64",
                "source": "wheels",
                "python": "3.11.7",
                "argv": ["/usr/bin/python3", "/app/x.py"],
                "libdir": "usr/lib/x",
                "packages": [["numpy", "2.0"]],
                "reasons": ["because"],
                "entries": list(entries) or [entry("a"), entry("b", "x", 1, 0), entry("c", "l", "a")],
            }
        ],
        "details": {"trim": "traced"},
    }


def load(value: object) -> fmt.Index:
    return fmt.load_index(json.dumps(value).encode())


def test_load_index() -> None:
    index = load(index_value())
    assert index.frames == (fmt.Frame(16, 50, 100, DIGEST),)
    assert index.blobs == (fmt.Blob(DIGEST, 0, 0, 60), fmt.Blob(DIGEST, 0, 60, 40))
    assert index.payloads[0].entries == (
        fmt.Entry("a", "f", 0, "", -1, 0),
        fmt.Entry("b", "x", 1, "", 0, 0),
        fmt.Entry("c", "l", -1, "a", -1, 0),
    )
    assert index.payloads[0].packages == (fmt.Package("numpy", "2.0"),)
    assert (index.name, index.network, index.env, index.details) == (
        "demo",
        False,
        {"A": "1"},
        {"trim": "traced"},
    )


def test_index_round_trip_is_canonical() -> None:
    index = load(index_value())
    data = fmt.dump_index(index)
    assert fmt.load_index(data) == index
    assert fmt.dump_index(fmt.load_index(data)) == data
    assert data.startswith(b'{"blobs":[["')


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        pytest.param([entry("a"), entry("a")], "the index names a path twice: 'a'", id="duplicate file"),
        pytest.param(
            [entry("a"), entry("a", "d", -1)], "the index names a path twice: 'a'", id="file and folder"
        ),
        pytest.param(
            [entry("a", "t"), entry("a", "t")], "the index names a path twice: 'a'", id="duplicate tail"
        ),
        pytest.param(
            [entry("a", "l", "b"), entry("a/x")],
            "'a/x' lies below 'a', which is no folder",
            id="below a link",
        ),
        pytest.param(
            [entry("a/x/y"), entry("a", "l", "b")],
            "'a/x/y' lies below 'a', which is no folder",
            id="deep below a later link",
        ),
        pytest.param(
            [entry("a"), entry("a/x", "d", -1)], "'a/x' lies below 'a', which is no folder", id="below a file"
        ),
        pytest.param(
            [entry("a/x", "t"), entry("a", "l", "b")],
            "'a/x' lies below 'a', which is no folder",
            id="tail below a link",
        ),
        pytest.param([entry("a", "f", 2)], "'a' refers to a blob that is not there", id="blob too high"),
        pytest.param([entry("a", "f", -1)], "'a' refers to a blob that is not there", id="file without blob"),
        pytest.param([entry("a", "t", -1)], "'a' refers to a blob that is not there", id="tail without blob"),
        pytest.param([entry("a", "d", 7)], "'a' refers to a blob that is not there", id="folder with a blob"),
        pytest.param(
            [entry("a", "f", 0, 1)],
            "'a' refers to a package or reason that is not there",
            id="package too high",
        ),
        pytest.param(
            [entry("a", "f", 0, -2)],
            "'a' refers to a package or reason that is not there",
            id="package too low",
        ),
        pytest.param(
            [entry("a", "f", 0, -1, 1)],
            "'a' refers to a package or reason that is not there",
            id="reason too high",
        ),
        pytest.param([entry("/a")], "the index holds a path that leaves the tree: '/a'", id="absolute path"),
        pytest.param(
            [entry("a/../../b", "d", -1)],
            "the index holds a path that leaves the tree: 'a/../../b'",
            id="climbing folder",
        ),
        pytest.param(
            [entry("a", "l", "../b")],
            "the index holds a link that leaves the tree: 'a' -> '../b'",
            id="escaping link",
        ),
        pytest.param(
            [entry("a", "?")],
            "the image's index can't be read (ValueError: unknown kind '?')",
            id="unknown kind",
        ),
        pytest.param(
            [entry("a", "f", 0, -1, -1)],
            "the image's index can't be read (ValueError: impossible size -1)",
            id="negative reason",
        ),
    ],
)
def test_bad_entries(entries: list[list[object]], message: str) -> None:
    with pytest.raises(ImageError) as caught:
        load(index_value(*entries))
    assert caught.value.message == message


def test_a_tail_may_have_the_path_of_its_file_but_not_of_a_link() -> None:
    load(index_value(entry("a"), entry("a", "t", 1)))
    with pytest.raises(ImageError):
        load(index_value(entry("a", "l", "b"), entry("a", "t", 1)))


@pytest.mark.parametrize(
    ("key", "item"),
    [
        ("name", 5),
        ("version", None),
        ("network", "no"),
        ("env", ["A"]),
        ("env", {"A": 1}),
        ("env", {"A": "x\0y"}),
        ("env", {"A=B": "x"}),
        ("frames", [[16, 50, 100]]),
        ("frames", [[16, 50, 100, "00"]]),
        ("frames", [[16, 50, 100, "x" * 64]]),
        ("frames", [[-1, 50, 100, HEX]]),
        ("frames", [[16, 50.0, 100, HEX]]),
        ("frames", [[16, True, 100, HEX]]),
        ("frames", [[1 << 62, 50, 100, HEX]]),
        ("frames", 7),
        ("blobs", [[HEX, 0, 0, 60], [HEX, 0, 60, 41]]),
        ("blobs", [[HEX, 1, 0, 1], [HEX, 0, 0, 1]]),
        ("blobs", [[HEX, 0, 101, 0], [HEX, 0, 0, 1]]),
        ("blobs", [[HEX, 0, 0, 1 << 61], [HEX, 0, 0, 1]]),
        ("payloads", [{}]),
        ("details", 5),
    ],
    ids=repr,
)
def test_bad_index_values(key: str, item: object) -> None:
    value = index_value()
    assert load(value).name == "demo"
    value[key] = item
    with pytest.raises(ImageError):
        load(value)


@pytest.mark.parametrize(
    ("key", "item"),
    [
        ("arch", 1),
        ("argv", []),
        ("argv", "python"),
        ("argv", ["a\0b"]),
        ("argv", [1]),
        ("libdir", None),
        ("packages", [["numpy"]]),
        ("entries", [["a", "f", 0, -1]]),
        ("entries", [["a", "f", 1.5, -1, 0]]),
        ("entries", [["a", "f", "0", -1, 0]]),
        ("entries", [["a", "f", 0, 0.5, 0]]),
        ("entries", [["a", "f", float("inf"), -1, 0]]),
        ("entries", [["a", "l", 0, -1, 0]]),
        ("entries", [[["a"], "f", 0, -1, 0]]),
        ("entries", [["a", ["f"], 0, -1, 0]]),
    ],
    ids=repr,
)
def test_bad_payload_values(key: str, item: object) -> None:
    value = index_value()
    value["payloads"][0][key] = item  # type: ignore[index]
    with pytest.raises(ImageError):
        load(value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{}", b"[" * 100_000, b"1" * 5000],
    ids=["empty", "cut", "list", "null", "text", "no utf-8", "no keys", "too deep", "huge number"],
)
def test_index_that_is_none(data: bytes) -> None:
    with pytest.raises(ImageError) as caught:
        fmt.load_index(data)
    assert caught.value.message.startswith("the image's index can't be read (")


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ([15, 50, 100, HEX], "frame 0 lies outside the image"),
        ([651, 50, 100, HEX], "frame 0 lies outside the image"),
        ([16, 685, 100, HEX], "frame 0 lies outside the image"),
        ([16, 50, (4 << 20) + 1, HEX], "frame 0 claims 4194305 bytes: too large"),
        ([16, 4292609, 100, HEX], "frame 0 claims 4292609 bytes: too large"),
    ],
    ids=["over the header", "over the index", "too long", "raw size", "compressed size"],
)
def test_frames_out_of_bounds(frame: list[object], message: str) -> None:
    value = index_value()
    value["frames"] = [frame]
    with pytest.raises(ImageError) as caught:
        fmt.check_frames(load(value), FOOTER)
    assert caught.value.message == message


def test_frames_in_bounds() -> None:
    value = index_value()
    value["frames"] = [[650, 50, 100, HEX]]
    fmt.check_frames(load(value), FOOTER)
