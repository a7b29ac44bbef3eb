"""Backends as a user meets them: chosen, overridden, measured, checked, kept."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rvbundle_runtime import backends, decisions, tune
from rvbundle_runtime.backends import Backend
from rvbundle_runtime.decision import Decision
from rvbundle_runtime.host import CachePlace, read_host
from rvbundle_runtime.options import RunOptions
from rvbundle_runtime.tuning import Tuned
from tests.conftest import AGENTS, Cli, build


@pytest.fixture(scope="session")
def tuned_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of an agent with numpy; its cold pack lies beside it."""
    return build(AGENTS / "tuned", tmp_path_factory.mktemp("tuned"))


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    """A store of its own."""
    return {"RVBUNDLE_CACHE": str(tmp_path / "cache")}


def kept(cache: dict[str, str]) -> list[dict[str, Any]]:
    folder = Path(cache["RVBUNDLE_CACHE"]) / "backends"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_a_run_says_what_it_takes_and_keeps_it(
    tuned_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path
) -> None:
    first = cli("run", "--verbose", tuned_image, "report", env=cache, cwd=tmp_path)
    assert first.code == 0, first.err
    assert "rvbundle: backend: any (each library picks its kernels for this processor)" in first.err
    assert "rvbundle: precision: float32 (the recipe asks for nothing else)" in first.err
    (decision,) = kept(cache)
    assert (decision["decision"]["backend"], decision["decision"]["measured"]) == ("any", False)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["backend"]["name"] == "any"
    assert report["image"]["name"] == "tuned"
    assert report["packages"]["numpy"] == "2.4.6"
    assert report["payload"]["python"].startswith("3.11")
    assert {"backend", "threads", "precision", "payload"} <= {choice["what"] for choice in report["choices"]}
    again = cli("run", tuned_image, env=cache, cwd=tmp_path)
    assert (again.code, len(kept(cache))) == (0, 1)


def test_the_report_without_a_sandbox(
    tuned_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path
) -> None:
    done = cli("run", "--no-sandbox", tuned_image, "report", env=cache, cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "report.json").read_text())["launcher"] == "native"


