"""Environments with native extras: Box2D, pygame, MuJoCo; and the "reachable" level without a cold pack."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.conftest import AGENTS, TEST_CACHE, build, run_cli

ENVIRONMENTS = ["LunarLander-v3", "CartPole-v1", "BipedalWalker-v3", "Ant-v5", "FrozenLake-v1"]


def test_reachable_environments_run_as_in_the_venv(tmp_path: Path) -> None:
    """One was traced; the others are reachable, by gymnasium's registry and our hooks alone."""
    image = build(AGENTS / "envs", tmp_path / "out")
    alone = Path(shutil.copy(image, tmp_path / "alone.rvb"))
    inside = run_cli("run", alone, *ENVIRONMENTS)
    assert inside.code == 0, inside.err
    venvs = [
        p
        for p in (TEST_CACHE / "build" / "environment").glob("*/venv")
        if list(p.glob("lib/*/site-packages/mujoco"))
    ]
    outside = subprocess.run(
        [venvs[0] / "bin" / "python", AGENTS / "envs" / "agent.py", *ENVIRONMENTS],
        capture_output=True,
        text=True,
        env={**os.environ, "SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"},
        check=True,
    )
    names = [line.split()[0] for line in outside.stdout.splitlines() if line.split()[0] in ENVIRONMENTS]
    assert names == ENVIRONMENTS
    assert inside.out == outside.stdout
