"""Make the broken input."""

from pathlib import Path
from typing import Any

from tests.unit.images import forge


def prepare(folder: Path, image: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        entries = index["payloads"][0]["entries"]
        blob = next(e[2] for e in entries if e[1] == "f")
        entries.append(["usr/../../evil", "f", blob, -1, 0])

    forge(image, folder / "damaged.rvb", change)