def test_without_the_cold_pack_kernels_that_were_traced(
    tuned_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path
) -> None:
    shutil.copy(tuned_image, tmp_path)
    image = tmp_path / tuned_image.name
    done = cli("run", "--verbose", image, "variables", env=cache, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "(without a cold pack only kernels that were traced" in done.err
    assert "OPENBLAS_CORETYPE=" in done.out
    refused = cli("run", "--backend", "any", image, env=cache, cwd=tmp_path)
    assert refused.code == 110
    assert (
        "error: --backend any can't be had: its kernels were not traced, and the cold pack is not here"
        in (refused.err)
    )


def test_overrides(tuned_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path) -> None:
    done = cli(
        "run", "--backend", "baseline", "--threads", "1", tuned_image, "variables", env=cache, cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert "OPENBLAS_CORETYPE=Nehalem\n" in done.out
    assert "OMP_NUM_THREADS=1\n" in done.out
    assert kept(cache) == []  # what was asked for once is no decision
    explained = cli("explain", "--backend", "avx2", "--threads", "2", tuned_image, env=cache)
    assert "avx2  --backend says so" in explained.out
    assert "2  --threads says so" in explained.out
    own = cli("run", "--threads", "1", "--env", "OMP_NUM_THREADS=5", tuned_image, "variables", env=cache)
    assert "OMP_NUM_THREADS=5\n" in own.out


def test_tune(tuned_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path) -> None:
    done = cli("tune", "--seconds", "30", tuned_image, env=cache, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "rvbundle: measuring any\n" in done.err
    assert "rvbundle: checking any\n" in done.err
    heads = done.out.splitlines()[0].split()
    assert heads[:4] == ["candidate", "workload", "runs", "gemm"]
    assert "\nchosen: " in done.out
    (value,) = kept(cache)
    assert value["decision"]["measured"] is True
    chosen = value["decision"]["backend"]
    assert f"{chosen}  measured: " in cli("explain", tuned_image, env=cache).out
    run = cli("run", "--verbose", tuned_image, env=cache, cwd=tmp_path)
    assert f"rvbundle: backend: {chosen} (measured: " in run.err
    assert os.listdir(tmp_path) == ["cache"]  # what the agent writes while it is measured goes elsewhere


def test_what_can_not_be_measured(probe_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path) -> None:
    """An agent without torch and numpy: its workload alone decides."""
    done = cli("tune", "--seconds", "5", probe_image, env=cache, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "chosen: any" in done.out


def search(
    monkeypatch: pytest.MonkeyPatch, image: Path, base: Path, rows: list[Backend], **options: Any
) -> tuple[Tuned, Decision]:
    """Tune with a table of these rows, the first of which a run would take."""
    real = backends.load_table()
    traced = [replace(rows[0], name=name, family=name) for name in ("avx2", "baseline")]
    table = replace(real, backends=(*rows, *traced), threads=())
    monkeypatch.setattr(backends, "load_table", lambda: table)
    monkeypatch.setattr(tune, "_LIMIT_MORE", 2.0)
    place = CachePlace(base, "the test says so")
    tuned, _, decision = tune.tune(read_host(), RunOptions(str(image), **options), place, 60.0)
    return tuned, decision


ROW = Backend("slow", os.uname().machine, ("native",), "a row of a test", "", env={"NAP": "0.3"})
QUICK = replace(ROW, name="quick", env={})


def verdict(tuned: Tuned, name: str) -> str:
    (line,) = [line for line in tuned.lines if line.candidate.row.name == name]
    return line.verdict


def test_the_faster_one_wins(tuned_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, decision = search(monkeypatch, tuned_image, tmp_path, [ROW, QUICK])
    assert (tuned.winner.row, decision.backend, decision.measured) == (QUICK, "quick", True)


@pytest.mark.parametrize(
    ("variable", "fault"),
    [
        ("CRASH", "it was ended by SIGSEGV"),
        ("HANG", "it did not end within "),
        ("LIE", "prints something else than when it was traced:\n"),
    ],
)
def test_one_that_crashes_hangs_or_prints_something_else(
    tuned_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, fault: str
) -> None:
    bad = replace(QUICK, name="bad", env={variable: "1"})
    tuned, decision = search(monkeypatch, tuned_image, tmp_path, [ROW, bad])
    assert (tuned.winner.row, decision.backend) == (ROW, "slow")
    assert fault in verdict(tuned, "bad")


def test_a_decision_of_another_machine_is_not_taken(
    tuned_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path
) -> None:
    """A home folder may be shared: the key names the processor, and a copied file does not fit."""
    cli("run", tuned_image, env=cache, cwd=tmp_path)
    (path,) = (Path(cache["RVBUNDLE_CACHE"]) / "backends").iterdir()
    value = json.loads(path.read_text())
    value["key"]["processor"][0] = "CentaurHauls"
    value["decision"] |= {"backend": "baseline", "measured": True}
    path.write_text(json.dumps(value))
    done = cli("run", "--verbose", tuned_image, env=cache, cwd=tmp_path)
    assert "rvbundle: backend: any (" in done.err
    path.write_text("{")
    assert cli("run", tuned_image, env=cache, cwd=tmp_path).code == 0


def test_a_store_that_can_not_be_written(
    tuned_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path
) -> None:
    """Runs decide anew each time; `tune` says that its result is lost, and what does the same."""
    cli("run", tuned_image, env=cache, cwd=tmp_path)
    folder = Path(cache["RVBUNDLE_CACHE"]) / "backends"
    shutil.rmtree(folder)
    folder.write_text("in the way")
    assert cli("run", tuned_image, env=cache, cwd=tmp_path).code == 0
    done = cli("tune", "--seconds", "1", tuned_image, env=cache, cwd=tmp_path)
    assert done.code == 108
    assert f"error: the result can't be kept below {cache['RVBUNDLE_CACHE']}: " in done.err
    assert "rvbundle run --backend any --threads " in done.err


def test_prune_forgets(tuned_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path) -> None:
    cli("run", tuned_image, env=cache, cwd=tmp_path)
    done = cli("cache", "prune", "--images", env=cache)
    assert "forgot 1 choices of backends" in done.out
    assert kept(cache) == []


def test_profile(tuned_image: Path, cli: Cli, cache: dict[str, str], tmp_path: Path) -> None:
    done = cli("profile", tuned_image, env=cache, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.startswith("one run, profiled: ")
    assert "instruction families: " in done.out
    value = json.loads(cli("profile", "--json", tuned_image, env=cache, cwd=tmp_path).out)
    assert value["total"] > 0
    assert value["operators"]


def test_keys_of_decisions(tuned_image: Path) -> None:
    """All that a decision depends on is in its key."""
    host = read_host()
    with_flags = replace(host, processor=replace(host.processor, flags=frozenset({"x"})))
    slower = replace(host, quota=0.5)
    keys = []
    for machine in (host, with_flags, slower):
        prepared, held = _prepared(machine, tuned_image)
        keys.append(decisions.key_of(prepared.situation))
        if held is not None:
            os.close(held)
    assert keys[0] != keys[1] != keys[2] != keys[0]


def _prepared(host: Any, image: Path) -> Any:
    from rvbundle_runtime import launch
    from tests.conftest import TEST_CACHE

    return launch.prepare_and_hold(host, RunOptions(str(image)), CachePlace(TEST_CACHE, ""), ())
