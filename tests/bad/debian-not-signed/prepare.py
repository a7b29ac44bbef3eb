"""Makes an archive without a signature."""

from pathlib import Path

from tests.archive import environment, make_archive, new_key


def prepare(folder: Path, image: Path) -> dict[str, str]:
    make_archive(folder / "archive", {"riscv64": []})
    with new_key() as key:
        return environment(folder / "archive", key.export(folder / "keys.gpg"))
