import os
import platform
import socket
from pathlib import Path
from typing import Any

import pytest

from rvbundle_runtime import checkup, trials, zstd
from rvbundle_runtime.checkup import Confinement, read_facts
from rvbundle_runtime.errors import RvbundleError, SandboxError
from rvbundle_runtime.host import Host, read_host, read_processor

MAPS = """\
55d0c0a00000-55d0c0a28000 r--p 00000000 08:01 1 /usr/bin/python3
7fffd8c5e000-7fffd8c7f000 rw-p 00000000 00:00 0 [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
"""


def host(**values: Any) -> Host:
    return Host(
        **{
            "arch": "x86_64",
            "kernel": "6.12",
            "page_size": 4096,
            "uid": os.getuid(),
            "gid": os.getgid(),
            "cwd": "/",
            "environ": {},
            "namespaces_denied": "",
            "namespaces_fix": "",
            **values,
        }
    )


def test_this_machine(tmp_path: Path) -> None:
    """What can be had in another way is the same; nothing of the trial sandbox is left."""
    mounts, name = Path("/proc/self/mountinfo").read_text(), socket.gethostname()
    facts = read_facts(read_host())
    assert facts.arch == platform.machine()
    assert facts.page_size == os.sysconf("SC_PAGESIZE")
    assert len(facts.cpus) == os.cpu_count()
    assert set(facts.usable) == os.sched_getaffinity(0)
    assert facts.processor == read_processor()
    assert [outcome.name for outcome in facts.trials] == [
        trial.name for trial in trials.TRIALS if trial.arch == facts.arch
    ]
    assert 0 < facts.memory.available <= facts.memory.total == os.sysconf("SC_PHYS_PAGES") * facts.page_size
    assert facts.zstd == ""
    assert facts.top_address > id(facts)
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert socket.gethostname() == name


def test_the_sandbox_is_made_where_namespaces_can_be_had() -> None:
    here = read_host()
    if here.namespaces_denied:
        pytest.skip(here.namespaces_denied)
    found = read_facts(here).confinement
    assert (found.failed, found.hint, found.root_only) == ("", "", False)


def test_denied_namespaces_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a child was started"))
    monkeypatch.setattr(trials, "make", lambda _: ())
    facts = read_facts(host(uid=1000, namespaces_denied="the kernel allows none", namespaces_fix="fix"))
    assert facts.confinement == Confinement("the kernel allows none", "fix")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_without_user_namespaces() -> None:
    facts = read_facts(host(namespaces_denied="the kernel allows none", namespaces_fix="fix"))
    assert facts.confinement == Confinement(root_only=True)
    assert facts.binfmt == "it needs a user namespace"


def test_a_sandbox_that_fails_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    if (here := read_host()).namespaces_denied:
        pytest.skip(here.namespaces_denied)

    def execute(self: object) -> None:
        raise PermissionError(13, "Permission denied", "/dev")

    monkeypatch.setattr(checkup.sandbox.Devices, "execute", execute)
    assert read_facts(here).confinement == Confinement(
        "sandbox: could not make a minimal /dev: Permission denied",
        "something on this host denies mounts (a container's seccomp or AppArmor profile?)",
    )


def test_top_address() -> None:
    assert checkup._top_address(MAPS) == 0x7FFFD8C7F000
    assert checkup._top_address("") == 0


def test_mmu() -> None:
    assert checkup._mmu("processor\t: 0\nhart\t\t: 1\nmmu\t\t: sv39\n\nmmu : sv48\n") == "sv39"
    assert checkup._mmu("flags : mmu") == checkup._mmu("") == ""


def raising(error: BaseException) -> Any:
    def function() -> dict[str, str | bool]:
        raise error

    return function


def test_a_child_returns_what_its_function_does() -> None:
    assert checkup._in_child(lambda: {"pid": os.getpid() != 0}) == {"pid": True}


@pytest.mark.parametrize(
    ("function", "failed", "hint"),
    [
        (
            raising(OSError(28, "No space left on device", "unshare")),
            "sandbox: unshare: No space left on device",
            "",
        ),
        (raising(SandboxError("denied", "allow it")), "denied", "allow it"),
        (raising(ZeroDivisionError()), "the child failed", ""),
        (lambda: os.kill(os.getpid(), 9), "a child was killed", ""),
    ],
)
def test_a_child_that_fails(function: Any, failed: str, hint: str) -> None:
    assert checkup._in_child(function) == {"failed": failed, "hint": hint}


def test_a_folder_from_which_code_can_be_mapped(tmp_path: Path) -> None:
    assert checkup._why_not_executable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_from_which_none_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(checkup.mmap, "mmap", refuse)
    why = f"code can't be mapped from a file in {tmp_path}: Operation not permitted"
    assert checkup._why_not_executable(tmp_path) == why


def test_no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RvbundleError("this Python has no zstd decoder", "get one")

    monkeypatch.setattr(zstd, "decoder", missing)
    assert checkup._why_no_decoder() == "this Python has no zstd decoder"


@pytest.mark.parametrize(
    ("marks", "environ", "name"),
    [
        ([], {}, ""),
        (["/.dockerenv"], {}, "docker"),
        (["/run/.containerenv"], {"container": "oci"}, "podman"),
        ([], {"container": "systemd-nspawn"}, "systemd-nspawn"),
    ],
)
def test_container(
    marks: list[str], environ: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup.os.path, "exists", marks.__contains__)
    assert checkup._container(environ) == name
