"""The image format: constants, the frozen types of the index, and their checks (docs/image-format.md).

    header | zstd frames, at most 16 MiB raw each | index (JSON, zstd) | footer

The index is found from the end of the file, so anything may stand before the header. All integers are
little-endian; all offsets count from the header's first byte. Nothing here touches the file system.
"""

import hashlib
import json
import posixpath
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rvbundle_runtime import filters
from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.families import Family
from rvbundle_runtime.families import from_json as family_from_json

FORMAT_VERSION = 2
KNOWN_FLAGS = 0

# Like PNG's signature: a high byte, CR LF and a control-Z show text-mode damage.
HEADER_MAGIC = b"\x89RVB\r\n\x1a\n"
HEADER = struct.Struct("<8sII")  # magic, version, flags
FOOTER_MAGIC = b"RVBFOOT\n"
# magic, version, flags, image size, index offset, index size (compressed, raw), index sha256,
# sha256 of the index of the image that a cold pack belongs to (zeros in an image)
FOOTER_BODY = struct.Struct("<8sIIQQQQ32s32s")
FOOTER_CHECK_SIZE = 16  # the first bytes of the body's sha256
FOOTER_SIZE = FOOTER_BODY.size + FOOTER_CHECK_SIZE

# The index begins with the sizes of its stable part, compressed and raw; that part and the rest are a zstd
# frame each. A size of 0: the index is one frame.
INDEX_HEAD = struct.Struct("<QQ")
AGENT_PREFIX = "app/"  # what changes most often: entries below it, with their blobs and frames, are the rest

FRAME_RAW_MAX = 16 << 20
# ZSTD_compressBound for incompressible data adds less than 1/128 and 64 KiB to a frame of this size.
FRAME_COMPRESSED_MAX = FRAME_RAW_MAX + (FRAME_RAW_MAX >> 7) + (64 << 10)
INDEX_RAW_MAX = 256 << 20
PATH_MAX = 4096
UNBOUND = bytes(32)

FILE, EXECUTABLE, LINK, DIRECTORY, TAIL, SPARSE, RANGES = "f", "x", "l", "d", "t", "s", "r"
# The hint for what no damage explains, since the digests are as they should be.
FORGED = "it is damaged or forged: get it anew from a source that you trust"
_KINDS = {FILE, EXECUTABLE, LINK, DIRECTORY, TAIL, SPARSE, RANGES}
_BESIDE = {TAIL, RANGES}  # kinds that belong to the file of the same path, rather than being one


@dataclass(frozen=True)
class Footer:
    """The fixed last bytes of a file; sizes and offsets in bytes."""

    image_size: int
    index_offset: int
    index_size: int
    index_raw_size: int
    identity: bytes
    bound_to: bytes


@dataclass(frozen=True)
class Frame:
    """One zstd frame: where it lies, its sizes in bytes, the SHA-256 of its compressed bytes."""

    offset: int
    size: int
    raw_size: int
    sha256: bytes


@dataclass(frozen=True)
class Blob:
    """`size` bytes that start at `offset` of frame `frame` (raw) and may go on in the frames after it."""

    sha256: bytes
    frame: int
    offset: int
    size: int


@dataclass(frozen=True)
class Piece:
    """A blob that fills several ranges of a file, one after the other: (offset, size) in bytes each.

    `filter` is the filter that the blob went through (see `filters.py`), "" for none.
    """

    blob: int
    ranges: tuple[tuple[int, int], ...]
    filter: str = ""


@dataclass(frozen=True)
class Entry:
    """One path of a payload's tree.

    `kind`: "f" file, "x" executable file, "l" symbolic link, "d" directory, "t" the tail (symbol tables
    and debug sections) of the hot file of the same path, "s" a sparse file (a trimmed library), "r" the
    ranges that the sparse file of the same path does not have. `blob` is an index into the blobs (files
    and tails), `target` a link's text, `package` and `reason` indices into the payload's lists. Sparse
    files and ranges have the `size` of the file in bytes, and `pieces` instead of a blob.
    """

    path: str
    kind: str
    blob: int
    target: str
    package: int
    reason: int
    size: int = 0
    pieces: tuple[Piece, ...] = ()

    @property
    def blobs(self) -> tuple[int, ...]:
        """All blobs that it needs."""
        if self.kind in (SPARSE, RANGES):
            return tuple(piece.blob for piece in self.pieces)
        return (self.blob,) if self.blob >= 0 else ()


