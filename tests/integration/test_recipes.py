"""The agents in recipes/: each builds, runs, and (where it trains) converges, all inside its image."""

import ast
import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RECIPES, build, run_cli

torch = pytest.mark.torch

SOLVED = 475.0  # mean return over 100 episodes that Gymnasium names as solving CartPole-v1


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{agent: image}, built as they are asked for."""
    return _Images(tmp_path_factory.mktemp("images"))


class _Images(dict[str, Path]):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, agent: str) -> Path:
        self[agent] = build(RECIPES / agent, self._folder)
        return self[agent]


def returns(path: Path) -> list[float]:
    with path.open() as file:
        return [float(row["reward"]) for row in csv.DictReader(file)]


def run(image: Path, folder: Path, *words: str) -> str:
    result = run_cli("run", image, "--", *words, cwd=folder, timeout=900)
    assert result.code == 0, result.err
    return result.out


def mean_return(text: str) -> float:
    """Return the last mean that an agent printed."""
    return float(re.findall(r"mean return (-?\d+\.\d+)", text)[-1])


@torch
def test_cartpole_random(images: dict[str, Path], tmp_path: Path) -> None:
    text = run(images["cartpole-random"], tmp_path, "--episodes", "5")
    rewards = returns(tmp_path / "rewards.csv")
    assert len(rewards) == 5
    assert f"total reward {sum(rewards):.1f}" in text


@torch
@pytest.mark.parametrize(
    ("agent", "options", "checkpoint"),
    [
        ("cartpole-cross-entropy", ["--episodes", "1120"], "policy.pt"),
        ("cartpole-policy-gradient", ["--episodes", "400"], "policy.pt"),
        ("sb3-ppo", ["--timesteps", "50000"], "policy.zip"),
    ],
)
def test_training_converges(
    images: dict[str, Path], tmp_path: Path, agent: str, options: list[str], checkpoint: str
) -> None:
    run(images[agent], tmp_path, *options, "--seed", "0")
    assert len(returns(tmp_path / "rewards.csv")) > 100
    text = run(images[agent], tmp_path, "--evaluate", checkpoint, "--evaluation-episodes", "100")
    assert mean_return(text) >= SOLVED


@torch
def test_resuming_continues_where_training_stopped(images: dict[str, Path], tmp_path: Path) -> None:
    image = images["cartpole-policy-gradient"]
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    run(image, tmp_path / "whole", "--episodes", "64")
    run(image, tmp_path / "parts", "--episodes", "32")
    run(image, tmp_path / "parts", "--episodes", "32", "--resume", "policy.pt")
    assert returns(tmp_path / "whole" / "rewards.csv") == returns(tmp_path / "parts" / "rewards.csv")


@torch
def test_the_shipped_checkpoint(images: dict[str, Path], tmp_path: Path) -> None:
    assert mean_return(run(images["cartpole-policy-gradient"], tmp_path, "--evaluate")) >= SOLVED


@torch
def test_atari_random(images: dict[str, Path], tmp_path: Path) -> None:
    """`gym.make` finds the plug-in by its entry point, and the plug-in its ROM."""
    text = run(images["atari-random"], tmp_path, "--steps", "200")
    assert "200" in text
    frame = (tmp_path / "frame.png").read_bytes()
    assert frame.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(frame) > 500


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tabular_q_converges(images: dict[str, Path], tmp_path: Path, seed: int) -> None:
    text = run(images["tabular-q"], tmp_path, "--seed", str(seed), "--evaluate")
    assert text.endswith("greedy return -13 (best possible -13), goal reached\n")


def test_tabular_q_untrained_does_not_find_the_goal(images: dict[str, Path], tmp_path: Path) -> None:
    text = run(images["tabular-q"], tmp_path, "--episodes", "0", "--evaluate")
    assert text.endswith("greedy return -1000 (best possible -13), goal not reached\n")


def test_tabular_q_goes_on_where_it_stopped(images: dict[str, Path], tmp_path: Path) -> None:
    image = images["tabular-q"]
    run(image, tmp_path, "--episodes", "60", "--save", "whole.json")
    run(image, tmp_path, "--episodes", "40", "--save", "part.json")
    run(image, tmp_path, "--episodes", "20", "--load", "part.json", "--save", "parts.json")
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert whole["episodes"] == 60
    assert json.loads((tmp_path / "parts.json").read_text()) == whole


def test_tabular_q_prints_the_same_inside_and_outside(images: dict[str, Path], tmp_path: Path) -> None:
    script = RECIPES / "tabular-q" / "train.py"
    outside = subprocess.run(
        [sys.executable, script, "--evaluate"], capture_output=True, text=True, check=True
    )
    assert run(images["tabular-q"], tmp_path, "--evaluate") == outside.stdout


def test_tabular_q_imports_next_to_nothing() -> None:
    """Two emulators deep every module costs seconds."""
    tree = ast.parse((RECIPES / "tabular-q" / "train.py").read_text())
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in imports] == ["import sys"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--episodes"], "--episodes: expected a value"),
        (["--episodes", "many"], "--episodes many: expected a whole number, 0 or more"),
        (["--seed=-1"], "--seed -1: expected a whole number, 0 or more"),
        (["--speed", "9"], "--speed: no such option"),
        (["--evaluate=yes"], "--evaluate: no such option"),
    ],
)
def test_tabular_q_says_what_is_wrong(words: list[str], message: str) -> None:
    script = RECIPES / "tabular-q" / "train.py"
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(f"train.py: {message}\n")
