"""`rvbundle run --emulator qemu` on the host's own architecture: an agent sees no difference but the machine.

Each in both ways in which children are emulated: by the kernel (binfmt_misc), and by the preloaded library.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import rvbundle_runtime
from rvbundle_runtime.host import read_host
from rvbundle_runtime.machine import Model, processors
from rvbundle_runtime.processor import parse_cpuinfo
from tests.conftest import REPOSITORY, TEST_CACHE, Result, run_cli
from tests.emulation.conftest import HERE
from tests.native.test_blas import build_callers

SIGNATURE = "000106a3"  # Nehalem's family 6, model 26, stepping 3

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the agent asks x86-64's CPUID")


@dataclass(frozen=True)
class Emulated:
    """The image, and a way to emulate its children."""

    image: Path
    children: str
    env: dict[str, str]

    def run(self, *words: str, options: tuple[str, ...] = (), **more: object) -> Result:
        env = {**self.env, **more.pop("env", {})}  # type: ignore[dict-item]
        return run_cli("run", "--emulator", "qemu", *options, self.image, *words, env=env, **more)  # type: ignore[arg-type]

    def start(self, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "rvbundle", "run", "--emulator", "qemu", str(self.image), *words]
        env = {**os.environ, "RVBUNDLE_CACHE": str(TEST_CACHE), **self.env}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


@pytest.fixture
def by_kernel(emulated_image: Path, qemu: Path) -> Emulated:
    return Emulated(emulated_image, "binfmt_misc", {"RVBUNDLE_EMULATORS": str(qemu)})


@pytest.fixture
def by_preload(by_kernel: Emulated) -> Emulated:
    return replace(by_kernel, children="preload", env={**by_kernel.env, "RVBUNDLE_NO_BINFMT": "1"})


@pytest.fixture(params=["binfmt_misc", "preload"])
def emulated(request: pytest.FixtureRequest, by_kernel: Emulated, by_preload: Emulated) -> Emulated:
    return by_kernel if request.param == by_kernel.children else by_preload


@pytest.fixture
def started(emulated: Emulated, request: pytest.FixtureRequest) -> "Iterator[subprocess.Popen[str]]":
    """The agent at the beginning of a long wait."""
    process = emulated.start(request.param)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_it_is_emulated(emulated: Emulated) -> None:
    assert emulated.run("signature").out == f"{SIGNATURE}\n"
    native = run_cli("run", emulated.image, "signature").out
    assert native != f"{SIGNATURE}\n"
    assert len(native) == 9


def test_the_plan_says_so(emulated: Emulated) -> None:
    result = emulated.run("signature", options=("--verbose",))
    assert "\nrvbundle: emulator: qemu 1" in result.err
    assert f"\nrvbundle: children: {emulated.children} (" in result.err
    explained = run_cli("explain", "--json", "--emulator", "qemu", emulated.image, env=emulated.env)
    choices = {choice["what"]: choice for choice in json.loads(explained.out)["choices"]}
    assert choices["children"]["value"] == emulated.children
    assert choices["emulator"]["value"].startswith("qemu ")
    assert choices["backend"]["value"] == "nehalem"


@pytest.mark.parametrize("code", [0, 5, 255])
def test_exit_codes(emulated: Emulated, code: int) -> None:
    assert emulated.run("code", str(code)).code == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_ending_by_a_signal(emulated: Emulated, number: signal.Signals) -> None:
    assert emulated.run("die", str(int(number))).code == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("started", ["sleep"], indirect=True)
def test_signals_reach_the_agent_once(started: "subprocess.Popen[str]", number: signal.Signals) -> None:
    started.send_signal(number)
    assert started.stdout
    assert started.stdout.read() == f"caught {number.name}\n"
    assert started.wait(60) == 7


@pytest.mark.parametrize("started", ["wait"], indirect=True)
def test_an_agent_that_does_not_care_is_ended(started: "subprocess.Popen[str]") -> None:
    started.terminate()
    assert started.wait(60) == -signal.SIGTERM


def test_standard_input(emulated: Emulated) -> None:
    assert emulated.run("echo", stdin="a\nb").out == "a\nb"


def test_memory(emulated: Emulated) -> None:
    """The emulator's own does not count."""
    assert emulated.run("memory", "100", options=("--memory", "64m")).out == "refused\n"
    assert emulated.run("memory", "100", options=("--memory", "256m")).out == "got 100\n"


