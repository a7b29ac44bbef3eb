"""Make the broken input."""

import shutil
from pathlib import Path

from rvbundle_runtime.image import Reader


def prepare(folder: Path, image: Path) -> None:
    shutil.copyfile(image, folder / "agent.rvb")
    data = bytearray(image.with_name("probe-1.0.cold.rvb").read_bytes())
    with Reader(image.with_name("probe-1.0.cold.rvb")) as reader:
        index = reader.index()
        entry = next(e for e in index.payloads[0].entries if e.path.endswith("/ftplib.pyc"))
        frame = index.frames[index.blobs[entry.blob].frame]
    data[frame.offset + frame.size // 2] ^= 1
    (folder / "agent.cold.rvb").write_bytes(data)
