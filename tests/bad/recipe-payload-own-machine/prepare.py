"""Names this machine's architecture in the recipe."""

import os
from pathlib import Path


def prepare(folder: Path, image: Path) -> None:
    path = folder / "recipe.toml"
    path.write_text(path.read_text().replace("MACHINE", os.uname().machine))
