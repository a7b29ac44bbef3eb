import errno
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rvbundle_runtime import sandbox
from rvbundle_runtime.errors import SandboxError
from rvbundle_runtime.host import Emulator
from rvbundle_runtime.options import RunOptions
from rvbundle_runtime.plan import ColdPack, Mount, Plan, make_plan
from rvbundle_runtime.selection import choose_launch

from .test_plan import HOST, INFO


def plan(**options: object) -> Plan:
    return make_plan(
        replace(HOST, namespaces_denied=""),
        "/store/x-riscv64/root",
        INFO,
        RunOptions("x.rvb", **options),  # type: ignore[arg-type]
        ColdPack("", "none"),
    )


def test_operations_in_order() -> None:
    described = [step.describe() for step in sandbox.operations(plan(), 1000, 100)]
    assert described == [
        "make an empty root",
        "mount the payload /store/x-riscv64/root",
        "write /etc/passwd",
        "write /etc/group",
        "write /etc/hosts",
        "write /etc/nsswitch.conf",
        "mount /proc",
        "make a minimal /dev",
        "mount an empty /tmp",
        "mount an empty /run",
        "mount an empty /home/agent",
        "mount an empty /var/tmp",
        "mount /sys/devices/system/cpu as /sys/devices/system/cpu read-only",
        "mount /sys/devices/system/node as /sys/devices/system/node read-only",
        "mount /sys/fs/cgroup as /sys/fs/cgroup read-only",
        "mount /etc/localtime as /etc/localtime read-only",
        "mount /usr/share/zoneinfo as /usr/share/zoneinfo read-only",
        "mount /home/me/work as /agent",
        "write /run/rvbundle/rvbundle_runtime.json",
        "take the host's files away",
    ]


def test_no_cwd_gets_an_empty_folder() -> None:
    described = [step.describe() for step in sandbox.operations(plan(cwd=False), 0, 0)]
    assert "mount an empty /agent" in described
    assert "mount /home/me/work as /agent" not in described


@pytest.mark.parametrize(
    ("uid", "gid", "passwd", "group"),
    [
        (
            1000,
            100,
            "agent:x:1000:100:agent:/home/agent:/bin/sh\nroot:x:0:0:root:/home/agent:/bin/sh\n",
            "agent:x:100:\nroot:x:0:\n",
        ),
        (0, 0, "root:x:0:0:root:/home/agent:/bin/sh\n", "root:x:0:\n"),
    ],
    ids=["user", "root"],
)
def test_users(uid: int, gid: int, passwd: str, group: str) -> None:
    texts = {
        step.path: step.text
        for step in sandbox.operations(plan(), uid, gid)
        if isinstance(step, sandbox.WriteFile)
    }
    assert (texts["/etc/passwd"], texts["/etc/group"]) == (passwd, group)


def test_volumes_come_after_the_folders_that_they_lie_in() -> None:
    from rvbundle_runtime.options import Volume

    steps = sandbox.operations(plan(volumes=(Volume("/a", "/tmp/a"),)), 0, 0)
    described = [step.describe() for step in steps]
    assert described.index("mount an empty /tmp") < described.index("mount /a as /tmp/a")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/plain/file", "/plain/file"),
        ("/plain/./file", "/plain/file"),
        ("/plain/../plain/file", "/plain/file"),
        ("/../../plain", "/plain"),
        ("/absolute/file", "/plain/file"),
        ("/relative/file", "/plain/file"),
        ("/nested/up", "/plain"),
        ("/relative/..", "/"),
        ("/climber", "/"),
        ("/chain/file", "/plain/file"),
        ("/nothing/at/all", "/nothing/at/all"),
        ("/dangling", "/nowhere"),
        ("//plain//file/", "/plain/file"),
        ("/", "/"),
    ],
)
def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: str) -> None:
    """Links of the host mean what they mean on the host, though its root is at another place now."""
    old = tmp_path / "oldroot"
    (old / "plain").mkdir(parents=True)
    (old / "plain/file").write_text("")
    (old / "nested").mkdir()
    (old / "absolute").symlink_to("/plain")
    (old / "relative").symlink_to("plain")
    (old / "nested/up").symlink_to("../plain")
    (old / "climber").symlink_to("../../../..")
    (old / "chain").symlink_to("/relative")
    (old / "dangling").symlink_to("nowhere")
    monkeypatch.setattr(sandbox, "_OLD", str(old))
    assert sandbox._resolve(path) == f"{old}{expected if expected != '/' else ''}"


def test_link_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    monkeypatch.setattr(sandbox, "_OLD", str(tmp_path))
    with pytest.raises(OSError, match="Too many levels of symbolic links") as caught:
        sandbox._resolve("/a/x")
    assert caught.value.errno == errno.ELOOP


# Its root can't be an initramfs here, so the kernel's answer to that is what is made up.
COVERED = """
import errno, os, sys
from rvbundle_runtime import sandbox, syscalls

def refuse(new, old):
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

uid, gid = os.getuid(), os.getgid()
syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
syscalls.pivot_root = refuse
sandbox.EnterRoot(sys.argv[1]).execute()
print(os.getcwd(), os.listdir("/"), open("/oldroot" + sys.argv[1] + "/payload").read())
os.mkdir("/after")
sandbox.LeaveOldRoot().execute()
print(os.listdir("/"), os.listdir(".."), os.access("/after", os.W_OK))
"""


