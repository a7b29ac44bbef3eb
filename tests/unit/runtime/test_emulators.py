"""Finding and probing emulators, with scripts and with tiny programs in their place."""

import json
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rvbundle_runtime import emulators
from rvbundle_runtime.emulators import candidates, examine, look, read_program
from rvbundle_runtime.host import Emulator, Host

from ..images import ARCH
from .test_plan import HOST

HERE = replace(HOST, arch=ARCH, environ={}, uid=os.getuid(), gid=os.getgid(), kernel="6.6.0")
GOOD_VERSION = "qemu-x86_64 version 10.0.13 (Debian 1:10.0.13+ds-0)"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulators, "PROBE_SECONDS", 1.0)


def script(path: Path, version: str = GOOD_VERSION, probe: str = "rvbundle probe x86_64 4096") -> Path:
    """Write an "emulator" that says its version, and otherwise runs the shell command(s) `probe`."""
    command = f"echo {probe}" if probe.startswith("rvbundle") else probe
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit; fi\n{command}\n')
    path.chmod(0o755)
    return path


def examined(path: Path) -> Emulator:
    return examine(Emulator("qemu", "x86_64", str(path)), HERE)


@pytest.mark.parametrize(
    ("version", "probe", "reason"),
    [
        (GOOD_VERSION, "kill -SEGV $$", "was ended by SIGSEGV in its probe"),
        (GOOD_VERSION, "exit 3", "ended with exit code 3 in its probe"),
        (GOOD_VERSION, "sleep 60 & sleep 60", "did not end within 1 s in its probe"),
        (GOOD_VERSION, "echo hello", "printed something else in its probe: 'hello\\n'"),
        (GOOD_VERSION, "rvbundle probe riscv64 4096", "printed something else in its probe: "),
        (GOOD_VERSION, ":", "printed something else in its probe: ''"),
        (GOOD_VERSION, "rvbundle probe x86_64 4096", "is a script: the sandbox can't show all that it needs"),
        (
            "qemu-x86_64 version 8.2.1 (Debian 1:8.2.1)",
            "rvbundle probe x86_64 4096",
            "is version 8.2.1, which is known to crash (8.2.0 to 8.2.2 are)",
        ),
        (
            "qemu-x86_64 version 7.2.22",
            "rvbundle probe x86_64 4096",
            "is version 7.2.22; 9 or newer is needed",
        ),
        ("hello", "rvbundle probe x86_64 4096", "is version unknown; 9 or newer is needed"),
    ],
)
def test_what_is_refused(tmp_path: Path, version: str, probe: str, reason: str) -> None:
    found = examined(script(tmp_path / "qemu-x86_64", version, probe))
    assert found.probe.startswith(reason), found.probe


def test_a_crash_may_be_chance(tmp_path: Path) -> None:
    script(tmp_path / "q", probe=f"if mkdir {tmp_path}/first; then kill -ABRT $$; fi; exit 9")
    assert examined(tmp_path / "q").probe == "ended with exit code 9 in its probe"


def test_a_hanging_one_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    script(tmp_path / "q", probe=f"echo $$ >{mark}; sleep 60 & echo $! >>{mark}; wait")
    assert "did not end" in examined(tmp_path / "q").probe
    pids = mark.read_text().split()
    assert len(pids) == 2
    for _ in range(500):  # their end is on the way
        if not any(map(is_running, pids)):
            return
        time.sleep(0.01)
    raise AssertionError(pids)


def is_running(pid: str) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_one_that_can_not_be_executed(tmp_path: Path) -> None:
    script(tmp_path / "q").chmod(0o644)
    assert examined(tmp_path / "q").probe == "is not executable"
    (tmp_path / "q").write_bytes(b"\x7fELF\x02\x01 damaged")
    (tmp_path / "q").chmod(0o755)
    assert examined(tmp_path / "q").probe.startswith("could not be started (Exec format error) when asked")


def test_a_version_that_is_never_said(tmp_path: Path) -> None:
    path = tmp_path / "q"
    path.write_text("#!/bin/sh\nsleep 60\n")
    path.chmod(0o755)
    assert examined(path).probe == "did not end within 1 s when asked for its version"


def test_a_dynamically_linked_one_is_of_no_use_in_the_sandbox() -> None:
    header = read_program("/bin/sh")
    assert header
    assert header.interpreter
    reason = emulators._why_not_shown(Emulator("qemu", "x86_64", "/bin/sh"), header, HERE)
    assert reason == ("is linked dynamically: the sandbox has no libraries for it; a static one is needed")
    assert emulators._why_not_shown(Emulator("box64", "x86_64", "/x", loader="/l"), header, HERE) == ""


