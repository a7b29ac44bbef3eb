"""Make the broken input."""

from pathlib import Path
from typing import Any

from tests.unit.images import forge


def prepare(folder: Path, image: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        entries = index["payloads"][0]["entries"]
        entries.append(["usr/evil", "l", "lib", -1, 0])
        blob = next(e[2] for e in entries if e[1] == "f")
        entries.append(["usr/evil/file", "f", blob, -1, 0])

    forge(image, folder / "damaged.rvb", change)