def test_the_root_of_an_initramfs_is_covered(tmp_path: Path) -> None:
    (tmp_path / "payload").write_text("here")
    done = subprocess.run(
        [sys.executable, "-c", COVERED, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == "/ ['oldroot'] here\n['after'] ['after'] False\n"


@dataclass(frozen=True)
class Failing:
    """An operation that fails."""

    number: int

    def describe(self) -> str:
        return "do something"

    def execute(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


DENIED = "something on this host denies mounts (a container's seccomp or AppArmor profile?)"


@pytest.mark.parametrize(
    ("number", "message", "hint"),
    [
        (errno.EPERM, "sandbox: could not do something: Operation not permitted", DENIED),
        (errno.EACCES, "sandbox: could not do something: Permission denied", DENIED),
        (
            errno.ENOSPC,
            "sandbox: could not do something: the kernel's limit of mounts is reached (ENOSPC; fs.mount-max)",
            "",
        ),
        (errno.EINVAL, "sandbox: could not do something: Invalid argument", ""),
        (errno.ENOENT, "sandbox: could not do something: No such file or directory", ""),
    ],
    ids=["eperm", "eacces", "enospc", "einval", "enoent"],
)
def test_a_step_fails(number: int, message: str, hint: str) -> None:
    with pytest.raises(SandboxError) as caught:
        sandbox.carry_out([Failing(number)])
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_steps_after_a_failure_are_not_carried_out(tmp_path: Path) -> None:
    later = sandbox.WriteFile(str(tmp_path / "x"), "text")
    with pytest.raises(SandboxError):
        sandbox.carry_out([Failing(errno.EIO), later])
    assert not (tmp_path / "x").exists()


def test_a_volume_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_OLD", str(tmp_path))
    step = sandbox.Bind(Mount("/nothing", "/data", read_only=True))
    with pytest.raises(SandboxError) as caught:
        sandbox.carry_out([step])
    assert caught.value.message == (
        "sandbox: could not mount /nothing as /data read-only: No such file or directory"
    )
    assert caught.value.hint == "it must exist before the run"


def test_optional_mounts_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_OLD", str(tmp_path))
    sandbox.carry_out([sandbox.Bind(Mount("/nothing", "/data", read_only=True, optional=True))])


def test_write_file(tmp_path: Path) -> None:
    sandbox.carry_out([sandbox.WriteFile(f"{tmp_path}/etc/x", "text ü\n")])
    assert (tmp_path / "etc/x").read_bytes() == "text ü\n".encode()


QEMU = Emulator("qemu", "x86_64", "/usr/bin/qemu-x86_64", "10.0.13")
BOX64 = Emulator("box64", "x86_64", "/opt/box64", "0.3.4", loader="/lib/ld.so", libraries=("/lib/libc.so.6",))
INSIDE = "/run/rvbundle/emulator.d"


def emulated(arch: str, emulator: Emulator, binfmt_denied: str, backend: str | None = None) -> list[str]:
    """Return what is done for an emulated payload beside what is done for a native one."""
    host = replace(HOST, arch=arch, namespaces_denied="", emulators=(emulator,), binfmt_denied=binfmt_denied)
    info = replace(INFO, arch="x86_64")
    options = RunOptions("x.rvb", emulator=emulator.kind, backend=backend)
    launch = choose_launch(host, ("x86_64",), options, "x.rvb")
    made = make_plan(host, "/store/x/root", info, options, ColdPack("", "none"), launch)
    described = [step.describe() for step in sandbox.operations(made, 1000, 100)]
    (start,) = [n for n, text in enumerate(described) if text == "mount /home/me/work as /agent"]
    assert described[-2:] == ["write /run/rvbundle/rvbundle_runtime.json", "take the host's files away"]
    return described[start + 1 : -2]


def test_emulated_by_the_kernel() -> None:
    assert emulated("riscv64", QEMU, "") == [
        "replace /proc/cpuinfo",
        f"mount /usr/bin/qemu-x86_64 as {INSIDE}/qemu-x86_64 read-only",
    ]


def test_emulated_on_its_own_architecture() -> None:
    """The kernel must not run the emulator by itself."""
    assert emulated("x86_64", QEMU, "") == [
        "replace /proc/cpuinfo",
        f"copy /usr/bin/qemu-x86_64 to {INSIDE}/qemu-x86_64",
    ]


def test_emulated_by_the_preload() -> None:
    library = f"{Path(sandbox.__file__).parent}/native/x86_64/emulate.so"
    assert emulated("riscv64", QEMU, "there is none") == [
        "replace /proc/cpuinfo",
        f"mount /usr/bin/qemu-x86_64 as {INSIDE}/qemu-x86_64 read-only",
        f"mount {library} as /run/rvbundle/emulate.so read-only",
        "write /run/rvbundle/emulator",
        "write /etc/ld.so.preload",
    ]


@pytest.mark.parametrize(
    ("host", "show"), [("riscv64", "mount {} as {} read-only"), ("x86_64", "copy {} to {}")]
)
def test_native_blas(host: str, show: str) -> None:
    """The kernel must not have the worker emulated."""
    natives = Path(sandbox.__file__).parent / "native"
    assert emulated(host, QEMU, "", "nehalem-native-blas")[2:] == [
        f"mount {natives}/x86_64/blas.so as /run/rvbundle/blas.so read-only",
        show.format(f"{natives}/{host}/blasworker", "/run/rvbundle/blasworker"),
        "write /etc/ld.so.preload",
    ]


def test_box64_with_libraries_of_its_own() -> None:
    assert emulated("riscv64", BOX64, "there is none") == [
        f"mount /lib/libc.so.6 as {INSIDE}/libc.so.6 read-only",
        f"mount /lib/ld.so as {INSIDE}/ld.so read-only",
        f"mount /opt/box64 as {INSIDE}/box64.program read-only",
        f"write {INSIDE}/box64",
        "write /etc/ld.so.preload",
    ]
