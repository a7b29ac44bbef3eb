"""The processes of an unconfined run. What needs a sandbox is in tests/integration."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rvbundle_runtime import supervisor
from rvbundle_runtime.supervisor import Outcome, die_like

# Runs the plan that argv describes and prints the outcome; a process of its own, as in real life.
_RUN = """
import json, os, sys
from rvbundle_runtime import supervisor
from rvbundle_runtime.errors import RvbundleError
from rvbundle_runtime.plan import NONE, Plan
from rvbundle_runtime.store import PayloadInfo
request = json.loads(sys.argv[1])
info = PayloadInfo("id", "demo", "1", "any", "wheels", "3.11", (), "lib", False, {})
plan = Plan("/root", info, NONE, True, (), request["env"], tuple(request["argv"]), request["workdir"],
            request["memory"], None, ())
before = os.getpid()
try:
    outcome = supervisor.run(plan, None, bytes.fromhex(request.get("present", "")))
    print(json.dumps([outcome.code, outcome.signal]), flush=True)
except RvbundleError as error:
    print(json.dumps([type(error).__name__, error.message]), flush=True)
assert os.getpid() == before, "a child went on in the parent's code"
if request["die"]:
    sys.exit(supervisor.die_like(outcome))
"""


def run(
    *argv: str,
    env: dict[str, str] | None = None,
    workdir: str = "/",
    memory: int | None = None,
    die: bool = False,
) -> subprocess.CompletedProcess[str]:
    request = {"argv": argv, "env": env or {}, "workdir": workdir, "memory": memory, "die": die}
    command = [sys.executable, "-c", _RUN, json.dumps(request)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> object:
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("code", [0, 1, 7, 127, 255])
def test_exit_code(code: int) -> None:
    assert last_line(run("/bin/sh", "-c", f"exit {code}")) == [code, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE])
def test_ended_by_a_signal(number: signal.Signals) -> None:
    assert last_line(run("/bin/sh", "-c", f"kill -{int(number)} $$")) == [0, int(number)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_dies_like_the_agent(number: signal.Signals) -> None:
    assert run("/bin/sh", "-c", f"kill -{int(number)} $$", die=True).returncode == -int(number)


def test_passes_the_exit_code_on() -> None:
    assert run("/bin/sh", "-c", "exit 9", die=True).returncode == 9


def test_environment_is_only_what_the_plan_says() -> None:
    done = run("/usr/bin/env", env={"A": "1", "B": "2"})
    assert sorted(done.stdout.splitlines()[:-1]) == ["A=1", "B=2"]


def present(content: str, *argv: str) -> subprocess.CompletedProcess[str]:
    request = {
        "argv": argv,
        "env": {"A": "1"},
        "workdir": "/",
        "memory": None,
        "die": False,
        "present": content,
    }
    command = [sys.executable, "-c", _RUN, json.dumps(request)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_present_can_be_read_by_the_agent() -> None:
    """Without a sandbox it is a file without a name, which goes with the launcher."""
    done = present("00ff12", "/bin/sh", "-c", 'od -An -tx1 "$RVBUNDLE_PRESENT"')
    assert done.stdout.splitlines()[0].split() == ["00", "ff", "12"]
    assert last_line(done) == [0, 0]


def test_nothing_is_shared_where_nothing_is_trimmed() -> None:
    assert present("", "/usr/bin/env").stdout.splitlines()[0] == "A=1"
    names = [line.partition("=")[0] for line in present("00", "/usr/bin/env").stdout.splitlines()[:-1]]
    assert sorted(names) == ["A", "RVBUNDLE_PRESENT"]


def test_working_folder(tmp_path: Path) -> None:
    done = run("/bin/sh", "-c", "pwd -P", workdir=str(tmp_path))
    assert done.stdout.splitlines()[0] == os.path.realpath(tmp_path)


def test_memory_limit() -> None:
    done = run("/bin/sh", "-c", "ulimit -d", memory=512 << 20)
    assert done.stdout.splitlines()[0] == str(512 << 10)


@pytest.mark.parametrize(
    ("argv", "workdir", "message"),
    [
        (
            ("/nothing/at/all",),
            "/",
            "the agent could not be started: /nothing/at/all: No such file or directory",
        ),
        (("/etc/passwd",), "/", "the agent could not be started: /etc/passwd: Permission denied"),
        (
            ("/bin/sh",),
            "/nothing",
            "the agent could not be started: /nothing: No such file or directory",
        ),
    ],
    ids=["missing", "not executable", "no working folder"],
)
def test_agent_that_can_not_be_started(argv: tuple[str, ...], workdir: str, message: str) -> None:
    assert last_line(run(*argv, workdir=workdir)) == ["SandboxError", message]


def test_a_program_whose_loader_is_missing(tmp_path: Path) -> None:
    """As without a sandbox on a machine with another C library, or none."""
    program = tmp_path / "program"
    data = bytearray(Path(os.path.realpath(sys.executable)).read_bytes())
    start = data.index(b"/ld-linux-")
    data[start : start + 4] = b"/no-"
    program.write_bytes(data)
    program.chmod(0o755)
    message = f"the agent could not be started: {program}: this machine has no loader for it"
    kind, said = last_line(run(str(program)))  # type: ignore[misc]
    assert (kind, said) == ("SandboxError", f"{message} (the ld.so that it names)")


@pytest.mark.parametrize(
    ("argv", "env", "memory"),
    [
        (("/bin/sh", "a\0b"), {}, None),
        ((), {}, None),
        (("/bin/true",), {"A=B": "x"}, None),
        (("/bin/true",), {"A": "x\0y"}, None),
        (("/bin/true",), {}, 1 << 70),
    ],
    ids=["nul in a word", "no words", "bad variable", "bad value", "too much memory"],
)
def test_whatever_goes_wrong_the_forked_child_ends(
    argv: tuple[str, ...], env: dict[str, str], memory: int | None
) -> None:
    """An exception that left the child would have two processes running the launcher's code."""
    done = run(*argv, env=env, memory=memory)
    assert "went on in the parent's code" not in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)[0] == "SandboxError"


