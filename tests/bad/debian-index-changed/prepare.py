"""Makes an archive and changes a package's paragraph in its list."""

from pathlib import Path

from tests.archive import environment, make_archive, new_key
from tests.debs import make_deb


def prepare(folder: Path, image: Path) -> dict[str, str]:
    with new_key() as key:
        deb = make_deb(folder / "dash.deb", "dash", arch="riscv64")
        release = make_archive(folder / "archive", {"riscv64": [deb]})
        key.sign(release)
        index = release.parent / "main/binary-riscv64/Packages"
        index.write_text(index.read_text().replace("Version: 1", "Version: 2"))
        return environment(folder / "archive", key.export(folder / "keys.gpg"))
