"""Lossless: test suites that others wrote give the same results in a trimmed image as in an untrimmed one.

Takes long; `make peers` runs it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import build, run_cli

AGENT = Path(__file__).parent / "agent"
pytestmark = pytest.mark.torch


@pytest.fixture(scope="session")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image at level "traced", its cold pack beside it."""
    return build(AGENT, tmp_path_factory.mktemp("trimmed"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with nothing left out."""
    folder = tmp_path_factory.mktemp("whole") / "agent"
    shutil.copytree(AGENT, folder)
    with (folder / "recipe.toml").open("a") as file:
        file.write('\n[trim]\nlevel = "none"\n')
    return build(folder, folder.parent / "out")


def results(image: Path, folder: Path, name: str, *words: str) -> dict[str, str]:
    """Run a command of the agent in `image`; return what it wrote."""
    done = run_cli("run", image, "--", words[0], f"/agent/{name}.json", *words[1:], cwd=folder, timeout=5400)
    assert done.code == 0, done.err[-3000:]
    found: dict[str, str] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_numpy_passes_and_fails_the_same_tests(trimmed: Path, whole: Path, tmp_path: Path) -> None:
    expected = results(whole, tmp_path, "whole", "numpy")
    found = results(trimmed, tmp_path, "trimmed", "numpy")
    assert len(expected) > 20000
    assert sum(outcome == "passed" for outcome in expected.values()) > 0.9 * len(expected)
    different = {
        n: (expected.get(n), found.get(n)) for n in expected | found if expected.get(n) != found.get(n)
    }
    print(len(expected), "tests,", sum(o == "failed" for o in expected.values()), "fail in both")
    assert different == {}


def test_operators_of_torch_give_the_same_bytes(trimmed: Path, whole: Path, tmp_path: Path) -> None:
    expected = results(whole, tmp_path, "whole", "ops")
    again = results(whole, tmp_path, "again", "ops")
    found = results(trimmed, tmp_path, "trimmed", "ops")
    unstable = sorted(name for name in expected if expected[name] != again[name])
    print(len(expected), "operators; different in two untrimmed runs:", ", ".join(unstable))
    assert len(expected) > 500
    assert len(unstable) < 30
    different = [n for n in sorted(expected | found) if n not in unstable and expected.get(n) != found.get(n)]
    assert different == []


def test_environments_of_gymnasium_take_the_same_steps(trimmed: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    requires = ["gymnasium[classic-control,toy-text,box2d]==1.4.0", "torch==2.13.0"]
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *requires], check=True)
    env = {"PATH": os.environ["PATH"], "SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}
    command = [venv / "bin" / "python", AGENT / "peers.py", "environments", "venv.json"]
    subprocess.run(command, check=True, cwd=tmp_path, env=env)
    expected = json.loads((tmp_path / "venv.json").read_text())
    found = results(trimmed, tmp_path, "trimmed", "environments")
    assert len(expected) > 10
    assert found == expected
