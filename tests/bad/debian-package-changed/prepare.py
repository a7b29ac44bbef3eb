"""Makes an archive, and a lock of another file than it holds."""

import os
from pathlib import Path

from tests.archive import SUITE, environment, make_archive, new_key
from tests.debs import make_deb

from rvbundle.debian import ARCHITECTURES, Package
from rvbundle.lock import Lock, LockedDebian, dumps


def prepare(folder: Path, image: Path) -> dict[str, str]:
    machine = os.uname().machine
    arch = ARCHITECTURES[machine]
    python = Package("python3-minimal", "3.13.5-1", "ab" * 32)
    part = LockedDebian("riscv64", SUITE, machine, (python,), (python,), ())
    (folder / "agent.lock").write_text(dumps(Lock("3.11", (), (), (part,))))
    deb = make_deb(folder / "python.deb", python.name, version=python.version, arch=arch)
    with new_key() as key:
        key.sign(make_archive(folder / "archive", {arch: [deb]}))
        return environment(folder / "archive", key.export(folder / "keys.gpg"))
