"""What a run would do with an image and why, and why each file is where it is. Prints nothing."""

import fnmatch
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rvbundle_runtime import decisions, store
from rvbundle_runtime import format as fmt
from rvbundle_runtime import plan as planning
from rvbundle_runtime.absent import RUN
from rvbundle_runtime.decision import Situation
from rvbundle_runtime.errors import ImageError, RvbundleError
from rvbundle_runtime.host import CachePlace, Host
from rvbundle_runtime.image import Reader
from rvbundle_runtime.launch import choose, find_cold, refuse_cold_pack
from rvbundle_runtime.options import RunOptions


def explain(path: Path, host: Host, place: CachePlace, options: RunOptions | None = None) -> dict[str, Any]:
    """Return what `run` would do with the image on this host; raises ImageError, HostError."""
    options = options or RunOptions(image=str(path))
    with Reader(path) as reader:
        refuse_cold_pack(reader)
        index = reader.index()
        host, launch = choose(host, options, place, tuple(p.arch for p in index.payloads), str(path))
        arch = launch.arch
        payload = next(p for p in index.payloads if p.arch == arch)
        info = store.describe(index, payload, reader.identity)
        unpacked = store.find(place.base, reader.identity, arch)
        cold, pack = find_cold(path, options.cold, reader.identity)
        root = store.root_path(place.base, reader.identity, arch)
        try:
            situation = Situation(host, launch, info, bool(pack.path))
            decision = decisions.decide(situation, planning.wanted(options), place.base, keep=False)
            plan = planning.make_plan(host, str(root), info, options, pack, launch, decision)
            choices = [vars(choice) for choice in plan.choices]
            argv, refused = list(plan.argv), None
        except RvbundleError as error:
            choices, argv = [], list(info.argv)
            refused = {"message": error.message, "hint": error.hint}
        where = "unpacked there already" if unpacked else "will be unpacked there at the first run"
        had = store.restored(unpacked) if unpacked else []
        if had:
            value = f"{len(had)} files"
            reason = "runs needed them: `run --record FILE`, then `build --with-record FILE` keeps them"
            choices.append({"what": "restored", "value": value, "reason": reason})
        choices += _restored_pages(unpacked)
        choices.append({"what": "store", "value": str(place.base), "reason": f"{place.reason}; {where}"})
        counts = [_reasons(reader), None]
        if cold:
            with cold, suppress(ImageError):  # a damaged one is of no use to `run` either
                counts[1] = _reasons(cold)
        return {
            "image": str(path),
            "name": index.name,
            "version": index.version,
            "choices": choices,
            "argv": argv,
            "refused": refused,
            "trim": index.details.get("trim"),
            "traces": index.details.get("traces"),
            "hot": counts[0],
            "cold": counts[1],
        }


def _restored_pages(unpacked: store.Unpacked | None) -> list[dict[str, Any]]:
    """Return a line for each trimmed library of which runs have restored pages."""
    runs = store.restored_runs(unpacked) if unpacked else {}
    reason = f"of {RUN >> 10} KiB each, at addresses that no trace touched"
    return [
        {
            "what": "restored pages",
            "value": f"{path.rpartition('/')[2]}: {len(numbers)} runs",
            "reason": reason,
        }
        for path, numbers in sorted(runs.items())
    ]


def _reasons(reader: Reader) -> dict[str, int]:
    """Return {reason: files}, the most frequent first; reasons without their details."""
    counts: dict[str, int] = {}
    for payload in reader.index().payloads:
        for entry in payload.entries:
            reason = re.split("[:;]", payload.reasons[entry.reason])[0]
            counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def explain_files(path: Path, pattern: str) -> list[dict[str, Any]]:
    """Return, for each file of image and cold pack that matches, its side and the reason.

    `pattern` is a glob for the path, with or without what comes before the package's own name.
    """
    rows = []
    with Reader(path) as image:
        cold, _ = (None, None) if image.bound_to else find_cold(path, None, image.identity)
        sides = [("cold" if image.bound_to else "hot", image), *([("cold", cold)] if cold else [])]
        for side, reader in sides:
            for payload in reader.index().payloads:
                rows += [
                    {"path": e.path, "kind": e.kind, "side": side, "reason": payload.reasons[e.reason]}
                    for e in payload.entries
                    if _matches(e, pattern)
                ]
        if cold:
            cold.close()
    return sorted(rows, key=lambda row: (row["path"], row["kind"]))


def _matches(entry: fmt.Entry, pattern: str) -> bool:
    return fnmatch.fnmatch(entry.path, pattern) or fnmatch.fnmatch(entry.path, f"*/{pattern}")


def plan_lines(report: dict[str, Any]) -> list[str]:
    """Return what `explain` returned as lines of plain text."""
    lines = [f"{report['name']} {report['version']} on this machine:"]
    lines += [f"  {c['what']:<15} {c['value']}  ({c['reason']})" for c in report["choices"]]
    lines.append(f"  {'starts':<15} {' '.join(report['argv'])}")
    if report["refused"]:
        lines += [
            "",
            f"run would refuse: {report['refused']['message']}",
            f"hint: {report['refused']['hint']}",
        ]
    return lines