def test_signals_reach_the_agent() -> None:
    script = "trap 'echo got; exit 3' TERM; echo ready; while :; do read x; done"
    request = {
        "argv": ["/bin/sh", "-c", script],
        "env": {},
        "workdir": "/",
        "memory": None,
        "die": True,
    }
    child = subprocess.Popen(
        [sys.executable, "-c", _RUN, json.dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate()
    assert out == "got\n[3, 0]\n"
    assert child.returncode == 3


def test_signal_handling_of_the_agent_is_the_usual() -> None:
    """Python ignores SIGPIPE and SIGXFSZ, and the supervisor blocks what it waits for."""
    done = run("/bin/sh", "-c", "grep -E 'SigBlk|SigIgn' /proc/self/status")
    blocked, ignored = (int(line.split()[1], 16) for line in done.stdout.splitlines()[:2])
    assert blocked == 0
    # others may be ignored by what runs the tests, and are then passed on
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


def test_mask_is_restored() -> None:
    code = _RUN + "\nimport signal\nprint(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    request = {"argv": ["/bin/true"], "env": {}, "workdir": "/", "memory": None, "die": False}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(request)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize(
    ("status", "expected"), [(0, (0, 0)), (7 << 8, (7, 0)), (9, (0, 9)), (11 | 0x80, (0, 11))]
)
def test_outcome_of_a_wait_status(status: int, expected: tuple[int, int]) -> None:
    assert supervisor._outcome(status) == {"code": expected[0], "signal": expected[1]}


def test_die_like_an_exit_code() -> None:
    assert die_like(Outcome(42)) == 42


_BLAS = """
import json, os, signal, sys
from rvbundle_runtime import supervisor
from rvbundle_runtime.errors import RvbundleError
supervisor._BLAS_POLLS = int(sys.argv[1])
try:
    supervisor._start_blas(tuple(sys.argv[2:]))
    print(json.dumps(os.path.exists(sys.argv[3])), flush=True)
except RvbundleError as error:
    print(json.dumps(error.message), flush=True)
"""


@pytest.mark.parametrize(
    ("polls", "script", "expected"),
    [
        (5000, 'sleep 0.2; : > "$0"; echo nobody reads this; env >&2; sleep 2', True),
        (20, "sleep 2", False),
        (20, "exit 1", False),
    ],
    ids=["it listens", "it is slow", "it ends"],
)
def test_the_native_blas_is_waited_for(tmp_path: Path, polls: int, script: str, expected: bool) -> None:
    program = tmp_path / "worker"
    program.write_text(f'#!/bin/sh\nset -- "$1"\nexec /bin/sh -c \'{script}\' "$1"\n')
    program.chmod(0o755)
    command = [sys.executable, "-c", _BLAS, str(polls), str(program), str(tmp_path / "socket")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    assert last_line(done) is expected
    assert done.stdout.count("\n") == 1


def test_a_native_blas_that_can_not_be_started(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BLAS, "1", str(tmp_path / "none"), str(tmp_path / "socket")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert last_line(done) == "the native BLAS could not be started: No such file or directory"
