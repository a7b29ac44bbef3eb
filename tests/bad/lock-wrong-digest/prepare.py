"""Make a wheel."""

import zipfile
from pathlib import Path

FILES = {
    "tiny.py": "",
    "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny-1.0.dist-info/RECORD": "tiny.py,,\ntiny-1.0.dist-info/METADATA,,\ntiny-1.0.dist-info/WHEEL,,\n",
}


def prepare(folder: Path, image: Path) -> None:
    (folder / "wheels").mkdir()
    with zipfile.ZipFile(folder / "wheels" / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            wheel.writestr(name, text)
