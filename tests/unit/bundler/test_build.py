import os
from dataclasses import replace
from pathlib import Path

import pytest

from rvbundle import build, environment, foreign, lock, trace
from rvbundle.debian import Package
from rvbundle.environment import Interpreter
from rvbundle.lock import LockedDebian
from rvbundle.progress import Progress
from rvbundle.recipe import Recipe
from rvbundle.stages import StageCache
from rvbundle.trace import Trace
from rvbundle_runtime.errors import LockError, UsageError

from .test_lock import HEX, LOCK, MACHINE, OTHER, recipe

PYTHON = Interpreter(Path("/p"), "3.11.4", "3.11", Path("/s"), Path("/b"), "c", True)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let every resolution give LOCK; return the list of the recipes that were resolved."""
    calls: list[object] = []
    monkeypatch.setattr(environment, "resolve", lambda value, _: calls.append(value) or LOCK)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    return calls


def get_lock(tmp_path: Path, *requires: str) -> lock.Lock:
    value = recipe(tmp_path, *(requires or ("torch==2.13.0", "numpy")))
    return build.get_lock(value, PYTHON, StageCache(tmp_path / "cache", "demo"), Progress())


def test_the_lock_beside_the_recipe_is_used(tmp_path: Path, resolved: list[object]) -> None:
    (tmp_path / "recipe.lock").write_text(lock.dumps(LOCK))
    assert get_lock(tmp_path) == LOCK
    assert resolved == []


def test_a_lock_that_does_not_fit_stops_the_build(tmp_path: Path, resolved: list[object]) -> None:
    (tmp_path / "recipe.lock").write_text(lock.dumps(LOCK))
    with pytest.raises(LockError):
        get_lock(tmp_path, "torch==2.12.0")


def test_without_a_lock_the_answer_is_kept(tmp_path: Path, resolved: list[object]) -> None:
    assert get_lock(tmp_path) == get_lock(tmp_path) == LOCK
    assert len(resolved) == 1
    get_lock(tmp_path, "numpy")
    assert len(resolved) == 2
    assert not (tmp_path / "recipe.lock").exists()


def test_another_index_is_another_answer(
    tmp_path: Path, resolved: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    get_lock(tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "https://x")
    get_lock(tmp_path)
    assert len(resolved) == 2


@pytest.mark.parametrize("there", ["nothing", "another file", "the same file"])
def test_deliver(tmp_path: Path, there: str) -> None:
    source, target = tmp_path / "cache/x.rvb", tmp_path / "dist/x.rvb"
    source.parent.mkdir()
    source.write_bytes(b"image")
    if there != "nothing":
        target.parent.mkdir()
        if there == "another file":
            target.write_bytes(b"old")
        else:
            os.link(source, target)
    assert build._deliver(source, target) == target
    assert target.read_bytes() == b"image"
    assert [p.name for p in target.parent.iterdir()] == ["x.rvb"]


def test_deliver_to_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "x.rvb").write_bytes(b"image")
    build._deliver(tmp_path / "x.rvb", tmp_path / "dist/x.rvb")
    assert (tmp_path / "dist/x.rvb").read_bytes() == b"image"


def test_kept_trace(tmp_path: Path) -> None:
    key = {"tree": "x"}
    record = Trace(())
    path = tmp_path / "recipe.trace"
    assert build._kept_trace(None, key) is None
    assert build._kept_trace(path, key) is None
    path.write_text(trace.dumps(record, key))
    assert build._kept_trace(path, key) == record
    assert build._kept_trace(path, {"tree": "y"}) is None
    path.write_text("damaged")
    assert build._kept_trace(path, key) is None


@pytest.mark.parametrize("payloads", [(), (MACHINE,), (OTHER,), (OTHER, MACHINE)])
def test_payloads_that_the_recipe_has(tmp_path: Path, payloads: tuple[str, ...]) -> None:
    build._check_payloads(replace(recipe(tmp_path), debian={OTHER: "trixie"}), payloads)


@pytest.mark.parametrize(
    ("debian", "payloads", "have", "hint"),
    [
        ({}, (OTHER,), MACHINE, f'add it: [payloads] {OTHER} = "debian:trixie"'),
        ({OTHER: "sid"}, (MACHINE, "mips"), f"{MACHINE}, {OTHER}", ""),
        ({OTHER: "sid"}, ("",), f"{MACHINE}, {OTHER}", ""),
    ],
    ids=["not in the recipe", "not known", "empty"],
)
def test_payloads_that_the_recipe_has_not(
    tmp_path: Path, debian: dict[str, str], payloads: tuple[str, ...], have: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build._check_payloads(replace(recipe(tmp_path), debian=debian), payloads)
    assert caught.value.message == (
        f"{tmp_path}/recipe.toml has no payload for {payloads[-1]}; it has: {have}"
    )
    assert caught.value.hint == hint


def test_stages_of_other_architectures_have_a_history_of_their_own() -> None:
    assert (build._named("trace", MACHINE), build._named("trace", OTHER)) == ("trace", f"trace-{OTHER}")


def test_other_payloads_are_another_lock(
    tmp_path: Path, resolved: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = LockedDebian(OTHER, "trixie", MACHINE, (Package("dash", "1", HEX),), (), ())
    asked: list[object] = []

    def lock_payloads(value: Recipe, found: lock.Lock, cache_base: Path) -> lock.Lock:
        asked.append(cache_base)
        return replace(found, debian=(part,)) if value.debian else found

    monkeypatch.setattr(foreign, "lock_payloads", lock_payloads)
    value = replace(recipe(tmp_path, *LOCK.requires), debian={OTHER: "trixie"})
    cache = StageCache(tmp_path / "cache", "demo")
    for _ in range(2):
        assert build.get_lock(value, PYTHON, cache, Progress()) == replace(LOCK, debian=(part,))
    assert asked == [tmp_path / "cache"]
    assert build.get_lock(replace(value, debian={}), PYTHON, cache, Progress()) == LOCK
    assert len(asked) == 2