def test_children_of_every_kind(emulated: Emulated) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    result = emulated.run("children")
    assert result.err == ""
    assert Path("/proc/self/mountinfo").read_text() == before
    assert not Path("/proc/sys/fs/binfmt_misc/rvbundle").exists()
    kinds = "subprocess bare shell script #!python popen posix_spawn execv system".split()
    assert json.loads(result.out) == {
        **dict.fromkeys((*kinds, "by name"), SIGNATURE),
        "argv[0]": "odd name",
        "absent": "No such file or directory",
        "code": 7,
        "signal": -signal.SIGTERM,
    }


def test_products_are_computed_natively(emulated: Emulated, tmp_path: Path) -> None:
    """In all of its processes; where the machine does it, no product reaches the agent's own BLAS."""
    build_callers(tmp_path)
    native = emulated.run("products", options=("--backend", "nehalem-native-blas"), cwd=tmp_path)
    assert (native.out, native.err) == ("[0, 0]\n" * 3, "")
    plain = emulated.run("products", options=("--backend", "nehalem"), cwd=tmp_path)
    assert plain.out == "[0, 2]\n[0, 4]\n[0, 2]\n"  # a forked child goes on counting


def test_pools(emulated: Emulated) -> None:
    result = emulated.run("pools")
    assert result.err == ""
    assert result.out.splitlines() == [
        f"{method} {SIGNATURE} {SIGNATURE}" for method in ("fork", "spawn", "forkserver")
    ]


def test_the_machine_is_coherent(emulated: Emulated, tmp_path: Path) -> None:
    leaks = {
        "QEMU_LD_PREFIX": "/nowhere", "QEMU_SET_ENV": "LEAK=1", "QEMU_STRACE": "1", "QEMU_CPU": "max",
        "BOX64_LOG": "3", "LD_PRELOAD": "", "LD_LIBRARY_PATH": "/nowhere", "LC_ALL": "C", "PYTHONHOME": "/x",
    }  # fmt: skip
    del leaks["PYTHONHOME"]  # it would be rvbundle's own Python that it harms
    result = emulated.run("facts", env=leaks)
    assert result.err == ""
    facts = json.loads(result.out)
    assert (facts["machine"], facts["system"]) == ("x86_64", "Linux")
    assert parse_cpuinfo(facts["cpuinfo"]) == processors()["qemu", "nehalem"].processor
    assert facts["cpuinfo"].count("processor\t: ") == facts["cpu_count"] == len(read_host().cpus)
    assert facts["affinity"] == len(os.sched_getaffinity(0))
    assert facts["env"]["LANG"] == "C.UTF-8"
    assert not leaks.keys() & facts["env"].keys()
    assert facts["argv"] == ["/usr/bin/python3", "/app/emulated.py", "facts"]
    assert facts["exe"].startswith("/usr/bin/python3")
    ours = ("/usr/", "/run/rvbundle/", "/dev/zero", "/memfd:", "/app/")
    assert [path for path in facts["maps"] if not path.startswith(ours)] == []


def test_the_agent_can_not_change_what_emulates_it(emulated: Emulated) -> None:
    inside = "/run/rvbundle/emulator.d/qemu-x86_64"
    places = [inside, "/proc/cpuinfo", "/etc/ld.so.preload"]
    places += ["/run/rvbundle/emulate.so"] if emulated.children == "preload" else []
    lines = emulated.run("grab", *places).out.splitlines()
    assert lines == [f"{path} Read-only file system" for path in places]
    facts = json.loads(emulated.run("facts").out)
    assert not any("binfmt" in mount for mount in facts["mounts"])


