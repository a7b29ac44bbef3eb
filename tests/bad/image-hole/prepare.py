"""Make the broken input."""

from pathlib import Path


def prepare(folder: Path, image: Path) -> None:
    data = bytearray(image.read_bytes())
    data[1 << 20 : 2 << 20] = bytes(1 << 20)
    (folder / "damaged.rvb").write_bytes(data)
