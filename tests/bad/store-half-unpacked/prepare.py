"""Make the broken input."""

import os
from pathlib import Path

from rvbundle_runtime.image import Reader


def prepare(folder: Path, image: Path) -> None:
    with Reader(image) as reader:
        name = f"{reader.identity}-{os.uname().machine}"
    store = folder.parent / "cache" / "store"
    (store / "tmp" / f"{name}.abc123" / "root" / "usr" / "bin").mkdir(parents=True)
    (store / "tmp" / f"{name}.abc123" / "root" / "usr" / "bin" / "python3").write_text("half")
