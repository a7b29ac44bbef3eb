"""Makes an archive and changes what is signed in it."""

from pathlib import Path

from tests.archive import environment, make_archive, new_key


def prepare(folder: Path, image: Path) -> dict[str, str]:
    with new_key() as key:
        release = make_archive(folder / "archive", {"riscv64": []})
        key.sign(release)
        signed = release.with_name("InRelease")
        signed.write_text(signed.read_text().replace("Origin: A test", "Origin: An attacker"))
        return environment(folder / "archive", key.export(folder / "keys.gpg"))
