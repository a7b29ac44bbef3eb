"""Make the broken input."""

import shutil
from pathlib import Path


def prepare(folder: Path, image: Path) -> None:
    (folder / ("t" * 100)).mkdir()
    shutil.copyfile(image, folder / "agent.rvb")
    shutil.copyfile(image.with_name("probe-1.0.cold.rvb"), folder / "agent.cold.rvb")
