"""Make the broken input."""

from pathlib import Path


def prepare(folder: Path, image: Path) -> None:
    data = bytearray(image.read_bytes())
    data[0] ^= 1
    (folder / "damaged.rvb").write_bytes(data)
