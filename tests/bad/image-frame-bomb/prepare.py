"""Make the broken input."""

from pathlib import Path
from typing import Any

from tests.unit.images import forge


def prepare(folder: Path, image: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        index["frames"][-1][2] += 1

    forge(image, folder / "damaged.rvb", change)
