"""Make the broken input."""

from pathlib import Path
from typing import Any

from tests.unit.images import forge


def prepare(folder: Path, image: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        entries = index["payloads"][0]["entries"]
        entries.append(["usr/evil", "l", "/etc/passwd", -1, 0])

    forge(image, folder / "damaged.rvb", change)
