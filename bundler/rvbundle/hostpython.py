"""Programs of this machine's own architecture out of Debian's packages, installed nowhere.

A foreign payload's Python is often of another version than those that this machine has; its bytecode is made
by a Python of the same version, natively. An emulator runs its workloads.
"""

import os
from pathlib import Path

from rvbundle import debian, process
from rvbundle.debian import Archive, Package
from rvbundle.environment import Interpreter
from rvbundle.stages import Key, StageCache
from rvbundle_runtime.errors import EnvironmentSetupError

PYTHON = ("python3-minimal", "libpython3-stdlib")
EMULATORS = ("qemu-user",)
# Python finds its library by the path that it was started by, which is ld.so's if ld.so is executed.
_WRAPPER = """\
#!/bin/sh
root='{root}'
exec "$root/{loader}" --argv0 "$root/{python}" --library-path "$root/{libraries}" "$root/{python}" "$@"
"""
_LOADERS = {
    "x86_64": "usr/lib64/ld-linux-x86-64.so.2",
    "aarch64": "usr/lib/ld-linux-aarch64.so.1",
    "riscv64": "usr/lib/ld-linux-riscv64-lp64d.so.1",
}


def machine() -> str:
    """Return this machine's architecture, in the kernel's words."""
    return os.uname().machine


def archive(cache_base: Path, suite: str, arch: str) -> Archive:
    """Return the archive of `suite` for `arch`, kept in the cache."""
    return Archive(cache_base / "build" / "debian", suite, arch)


def host_python(suite: str, packages: tuple[Package, ...], cache: StageCache) -> Interpreter:
    """Return a Python for this machine made of `packages`, which PYTHON resolves to in `suite`.

    Raises EnvironmentSetupError.
    """
    return _interpreter(_unpacked("host-python", suite, packages, cache) / "root")


def _unpacked(
    stage: str, suite: str, packages: tuple[Package, ...], cache: StageCache, only: tuple[str, ...] = ()
) -> Path:
    source = archive(cache.base.parent, suite, machine())
    key: Key = {
        "packages": [p.sha256 for p in packages],
        "arch": source.arch,
        "only": list(only),
        "inside": debian.code_digest(),
    }

    def make(folder: Path) -> None:
        debian.unpack(source, packages, folder / "root", only)

    return cache.get(stage, key, make).folder


def _interpreter(root: Path) -> Interpreter:
    program = find_python(root)
    arch = machine()
    wrapper = root.parent / "python"
    text = _WRAPPER.format(
        root=str(root).replace("'", "'\\''"),
        loader=_LOADERS[arch],
        python=f"usr/bin/{program.name}",
        libraries=f"usr/lib/{debian.TRIPLETS[arch]}",
    )
    if not wrapper.exists() or wrapper.read_text() != text:
        temporary = wrapper.with_name(f"python.{os.getpid()}")
        temporary.write_text(text)
        temporary.chmod(0o755)
        temporary.rename(wrapper)
    short = program.name.removeprefix("python")
    version = process.run([wrapper, "-I", "-c", "import platform; print(platform.python_version())"])
    return Interpreter(
        wrapper,
        version.stdout.decode().strip(),
        short,
        root / f"usr/lib/{program.name}",
        root / "usr",
        f"cpython-{short.replace('.', '')}",
        usual_site=False,
    )


def find_python(root: Path) -> Path:
    """Return the interpreter of Debian's packages unpacked at `root`; raises EnvironmentSetupError."""
    found = [path for path in root.glob("usr/bin/python3.*") if path.name[8:].isdigit()]
    if not found:
        raise EnvironmentSetupError(f"the packages hold no Python: {root}")
    return max(found, key=lambda path: int(path.name[8:]))


def emulators(suite: str, packages: tuple[Package, ...], cache: StageCache) -> Path:
    """Return the folder of the emulators for this machine made of `packages` (see EMULATORS)."""
    wanted = tuple(f"usr/bin/qemu-{arch}" for arch in debian.ARCHITECTURES)
    return _unpacked("emulators", suite, packages, cache, wanted) / "root/usr/bin"