def test_cold_pages_come_back(emulated: Emulated, tmp_path: Path) -> None:
    """Guard and pager work under the emulator, and the results are those of a native run."""
    fresh = {"RVBUNDLE_CACHE": str(tmp_path / "store")}
    native = run_cli("run", emulated.image, "untraced")
    result = emulated.run("untraced", env=fresh)
    assert (result.out, result.err) == (native.out, "")
    explained = run_cli("explain", "--json", emulated.image, env=fresh)
    restored = [c for c in json.loads(explained.out)["choices"] if c["what"] == "restored pages"]
    assert restored


def test_without_a_cold_pack_it_is_said_what_is_missing(emulated: Emulated, tmp_path: Path) -> None:
    alone = tmp_path / emulated.image.name
    shutil.copy(emulated.image, alone)
    env = {**emulated.env, "RVBUNDLE_CACHE": str(tmp_path / "store")}
    for words in (("signature",), ("numbers",)):
        traced = run_cli("run", "--emulator", "qemu", alone, *words, env=env)
        assert (traced.code, traced.err) == (0, "")
    result = run_cli("run", "--emulator", "qemu", alone, "untraced", env=env)
    assert result.code in (1, 112)  # a module that is cold, or pages that are
    assert "left out of" in result.err
    assert "no trace used it, and the cold pack is not here" in result.err


