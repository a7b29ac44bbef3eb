import errno
import os
import tempfile
from pathlib import Path

import pytest

from rvbundle_runtime import host, processor, store, syscalls
from rvbundle_runtime.host import CachePlace, cache_place
from rvbundle_runtime.processor import Cluster, Processor


def usable_only(*places: str) -> object:
    return lambda base: "" if str(base) in places else f"{base} is bad"


@pytest.mark.parametrize(
    ("environ", "usable", "place", "reason"),
    [
        ({"RVBUNDLE_CACHE": "/x", "HOME": "/h"}, [], "/x", "RVBUNDLE_CACHE says so"),
        (
            {"XDG_CACHE_HOME": "/c", "HOME": "/h"},
            ["/c/rvbundle"],
            "/c/rvbundle",
            "XDG_CACHE_HOME says so",
        ),
        (
            {"XDG_CACHE_HOME": "relative", "HOME": "/h"},
            ["/h/.cache/rvbundle"],
            "/h/.cache/rvbundle",
            "your cache folder",
        ),
        (
            {"RVBUNDLE_CACHE": "", "HOME": "/h"},
            ["/h/.cache/rvbundle"],
            "/h/.cache/rvbundle",
            "your cache folder",
        ),
        (
            {"HOME": "/h"},
            ["/var/tmp/rvbundle-7"],
            "/var/tmp/rvbundle-7",
            "/h/.cache/rvbundle is bad; a temporary folder",
        ),
        (
            {"HOME": "/h"},
            ["/tmp/rvbundle-7"],
            "/tmp/rvbundle-7",
            "/h/.cache/rvbundle is bad; /var/tmp/rvbundle-7 is bad; a temporary folder",
        ),
        ({}, ["/var/tmp/rvbundle-7"], "/var/tmp/rvbundle-7", "a temporary folder"),
        ({"HOME": "relative"}, ["/var/tmp/rvbundle-7"], "/var/tmp/rvbundle-7", "a temporary folder"),
        (
            {"HOME": "/h"},
            [],
            "/h/.cache/rvbundle",
            "/h/.cache/rvbundle is bad; /var/tmp/rvbundle-7 is bad; "
            "/tmp/rvbundle-7 is bad; your cache folder",
        ),
    ],
    ids=["named", "xdg", "relative xdg", "empty name", "var tmp", "tmp", "no home", "relative home", "none"],
)
def test_cache_place(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], usable: list[str], place: str, reason: str
) -> None:
    monkeypatch.setattr(store, "why_unusable", usable_only(*usable))
    assert cache_place(environ, 7) == CachePlace(Path(place), reason)


def test_named_place_is_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cache_place({"RVBUNDLE_CACHE": "cache"}, 7).base == tmp_path / "cache"


