"""Make the broken input."""

from pathlib import Path

from tests.unit.images import build, item, link


def prepare(folder: Path, image: Path) -> None:
    identity = build(folder / "agent.rvb", [item("usr/file"), link("evil", "usr")])
    build(folder / "agent.cold.rvb", [item("evil/file", b"evil")], bound_to=identity)
