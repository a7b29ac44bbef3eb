"""A riscv64 board in QEMU with Debian's kernel, busybox and nothing else: runs scripts, logs what they say.

    python -m tests.machine.machine FILE...                 a shell in it; Ctrl-A X switches it off at once
    python -m tests.machine.machine --job 'sh /media/x.run' x.run

Needs apt and dpkg-deb (it takes QEMU, OpenSBI, the kernel and busybox from Debian's packages, unpacked into
build/machine) and mke2fs, but not root. There is no network inside.

`first.sh` in the initramfs loads drivers and makes an ext4 disk the root; `second.sh` mounts what every
system has and runs the jobs, one after the other. The disks: an empty one, writable; and /media, read-only,
with the files and, in /media/jobs, the scripts and their list. The jobs' output does not come by the serial
console but by a virtio port, so that no message of the kernel gets into it; lines of ours begin with "@@ ":

    @@ boot seconds=S kernel=RELEASE        seconds on the board's clock, since its kernel's start
    @@ begin JOB
    @@ end JOB code=N seconds=S peak=BYTES  peak: memory of the job's cgroup, page cache included
    @@ off
"""

import argparse
import gzip
import lzma
import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rvbundle import debian, process
from rvbundle_runtime.errors import RvbundleError

HERE = Path(__file__).resolve().parent
WORK = HERE.parents[1] / "build" / "machine"
SUITE = "trixie"
# Not built into Debian's kernel, and used here or by a sandbox.
MODULES = ("virtio_blk", "crc32c_generic", "ext4", "overlay", "binfmt_misc")
DISK_BYTES = 8 << 30  # the writable disk; a sparse file
MEDIA_SPARE_BYTES = 64 << 20  # for ext4's own tables on /media, beside the files
BOOT_LIMIT = 300  # seconds; 4 to 7 are needed
_JOB_SPARE = 60  # seconds beside a job's own, to start and end it
_SERIAL, _PORT = "console", "jobs"


class MachineError(RvbundleError):
    """The machine did not do what it was started for."""


@dataclass(frozen=True)
class Board:
    """What is emulated. The defaults are a small board's: four cores, 2 GiB, 39 bits of addresses (Sv39)."""

    cores: int = 4
    memory: int = 2048  # MiB
    cpu: str = "rv64,sv48=off,sv57=off"
    kernel_arguments: tuple[str, ...] = ()  # "machine.root=memory": no disk as root, as in some firmware


@dataclass(frozen=True)
class Job:
    """A shell script to run on the board, by `sh`, for at most `limit` seconds of its clock."""

    name: str
    script: str
    user: str = "user"  # uid 1000; or root
    limit: int = 1800


@dataclass(frozen=True)
class Outcome:
    """What a job did."""

    code: int
    seconds: float
    peak: int  # bytes
    output: str


@dataclass(frozen=True)
class Session:
    """What happened from power on to power off."""

    boot_seconds: float
    kernel: str
    outcomes: Mapping[str, Outcome]
    log: Path


@dataclass(frozen=True)
class Parts:
    """Programs and files that make the board."""

    qemu: tuple[str, ...]
    firmware: Path
    kernel: Path
    initramfs: Path


def gather(work: Path = WORK) -> Parts:
    """Return the board's parts, fetched and unpacked into `work` once. Raises RvbundleError."""
    host = os.uname().machine
    tools = _unpacked(work, host, ("qemu-system-riscv", "opensbi"), lambda _: True)
    wanted = ("linux-image-", "linux-modules-", "busybox-static")
    board = _unpacked(
        work, "riscv64", ("linux-image-riscv64", "busybox-static"), lambda n: n.startswith(wanted)
    )
    libraries = tools / "usr" / "lib" / debian.TRIPLETS[host]
    loader = next(path for path in sorted(libraries.glob("ld-linux-*.so.*")))
    qemu = [
        loader,
        "--library-path",
        libraries,
        tools / "usr/bin/qemu-system-riscv64",
        "-L",
        tools / "usr/share/qemu",
    ]
    initramfs = work / "initramfs.gz"
    content = gzip.compress(cpio(_initramfs(board)), compresslevel=1, mtime=0)
    if not initramfs.exists() or initramfs.read_bytes() != content:
        initramfs.write_bytes(content)
    return Parts(
        qemu=tuple(map(str, qemu)),
        firmware=tools / "usr/lib/riscv64-linux-gnu/opensbi/generic/fw_dynamic.bin",
        kernel=next(iter(board.glob("boot/vmlinu*-*"))),
        initramfs=initramfs,
    )


