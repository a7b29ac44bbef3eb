"""Make the broken input."""

from pathlib import Path

from tests.unit.images import build, item, link


def prepare(folder: Path, image: Path) -> None:
    links = link("a/b/up", "../.."), link("evil", "a/b/up/../outside")
    (folder / "outside").mkdir()
    identity = build(folder / "agent.rvb", [item("usr/file"), *links])
    build(folder / "agent.cold.rvb", [item("evil/file", b"evil")], bound_to=identity)
