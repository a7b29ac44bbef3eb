"""Small images for tests: honest ones made by the pack stage, and forged ones with valid digests."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import zstandard

from rvbundle.pack import Chunk, Effort, ImageMeta, Item, PayloadMeta, pack
from rvbundle_runtime import filters
from rvbundle_runtime import format as fmt
from rvbundle_runtime.families import Family

ARCH = os.uname().machine
EFFORT = Effort(3, 4 << 20)


def item(
    path: str,
    content: bytes = b"",
    kind: str = fmt.FILE,
    group: str = "data",
    package: str = "",
    reason: str = "a test",
) -> Item:
    """Return a file to pack."""
    digest = hashlib.sha256(content).hexdigest()
    return Item(path, kind, group, content, len(content), digest, "", package, reason)


def link(path: str, target: str) -> Item:
    """Return a symbolic link to pack."""
    return Item(path, fmt.LINK, "", None, 0, "", target, "", "a test")


def folder(path: str) -> Item:
    """Return a folder to pack."""
    return Item(path, fmt.DIRECTORY, "", None, 0, "", "", "", "a test")


def chunk(content: bytes, *ranges: tuple[int, int], filter_: str = "") -> Chunk:
    """Return what fills ranges (offset and size each) of a sparse file."""
    coded = filters.encode(filter_, content) if filter_ else content
    assert coded is not None
    return Chunk(coded, len(coded), hashlib.sha256(coded).hexdigest(), ranges, filter_)


def sparse(path: str, size: int, *chunks: Chunk) -> Item:
    """Return a sparse file of `size` bytes to pack."""
    return Item(path, fmt.SPARSE, "libraries", None, size, "", "", "", "a test", chunks)


def ranges(path: str, size: int, *chunks: Chunk) -> Item:
    """Return what the sparse file of the same path does not have."""
    return Item(path, fmt.RANGES, "pages", None, size, "", "", "", "a test", chunks)


SMALL = (
    item("usr/bin/agent", b"#!/bin/sh\necho hello\n", kind=fmt.EXECUTABLE, group="libraries"),
    item("usr/lib/data.txt", b"data " * 40, package="numpy"),
    item("usr/lib/copy.txt", b"data " * 40),
    item("usr/lib/empty.txt", b""),
    item("app/train.py", b"print(1)\n", group="agent"),
    link("bin", "usr/bin"),
    link("usr/bin/sh", "agent"),
    folder("app/empty"),
)


def build(
    path: Path,
    items: Iterable[Item] = SMALL,
    *,
    bound_to: str = "",
    arch: str = ARCH,
    argv: tuple[str, ...] = ("/usr/bin/agent", "--now"),
    details: dict[str, Any] | None = None,
    name: str = "demo",
    effort: Effort = EFFORT,
    families: tuple[Family, ...] = (),
    blas: Mapping[str, str] | None = None,
    others: Mapping[str, Iterable[Item]] | None = None,
) -> str:
    """Pack `items` into an image (or cold pack) at `path`; return its identity.

    `others` are the items of further payloads, by architecture.
    """
    meta = ImageMeta(
        name=name,
        version="1.0",
        created_by="a test",
        network=False,
        env={"GREETING": "hello"},
        details={"trim": "traced"} if details is None else details,
        bound_to=bound_to,
    )
    payloads = [
        (_payload(arch, argv, families, blas or {}), items)
        for arch, items in {arch: items, **(others or {})}.items()
    ]
    return pack(path, meta, payloads, effort, path.parent / "frames")


def _payload(
    arch: str, argv: tuple[str, ...], families: tuple[Family, ...], blas: Mapping[str, str]
) -> PayloadMeta:
    packages = (("numpy", "2.4.6"),)
    return PayloadMeta(arch, "wheels", "3.11.7", argv, "usr/lib/lib", packages, families, blas)


def read_index(image: Path) -> dict[str, Any]:
    """Return the index of `image` as the JSON that it is."""
    data = image.read_bytes()
    footer = fmt.parse_footer(data[-fmt.FOOTER_SIZE :], len(data))
    index = data[footer.index_offset : footer.index_offset + footer.index_size]
    size, _ = fmt.INDEX_HEAD.unpack_from(index)
    cut = fmt.INDEX_HEAD.size + size
    parts = [index[fmt.INDEX_HEAD.size : cut], index[cut:]]
    value: dict[str, Any] = json.loads(
        b"".join(zstandard.ZstdDecompressor().decompress(p) for p in parts if p)
    )
    return value


def joined(value: dict[str, Any]) -> dict[str, Any]:
    """Return an index with its two parts put together, as a reader understands it."""
    stable, rest = value["stable"], value["rest"]
    payloads = [
        {**payload, "entries": [*entries, *payload["entries"]], "reasons": reasons}
        for payload, entries, reasons in zip(
            rest["payloads"], stable["entries"], stable["reasons"], strict=True
        )
    ]
    both = {key: [*stable[key], *rest[key]] for key in ("frames", "blobs")}
    return {**rest, **both, "payloads": payloads}


def parted(value: dict[str, Any]) -> dict[str, Any]:
    """Undo `joined`, with as much as can be in the second part."""
    payloads = [{key: v for key, v in p.items() if key != "reasons"} for p in value["payloads"]]
    stable = {
        "frames": [],
        "blobs": [],
        "entries": [[] for _ in payloads],
        "reasons": [p["reasons"] for p in value["payloads"]],
    }
    return {"stable": stable, "rest": {**value, "payloads": payloads}}


def forge(
    source: Path,
    target: Path,
    change: Callable[[dict[str, Any]], Any] = lambda _: None,
    raw: bytes | None = None,
    raw_size: int | None = None,
    **footer: Any,
) -> Path:
    """Write `source` again with a changed index and footer whose digests are all as they should be.

    `change` edits the index, its two parts put together; `raw` replaces it; `footer` replaces fields of
    fmt.Footer. The new index is a single zstd frame.
    """
    data = source.read_bytes()
    old = fmt.parse_footer(data[-fmt.FOOTER_SIZE :], len(data))
    if raw is None:
        value = joined(read_index(source))
        change(value)
        raw = json.dumps(parted(value)).encode()
    index = fmt.INDEX_HEAD.pack(0, 0) + zstandard.ZstdCompressor().compress(raw)
    fields = {
        "image_size": old.index_offset + len(index) + fmt.FOOTER_SIZE,
        "index_offset": old.index_offset,
        "index_size": len(index),
        "index_raw_size": len(raw) if raw_size is None else raw_size,
        "identity": hashlib.sha256(index).digest(),
        "bound_to": old.bound_to,
    }
    end = fmt.pack_footer(fmt.Footer(**{**fields, **footer}))
    target.write_bytes(data[: old.index_offset] + index + end)
    return target


def tree(root: Path) -> dict[str, tuple[str, str, bytes]]:
    """Return {path: (kind, link's target, bytes)} of everything below `root`."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path), b"")
        elif path.is_dir():
            found[name] = ("folder", "", b"")
        else:
            kind = "program" if path.stat().st_mode & 0o111 else "file"
            found[name] = (kind, "", path.read_bytes())
    return found


SMALL_TREE = {
    "app": ("folder", "", b""),
    "app/empty": ("folder", "", b""),
    "app/train.py": ("file", "", b"print(1)\n"),
    "bin": ("link", "usr/bin", b""),
    "usr": ("folder", "", b""),
    "usr/bin": ("folder", "", b""),
    "usr/bin/agent": ("program", "", b"#!/bin/sh\necho hello\n"),
    "usr/bin/sh": ("link", "agent", b""),
    "usr/lib": ("folder", "", b""),
    "usr/lib/copy.txt": ("file", "", b"data " * 40),
    "usr/lib/data.txt": ("file", "", b"data " * 40),
    "usr/lib/empty.txt": ("file", "", b""),
}
