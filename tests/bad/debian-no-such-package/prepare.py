"""Makes an archive without the package, and a wheel that is for this machine alone."""

import sysconfig
import zipfile
from pathlib import Path

from tests.archive import environment, make_archive, new_key
from tests.debs import make_deb


def prepare(folder: Path, image: Path) -> dict[str, str]:
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_')}"
    (folder / "wheels").mkdir()
    with zipfile.ZipFile(folder / f"wheels/tiny_code-1.0-{tag}.whl", "w") as wheel:
        wheel.writestr("tiny_code.py", "")
        wheel.writestr(
            "tiny_code-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-code\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_code-1.0.dist-info/WHEEL",
            f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n",
        )
        wheel.writestr("tiny_code-1.0.dist-info/RECORD", "")
    deb = make_deb(folder / "dash.deb", "dash", arch="riscv64")
    with new_key() as key:
        key.sign(make_archive(folder / "archive", {"riscv64": [deb]}))
        return environment(folder / "archive", key.export(folder / "keys.gpg"))
