"""Checks every digest of an image and of what goes with it."""

from pathlib import Path
from typing import Any

from rvbundle_runtime import bootstraps
from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.image import Reader
from rvbundle_runtime.launch import cold_beside, cold_inside


def verify(path: Path) -> dict[str, Any]:
    """Check every digest of a file, of its cold pack beside or inside it, and of its bootstraps.

    Raises ImageError naming the damage.
    """
    table = bootstraps.find_table(path)
    for section in table.sections if table else ():
        bootstraps.check_section(path, section)
    with Reader(path) as reader:
        checked = [_verify_one(reader)]
        beside = cold_beside(path)
        if beside.exists() and beside != path:
            with Reader(beside) as cold:
                checked.append(_verify_one(cold))
            if checked[1]["bound_to"] != reader.identity:
                raise ImageError(
                    f"{beside} belongs to another image than {path}", "build both again, or remove it"
                )
        inside = cold_inside(path, reader.identity)
        if inside:
            with inside:
                checked.append(_verify_one(inside))
    archs = [section.arch for section in table.sections] if table else []
    return {"verified": checked, "bootstraps": archs}


def _verify_one(reader: Reader) -> dict[str, Any]:
    damaged = set()
    path = reader.path
    index = reader.index()
    for number in range(len(index.frames)):
        try:
            reader.read_frame(number)
        except ImageError:
            damaged.add(number)
    bad = [
        index.label(payload.arch, entry.path)
        for payload in index.payloads
        for entry in payload.entries
        if any(_is_bad(reader, blob, damaged) for blob in entry.blobs)
    ]
    if damaged or bad:
        shown = "".join(f"\n    {name}" for name in bad[:20])
        more = f"\n    … and {len(bad) - 20} more" if len(bad) > 20 else ""
        raise ImageError(
            f"{path} is damaged in {len(damaged)} of {len(index.frames)} frames; files that are affected:"
            f"{shown}{more}",
            "copy it again from its source",
        )
    return {
        "file": str(path),
        "kind": "cold pack" if reader.bound_to else "image",
        "identity": reader.identity,
        "bound_to": reader.bound_to,
        "frames": len(index.frames),
        "blobs": len(index.blobs),
    }


def _is_bad(reader: Reader, blob: int, damaged: set[int]) -> bool:
    if damaged and any(frame in damaged for frame, _, _ in reader.extents(blob)):
        return True
    try:
        reader.read_blob(blob)
    except ImageError:
        return True
    return False


def print_verified(report: dict[str, Any]) -> None:
    """Print what `verify` returned."""
    for arch in report["bootstraps"]:
        print(f"bootstrap for {arch}: intact")
    for row in report["verified"]:
        print(f"{row['file']}: intact ({row['kind']}, {row['frames']} frames, {row['blobs']} blobs)")
