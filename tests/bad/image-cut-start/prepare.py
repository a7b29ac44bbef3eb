"""Make the broken input."""

from pathlib import Path


def prepare(folder: Path, image: Path) -> None:
    (folder / "damaged.rvb").write_bytes(image.read_bytes()[1:])
