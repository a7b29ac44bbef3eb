"""Write an agent that no linter of this repository would let pass."""

from pathlib import Path


def prepare(folder: Path, image: Path) -> None:
    (folder / "agent.py").write_text('print("hello"\n')
