"""Make the broken input."""

from pathlib import Path

from tests.unit.images import forge


def prepare(folder: Path, image: Path) -> None:
    forge(image, folder / "damaged.rvb", raw=b"[" * 1_000_000)