@dataclass(frozen=True)
class Package:
    """A distribution of the payload, as its metadata names it."""

    name: str
    version: str


@dataclass(frozen=True)
class Payload:
    """The tree for one architecture and what is needed to start it.

    `families` are the families of CPU kernels whose pages its trimmed libraries have; none where no
    library is trimmed. `blas` are the versions of its BLAS libraries by name (blas.py), as far as known.
    """

    arch: str
    source: str
    python: str
    argv: tuple[str, ...]
    libdir: str
    packages: tuple[Package, ...]
    reasons: tuple[str, ...]
    entries: tuple[Entry, ...]
    families: tuple[Family, ...] = ()
    blas: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Index:
    """Everything that a file says about itself. `details` is free-form and only for display."""

    name: str
    version: str
    created_by: str
    network: bool
    env: dict[str, str]
    frames: tuple[Frame, ...]
    blobs: tuple[Blob, ...]
    payloads: tuple[Payload, ...]
    details: dict[str, Any]

    def label(self, arch: str, path: str) -> str:
        """Return a path as reports show it: with its payload, if there are several."""
        return path if len(self.payloads) == 1 else f"{arch}: {path}"


def pack_header() -> bytes:
    """Return the header's bytes."""
    return HEADER.pack(HEADER_MAGIC, FORMAT_VERSION, KNOWN_FLAGS)


def pack_footer(footer: Footer) -> bytes:
    """Return the footer's FOOTER_SIZE bytes."""
    body = FOOTER_BODY.pack(
        FOOTER_MAGIC,
        FORMAT_VERSION,
        KNOWN_FLAGS,
        footer.image_size,
        footer.index_offset,
        footer.index_size,
        footer.index_raw_size,
        footer.identity,
        footer.bound_to,
    )
    return body + hashlib.sha256(body).digest()[:FOOTER_CHECK_SIZE]


def parse_footer(data: bytes, file_size: int) -> Footer:
    """Read a footer from the last FOOTER_SIZE bytes of a file of `file_size` bytes.

    Raises ImageError for anything but a footer of this version whose sizes fit into the file.
    """
    if len(data) != FOOTER_SIZE or not data.startswith(FOOTER_MAGIC):
        raise ImageError(
            "this is no rvbundle image, or its end is missing",
            "if it was downloaded or copied, compare its size with the original",
        )
    body, check = data[: FOOTER_BODY.size], data[FOOTER_BODY.size :]
    _, version, flags, size, offset, csize, rsize, identity, bound_to = FOOTER_BODY.unpack(body)
    # Footers of all versions keep size, magic, version and check: damage must not look like a new version.
    if hashlib.sha256(body).digest()[:FOOTER_CHECK_SIZE] != check:
        raise ImageError("the image's footer is damaged", "copy the image again from its source")
    if version != FORMAT_VERSION:
        raise ImageError(
            f"the image has format version {version}, this rvbundle reads version {FORMAT_VERSION}",
            "use the rvbundle that made it, or a newer one",
        )
    if flags & ~KNOWN_FLAGS:
        raise ImageError(
            f"the image uses features that this rvbundle does not know (flags {flags:#x})",
            "use the rvbundle that made it, or a newer one",
        )
    if rsize > INDEX_RAW_MAX or csize > INDEX_RAW_MAX:
        raise ImageError(f"the image claims an index of {max(rsize, csize)} bytes: too large", FORGED)
    if size > file_size:
        raise ImageError(
            f"the image is cut short: {file_size} bytes of {size} are here",
            "copy the image again from its source",
        )
    if offset < HEADER.size or offset + csize + FOOTER_SIZE != size:
        raise ImageError(
            "the image's footer does not fit its size: it is damaged or forged",
            "copy the image again from its source",
        )
    return Footer(size, offset, csize, rsize, identity, bound_to)