def test_a_home_that_can_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME=/root for another user, as `su` without `-` leaves it."""
    original = os.stat

    def stat(path: object, **kwargs: object) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/closed/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, **kwargs)  # type: ignore[arg-type]

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "stat", stat)
    place = cache_place({"HOME": f"{tmp_path}/closed/home"}, 123456789)
    assert place.base in (Path("/var/tmp/rvbundle-123456789"), Path("/tmp/rvbundle-123456789"))


def test_a_home_that_can_not_be() -> None:
    place = cache_place({"HOME": "/" + "x" * 300}, 123456789)
    assert place.base in (Path("/var/tmp/rvbundle-123456789"), Path("/tmp/rvbundle-123456789"))


def test_read_host() -> None:
    found = host.read_host()
    assert (found.arch, found.uid, found.gid) == (os.uname().machine, os.getuid(), os.getgid())
    assert found.cwd == os.getcwd()
    assert found.environ == dict(os.environ)
    assert found.page_size in (4096, 16384, 65536)
    assert bool(found.namespaces_denied) == bool(found.namespaces_fix)


def test_read_processor() -> None:
    """The kernel names the processor of this machine, whatever it is."""
    found = host.read_processor()
    text = Path("/proc/cpuinfo").read_text()
    assert found.vendor in text
    assert all(flag in text for flag in found.flags)
    assert host.read_host().processor == found
    if os.uname().machine == "x86_64":
        assert found.vendor
        assert "sse2" in found.flags


def test_no_processor_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: str) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    monkeypatch.setattr("builtins.open", refuse)
    found = host.read_processor()
    monkeypatch.undo()
    assert found == Processor()


def test_processors_of_this_machine() -> None:
    found = host.read_host()
    assert set(found.usable) == os.sched_getaffinity(0)
    assert len(found.cpus) == os.cpu_count()
    assert [cpu for cluster in found.clusters for cpu in cluster.cpus]
    assert sorted(cpu for cluster in found.clusters for cpu in cluster.cpus) == list(found.cpus)
    assert found.quota is None or found.quota > 0


def kernel_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(host, "_bytes", lambda path, _size=0: files.get(path, "").encode())


def test_limits_of_all_control_groups_above_count(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_files(
        monkeypatch,
        {
            "/proc/self/cgroup": "0::/user.slice/run.scope\n",
            "/proc/meminfo": "MemTotal:  1024 kB\nMemFree: 1 kB\nMemAvailable:  512 kB\n",
            "/sys/fs/cgroup/user.slice/run.scope/memory.max": "max\n",
            "/sys/fs/cgroup/user.slice/memory.max": "262144\n",
            "/sys/fs/cgroup/user.slice/run.scope/cpu.max": "max 100000\n",
            "/sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
        },
    )
    assert host.read_memory() == host.Memory(1 << 20, 1 << 19, 1 << 18)
    assert host.read_quota() == 1.5


def test_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    more = "0::/\n"
    kernel_files(
        monkeypatch,
        {
            "/proc/self/cgroup": more,
            "/sys/fs/cgroup/cpu.max": "max 100000\n",
            "/proc/meminfo": "MemTotal: 4 kB\n",
            "/sys/fs/cgroup/memory.max": "999999999\n",
        },
    )
    assert host.read_memory() == host.Memory(4096, 0, None)
    assert host.read_quota() is None


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        (
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n3:memory:/x\n0::/\n",
                "/sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "250000\n",
                "/sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"/proc/self/cgroup": "0::/../..\n", "/sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "0 0"}, None),
        ({"/proc/self/cgroup": "odd\n\n"}, None),
        ({}, None),
    ],
    ids=["version 1", "only the top is there", "above the top", "no number", "odd", "no files"],
)
def test_quota(files: dict[str, str], quota: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_files(monkeypatch, files)
    assert host.read_quota() == quota


def test_memory_of_a_control_group_of_version_1(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_files(
        monkeypatch,
        {
            "/proc/self/cgroup": "3:memory:/x\n",
            "/proc/meminfo": "MemTotal: 1024 kB\nMemAvailable: 4 kB\n",
            "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "65536\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert host.read_memory() == host.Memory(1 << 20, 4096, 65536)


def test_kinds_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_files(
        monkeypatch,
        {
            "/sys/devices/cpu_core/cpus": "0-3\n",
            "/sys/devices/cpu_atom/cpus": "4-7\n",
            "/sys/devices/system/cpu/cpu0/cpu_capacity": "1024\n",
            "/sys/devices/system/cpu/cpu2/cpu_capacity": "odd",
        },
    )
    assert host._read_kinds("x86_64", (0,)) == ({}, {"core": (0, 1, 2, 3), "atom": (4, 5, 6, 7)})
    assert host._read_kinds("riscv64", (0, 1, 2)) == ({0: 1024}, {})


def test_where_the_kernel_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    kernel_files(monkeypatch, {})
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    found = host.read_host()
    assert (found.processor, found.quota) == (Processor(), None)
    assert found.cpus == found.usable == tuple(range(os.cpu_count() or 1))
    assert found.clusters == (Cluster(found.cpus),)
    assert host.read_memory() == host.Memory(0, 0)


RISCV = "processor : 0\nisa : rv64imafdcv_zvl128b\n\n"


@pytest.mark.parametrize(
    ("control", "vlen", "expected"),
    [
        (0, 32, 256),
        (2, 32, 256),
        (1, 32, 0),
        (OSError(errno.EINVAL, "Invalid argument"), 32, 256),
        (2, OSError(errno.EACCES, "Permission denied"), 128),
    ],
    ids=["default", "on", "off", "no such call", "no executable memory"],
)
def test_vectors_of_riscv(
    control: int | OSError, vlen: int | OSError, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length is only read where the kernel says that vectors may be used."""

    def answer(value: int | OSError) -> int:
        if isinstance(value, OSError):
            raise value
        return value

    def call_code(code: bytes) -> int:
        assert control != 1
        return answer(vlen)

    kernel_files(monkeypatch, {})
    monkeypatch.setattr(syscalls, "riscv_hwprobe", lambda _keys, _cpus: {processor.IMA_EXT_0: 7})
    monkeypatch.setattr(syscalls, "prctl", lambda _: answer(control))
    monkeypatch.setattr(syscalls, "call_code", call_code)
    found = host._read_processor("riscv64", RISCV, (0,))
    assert found.vlen == expected
    assert ("v" in found.flags) == (expected > 0)


