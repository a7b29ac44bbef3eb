"""Make the broken input."""

import shutil
from pathlib import Path


def prepare(folder: Path, image: Path) -> None:
    shutil.copyfile(image, folder / "agent.rvb")
    cold = image.with_name("probe-1.0.cold.rvb")
    with cold.open("rb") as file:
        (folder / "agent.cold.rvb").write_bytes(file.read(1 << 20))
