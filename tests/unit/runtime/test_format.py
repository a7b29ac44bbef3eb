import dataclasses
import hashlib
import json
import struct
from dataclasses import replace
from typing import Any

import pytest

from rvbundle_runtime import format as fmt
from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.families import Family

DIGEST = hashlib.sha256(b"x").digest()
HEX = DIGEST.hex()
FOOTER = fmt.Footer(
    image_size=1000, index_offset=700, index_size=172, index_raw_size=500, identity=DIGEST, bound_to=bytes(32)
)
NEWER = "use the rvbundle that made it, or a newer one"
COPY = "copy the image again from its source"


def footer_bytes(version: int = 2, flags: int = 0, **changes: object) -> bytes:
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
    assert fmt.pack_header() == b"\x89RVB\r\n\x1a\n" + struct.pack("<II", 2, 0)
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
            footer_bytes(version=3),
            "the image has format version 3, this rvbundle reads version 2",
            NEWER,
            id="newer",
        ),
        pytest.param(
            footer_bytes(version=1),
            "the image has format version 1, this rvbundle reads version 2",
            NEWER,
            id="older",
        ),
        pytest.param(
            footer_bytes(version=0),
            "the image has format version 0, this rvbundle reads version 2",
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


def entry(path: str, kind: str = "f", what: Any = 0, package: int = -1, reason: int = 0) -> list[object]:
    return [path, kind, what, package, reason]


def index_value(*entries: list[object]) -> dict[str, dict[str, Any]]:
    """Return an index of one frame (100 bytes raw) and two blobs (60 and 40 bytes)."""
    return {
        "stable": {
            "frames": [[16, 50, 100, HEX]],
            "blobs": [[HEX, 0, 0, 60], [HEX, 0, 60, 40]],
            "entries": [list(entries) or [entry("a"), entry("b", "x", 1, 0), entry("c", "l", "a")]],
            "reasons": [["because"]],
        },
        "rest": {
            "name": "demo",
            "version": "1.0",
            "created_by": "a test",
            "network": False,
            "env": {"A": "1"},
            "frames": [],
            "blobs": [],
            "payloads": [
                {
                    "arch": "riscv64",
                    "source": "wheels",
                    "python": "3.11.7",
                    "argv": ["/usr/bin/python3", "/app/x.py"],
                    "libdir": "usr/lib/x",
                    "packages": [["numpy", "2.0"]],
                    "families": [],
                    "blas": {},
                    "entries": [],
                }
            ],
            "details": {"trim": "traced"},
        },
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
    stable, rest = fmt.dump_index(index)
    assert fmt.load_index(stable + rest) == index
    assert fmt.dump_index(fmt.load_index(stable + rest)) == (stable, rest)
    assert stable.startswith(b'{"stable":{"blobs":[["')
    assert rest.startswith(b'"rest":{"blobs":[],')
    assert json.loads(stable + rest) == index_value()


def agent_index() -> fmt.Index:
    """Return an index of two frames; the agent's file lies in the second."""
    value = index_value(entry("usr/a"), entry("z", "d", -1))
    value["stable"]["frames"] = [[16, 50, 60, HEX]]
    value["stable"]["blobs"] = [[HEX, 0, 0, 60]]
    value["rest"]["frames"] = [[66, 30, 40, HEX]]
    value["rest"]["blobs"] = [[HEX, 1, 0, 40]]
    value["rest"]["payloads"][0]["entries"] = [entry("app/x.py", "f", 1)]
    return load(value)


def test_entries_of_both_parts_are_in_order() -> None:
    index = agent_index()
    assert [e.path for e in index.payloads[0].entries] == ["app/x.py", "usr/a", "z"]
    assert (len(index.frames), len(index.blobs)) == (2, 2)


def test_a_changed_agent_leaves_the_first_part_as_it_is() -> None:
    index = agent_index()
    stable, rest = fmt.dump_index(index)
    value = json.loads(stable + rest)
    assert value["rest"]["frames"] == [[66, 30, 40, HEX]]
    assert value["rest"]["blobs"] == [[HEX, 1, 0, 40]]
    assert [row[0] for row in value["stable"]["entries"][0]] == ["usr/a", "z"]
    assert [row[0] for row in value["rest"]["payloads"][0]["entries"]] == ["app/x.py"]
    frames = (index.frames[0], replace(index.frames[1], size=31))
    changed = replace(index, frames=frames, version="1.1", env={"B": "2"}, details={})
    assert fmt.dump_index(changed)[0] == stable
    assert fmt.dump_index(changed)[1] != rest


def test_a_blob_that_others_share_with_the_agent_is_not_the_agents() -> None:
    """The agent may hold a copy of an installed file: one blob, which must come with the others."""
    index = agent_index()
    entries = (*index.payloads[0].entries, fmt.Entry("zz", "f", 1, "", -1, 0))
    both = replace(index, payloads=(replace(index.payloads[0], entries=entries),))
    value = json.loads(b"".join(fmt.dump_index(both)))
    assert (len(value["stable"]["blobs"]), value["rest"]["blobs"]) == (2, [])
    assert (len(value["stable"]["frames"]), value["rest"]["frames"]) == (2, [])
    assert fmt.load_index(b"".join(fmt.dump_index(both))) == both


FAMILY = {
    "name": "avx2",
    "needs": ["avx2", "fma"],
    "env": {"ATEN_CPU_CAPABILITY": "avx2"},
    "numpy": ["AVX512F"],
    "vendor": "GenuineIntel",
    "vlen": 0,
}


def test_families() -> None:
    value = index_value()
    value["rest"]["payloads"][0]["families"] = [FAMILY]
    index = load(value)
    assert index.payloads[0].families == (
        Family("avx2", ("avx2", "fma"), {"ATEN_CPU_CAPABILITY": "avx2"}, ("AVX512F",), "GenuineIntel"),
    )
    assert json.loads(b"".join(fmt.dump_index(index))) == value


def test_families_of_before_there_were_lengths_of_vectors() -> None:
    value = index_value()
    value["rest"]["payloads"][0]["families"] = [{k: v for k, v in FAMILY.items() if k != "vlen"}]
    assert load(value).payloads[0].families[0].vlen == 0


def test_blas() -> None:
    value = index_value()
    value["rest"]["payloads"][0]["blas"] = {"openblas": "0.3.29", "reference": "3.12.1"}
    index = load(value)
    assert index.payloads[0].blas == {"openblas": "0.3.29", "reference": "3.12.1"}
    assert json.loads(b"".join(fmt.dump_index(index))) == value


def test_an_image_of_before_blas_was_told() -> None:
    value = index_value()
    del value["rest"]["payloads"][0]["blas"]
    assert load(value).payloads[0].blas == {}


def test_sparse_files_and_ranges() -> None:
    sparse = entry("a", "s", [200, [[0, [0, 20, 100, 40]], [1, [20, 40], "1x24"]]])
    ranges = entry("a", "r", [190, [[1, [60, 40]]]])
    value = index_value(ranges, sparse)
    index = load(value)
    assert index.payloads[0].entries == (
        fmt.Entry("a", "r", -1, "", -1, 0, 190, (fmt.Piece(1, ((60, 40),)),)),
        fmt.Entry(
            "a",
            "s",
            -1,
            "",
            -1,
            0,
            200,
            (fmt.Piece(0, ((0, 20), (100, 40))), fmt.Piece(1, ((20, 40),), "1x24")),
        ),
    )
    assert [e.blobs for e in index.payloads[0].entries] == [(1,), (0, 1)]
    assert json.loads(b"".join(fmt.dump_index(index))) == value


def test_blobs_of_entries() -> None:
    index = load(index_value(entry("a", "f", 1), entry("b", "l", "a"), entry("c", "d", -1)))
    assert [e.blobs for e in index.payloads[0].entries] == [(1,), (), ()]


OVERLAP = "the ranges of 'a' overlap or leave the file"
SUM = "a piece of 'a' has another size than its ranges"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param([100, [[0, [0, 30, 20, 30]]]], OVERLAP, id="overlap in a piece"),
        pytest.param([200, [[0, [0, 60]], [1, [59, 40]]]], OVERLAP, id="overlap of two pieces"),
        pytest.param([200, [[0, [0, 60]], [0, [0, 60]]]], OVERLAP, id="twice the same"),
        pytest.param([59, [[0, [0, 60]]]], OVERLAP, id="behind the end"),
        pytest.param([10, [[0, [1000, 60]]]], OVERLAP, id="far behind the end"),
        pytest.param([100, [[0, [0, 60, 70, 0]]]], OVERLAP, id="empty range"),
        pytest.param([100, [[0, [0, 59]]]], SUM, id="too few bytes"),
        pytest.param([100, [[0, [0, 61]]]], SUM, id="too many bytes"),
        pytest.param([100, [[0, []]]], SUM, id="no ranges"),
        pytest.param([100, [[2, [0, 60]]]], "'a' refers to a blob that is not there", id="blob too high"),
        pytest.param([100, [[-1, [0, 60]]]], "'a' refers to a blob that is not there", id="blob too low"),
        pytest.param(
            [100, [[0, [0, 60], "2x2"]]],
            "the image's index can't be read (ValueError: unknown filter '2x2')",
            id="unknown filter",
        ),
        pytest.param(
            [100, [[0, [0, 60], 7]]],
            "the image's index can't be read (ValueError: unknown filter 7)",
            id="filter that is no text",
        ),
        pytest.param(
            [100, [[0, [0, 60, 1]]]],
            "the image's index can't be read (ValueError: ranges are pairs of numbers)",
            id="odd numbers",
        ),
        pytest.param(
            [100, [[0, [-1, 60]]]],
            "the image's index can't be read (ValueError: impossible size -1)",
            id="negative offset",
        ),
        pytest.param(
            [-1, []], "the image's index can't be read (ValueError: impossible size -1)", id="negative size"
        ),
        pytest.param(
            [1 << 62, []],
            f"the image's index can't be read (ValueError: impossible size {1 << 62})",
            id="huge size",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["s", "r"])
def test_bad_ranges(kind: str, what: Any, message: str) -> None:
    with pytest.raises(ImageError) as caught:
        load(index_value(entry("a", kind, what)))
    assert caught.value.message == message


@pytest.mark.parametrize(
    "what",
    [
        0,
        "x",
        None,
        [],
        [100],
        [100, [], 1],
        ["100", []],
        [100, [5]],
        [100, [[]]],
        [100, [[0]]],
        [100, [[0, 5]]],
        [100, [[0, "ab"]]],
        [100, [[0, {"0": 60}]]],
        [100, [[0, [0, "60"]]]],
        [100, [[0, [0, 60], "", 1]]],
        [100, [["0", [0, 60]]]],
        [100, [[True, [0, 60]]]],
    ],
    ids=repr,
)
def test_nonsense_instead_of_pieces(what: Any) -> None:
    with pytest.raises(ImageError) as caught:
        load(index_value(entry("a", "s", what)))
    assert caught.value.message.startswith("the image's index can't be read (")


@pytest.mark.parametrize(
    ("kind", "what"), [("f", 0), ("x", 0), ("l", "b"), ("d", -1)], ids=["file", "program", "link", "folder"]
)
def test_ranges_of_what_is_no_sparse_file(kind: str, what: int | str) -> None:
    with pytest.raises(ImageError) as caught:
        load(index_value(entry("a", kind, what), entry("a", "r", [100, []])))
    assert caught.value.message == "the index has ranges of 'a', which is no sparse file"


def test_ranges_may_stand_alone() -> None:
    """In a cold pack: the sparse file is in its image."""
    load(index_value(entry("a", "r", [100, []])))


def test_a_sparse_file_is_a_file() -> None:
    sparse = entry("a", "s", [100, []])
    load(index_value(sparse, entry("a", "t", 1)))
    for other, message in (
        (entry("a"), "the index names a path twice: 'a'"),
        (sparse, "the index names a path twice: 'a'"),
        (entry("a/b"), "'a/b' lies below 'a', which is no folder"),
    ):
        with pytest.raises(ImageError) as caught:
            load(index_value(sparse, other))
        assert caught.value.message == message


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
        ("rest.name", 5),
        ("rest.version", None),
        ("rest.network", "no"),
        ("rest.env", ["A"]),
        ("rest.env", {"A": 1}),
        ("rest.env", {"A": "x\0y"}),
        ("rest.env", {"A=B": "x"}),
        ("stable.frames", [[16, 50, 100]]),
        ("stable.frames", [[16, 50, 100, "00"]]),
        ("stable.frames", [[16, 50, 100, "x" * 64]]),
        ("stable.frames", [[-1, 50, 100, HEX]]),
        ("stable.frames", [[16, 50.0, 100, HEX]]),
        ("stable.frames", [[16, True, 100, HEX]]),
        ("stable.frames", [[1 << 62, 50, 100, HEX]]),
        ("stable.frames", 7),
        ("rest.frames", 7),
        ("rest.frames", [[16, 50, 100, "00"]]),
        ("stable.blobs", [[HEX, 0, 0, 60], [HEX, 0, 60, 41]]),
        ("stable.blobs", [[HEX, 1, 0, 1], [HEX, 0, 0, 1]]),
        ("stable.blobs", [[HEX, 0, 101, 0], [HEX, 0, 0, 1]]),
        ("stable.blobs", [[HEX, 0, 0, 1 << 61], [HEX, 0, 0, 1]]),
        ("rest.blobs", [[HEX, 0, 60, 41]]),
        ("rest.blobs", None),
        ("rest.payloads", [{}]),
        ("rest.payloads", []),
        ("rest.payloads", {}),
        ("stable.entries", []),
        ("stable.entries", [[], []]),
        ("stable.entries", 5),
        ("stable.entries", [5]),
        ("stable.entries", [[5]]),
        ("stable.entries", [[[]]]),
        ("stable.entries", [[["a"]]]),
        ("stable.entries", [["ab"]]),
        ("stable.entries", [[{}]]),
        ("stable.entries", [[None]]),
        ("stable.reasons", []),
        ("stable.reasons", [["a"], ["b"]]),
        ("stable.reasons", [[5]]),
        ("stable.reasons", [5]),
        ("stable", []),
        ("stable", None),
        ("rest", "x"),
        ("rest.details", 5),
    ],
    ids=repr,
)
def test_bad_index_values(key: str, item: object) -> None:
    value: dict[str, Any] = index_value()
    assert load(value).name == "demo"
    part, _, inner = key.partition(".")
    if inner:
        value[part][inner] = item
    else:
        value[part] = item
    with pytest.raises(ImageError):
        load(value)


