"""Makes an archive with a shell, but without Python."""

from pathlib import Path

from tests.archive import environment, make_archive, new_key
from tests.debs import make_deb


def prepare(folder: Path, image: Path) -> dict[str, str]:
    deb = make_deb(folder / "dash.deb", "dash", arch="riscv64")
    with new_key() as key:
        key.sign(make_archive(folder / "archive", {"riscv64": [deb]}))
        return environment(folder / "archive", key.export(folder / "keys.gpg"))
