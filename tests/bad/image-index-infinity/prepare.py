"""Make the broken input."""

from pathlib import Path
from typing import Any

from tests.unit.images import forge


def prepare(folder: Path, image: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        entry = next(e for e in index["payloads"][0]["entries"] if e[1] == "f")
        entry[2] = float("inf")

    forge(image, folder / "damaged.rvb", change)
