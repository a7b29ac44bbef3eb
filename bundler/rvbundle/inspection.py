"""Looking into images: inspect, verify, extract."""

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rvbundle import licences
from rvbundle.elf import join_tail
from rvbundle.progress import line, mib, wide_console
from rvbundle_runtime import format as fmt
from rvbundle_runtime import store
from rvbundle_runtime.bootstraps import find_table
from rvbundle_runtime.errors import ImageError, StoreError, UsageError
from rvbundle_runtime.image import Reader
from rvbundle_runtime.launch import cold_beside, cold_inside, find_cold, refuse_cold_pack
from rvbundle_runtime.verifying import print_verified, verify

__all__ = ["Extracted", "compressed_sizes", "extract", "inspect", "print_report", "print_verified", "verify"]

NO_PACKAGE = "(Python and system)"


def compressed_sizes(index: fmt.Index) -> list[float]:
    """Return, per blob, its share of the compressed bytes of the frames that it lies in."""
    shares = []
    for blob in index.blobs:
        frame, start, left, share = blob.frame, blob.offset, blob.size, 0.0
        while left:
            there = index.frames[frame]
            part = min(left, there.raw_size - start)
            share += there.size * part / there.raw_size if there.raw_size else 0.0
            left, frame, start = left - part, frame + 1, 0
        shares.append(share)
    return shares


def inspect(path: Path, files: bool) -> dict[str, Any]:
    """Return what an image or cold pack holds; sizes in bytes. Raises ImageError."""
    with Reader(path) as reader:
        index = reader.index()
        shares = compressed_sizes(index)
        return {
            "file": str(path),
            "kind": "cold pack" if reader.bound_to else "image",
            "name": index.name,
            "version": index.version,
            "identity": reader.identity,
            "bound_to": reader.bound_to or None,
            "created_by": index.created_by,
            "size": reader.footer.image_size,
            "before": reader.start,
            "network": index.network,
            "env": index.env,
            "details": index.details,
            "payloads": [_payload(index, payload, shares, files) for payload in index.payloads],
        }


def _payload(index: fmt.Index, payload: fmt.Payload, shares: list[float], files: bool) -> dict[str, Any]:
    by_package: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
    libraries = []
    listing = []
    seen: set[int] = set()
    for entry in payload.entries:
        size = sum(index.blobs[blob].size for blob in entry.blobs)
        share = sum(shares[blob] for blob in entry.blobs if blob not in seen)
        seen.update(entry.blobs)
        name = payload.packages[entry.package].name if entry.package >= 0 else NO_PACKAGE
        if entry.path.startswith("app/"):
            name = "(the agent)"
        row = by_package[name]
        row[0], row[1], row[2] = row[0] + size, row[1] + share, row[2] + 1
        base = os.path.basename(entry.path)
        if base.endswith(".so") or ".so." in base:
            libraries.append(
                {"path": entry.path, "kind": entry.kind, "size": size, "compressed": round(share)}
            )
        if files:
            listing.append(
                {
                    "path": entry.path,
                    "kind": entry.kind,
                    "size": size,
                    "compressed": round(share),
                    "package": name,
                    "reason": payload.reasons[entry.reason],
                }
            )
    versions = {package.name: package.version for package in payload.packages}
    value: dict[str, Any] = {
        "arch": payload.arch,
        "source": payload.source,
        "python": payload.python,
        "argv": list(payload.argv),
        "families": [asdict(family) for family in payload.families],
        "blas": dict(payload.blas),
        "files": len(payload.entries),
        "packages": [
            {
                "name": name,
                "version": versions.get(name),
                "size": int(row[0]),
                "compressed": round(row[1]),
                "files": int(row[2]),
            }
            for name, row in sorted(by_package.items(), key=lambda item: -item[1][1])
        ],
        "libraries": sorted(libraries, key=lambda row: -int(row["compressed"])),
    }
    if files:
        value["entries"] = listing
    return value


def print_report(report: dict[str, Any]) -> None:
    """Print what `inspect` returned."""
    console = wide_console()
    about = f"  {report['kind']}, {mib(report['size'])}, by {report['created_by']}"
    console.print(line((f"{report['name']} {report['version']}", "bold"), about))
    console.print(f"identity  {report['identity']}")
    if report["before"]:
        console.print(f"{mib(report['before'])} stand before it in the file (a cold pack inside?)")
    if report["bound_to"]:
        console.print(f"belongs to image  {report['bound_to']}")
    for payload in report["payloads"]:
        console.print(
            f"\npayload {payload['arch']} from {payload['source']}, Python {payload['python']}, "
            f"{payload['files']} files, starts {' '.join(payload['argv'])}"
        )
        if "entries" in payload:
            for row in payload["entries"]:
                print(f"{row['kind']} {row['size']:>10} {row['compressed']:>10}  {row['path']}")
            continue
        console.print(_table("package", payload["packages"], "name"))
        console.print(_table("shared library", payload["libraries"][:12], "path"))


def _table(title: str, rows: list[dict[str, Any]], key: str) -> Table:
    table = Table(title, "version", "raw MiB", "compressed MiB", box=None, pad_edge=False)
    for column in (2, 3):
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(
            line(str(row[key])),
            line(str(row.get("version") or "")),
            f"{row['size'] / (1 << 20):.1f}",
            f"{row['compressed'] / (1 << 20):.2f}",
        )
    return table


