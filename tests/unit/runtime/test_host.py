import errno
import os
import tempfile
from pathlib import Path

import pytest

from rvbundle_runtime import host, store
from rvbundle_runtime.families import Processor
from rvbundle_runtime.host import CachePlace, cache_place


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
