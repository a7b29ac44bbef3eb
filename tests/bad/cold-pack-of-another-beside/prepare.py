"""Make the broken input."""

import shutil
from pathlib import Path

from tests.unit.images import build


def prepare(folder: Path, image: Path) -> None:
    shutil.copyfile(image, folder / "agent.rvb")
    build(folder / "agent.cold.rvb", bound_to="ab" * 32)
