"""Tiny packages of Debian's, made by its own dpkg-deb."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path


def make_deb(
    file: Path,
    name: str,
    files: Mapping[str, str] | None = None,
    *,
    version: str = "1",
    arch: str = "all",
    depends: str = "",
    script: str = "",
) -> Path:
    """Write the package `file` of {path: text}; `script` is what its maintainer would run as root.

    A text that starts with "-> " makes a link; a path that ends with "/" an empty folder.
    """
    folder = file.with_suffix(".tree")
    (folder / "DEBIAN").mkdir(parents=True)
    control = f"Package: {name}\nVersion: {version}\nArchitecture: {arch}\nMaintainer: A <a@b.example>\n"
    control += (f"Depends: {depends}\n" if depends else "") + "Description: for a test\n"
    (folder / "DEBIAN/control").write_text(control)
    if script:
        (folder / "DEBIAN/postinst").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "DEBIAN/postinst").chmod(0o755)
    for path, text in (files or {}).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("/"):
            place.mkdir()
        elif text.startswith("-> "):
            place.symlink_to(text[3:])
        else:
            place.write_text(text)
    command = ["dpkg-deb", "--root-owner-group", "--build", folder, file]
    subprocess.run(command, check=True, capture_output=True)
    shutil.rmtree(folder)
    return file
