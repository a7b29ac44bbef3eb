"""Make the broken input."""

from pathlib import Path
from typing import Any

from tests.unit.images import forge


def prepare(folder: Path, image: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        index["frames"][0][0] = 1 << 40

    forge(image, folder / "damaged.rvb", change)
