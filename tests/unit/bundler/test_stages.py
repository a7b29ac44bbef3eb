import hashlib
import json
import threading
from pathlib import Path

import pytest

from rvbundle import stages
from rvbundle.stages import StageCache, key_digest

KEY = {"python": "3.11.7", "requires": ["b", "a"]}


@pytest.fixture
def cache(tmp_path: Path) -> StageCache:
    return StageCache(tmp_path, "demo")


def make(folder: Path) -> None:
    (folder / "result").write_text("made")


def fail(folder: Path) -> None:
    (folder / "half").write_text("")
    raise RuntimeError("no luck")


def test_key_digest_is_of_canonical_json() -> None:
    expected = hashlib.sha256(b'{"python":"3.11.7","requires":["b","a"]}').hexdigest()[:32]
    assert key_digest(KEY) == key_digest(dict(reversed(KEY.items()))) == expected
    assert key_digest({**KEY, "requires": ["a", "b"]}) != expected


def test_made_once(cache: StageCache, tmp_path: Path) -> None:
    first = cache.get("freeze", KEY, make)
    assert first.folder == tmp_path / "build/freeze" / key_digest(KEY)
    assert (first.reused, first.why) == (False, "it was never made for this agent")
    assert (first.folder / "result").read_text() == "made"
    assert json.loads((first.folder / "key.json").read_text()) == KEY
    second = cache.get("freeze", KEY, fail)
    assert (second.folder, second.reused, second.why) == (
        first.folder,
        True,
        "nothing that it depends on has changed",
    )


def test_another_stage_or_key_is_another_result(cache: StageCache) -> None:
    folders = {
        cache.get("freeze", KEY, make).folder,
        cache.get("trace", KEY, make).folder,
        cache.get("freeze", {**KEY, "python": "3.12"}, make).folder,
    }
    assert len(folders) == 3


def test_failure_leaves_nothing(cache: StageCache) -> None:
    with pytest.raises(RuntimeError, match="no luck"):
        cache.get("freeze", KEY, fail)
    assert not cache.folder("freeze", KEY).exists()
    assert not cache.get("freeze", KEY, make).reused


def test_killed_build_is_made_anew(cache: StageCache) -> None:
    folder = cache.folder("freeze", KEY)
    folder.mkdir(parents=True)
    (folder / "half").write_text("")
    assert cache.find("freeze", KEY) is None
    assert not cache.get("freeze", KEY, make).reused
    assert sorted(p.name for p in folder.iterdir()) == ["key.json", "result"]


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ({"python": "3.12", "requires": ["b", "a"]}, "changed since the last build: python"),
        ({"python": "3.12", "requires": []}, "changed since the last build: python, requires"),
        ({"python": "3.11.7"}, "changed since the last build: requires"),
        ({**KEY, "pip": {}}, "changed since the last build: pip"),
        (KEY, "changed since the last build: nothing, but the cache is gone"),
    ],
    ids=["one", "two", "less", "more", "cache gone"],
)
def test_why_it_was_not_reused(tmp_path: Path, then: dict[str, object], why: str) -> None:
    first = StageCache(tmp_path, "demo")
    folder = first.get("freeze", KEY, make).folder
    first.remember()
    (folder / "key.json").unlink()
    assert StageCache(tmp_path, "demo").get("freeze", then, make).why == why
    assert (
        StageCache(tmp_path, "other").get("freeze", {"x": 1}, make).why == "it was never made for this agent"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"freeze": 3}'])
def test_damaged_history(tmp_path: Path, text: str) -> None:
    (tmp_path / "build/last").mkdir(parents=True)
    (tmp_path / "build/last/demo.json").write_text(text)
    assert not StageCache(tmp_path, "demo").get("freeze", KEY, make).reused


def test_two_builds_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(3)
    made, results = [], []

    def slow(folder: Path) -> None:
        made.append(folder)
        make(folder)

    def run() -> None:
        barrier.wait()
        results.append(StageCache(tmp_path, "demo").get("freeze", KEY, slow))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert sorted(r.reused for r in results) == [False, True, True]


def test_list_and_prune(tmp_path: Path, cache: StageCache) -> None:
    cache.get("freeze", KEY, make)
    cache.get("trace", KEY, make)
    cache.folder("image", KEY).mkdir(parents=True)  # of a killed build
    assert [(s.stage, s.key) for s in stages.list_stages(tmp_path)] == [
        ("freeze", key_digest(KEY)),
        ("trace", key_digest(KEY)),
    ]
    assert stages.prune_stages(tmp_path) > 0
    assert stages.list_stages(tmp_path) == []
    assert not (tmp_path / "build").exists()
    assert stages.prune_stages(tmp_path) == 0


def test_write_atomically(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    stages.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomically_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        stages.write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
