"""Make the broken input."""

from pathlib import Path


def prepare(folder: Path, image: Path) -> None:
    size = 4000
    (folder / "damaged.rvb").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(size) + b"IEND\xaeB`\x82")