def check_header(data: bytes) -> None:
    """Raise ImageError unless `data` is the header that belongs to a footer of this version."""
    if data != pack_header():
        raise ImageError(
            "the image's header is damaged, or its beginning is missing",
            "copy the image again from its source",
        )


_CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f]")  # a NUL ends a path, an escape sequence rules a terminal


def check_path(path: str) -> None:
    """Raise ImageError unless `path` names something below the tree's root, in its shortest form."""
    parts = path.split("/")
    if not path or _CONTROL.search(path) or not _is_utf8(path) or len(path.encode()) >= PATH_MAX:
        raise ImageError(f"the index holds an impossible path: {path[:80]!r}")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise ImageError(f"the index holds a path that leaves the tree: {path[:80]!r}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can express
        return False
    return True


def check_link(path: str, target: str) -> None:
    """Raise ImageError if the symbolic link at `path` points out of the tree."""
    parts = target.split("/")
    climbs = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    # Only at its start may it climb, and not above the root: behind another link ".." leads anywhere.
    outside = climbs > path.count("/") or ".." in parts[climbs:]
    if not target or target.startswith("/") or outside or _CONTROL.search(target) or not _is_utf8(target):
        raise ImageError(f"the index holds a link that leaves the tree: {path!r} -> {target[:80]!r}")


def dump_index(index: Index) -> tuple[bytes, bytes]:
    """Return the index as canonical JSON, cut behind what a change of the agent alone does not change.

    The same index always gives the same bytes; both parts together are one JSON text.
    """
    frames, blobs = _stable_counts(index)
    stable = {
        "frames": [_dump_frame(f) for f in index.frames[:frames]],
        "blobs": [_dump_blob(b) for b in index.blobs[:blobs]],
        "entries": [[_dump_entry(e) for e in p.entries if not _is_agents(e)] for p in index.payloads],
        "reasons": [list(p.reasons) for p in index.payloads],
    }
    rest = {
        "name": index.name,
        "version": index.version,
        "created_by": index.created_by,
        "network": index.network,
        "env": index.env,
        "frames": [_dump_frame(f) for f in index.frames[frames:]],
        "blobs": [_dump_blob(b) for b in index.blobs[blobs:]],
        "payloads": [_dump_payload(payload) for payload in index.payloads],
        "details": index.details,
    }
    return b'{"stable":' + _json(stable) + b",", b'"rest":' + _json(rest) + b"}"


def _is_agents(entry: Entry) -> bool:
    return entry.path.startswith(AGENT_PREFIX)


def _stable_counts(index: Index) -> tuple[int, int]:
    """Return how many frames and blobs, from the first on, what is not the agent's needs."""
    needed = {n for p in index.payloads for e in p.entries if not _is_agents(e) for n in e.blobs}
    blobs = max(needed, default=-1) + 1
    others = [blob.frame for blob in index.blobs[blobs:] if blob.size]
    return min(others, default=len(index.frames)), blobs


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _dump_frame(frame: Frame) -> list[Any]:
    return [frame.offset, frame.size, frame.raw_size, frame.sha256.hex()]


def _dump_blob(blob: Blob) -> list[Any]:
    return [blob.sha256.hex(), blob.frame, blob.offset, blob.size]


def _dump_entry(entry: Entry) -> list[Any]:
    what: Any = entry.target if entry.kind == LINK else entry.blob
    if entry.kind in (SPARSE, RANGES):
        what = [entry.size, [_dump_piece(piece) for piece in entry.pieces]]
    return [entry.path, entry.kind, what, entry.package, entry.reason]


def _dump_piece(piece: Piece) -> list[Any]:
    numbers = [number for pair in piece.ranges for number in pair]
    return [piece.blob, numbers, *([piece.filter] if piece.filter else [])]


def _dump_payload(payload: Payload) -> dict[str, Any]:
    return {
        "arch": payload.arch,
        "source": payload.source,
        "python": payload.python,
        "argv": list(payload.argv),
        "libdir": payload.libdir,
        "packages": [[p.name, p.version] for p in payload.packages],
        "families": [asdict(family) for family in payload.families],
        "blas": dict(payload.blas),
        "entries": [_dump_entry(e) for e in payload.entries if _is_agents(e)],
    }


_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


def load_index(data: bytes) -> Index:
    """Parse and check an index; raises ImageError for anything out of the ordinary.

    Checked here: types, path and link safety, and that every reference stays in bounds. Whether frames
    stay inside the file is checked by `check_frames`, which knows the footer.
    """
    try:
        value = json.loads(data)
        stable, rest = value["stable"], value["rest"]
        frames, blobs = [*stable["frames"], *rest["frames"]], [*stable["blobs"], *rest["blobs"]]
        shares = zip(rest["payloads"], stable["entries"], stable["reasons"], strict=True)
        index = Index(
            name=_text(rest["name"]),
            version=_text(rest["version"]),
            created_by=_text(rest["created_by"]),
            network=_flag(rest["network"]),
            env={_variable(k): _word(v) for k, v in rest["env"].items()},
            frames=tuple(Frame(_size(o), _size(c), _size(r), _digest(h)) for o, c, r, h in frames),
            blobs=tuple(Blob(_digest(h), _size(f), _size(o), _size(s)) for h, f, o, s in blobs),
            payloads=tuple(_load_payload(*share) for share in shares),
            details=dict(rest["details"]),
        )
    except _UNREADABLE as error:
        raise ImageError(f"the image's index can't be read ({type(error).__name__}: {error})") from None
    _check_references(index)
    return index


def _load_payload(value: dict[str, Any], entries: list[Any], reasons: list[Any]) -> Payload:
    rows = sorted([*entries, *value["entries"]], key=lambda row: (_text(row[0]), _text(row[1])))
    return Payload(
        arch=_text(value["arch"]),
        source=_text(value["source"]),
        python=_text(value["python"]),
        argv=_words(value["argv"]),
        libdir=_text(value["libdir"]),
        packages=tuple(Package(_text(n), _text(v)) for n, v in value["packages"]),
        reasons=tuple(_text(reason) for reason in reasons),
        entries=tuple(_load_entry(*row) for row in rows),
        families=tuple(family_from_json(family) for family in value["families"]),
        blas=load_blas(value),
    )


def load_blas(value: dict[str, Any]) -> dict[str, str]:
    """Read `blas` of a payload's description, which older images lack; raises TypeError or AttributeError."""
    return {_text(name): _text(version) for name, version in value.get("blas", {}).items()}


def _load_entry(path: str, kind: str, what: Any, package: int, reason: int) -> Entry:
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    if kind in (SPARSE, RANGES):
        size, pieces = what
        loaded = tuple(_load_piece(*piece) for piece in pieces)
        return Entry(_text(path), kind, -1, "", _integer(package), _size(reason), _size(size), loaded)
    target = _text(what) if kind == LINK else ""
    blob = -1 if kind == LINK else _integer(what)
    return Entry(_text(path), kind, blob, target, _integer(package), _size(reason))


def _load_piece(blob: int, numbers: list[int], name: str = "") -> Piece:
    if len(numbers) % 2:
        raise ValueError("ranges are pairs of numbers")
    if name and name not in filters.NAMES:
        raise ValueError(f"unknown filter {name!r}")
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return Piece(_integer(blob), tuple((_size(offset), _size(size)) for offset, size in pairs), name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {type(value).__name__}")
    return value


def _word(value: Any) -> str:
    """Return a text that can be an argument or a variable's value."""
    text = _text(value)
    if "\0" in text or not _is_utf8(text):
        raise ValueError(f"impossible argument {text[:80]!r}")
    return text


def _variable(value: Any) -> str:
    text = _word(value)
    if not text or "=" in text:
        raise ValueError(f"impossible name of a variable {text[:80]!r}")
    return text


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise TypeError("the words that start the agent must be a list, and not empty")
    return tuple(_word(word) for word in value)


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected an integer, found {type(value).__name__}")
    return value


def _size(value: Any) -> int:
    if not 0 <= _integer(value) < 1 << 62:
        raise ValueError(f"impossible size {value!r}")
    return _integer(value)


def _digest(value: Any) -> bytes:
    digest = bytes.fromhex(_text(value))
    if len(digest) != 32:
        raise ValueError("a SHA-256 digest has 32 bytes")
    return digest


def check_frames(index: Index, footer: Footer) -> None:
    """Raise ImageError unless all frames lie between header and index and keep to the size limits."""
    for number, frame in enumerate(index.frames):
        if frame.raw_size > FRAME_RAW_MAX or frame.size > FRAME_COMPRESSED_MAX:
            raise ImageError(f"frame {number} claims {max(frame.raw_size, frame.size)} bytes: too large")
        if frame.offset < HEADER.size or frame.offset + frame.size > footer.index_offset:
            raise ImageError(f"frame {number} lies outside the image")


def _check_references(index: Index) -> None:
    starts = [0]
    for frame in index.frames:
        starts.append(starts[-1] + frame.raw_size)
    for blob in index.blobs:
        inside = blob.frame < len(index.frames) or (blob.size == 0 and blob.frame == 0)
        if not inside or starts[blob.frame] + blob.offset + blob.size > starts[-1]:
            raise ImageError(f"blob {blob.sha256.hex()[:12]} lies outside the frames")
    for payload in index.payloads:
        _check_payload(payload, index.blobs)


def _check_payload(payload: Payload, blobs: tuple[Blob, ...]) -> None:
    for entry in payload.entries:
        numbers = range(len(blobs)) if entry.kind in (FILE, EXECUTABLE, TAIL) else (-1,)
        if entry.blob not in numbers or any(p.blob not in range(len(blobs)) for p in entry.pieces):
            raise ImageError(f"{entry.path!r} refers to a blob that is not there")
        _check_pieces(entry, blobs)
        if not -1 <= entry.package < len(payload.packages) or entry.reason >= len(payload.reasons):
            raise ImageError(f"{entry.path!r} refers to a package or reason that is not there")
    check_entries(payload.entries)


def _check_pieces(entry: Entry, blobs: tuple[Blob, ...]) -> None:
    """Raise ImageError unless the pieces fill ranges that lie in the file and apart from each other."""
    for piece in entry.pieces:
        if sum(size for _, size in piece.ranges) != blobs[piece.blob].size:
            raise ImageError(f"a piece of {entry.path!r} has another size than its ranges")
    end = 0
    for offset, size in sorted(pair for piece in entry.pieces for pair in piece.ranges):
        if offset < end or not size or offset + size > entry.size:
            raise ImageError(f"the ranges of {entry.path!r} overlap or leave the file")
        end = offset + size


def check_entries(entries: Iterable[Entry]) -> None:
    """Raise ImageError unless the entries make one tree: no path twice, nothing below a file or a link.

    A tail may share the path of a file, ranges that of a sparse file, but not of a link.
    """
    kinds: dict[tuple[str, str], str] = {}
    for entry in entries:
        check_path(entry.path)
        if entry.kind == LINK:
            check_link(entry.path, entry.target)
        key = (entry.path, entry.kind if entry.kind in _BESIDE else "")
        if key in kinds:
            raise ImageError(f"the index names a path twice: {entry.path!r}")
        kinds[key] = entry.kind
    for path, beside in kinds:
        kind = kinds.get((path, ""), SPARSE)
        if beside == TAIL and kind not in (FILE, EXECUTABLE, SPARSE):
            raise ImageError(f"the index has the tail of {path!r}, which is no file")
        if beside == RANGES and kind != SPARSE:
            raise ImageError(f"the index has ranges of {path!r}, which is no sparse file")
        parent = posixpath.dirname(path)
        while parent:
            if kinds.get((parent, ""), DIRECTORY) != DIRECTORY:
                raise ImageError(f"{path!r} lies below {parent!r}, which is no folder")
            parent = posixpath.dirname(parent)