def _unpacked(work: Path, arch: str, names: Sequence[str], needed: Callable[[str], bool]) -> Path:
    """Return a folder with `names` and those of their dependencies that are `needed`."""
    root = work / f"{SUITE}-{arch}"
    if not root.exists():
        archive = debian.Archive(work / "apt", SUITE, arch)
        packages = [package for package in debian.resolve(archive, names) if needed(package.name)]
        fresh = root.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        debian.unpack(archive, packages, fresh)
        fresh.rename(root)
    return root


def _initramfs(board: Path) -> dict[str, bytes]:
    """Return the initramfs's files by path."""
    modules = next((board / "usr/lib/modules").iterdir())
    files = {
        "init": (HERE / "first.sh").read_bytes(),
        "sbin/machine": (HERE / "second.sh").read_bytes(),
        "bin/busybox": (board / "usr/bin/busybox").read_bytes(),
        "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n",
        "etc/group": b"root:x:0:\nuser:x:1000:\n",
    }
    for position, (name, content) in enumerate(in_order(MODULES, _modules_of(modules))):
        files[f"modules/{position:02}-{name}.ko"] = content
    return files


def _modules_of(folder: Path) -> Callable[[str], bytes]:
    paths = {path.name.split(".")[0].replace("-", "_"): path for path in folder.glob("kernel/**/*.ko.xz")}

    def read(name: str) -> bytes:
        if name not in paths:
            raise MachineError(
                f"{folder.name} has no module {name}", "it may be built in now: take it out of MODULES"
            )
        return lzma.decompress(paths[name].read_bytes())

    return read


def in_order(names: Iterable[str], read: Callable[[str], bytes]) -> list[tuple[str, bytes]]:
    """Return the kernel modules `names` with those that they depend on, each after what it needs."""
    done: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in done:
            return
        content = read(name)
        found = re.search(rb"\0depends=([^\0]*)\0", content)
        for needed in found[1].decode().split(",") if found and found[1] else ():
            add(needed.replace("-", "_"))
        done[name] = content

    for name in names:
        add(name)
    return list(done.items())


