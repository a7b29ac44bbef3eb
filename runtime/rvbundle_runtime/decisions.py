"""Decisions about backends that were made before: kept in the store, found by all that they depend on.

BASE/backends/IDENTITY-ARCH-KEY.json    a decision, measured or not, and the key that it was made for

The image's identity is a digest of every byte of its libraries and of the agent, so that the key needs no
more of these. A decision that can't be written is made again by the next run.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from rvbundle_runtime import __version__, table
from rvbundle_runtime.decision import Decision, Situation, Wanted, dumps, loads
from rvbundle_runtime.launchers.start import usable

_FOLDER = "backends"
_NAME_HEX = 16  # digits of an identity and of a key in a file's name; the file holds both whole


def decide(situation: Situation, wanted: Wanted, base: Path, keep: bool = True) -> Decision:
    """Return the backend for a run: as found in the store at `base`, unless `wanted` says otherwise.

    A decision that was not there is kept if `keep`. Raises UsageError and HostError of `backends.choose`.
    """
    key = key_of(situation)
    found = read(base, key)
    if found and wanted.nothing:
        return found
    from rvbundle_runtime import backends  # late: most runs find what was decided before

    made = backends.choose(backends.load_table(), situation, wanted, found)
    if wanted.nothing and keep:
        with contextlib.suppress(OSError):  # an unwritable store: it takes some milliseconds each time
            write(base, key, made)
    return made


def key_of(situation: Situation) -> dict[str, Any]:
    """Return all that a decision depends on, as JSON has it."""
    host, launch, info = situation.host, situation.launch, situation.info
    emulator = None if launch.native else usable(host, launch.launcher, launch.arch)
    processor = host.processor
    return {
        "rvbundle": __version__,
        "table": _table_digest(),
        "image": info.identity,
        "payload": info.arch,
        "launcher": launch.launcher,
        "emulator": emulator.version if emulator else "",
        "cold": situation.cold,
        "processor": [
            processor.vendor,
            [list(pair) for pair in processor.ids],
            " ".join(sorted(processor.flags)),
            processor.vlen,
        ],
        "processors": [len(host.usable), host.quota, [len(cluster.cpus) for cluster in host.clusters]],
    }


def _table_digest() -> str:
    try:
        with open(table.FILE, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:_NAME_HEX]
    except OSError:
        return ""


def _path(base: Path, key: dict[str, Any]) -> str:
    text = json.dumps(key, sort_keys=True)
    name = (
        f"{key['image'][:_NAME_HEX]}-{key['payload']}-{hashlib.sha256(text.encode()).hexdigest()[:_NAME_HEX]}"
    )
    return f"{base}/{_FOLDER}/{name}.json"


def read(base: Path, key: dict[str, Any]) -> Decision | None:
    """Return the decision that was made for `key`; None if there is none, or it can't be read."""
    try:
        with open(_path(base, key), encoding="utf-8") as file:
            return loads(file.read(), key)
    except (OSError, ValueError):
        return None


def write(base: Path, key: dict[str, Any], decision: Decision) -> None:
    """Keep a decision; raises OSError."""
    path = _path(base, key)
    # Whoever may write here may set variables of later runs: nobody else, whatever the umask.
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(dumps(decision, key))
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def forget(base: Path, kept: set[str]) -> int:
    """Remove the decisions for images that are none of `kept` (identities); return how many."""
    names = {identity[:_NAME_HEX] for identity in kept}
    removed = 0
    for path in (base / _FOLDER).glob("*.json"):
        if path.name.partition("-")[0] not in names:
            path.unlink(missing_ok=True)
            removed += 1
    return removed