@pytest.mark.parametrize("part", ["stable", "rest"])
def test_half_an_index(part: str) -> None:
    value = index_value()
    with pytest.raises(ImageError) as caught:
        load({part: value[part]})
    assert caught.value.message.startswith("the image's index can't be read (KeyError: ")


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
        ("families", 5),
        ("families", [5]),
        ("families", [{}]),
        ("families", [{**FAMILY, "name": 5}]),
        ("families", [{**FAMILY, "needs": 5}]),
        ("families", [{**FAMILY, "vlen": "5"}]),
        ("blas", 5),
        ("blas", ["openblas"]),
        ("blas", {"openblas": 5}),
        ("families", [{**FAMILY, "env": []}]),
        ("families", [{**FAMILY, "env": {"A": 1}}]),
        ("families", [{**FAMILY, "env": {"A=B": ""}}]),
        ("entries", 5),
        ("entries", [[]]),
        ("entries", [["a"]]),
        ("entries", [["a", "f"]]),
        ("entries", [["a", "f", 0, -1]]),
        ("entries", [["a", "f", 0, -1, 0, 0]]),
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
    value["stable"]["entries"] = [[]]
    value["rest"]["payloads"][0][key] = item
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
        ([16, 50, (16 << 20) + 1, HEX], "frame 0 claims 16777217 bytes: too large"),
        ([16, 16973825, 100, HEX], "frame 0 claims 16973825 bytes: too large"),
    ],
    ids=["over the header", "over the index", "too long", "raw size", "compressed size"],
)
def test_frames_out_of_bounds(frame: list[object], message: str) -> None:
    value = index_value()
    value["stable"]["frames"] = [frame]
    with pytest.raises(ImageError) as caught:
        fmt.check_frames(load(value), FOOTER)
    assert caught.value.message == message


def test_frames_in_bounds() -> None:
    value = index_value()
    value["stable"]["frames"] = [[650, 50, 100, HEX]]
    fmt.check_frames(load(value), FOOTER)
