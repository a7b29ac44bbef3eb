"""Make the broken input."""

from pathlib import Path

from tests.unit.images import build


def prepare(folder: Path, image: Path) -> None:
    build(folder / "agent.cold.rvb", bound_to="ab" * 32)
