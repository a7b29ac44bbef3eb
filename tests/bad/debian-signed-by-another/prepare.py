"""Makes an archive, and the keys of another."""

from pathlib import Path

from tests.archive import environment, make_archive, new_key


def prepare(folder: Path, image: Path) -> dict[str, str]:
    with new_key() as key, new_key() as other:
        key.sign(make_archive(folder / "archive", {"riscv64": []}))
        return environment(folder / "archive", other.export(folder / "keys.gpg"))
