"""Small images for tests: honest ones made by the pack stage, and forged ones with valid digests."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zstandard

from rvbundle.pack import ImageMeta, Item, PayloadMeta, pack
from rvbundle_runtime import format as fmt

ARCH = os.uname().machine
LEVEL = 3


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
) -> str:
    """Pack `items` into an image (or cold pack) at `path`; return its identity."""
    meta = ImageMeta(
        name=name,
        version="1.0",
        created_by="a test",
        network=False,
        env={"GREETING": "hello"},
        details={"trim": "traced"} if details is None else details,
        bound_to=bound_to,
    )
    payload = PayloadMeta(arch, "wheels", "3.11.7", argv, "usr/lib/lib", (("numpy", "2.4.6"),))
    return pack(path, meta, payload, items, LEVEL, path.parent / "frames")


def forge(
    source: Path,
    target: Path,
    change: Callable[[dict[str, Any]], Any] = lambda _: None,
    raw: bytes | None = None,
    raw_size: int | None = None,
    **footer: Any,
) -> Path:
    """Write `source` again with a changed index and footer whose digests are all as they should be.

    `change` edits the index; `raw` replaces it; `footer` replaces fields of fmt.Footer.
    """
    data = source.read_bytes()
    old = fmt.parse_footer(data[-fmt.FOOTER_SIZE :], len(data))
    index = data[old.index_offset : old.index_offset + old.index_size]
    if raw is None:
        value = json.loads(zstandard.ZstdDecompressor().decompress(index))
        change(value)
        raw = json.dumps(value).encode()
    index = zstandard.ZstdCompressor().compress(raw)
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
