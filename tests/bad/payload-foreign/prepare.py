"""Make an image for another machine."""

from pathlib import Path

from tests.unit import images


def prepare(folder: Path, image: Path) -> None:
    images.build(folder / "foreign.rvb", arch="riscv64")
