"""What all tests share: the command line as a user calls it, and images that are built once."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
AGENTS = REPOSITORY / "tests" / "integration" / "agents"
RECIPES = REPOSITORY / "recipes"
# Kept between test runs (the stages' keys hold a digest of rvbundle's own code): `make clean` removes it.
TEST_CACHE = Path(os.environ.get("RVBUNDLE_TEST_CACHE", REPOSITORY / "build" / "test-cache"))


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


def run_cli(
    *words: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    stdin: str = "",
    timeout: float = 600,
) -> Result:
    """Run `rvbundle WORDS` in a process of its own, with the tests' cache."""
    done = subprocess.run(
        [sys.executable, "-m", "rvbundle", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "RVBUNDLE_CACHE": str(TEST_CACHE), **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def cli() -> Cli:
    """The command line."""
    return run_cli


def build(recipe: Path, output: Path) -> Path:
    """Build a recipe; return the image's path (its cold pack lies beside it)."""
    result = run_cli("build", recipe, "--output", output, timeout=1200)
    assert result.code == 0, result.err
    return Path(result.out.split()[0])


@pytest.fixture(scope="session")
def probe_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of the standard-library agent that does what tests ask for; its cold pack lies beside it."""
    return build(AGENTS / "probe", tmp_path_factory.mktemp("probe"))


@pytest.fixture
def alone(probe_image: Path, tmp_path: Path) -> Path:
    """The probe's image in a folder of its own, without its cold pack."""
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / probe_image.name).write_bytes(probe_image.read_bytes())
    return folder / probe_image.name
