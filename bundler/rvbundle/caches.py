"""`rvbundle cache`: what lies in the store and in the build cache, and bootstraps of self-running files."""

import time
from typing import Any

from rich.table import Table

from rvbundle.progress import line, wide_console
from rvbundle.stages import list_stages, prune_stages
from rvbundle_runtime import bootstraps, decisions, store
from rvbundle_runtime.host import CachePlace


def list_cache(place: CachePlace) -> dict[str, Any]:
    """Return unpacked images, bootstraps and build stages; sizes in bytes, times in seconds since 1970."""
    return {
        "base": str(place.base),
        "images": [vars(stored) for stored in store.list_stored(place.base)],
        "bootstraps": [vars(stored) for stored in bootstraps.list_stored(place.base)],
        "stages": [vars(stage) for stage in list_stages(place.base)],
    }


def print_cache(report: dict[str, Any]) -> None:
    """Print what `list_cache` returned."""
    console = wide_console()
    console.print(report["base"])
    table = Table("image", "version", "MiB", "last used", "key", box=None, pad_edge=False)
    for row in report["images"]:
        table.add_row(
            line(row["name"]), line(row["version"]), _mib(row["size"]), _when(row["used"]), row["key"][:12]
        )
    console.print(table if report["images"] else "no unpacked images")
    if report["bootstraps"]:
        table = Table("bootstrap", "MiB", "last used", box=None, pad_edge=False)
        for row in report["bootstraps"]:
            table.add_row(row["key"][:12], _mib(row["size"]), _when(row["used"]))
        console.print(table)
    table = Table("build stage", "MiB", "last used", "key", box=None, pad_edge=False)
    for row in report["stages"]:
        table.add_row(row["stage"], _mib(row["size"]), _when(row["used"]), row["key"][:12])
    console.print(table if report["stages"] else "no build stages")


def prune_cache(place: CachePlace, images: bool, stages: bool) -> list[str]:
    """Remove what is asked for; return lines that say what was."""
    lines = []
    if images:
        removed, busy = store.prune(place.base)
        lines.append(f"removed {len(removed)} unpacked images ({_mib(sum(s.size for s in removed))} MiB)")
        lines += [f"kept {stored.name} {stored.version}: it is running" for stored in busy]
        forgotten = decisions.forget(place.base, {stored.key.rpartition("-")[0] for stored in busy})
        if forgotten:
            lines.append(f"forgot {forgotten} choices of backends, those of `rvbundle tune` too")
        gone, running = bootstraps.prune(place.base)
        if gone:
            size = _mib(sum(stored.size for stored in gone))
            lines.append(f"removed {len(gone)} bootstraps of self-running files ({size} MiB)")
        lines += [f"kept the bootstrap {stored.key[:12]}: it is running" for stored in running]
    if stages:
        lines.append(f"removed the build stages ({_mib(prune_stages(place.base))} MiB)")
    return lines


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