def list_licences(path: Path) -> dict[str, Any]:
    """Return what an image's file is made of, by its parts (None: it does not say); raises ImageError.

    A cold pack inside the file counts, and the bootstraps of a self-running one; a cold pack beside it does
    not.
    """
    with Reader(path) as reader:
        index = reader.index()
        parts = _licences(reader)
        inside = cold_inside(path, reader.identity)
    if inside and parts is not None:
        with inside:
            parts |= {f"cold pack, {name}": rows for name, rows in (_licences(inside) or {}).items()}
    table = find_table(path)
    if table and parts is not None:
        parts |= {
            f"bootstrap {s.arch}": tuple(licences.Licence(*row) for row in s.licences) for s in table.sections
        }
    rows = {
        name: [{**asdict(row), "wants_source": row.wants_source} for row in listed]
        for name, listed in (parts or {}).items()
    }
    return {
        "file": str(path),
        "name": index.name,
        "version": index.version,
        "licences": None if parts is None else rows,
    }


def _licences(reader: Reader) -> dict[str, tuple[licences.Licence, ...]] | None:
    try:
        return licences.from_details(reader.index().details)
    except ValueError as error:
        raise ImageError(f"{reader.path}: its list of licences can't be read: {error}", fmt.FORGED) from None


def print_licences(report: dict[str, Any]) -> None:
    """Print what `list_licences` returned."""
    if report["licences"] is None:
        print(f"{report['file']} has no list of licences: an older rvbundle has built it")
        return
    console = wide_console()
    columns = ("component", "version", "licence", "source")
    for part, rows in report["licences"].items():
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(line(row[name]) for name in columns))
        console.print(line((part, "bold")))
        console.print(table)
    every = {(r["component"], r["version"]): r for rows in report["licences"].values() for r in rows}.values()
    for count, what in (
        (sum(row["wants_source"] for row in every), "whose licence asks for its source beside the file"),
        (sum(not row["where"] for row in every), "whose licence text is not at hand"),
    ):
        print(f"{count} {'component' if count == 1 else 'components'} {what}")
    print(
        "Their texts lie in the cold pack, and bootstraps have theirs. A publisher's part: docs/licences.md"
    )


@dataclass(frozen=True)
class Extracted:
    """What `extract` wrote: how many files, bytes, and whether the tree is whole."""

    files: int
    size: int
    note: str


def extract(path: Path, folder: Path, arch: str | None = None) -> Extracted:
    """Write the tree of the image `path` into `folder`, which must be new or empty.

    With the cold pack beside the image the tree is the frozen one, libraries with their symbols included.
    `arch` says which payload, if the image has several and none for this machine. Raises ImageError,
    StoreError, UsageError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise StoreError(f"{folder} {what}", "name a new folder")
    with Reader(path) as reader:
        refuse_cold_pack(reader)
        payload = _choose_payload(reader, arch)
        entries = payload.entries
        cold, pack = find_cold(path, None, reader.identity)
        if cold is None:
            beside = cold_beside(path)
            why = pack.reason if beside.exists() else f"no {beside.name} beside the image"
            note = f"the hot part only ({why})"
            with _emptied_on_failure(folder):
                files = _extract_from(reader, entries, folder)
        else:
            note = "whole"
            with cold, _emptied_on_failure(folder):
                rest = _choose_payload(cold, payload.arch).entries
                _check_fit(cold, entries, rest)
                files = _extract_from(reader, entries, folder) + _extract_from(cold, rest, folder)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return Extracted(files, size, note)


@contextmanager
def _emptied_on_failure(folder: Path) -> Iterator[None]:
    """Make `folder` if need be; if the block fails, leave it as it was: absent or empty."""
    was_there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not was_there and folder.is_dir():
            folder.rmdir()
        if isinstance(error, OSError):
            raise StoreError(f"can't write {error.filename or folder}: {error.strerror}") from None
        raise


def _check_fit(cold: Reader, hot: tuple[fmt.Entry, ...], rest: tuple[fmt.Entry, ...]) -> None:
    """Raise ImageError unless image and cold pack together make one tree, as each does alone."""
    try:
        fmt.check_entries([*hot, *rest])
        sparse = {entry.path for entry in hot if entry.kind == fmt.SPARSE}
        for entry in rest:
            if entry.kind == fmt.RANGES and entry.path not in sparse:
                raise ImageError(f"it has ranges of {entry.path!r}, which the image has not trimmed")
    except ImageError as error:
        raise ImageError(f"{cold.path}: {error.message}", fmt.FORGED) from None


def _choose_payload(reader: Reader, arch: str | None) -> fmt.Payload:
    """Return the payload for `arch`; where that is None, the only one or the one for this machine."""
    payloads = {payload.arch: payload for payload in reader.index().payloads}
    if arch is None:
        arch = next(iter(payloads)) if len(payloads) == 1 else os.uname().machine
    if arch not in payloads:
        raise UsageError(
            f"{reader.path} has no payload for {arch}; it has: {', '.join(payloads) or 'none'}",
            "name one of these: --payload ARCH",
        )
    return payloads[arch]


def _extract_from(reader: Reader, entries: tuple[fmt.Entry, ...], folder: Path) -> int:
    store.write_tree(reader, tuple(e for e in entries if e.kind != fmt.TAIL), folder)
    for entry in entries:
        target = folder / entry.path
        if entry.kind == fmt.RANGES:
            os.truncate(target, entry.size)  # what the trim had put behind its end
    for entry in entries:
        target = folder / entry.path
        if entry.kind == fmt.TAIL and target.exists():
            whole = join_tail(target.read_bytes(), reader.read_blob(entry.blob))
            if whole is None:
                raise ImageError(f"{reader.path}: the tail of {entry.path!r} does not fit its library")
            target.write_bytes(whole)
    return len(entries)