def test_one_that_is_emulated_itself() -> None:
    header = emulators.Program(999, "")
    assert emulators._why_not_shown(Emulator("qemu", "x86_64", "/x"), header, HERE) == (
        "is emulated itself, by means that the sandbox does not have"
    )


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + bytes(80)])
def test_what_is_no_program(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert read_program(str(tmp_path / "x")) is None
    assert read_program(str(tmp_path / "absent")) is None


def test_places_and_their_order(tmp_path: Path) -> None:
    for name in ("own/qemu-x86_64", "own/box64", "a/qemu-x86_64", "a/qemu-x86_64-static", "b/qemu-x86_64"):
        script(tmp_path / name)
    (tmp_path / "b" / "qemu-aarch64").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "qemu-x86_64").symlink_to("../b/qemu-x86_64")
    path = ":".join(["relative", *(str(tmp_path / name) for name in ("a", "b", "c", "a"))])
    environ = {"RVBUNDLE_EMULATORS": str(tmp_path / "own"), "PATH": path}
    assert candidates("x86_64", environ) == [
        ("qemu", str(tmp_path / "own/qemu-x86_64")),
        ("box64", str(tmp_path / "own/box64")),
        ("qemu", str(tmp_path / "a/qemu-x86_64-static")),
        ("qemu", str(tmp_path / "a/qemu-x86_64")),
        ("qemu", str(tmp_path / "b/qemu-x86_64")),
    ]
    assert candidates("aarch64", environ) == []
    assert candidates("x86_64", {}) == []


def test_what_failed_is_probed_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    script(tmp_path / "qemu-x86_64", probe=f"echo run >>{runs}; exit 1")
    host = replace(HERE, environ={"PATH": str(tmp_path)})
    for _ in range(2):
        assert look(host, ("x86_64",), tmp_path / "store").emulators[0].probe
    assert runs.read_text().splitlines() == ["run", "run"]
    assert not (tmp_path / "store").exists()


def test_what_passed_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def passed(emulator: Emulator, host: Host) -> Emulator:
        asked.append(emulator.path)
        return replace(emulator, version="10.0")

    monkeypatch.setattr(emulators, "examine", passed)
    path = script(tmp_path / "qemu-x86_64")
    host, store = replace(HERE, environ={"PATH": str(tmp_path)}), tmp_path / "store"
    expected = (Emulator("qemu", "x86_64", str(path), "10.0"),)
    assert [look(host, ("x86_64",), store).emulators for _ in range(2)] == [expected, expected]
    assert len(asked) == 1
    assert [p.name for p in store.iterdir()] == ["emulators.json"]
    look(replace(host, kernel="6.7.0"), ("x86_64",), store)
    assert len(asked) == 2
    os.utime(path, ns=(0, 0))
    look(host, ("x86_64",), store)
    assert len(asked) == 3
    for damaged in ("", "[]", '{"x": 1}', json.dumps({"x": {"kind": "qemu", "libraries": [1]}})):
        (store / "emulators.json").write_text(damaged)
        assert look(host, ("x86_64",), store).emulators == expected
    assert len(asked) == 7


def test_a_store_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulators, "examine", lambda emulator, _host: emulator)
    path = script(tmp_path / "qemu-x86_64")
    (tmp_path / "file").write_text("")
    host = replace(HERE, environ={"PATH": str(tmp_path)})
    assert look(host, ("x86_64",), tmp_path / "file").emulators == (Emulator("qemu", "x86_64", str(path)),)


def test_binfmt_is_asked_for_with_the_emulators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulators.binfmt, "why_denied", lambda *_: "because")
    assert HERE.binfmt_denied == "not looked at"
    assert look(HERE, (), tmp_path).binfmt_denied == "because"
    forced = replace(HERE, environ={"RVBUNDLE_NO_BINFMT": "1"})
    assert look(forced, (), tmp_path).binfmt_denied == "RVBUNDLE_NO_BINFMT is set"
    denied = replace(HERE, namespaces_denied="x")
    assert look(denied, (), tmp_path).binfmt_denied == "it needs a user namespace"


def test_libraries_of_its_own(tmp_path: Path) -> None:
    libs = tmp_path / "box64.libs"
    libs.mkdir()
    emulator = Emulator("box64", "x86_64", str(tmp_path / "box64"))
    missing = emulators._find_libraries(emulator, "/lib/ld-linux.so.1")
    assert missing.probe == f"can't be started: there is no {libs}/ld-linux.so.1"
    for name in ("ld-linux.so.1", "libc.so.6", "libm.so.6"):
        (libs / name).write_bytes(b"")
    found = emulators._find_libraries(emulator, "/lib/ld-linux.so.1")
    assert (found.loader, found.carried, found.probe) == (f"{libs}/ld-linux.so.1", True, "")
    assert found.libraries == (f"{libs}/libc.so.6", f"{libs}/libm.so.6")


def test_libraries_of_the_host() -> None:
    header = read_program("/bin/sh")
    assert header
    found = emulators._find_libraries(Emulator("box64", "x86_64", "/bin/sh"), header.interpreter)
    assert (found.loader, found.carried, found.probe) == (header.interpreter, False, "")
    assert any("/libc.so" in path for path in found.libraries)
    assert all(stat.S_ISREG(os.stat(path).st_mode) for path in found.libraries)
