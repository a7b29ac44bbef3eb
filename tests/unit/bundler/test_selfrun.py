"""Self-running files: what is asked for, and how the parts are put together."""

import subprocess
from pathlib import Path

import pytest

from rvbundle import selfrun
from rvbundle.bootstrap import Bootstrap
from rvbundle.debian import Package
from rvbundle.progress import Progress
from rvbundle.selfrun import Wanted, emulators_for, parse_wanted, write_self_running
from rvbundle_runtime import bootstraps
from rvbundle_runtime.bootstraps import BLOCK
from rvbundle_runtime.errors import StoreError, UsageError
from rvbundle_runtime.image import Reader

from ..images import build, item

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}


@pytest.mark.parametrize(
    ("arches", "emulators", "expected"),
    [
        ("riscv64", "needed", Wanted(("riscv64",))),
        ("x86_64,riscv64,x86_64", "always", Wanted(("x86_64", "riscv64"), "always")),
        ("aarch64", "none", Wanted(("aarch64",), "none")),
        ("riscv64", "box64,qemu,box64", Wanted(("riscv64",), ("box64", "qemu"))),
    ],
)
def test_what_is_wanted(arches: str, emulators: str, expected: Wanted) -> None:
    assert parse_wanted(arches, emulators) == expected


@pytest.mark.parametrize(
    ("arches", "emulators", "message"),
    [
        ("", "needed", "--self-running : expected some of aarch64, riscv64, x86_64"),
        ("riscv64,", "needed", "--self-running riscv64,: expected some of"),
        ("riscv64, x86_64", "needed", "--self-running riscv64, x86_64: expected some of"),
        ("amd64", "needed", "--self-running amd64: expected some of"),
        ("riscv64", "", "--emulators : expected one of always, needed, none, qemu, box64"),
        ("riscv64", "always,qemu", "--emulators always,qemu: expected one of"),
    ],
)
def test_what_can_not_be_had(arches: str, emulators: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_wanted(arches, emulators)
    assert raised.value.message.startswith(f"build: {message}")


@pytest.mark.parametrize(
    ("arch", "payloads", "wanted", "expected"),
    [
        ("riscv64", "x86_64", "needed", "qemu"),
        ("riscv64", "x86_64 riscv64", "needed", ""),
        ("riscv64", "riscv64", "needed", ""),
        ("x86_64", "x86_64", "needed", ""),
        ("x86_64", "riscv64", "needed", "qemu"),
        ("riscv64", "x86_64 riscv64", "always", "qemu"),
        ("riscv64", "riscv64", "always", ""),
        ("riscv64", "x86_64", "none", ""),
        ("riscv64", "x86_64 riscv64", "box64 qemu", "box64 qemu"),
        ("riscv64", "riscv64", "box64 qemu", ""),
        ("riscv64", "aarch64", "box64 qemu", "qemu"),
        ("aarch64", "x86_64", "box64", "box64"),
        ("x86_64", "riscv64", "box64 qemu", "qemu"),
    ],
)
def test_which_emulators(arch: str, payloads: str, wanted: str, expected: str) -> None:
    kinds = wanted if wanted in ("needed", "always", "none") else tuple(wanted.split())
    found = emulators_for(arch, payloads.split(), Wanted((arch,), kinds))
    assert found == tuple(expected.split())


def a_bootstrap(folder: Path, arch: str, blocks: int = 1) -> Bootstrap:
    """Return something of the right size."""
    path = folder / f"{arch}.tar.gz"
    path.write_bytes(arch.encode().ljust(blocks * BLOCK, b"."))
    return Bootstrap(arch, path, arch.encode().hex().ljust(64, "0"), 77, (Package("p", "1", ""),), (), ())


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """Nothing is fetched; what was asked for is noted."""
    asked = []

    def make(arch: str, payloads: tuple[str, ...], emulators: tuple[str, ...], cache: object) -> Bootstrap:
        asked.append((arch, emulators))
        return a_bootstrap(tmp_path, arch, len(arch))

    monkeypatch.setattr(selfrun, "make_bootstrap", make)
    return asked


def test_a_file(made: list[tuple[str, tuple[str, ...]]], tmp_path: Path) -> None:
    image = tmp_path / "agent-1.0.rvb"
    build(image, [item("app/x", b"x")])
    cold = tmp_path / "c.rvb"
    cold.write_bytes(b"a cold pack")
    wanted = Wanted(("riscv64", "x86_64"))
    written = write_self_running(image, cold, wanted, tmp_path / "cache", Progress())
    assert (written.path, written.arches) == (tmp_path / "agent-1.0.run", ("riscv64", "x86_64"))
    assert made == [("riscv64", ("qemu",)), ("x86_64", ())]
    data = written.path.read_bytes()
    assert data.endswith(b"a cold pack" + image.read_bytes())
    assert written.path.stat().st_mode & 0o777 == 0o755
    table = bootstraps.find_table(written.path)
    assert table
    assert table.size == written.size == len(data)
    for section in table.sections:
        bootstraps.check_section(written.path, section)
        assert data[section.offset :].startswith(section.arch.encode())
    with Reader(written.path) as reader, Reader(image) as plain:
        assert reader.identity == plain.identity == table.image
    again = write_self_running(image, cold, wanted, tmp_path / "cache", Progress())
    assert again.path.read_bytes() == data
    assert not list(tmp_path.glob(".*"))


def test_no_place_for_it(made: object, tmp_path: Path) -> None:
    image = tmp_path / "agent-1.0.rvb"
    build(image, [item("app/x", b"x")])
    (tmp_path / "agent-1.0.run").mkdir()
    with pytest.raises(StoreError, match=r"can't write .*/agent-1.0.run: Is a directory"):
        write_self_running(image, None, Wanted(("x86_64",)), tmp_path / "cache", Progress())
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_the_script_is_understood(shell: list[str], made: object, tmp_path: Path) -> None:
    image = tmp_path / "agent-1.0.rvb"
    build(image, [item("app/x", b"x")])
    wanted = Wanted(("riscv64", "x86_64", "aarch64"))
    file = write_self_running(image, None, wanted, tmp_path / "cache", Progress()).path
    text, end, _ = file.read_bytes().partition(b"\nexit 1\n")  # nothing behind it is ever read
    script = tmp_path / "script"
    script.write_bytes(text + end)
    done = subprocess.run([*shell, "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert b"@" not in text.replace(b'"$@"', b"")


def test_every_variable_of_the_script_is_its_own() -> None:
    """One of the caller's that is changed would be changed for the agent."""
    import re

    text = (Path(selfrun.__file__).parent / "selfrun.sh").read_text()
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    assigned = set(re.findall(r"(?:^|[\s;(])([A-Za-z_]\w*)=", code))
    read = {name for line in re.findall(r"\bread -r ([\w ]+)", code) for name in line.split()}
    loops = set(re.findall(r"\bfor (\w+) in", code))
    assert {n for n in assigned | read | loops if not n.startswith("rv_")} == {
        "LC_ALL",
        "_",
        "if",
        "bs",
        "skip",
        "count",
    }


def test_shellcheck(made: object, tmp_path: Path) -> None:
    image = tmp_path / "agent-1.0.rvb"
    build(image, [item("app/x", b"x")])
    file = write_self_running(image, None, Wanted(("riscv64",)), tmp_path / "cache", Progress()).path
    script = file.read_bytes().partition(b"\nexit 1\n")[0]
    done = subprocess.run(["shellcheck", "-s", "sh", "-"], input=script, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
