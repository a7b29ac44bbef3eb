"""Make the broken input."""

from pathlib import Path

from rvbundle_runtime.image import Reader


def prepare(folder: Path, image: Path) -> None:
    data = bytearray(image.read_bytes())
    with Reader(image) as reader:
        index = reader.index()
        entry = next(e for e in index.payloads[0].entries if e.path == "app/probe.py")
        frame = index.frames[index.blobs[entry.blob].frame]
    data[frame.offset + frame.size // 2] ^= 1
    (folder / "damaged.rvb").write_bytes(data)
