"""Makes an archive of another suite."""

from pathlib import Path

from tests.archive import environment, make_archive, new_key


def prepare(folder: Path, image: Path) -> dict[str, str]:
    with new_key() as key:
        key.sign(make_archive(folder / "archive", {"riscv64": []}))
        return environment(folder / "archive", key.export(folder / "keys.gpg"))
