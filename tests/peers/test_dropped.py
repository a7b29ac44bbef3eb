"""Images that lack a random twentieth of what was hot: always the right result, or the clear error.

Takes long; `make peers` runs it.
"""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rvbundle import build as building
from rvbundle import recipe as recipes
from rvbundle.pack import Effort
from rvbundle.pages import PageTrace, numbers, runs
from rvbundle.progress import Progress
from rvbundle.recipe import Recipe
from rvbundle.trace import Trace, dumps, loads
from tests.conftest import TEST_CACHE, run_cli

HERE = Path(__file__).parent / "dropped"
SHARE = 0.05
SEEDS = {"numbers": range(160), "network": range(160, 200)}


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """{agent: its folder with lock and trace record, what it prints}."""
    found = {}
    for name in SEEDS:
        folder = tmp_path_factory.mktemp("dropped") / name
        shutil.copytree(HERE / name, folder)
        assert run_cli("lock", folder / "recipe.toml").code == 0
        done = run_cli("build", folder, "-o", folder / "out", timeout=1200)
        assert done.code == 0, done.err
        image = Path(done.out.split()[0])
        found[name] = (folder, run_cli("run", *held_to_traced(image), image).out)
    return found


def drop(record: Trace, seed: int) -> Trace:
    """Return the record without a share of the pages that were touched."""
    chance = random.Random(seed)
    pages = {}
    for path, trace in sorted(record.pages.items()):
        touched = [page for page in numbers(trace.touched) if chance.random() >= SHARE]
        pages[path] = PageTrace(runs(touched), trace.watched)
    return replace(record, pages=pages)


def make_image(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build from the record that lies beside the lock, without the proof (which must fail)."""
    monkeypatch.setattr(building, "prove", lambda *_: None)
    monkeypatch.setattr(building, "HOT_EFFORT", Effort(1, 4 << 20))
    monkeypatch.setattr(building, "COLD_EFFORT", Effort(1, 4 << 20))
    monkeypatch.setattr(building, "_frames", lambda _: folder / "frames")
    built = building.build(recipe, building.Wanted(folder), TEST_CACHE, Progress())
    for kept in (TEST_CACHE / "build" / "image").glob("*/identity"):
        if kept.read_text() == built.identity:
            shutil.rmtree(kept.parent)  # hundreds of these would fill the disk
    return built.image


@pytest.mark.torch
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name, seeds in SEEDS.items() for seed in seeds])
def test_a_twentieth_less(
    agents: dict[str, tuple[Path, str]],
    name: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, expected = agents[name]
    recipe = recipes.load(folder / "recipe.toml")
    original = recipe.trace_path.read_text()
    try:
        record, key = loads(original)
        recipe.trace_path.write_text(dumps(drop(record, seed), key))
        image = make_image(recipe, tmp_path / "out", monkeypatch)
    finally:
        recipe.trace_path.write_text(original)
    cold = image.with_name(image.name.replace(".rvb", ".cold.rvb"))
    options = ["--env", f"OMP_NUM_THREADS={seed % 2 + 1}"]
    env = {"RVBUNDLE_CACHE": str(tmp_path / "with")}
    with_pack = run_cli("run", *options, *held_to_traced(image), image, env=env, timeout=120)
    assert (with_pack.code, with_pack.out) == (0, expected), with_pack.err
    assert list((tmp_path / "with").glob("store/*/pages.txt"))  # something had to be restored
    cold.unlink()
    env = {"RVBUNDLE_CACHE": str(tmp_path / "without")}
    alone = run_cli("run", *options, image, env=env, timeout=120)
    if alone.code == 0:
        assert alone.out == expected
    else:
        assert alone.code == 112, alone.err
        assert "rvbundle: the agent needs code that was left out of its image: " in alone.err
        assert expected.startswith(alone.out)
    for entry in tmp_path.iterdir():
        shutil.rmtree(entry)


def held_to_traced(image: Path) -> list[str]:
    """Return options that hold a run with its cold pack to the kernels of one without."""
    families = json.loads(run_cli("inspect", image, "--json").out)["payloads"][0]["families"]
    return [word for name, value in families[0]["env"].items() for word in ("--env", f"{name}={value}")]
