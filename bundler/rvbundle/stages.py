"""The build cache: each stage's result in a folder named by an explicit key, complete or absent.

BASE/build/STAGE/DIGEST/...        the result
BASE/build/STAGE/DIGEST/key.json   the key it was made for; written last, so that it marks completeness
BASE/build/last/AGENT.json         the keys of an agent's last build, to say what has changed since
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Key = dict[str, Any]


@dataclass(frozen=True)
class Cached:
    """A stage's folder, whether it was there already, and why (not)."""

    folder: Path
    reused: bool
    why: str


class StageCache:
    """The cache of one build; `agent` names the history that reasons are drawn from."""

    def __init__(self, base: Path, agent: str) -> None:
        self.base = base / "build"
        self._last_path = self.base / "last" / f"{agent}.json"
        self._last = _read_history(self._last_path)
        self._now: dict[str, Key] = {}

    def folder(self, stage: str, key: Key) -> Path:
        """Return where the result for `key` lies or would lie."""
        return self.base / stage / key_digest(key)

    def find(self, stage: str, key: Key) -> Path | None:
        """Return the complete result for `key`, if there is one."""
        folder = self.folder(stage, key)
        return folder if (folder / "key.json").is_file() else None

    def get(self, stage: str, key: Key, make: Callable[[Path], None]) -> Cached:
        """Return the result of `stage` for `key`, calling `make(folder)` to fill an empty folder if need be.

        Another build of the same key waits; a `make` that fails leaves nothing behind.
        """
        found = self.find(stage, key)
        why = self._why(stage, key, found is not None)
        self._now[stage] = key
        if found:
            os.utime(found / "key.json")
            return Cached(found, True, why)
        folder = self.folder(stage, key)
        with _locked(self.base / "locks" / f"{stage}-{folder.name}.lock"):
            found = self.find(stage, key)
            if found:
                return Cached(found, True, "another build has just made it")
            if folder.exists():
                shutil.rmtree(folder)  # of a killed build
            folder.mkdir(parents=True)
            try:
                make(folder)
                write_atomically(folder / "key.json", json.dumps(key, sort_keys=True).encode())
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return Cached(folder, False, why)

    def remember(self) -> None:
        """Note the keys of this build as the last that worked."""
        self._last_path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._last_path, json.dumps(self._now, sort_keys=True).encode())

    def _why(self, stage: str, key: Key, reused: bool) -> str:
        if reused:
            return "nothing that it depends on has changed"
        last = self._last.get(stage)
        if last is None:
            return "it was never made for this agent"
        changed = sorted(k for k in key.keys() | last.keys() if key.get(k) != last.get(k))
        return f"changed since the last build: {', '.join(changed) or 'nothing, but the cache is gone'}"


def _read_history(path: Path) -> dict[str, Key]:
    """Return the keys of the last build; {} if there was none, or its record is damaged."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, dict) for key in value.values()):
        return {}
    return value


def key_digest(key: Key) -> str:
    """Return the folder name for a key: 32 hex digits of the SHA-256 of its canonical JSON."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def digest_of_files(paths: Iterable[Path]) -> str:
    """Return a SHA-256 (hex) of the files' names and contents, for keys that depend on our own code."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that it is either complete or absent."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class CachedStage:
    """A line of `cache ls` for build stages: bytes on disk, time of last use."""

    stage: str
    key: str
    size: int
    used: float


def list_stages(base: Path) -> list[CachedStage]:
    """Return the complete results in the build cache."""
    from rvbundle_runtime.store import disk_usage

    found = []
    for marker in sorted((base / "build").glob("*/*/key.json")):
        folder = marker.parent
        found.append(CachedStage(folder.parent.name, folder.name, disk_usage(folder), marker.stat().st_mtime))
    return found


def prune_stages(base: Path) -> int:
    """Remove the whole build cache; return the bytes that it took."""
    from rvbundle_runtime.store import disk_usage

    folder = base / "build"
    size = disk_usage(folder)
    if folder.exists():
        shutil.rmtree(folder)
    return size
