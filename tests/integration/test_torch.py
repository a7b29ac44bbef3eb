"""Torch and gymnasium inside an image: what a training agent does, traced or not."""

from pathlib import Path

import pytest

from tests.conftest import AGENTS, build, run_cli

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image whose only trace is one training step; its cold pack lies beside it."""
    return build(AGENTS / "torchprobe", tmp_path_factory.mktemp("torchprobe"))


def lines(image: Path, *words: str) -> list[str]:
    result = run_cli("run", image, "--", *words)
    assert result.code == 0, result.err
    return result.out.splitlines()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_with_workers(image: Path, method: str) -> None:
    assert lines(image, "loader", method) == ["[[0.0, 1.0, 4.0, 9.0], [16.0, 25.0, 36.0, 49.0]]"]


def test_torchscript_reads_sources_from_the_cold_pack(image: Path) -> None:
    assert lines(image, "script") == ["[0.0, 2.0]", "True"]


def test_environments_that_no_trace_made(image: Path) -> None:
    assert [line.split()[0] for line in lines(image, "environments")] == [
        "CartPole-v1",
        "Pendulum-v1",
        "FrozenLake-v1",
    ]


def test_operations_that_no_trace_used(image: Path) -> None:
    # computed by numpy from the same random numbers is beyond this test: an untrimmed venv printed these
    assert lines(image, "untraced") == ["2.59965", "13.43959", "error inconsistent tensor size, expe"]


def test_tensors_between_processes(image: Path) -> None:
    assert lines(image, "shared") == ["[0.0, 2.0, 4.0, 6.0]"]


def test_metadata(image: Path) -> None:
    assert lines(image, "metadata") == ["2.13.0 2.13.0", "True True"]
