"""A bare machine of another architecture: a folder, an emulator, binfmt_misc in a user namespace."""

import shutil
import subprocess
from pathlib import Path

from rvbundle import debian, hostpython
from rvbundle_runtime import binfmt

SUITE, RISCV64 = "trixie", "riscv64"
# A machine with nothing but busybox: its programs are links, as an installer makes them.
_APPLETS = "sh dd gzip tar ls mkdir rm rmdir mv uname id cat chmod df mktemp sleep cut env stat touch".split()
# Makes a host of another architecture: the kernel hands its programs to the emulator that $2 registers.
_HOST = r"""
set -e
root=$1 rule=$2 cpu=$3; shift 3
mount --bind "$root" "$root"
mount -t tmpfs none "$root/tmp"
mount --rbind /dev "$root/dev"
mount --rbind /proc "$root/proc"
mkdir "$root/tmp/binfmt"
mount -t binfmt_misc none "$root/tmp/binfmt"
printf '%s' "$rule" > "$root/tmp/binfmt/register"
cd "$root"
exec env -i PATH=/usr/bin:/usr/sbin TERM=dumb QEMU_CPU="$cpu" chroot . "$@"
"""


def make_host(folder: Path, cache_base: Path) -> Path:
    """Make the root of a riscv64 machine that has busybox and nothing else; return its path."""
    archive = hostpython.archive(cache_base, SUITE, RISCV64)
    packages = debian.resolve(archive, ["busybox-static"])
    debian.unpack(archive, packages, folder / "packages")
    root = folder / "root"
    for name in ("usr/bin", "tmp", "dev", "proc", "sys", "etc", "root", "var/tmp", "srv"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    shutil.copy2(folder / "packages/usr/bin/busybox", root / "usr/bin/busybox")
    for applet in _APPLETS:
        (root / "usr/bin" / applet).symlink_to("busybox")
    return root


def on_host(
    host: Path, qemu: Path, *words: str, cpu: str = "max", timeout: float = 900
) -> "subprocess.CompletedProcess[str]":
    """Run a command on the machine at `host`, whose processor is `cpu` (QEMU's name), as its root.

    The kernel starts QEMU with the environment of each program: an agent whose processor counts needs the
    variable QEMU_CPU, too.
    """
    rule = binfmt.rule(RISCV64, str(qemu / f"qemu-{RISCV64}")).decode()
    start = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc"]
    return subprocess.run(
        [*start, "sh", "-c", _HOST, "host", str(host), rule, cpu, *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