def cpio(files: Mapping[str, bytes]) -> bytes:
    """Return an initramfs with these files, all executable.

    The format is Linux's Documentation/driver-api/early-userspace/buffer-format.rst.
    """
    folders = sorted({str(parent) for path in files for parent in Path(path).parents} - {"."})
    entries = [(path, 0o40755, b"") for path in folders]
    entries += [(path, 0o100755, content) for path, content in sorted(files.items())]
    out = bytearray()
    for inode, (path, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        name = path.encode() + b"\0"
        # inode, mode, uid, gid, links, mtime, size, device (4 numbers), length of the name, checksum
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        out += b"070701" + b"".join(b"%08X" % number for number in fields) + name
        out += b"\0" * (-len(out) % 4) + content
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def command(parts: Parts, board: Board, disks: Sequence[Path], port: int | None) -> list[str]:
    """Return QEMU's command line. `port` is the file descriptor for the jobs' output; None: a shell."""
    arguments = ["console=ttyS0", "panic=-1", *board.kernel_arguments]
    words = [
        *parts.qemu,
        "-machine",
        "virt",
        "-cpu",
        board.cpu,
        "-smp",
        str(board.cores),
        "-m",
        str(board.memory),
    ]
    words += ["-accel", "tcg,thread=multi", "-nodefaults", "-display", "none", "-no-reboot", "-nic", "none"]
    words += ["-bios", str(parts.firmware), "-kernel", str(parts.kernel), "-initrd", str(parts.initramfs)]
    for number, disk in enumerate(disks):
        words += [
            "-drive",
            f"if=none,id=disk{number},format=raw,cache=unsafe,file={str(disk).replace(',', ',,')}",
        ]
        words += ["-device", f"virtio-blk-pci,drive=disk{number},addr={number + 4}"]
    if port is None:
        words += ["-serial", "mon:stdio"]
        arguments.append("machine.shell")
    else:
        words += ["-serial", "stdio", "-device", "virtio-serial-pci"]
        words += [
            "-chardev",
            f"file,id=jobs,path=/dev/fd/{port}",
            "-device",
            "virtserialport,chardev=jobs,name=jobs",
        ]
    return [*words, "-append", " ".join(arguments)]


def make_disks(folder: Path, files: Sequence[Path], jobs: Sequence[Job]) -> list[Path]:
    """Make the two disks in `folder`. Raises RvbundleError."""
    if shutil.which("mke2fs", path=_path()) is None:
        raise MachineError("there is no mke2fs on this machine", "apt install e2fsprogs")
    disk, media, content = folder / "disk.img", folder / "media.img", folder / "media"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    _mke2fs("-E", "root_owner=0:0,lazy_itable_init=1,nodiscard", disk)
    (content / "jobs").mkdir(parents=True)
    for path in files:
        copy = shutil.copy(path, content / path.name)
        os.chmod(copy, path.stat().st_mode & 0o777 | 0o444)
    for job in jobs:
        (content / "jobs" / f"{job.name}.sh").write_text(job.script + "\n")
    (content / "jobs" / "list").write_text("".join(f"{job.name} {job.user} {job.limit}\n" for job in jobs))
    size = sum(path.lstat().st_size + 4096 for path in content.rglob("*"))
    with media.open("wb") as file:
        file.truncate(size + size // 20 + MEDIA_SPARE_BYTES)
    _mke2fs("-d", content, "-E", "root_owner=0:0", media)
    shutil.rmtree(content)
    return [disk, media]


def _mke2fs(*words: str | Path) -> None:
    process.run(["mke2fs", "-q", "-t", "ext4", "-m", "0", *words], env={**os.environ, "PATH": _path()})


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # a plain user's has no sbin on Debian


@dataclass
class _Log:
    """Writes lines as they come, each with the seconds since the start and where it is from."""

    path: Path
    echo: bool
    start: float = field(default_factory=time.monotonic)
    streams: dict[str, bytearray] = field(default_factory=dict)
    shown: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def add(self, stream: str, data: bytes, last: bool = False) -> None:
        whole = self.streams.setdefault(stream, bytearray())
        whole += data
        end = len(whole) if last else whole.rfind(b"\n") + 1
        begin = self.shown.get(stream, 0)
        if end <= begin:
            return
        self.shown[stream] = end
        text = whole[begin:end].decode("utf-8", "replace").replace("\r", "")
        now = f"{time.monotonic() - self.start:8.1f}"
        lines = "".join(f"{now} {stream:7} | {line}\n" for line in text.split("\n") if line)
        with self.path.open("a") as file:
            file.write(lines)
        if self.echo:
            sys.stderr.write(lines)

    def text(self, stream: str) -> str:
        return self.streams.get(stream, bytearray()).decode("utf-8", "replace")


def run(
    parts: Parts,
    jobs: Sequence[Job],
    files: Sequence[Path],
    log: Path,
    *,
    board: Board | None = None,
    echo: bool = False,
) -> Session:
    """Boot, run the jobs, switch off; `files` lie in /media. All output goes to the file `log`.

    Raises RvbundleError if the machine itself fails; what a job's exit code means is the caller's business.
    """
    limit = BOOT_LIMIT + sum(job.limit + _JOB_SPARE for job in jobs)
    with tempfile.TemporaryDirectory(prefix="machine-", dir=WORK) as name:
        disks = make_disks(Path(name), files, jobs)
        reading, writing = os.pipe()
        words = command(parts, board or Board(), disks, writing)
        kept = _Log(log, echo)
        kept.add(_SERIAL, f"{shlex.join(words)}\n".encode())
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        ended = _follow(child, reading, kept, limit)
    if not ended and kept.text(_PORT):
        raise MachineError(f"the machine did not switch off within {limit} s", _where(kept))
    return parse(kept)


def _follow(child: "subprocess.Popen[bytes]", port: int, log: _Log, limit: float) -> bool:
    """Log what the machine says until it is off; False when time was up and it was stopped."""
    assert child.stdout is not None
    names = {child.stdout.fileno(): _SERIAL, port: _PORT}

    def late() -> bool:
        return time.monotonic() > log.start + (limit if log.streams.get(_PORT) else BOOT_LIMIT)

    selector = selectors.DefaultSelector()
    try:
        for descriptor in names:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and not late():
            for key, _ in selector.select(1.0):
                data = os.read(key.fd, 1 << 16)
                log.add(names[key.fd], data, last=not data)
                if not data:
                    selector.unregister(key.fd)
        return not selector.get_map()
    finally:
        if selector.get_map():
            child.kill()
        child.wait()
        child.stdout.close()
        os.close(port)
        selector.close()


_BOOT = re.compile(r"^@@ boot seconds=(\S+) kernel=(\S+)$", re.MULTILINE)
_JOB = re.compile(
    r"^@@ begin (?P<name>\S+)\n(?P<output>.*?)\n@@ end (?P=name) code=(?P<code>\d+) "
    r"seconds=(?P<seconds>\S+) peak=(?P<peak>\d+)$",
    re.MULTILINE | re.DOTALL,
)


def parse(log: _Log) -> Session:
    """Read what came out of the port; raises MachineError unless the machine switched itself off."""
    text = log.text(_PORT)
    boot = _BOOT.search(text)
    if boot is None:
        raise MachineError(
            f"the machine did not boot:\n{process.indent_tail(log.text(_SERIAL))}", _where(log)
        )
    if not text.endswith("@@ off\n"):
        raise MachineError("the machine stopped before its last job ended", _where(log))
    outcomes = {
        found["name"]: Outcome(
            int(found["code"]), float(found["seconds"]), int(found["peak"]), found["output"]
        )
        for found in _JOB.finditer(text)
    }
    return Session(float(boot[1]), boot[2], outcomes, log.path)


def _where(log: _Log) -> str:
    return f"all that it said is in {log.path}"


def shell(parts: Parts, files: Sequence[Path], board: Board) -> int:
    """Give the terminal a shell on the board, as its plain user; return QEMU's exit code."""
    with tempfile.TemporaryDirectory(prefix="machine-", dir=WORK) as name:
        return subprocess.run(
            command(parts, board, make_disks(Path(name), files, []), None), check=False
        ).returncode


def main() -> int:
    """Run what the command line says."""
    default = Board()
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine.machine", description=__doc__.split("\n")[0]
    )
    parser.add_argument("files", nargs="*", type=Path, help="put into /media")
    parser.add_argument("--job", action="append", default=[], metavar="SCRIPT", help="instead of a shell")
    parser.add_argument("--limit", type=int, default=1800, help="seconds for each job")
    parser.add_argument("--root", action="store_true", help="run the jobs as root")
    parser.add_argument("--cores", type=int, default=default.cores)
    parser.add_argument("--memory", type=int, default=default.memory, help="MiB")
    parser.add_argument("--cpu", default=default.cpu)
    parser.add_argument(
        "--append", action="append", default=[], help="for the kernel, such as machine.root=memory"
    )
    given = parser.parse_args()
    board = Board(given.cores, given.memory, given.cpu, tuple(given.append))
    try:
        parts = gather()
        if not given.job:
            return shell(parts, given.files, board)
        user = "root" if given.root else "user"
        jobs = [Job(f"job{n}", script, user, given.limit) for n, script in enumerate(given.job, start=1)]
        session = run(parts, jobs, given.files, WORK / "by-hand.log", board=board, echo=True)
    except RvbundleError as error:
        sys.exit(f"{error}\nhint: {error.hint}")
    print(f"boot: {session.boot_seconds} s; log: {session.log}")
    for name, outcome in session.outcomes.items():
        peak = outcome.peak >> 20
        print(f"{name}: code {outcome.code}, {outcome.seconds} s, {peak} MiB at most")
    return max(outcome.code for outcome in session.outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