def test_without_a_sandbox(by_kernel: Emulated) -> None:
    assert by_kernel.run("signature", options=("--no-sandbox",)).out == f"{SIGNATURE}\n"
    result = by_kernel.run("pools", options=("--no-sandbox",))
    assert result.err == ""
    assert result.out.splitlines()[1:] == [
        f"{method} {SIGNATURE} {SIGNATURE}" for method in ("spawn", "forkserver")
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_as_a_plain_user(emulated: Emulated, tmp_path: Path) -> None:
    """Nothing of it needs root; the agent has its user's id, and the kernel still emulates its children."""
    for source, name in (("bundler", "rvbundle"), ("runtime", "rvbundle_runtime")):
        shutil.copytree(REPOSITORY / source / name, tmp_path / "src" / name)
    shutil.copy(emulated.image, tmp_path)
    (tmp_path / "emulators").mkdir()
    shutil.copy(Path(emulated.env["RVBUNDLE_EMULATORS"]) / "qemu-x86_64", tmp_path / "emulators")
    env = {**emulated.env, "RVBUNDLE_CACHE": str(tmp_path / "cache")}
    env["RVBUNDLE_EMULATORS"] = str(tmp_path / "emulators")
    # unpacked before: the decoder here is compiled for this Python only
    assert run_cli("run", "--emulator", "qemu", emulated.image, "signature", env=env).out == f"{SIGNATURE}\n"
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)
    words = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "/usr/bin/python3",
        "-m",
        "rvbundle",
    ]
    words += ["run", "--verbose", "--emulator", "qemu", str(tmp_path / emulated.image.name)]
    env |= {"PYTHONPATH": str(tmp_path / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*words, "facts"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert f"\nrvbundle: children: {emulated.children} (" in done.stderr, done.stderr
    assert json.loads(done.stdout)["uid"] == 65534
    done = subprocess.run([*words, "pools"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == [
        f"{method} {SIGNATURE} {SIGNATURE}" for method in ("spawn", "forkserver")
    ]


# Runs a command as root of a user namespace that can have none below it: a machine without user namespaces.
ROOT_ONLY = """
import ctypes, os, sys
uid, gid = os.getuid(), os.getgid()
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
    sys.exit(os.strerror(ctypes.get_errno()))
for path, text in (("/proc/self/setgroups", "deny"), ("/proc/self/uid_map", "0 %d 1" % uid),
                   ("/proc/self/gid_map", "0 %d 1" % gid), ("/proc/sys/user/max_user_namespaces", "0")):
    with open(path, "w") as file:
        file.write(text)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_as_root_without_user_namespaces(by_kernel: Emulated) -> None:
    """There binfmt_misc is never touched: it would be the whole machine's."""
    words = ["run", "--verbose", "--emulator", "qemu", str(by_kernel.image), "children"]
    done = subprocess.run(
        [sys.executable, "-c", ROOT_ONLY, sys.executable, "-m", "rvbundle", *words],
        env={**os.environ, "RVBUNDLE_CACHE": str(TEST_CACHE), **by_kernel.env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\nrvbundle: sandbox: root (" in done.stderr
    assert "\nrvbundle: children: preload (without a user namespace binfmt_misc" in done.stderr
    assert set(json.loads(done.stdout).values()) - {SIGNATURE} == {
        *("odd name", "No such file or directory", 7, -signal.SIGTERM),
    }


def test_traces_of_an_emulated_tree(by_kernel: Emulated, by_preload: Emulated, tmp_path: Path) -> None:
    """The tracer sees every process of a tree that runs emulated, as of one that runs natively."""
    assert run_cli("extract", by_kernel.image, tmp_path / "tree").code == 0
    records = [
        _trace(tmp_path, by_kernel, "none"),
        _trace(tmp_path, by_kernel, "qemu"),
        _trace(tmp_path, by_preload, "qemu"),
    ]
    assert records[0].keys() == records[1].keys() == records[2].keys()
    assert any("libpython" in name for name in records[0])


def _trace(folder: Path, emulated: Emulated, emulator: str) -> dict[str, bytes]:
    """Trace the agent's children in an unpacked tree; return what was recorded."""
    records = folder / f"{emulator}-{emulated.children}"
    records.mkdir()
    (records / "preload.txt").write_text("/trace/traceall.so\n")
    tools = Path(rvbundle_runtime.__file__).parent / "native" / "x86_64"
    request = {
        "tree": str(folder / "tree"),
        "mounts": [
            [str(HERE / "agents" / "emulated"), "/app", True],
            [str(tools / "tracer.so"), "/trace/tracer.so", True],
            [str(tools / "traceall.so"), "/trace/traceall.so", True],
            [str(records), "/trace/pages", False],
            [str(records / "preload.txt"), "/etc/ld.so.preload", True],
        ],
        "name": "tree", "version": "1", "arch": "x86_64", "python": "3.11",
        "libdir": "usr/lib/x86_64-linux-gnu", "network": False, "env": {},
        "argv": ["/usr/bin/python3", "/app/emulated.py", "children"],
        "emulator": emulator,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "rvbundle.run_tree"],
        env={**os.environ, "RVBUNDLE_CACHE": str(TEST_CACHE), **emulated.env},
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (SIGNATURE in done.stdout) == (emulator == "qemu")
    return {path.name: path.read_bytes() for path in records.iterdir() if path.name != "preload.txt"}


_QEMU_X86 = [m for (emulator, _), m in processors().items() if emulator == "qemu" and m.vendor]


@pytest.mark.parametrize("model", _QEMU_X86, ids=lambda model: model.option or "default")
def test_what_is_emulated_is_what_is_described(qemu: Path, tmp_path: Path, model: Model) -> None:
    """The processors in backends.toml have the flags that QEMU's CPUID has."""
    source = tmp_path / "cpuid.c"
    source.write_text((HERE / "cpuid.c").read_text())
    subprocess.run(["gcc", "-O1", "-o", tmp_path / "cpuid", source], check=True)
    option = ("-cpu", model.option) if model.option else ()
    command = [qemu / "qemu-x86_64", *option, tmp_path / "cpuid"]
    said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert said["vendor"] == model.vendor
    assert (said["family"], said["model"], said["stepping"]) == (model.family, model.model, model.stepping)
    assert said["name"] == model.name
    synthetic = {"nopl", "cpuid"}  # the kernel's own words
    assert set(said["flags"]) == set(model.flags) - synthetic
