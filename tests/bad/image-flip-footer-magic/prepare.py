"""Make the broken input."""

from pathlib import Path

from rvbundle_runtime import format as fmt


def prepare(folder: Path, image: Path) -> None:
    data = bytearray(image.read_bytes())
    data[-fmt.FOOTER_SIZE] ^= 1
    (folder / "damaged.rvb").write_bytes(data)