def test_riscv_before_hwprobe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is executed that may not be there."""

    def refuse(*args: object) -> dict[int, int]:
        raise OSError(errno.ENOSYS, "Function not implemented")

    kernel_files(monkeypatch, {})
    monkeypatch.setattr(syscalls, "riscv_hwprobe", refuse)
    monkeypatch.setattr(syscalls, "call_code", lambda _: pytest.fail("code was run"))
    assert host._read_processor("riscv64", RISCV, (0,)).vlen == 128
    hwcap = b"".join(n.to_bytes(8, "little") for n in (16, 0x112D))
    monkeypatch.setattr(host, "_bytes", lambda _path, _size=0: hwcap)
    assert host._read_processor("riscv64", RISCV, (0,)).vlen == 0


@pytest.mark.parametrize(
    ("sysctls", "why", "fix"),
    [
        (
            {"user/max_user_namespaces": "0"},
            "the kernel allows none (user.max_user_namespaces is 0)",
            "sudo sysctl -w user.max_user_namespaces=15000",
        ),
        (
            {"user/max_user_namespaces": "100", "kernel/unprivileged_userns_clone": "0"},
            "the kernel allows them to root only (kernel.unprivileged_userns_clone is 0)",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            {"kernel/apparmor_restrict_unprivileged_userns": "1"},
            "AppArmor denies them (kernel.apparmor_restrict_unprivileged_userns is 1, as on Ubuntu 24.04)",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        (
            {"kernel/apparmor_restrict_unprivileged_userns": "0"},
            "operation not permitted (inside a container? then its runtime's seccomp profile denies them)",
            "allow user namespaces on this machine",
        ),
    ],
    ids=["none at all", "debian", "ubuntu", "container"],
)
def test_why_namespaces_are_denied(
    monkeypatch: pytest.MonkeyPatch, sysctls: dict[str, str], why: str, fix: str
) -> None:
    monkeypatch.setattr(host, "_sysctl", lambda name: sysctls.get(name, ""))
    assert host._explain_denial(errno.EPERM) == (why, fix)


def test_the_probe_leaves_this_process_alone() -> None:
    before = os.readlink("/proc/self/ns/user"), os.readlink("/proc/self/ns/mnt")
    host.read_host()
    assert (os.readlink("/proc/self/ns/user"), os.readlink("/proc/self/ns/mnt")) == before
    assert Path(tempfile.gettempdir()).is_dir()
