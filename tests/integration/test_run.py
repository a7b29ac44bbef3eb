"""`rvbundle run` behaves as if the agent had been started directly."""

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, TEST_CACHE, run_cli

ENV = {**os.environ, "RVBUNDLE_CACHE": str(TEST_CACHE)}


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "rvbundle", "run", *map(str, words)]


def wait_for(process: "subprocess.Popen[str]", word: str) -> str:
    assert process.stdout
    line = process.stdout.readline()
    assert line.startswith(word), line
    return line


def gone(pid: int) -> bool:
    """Wait (boundedly) for a process of this machine to be gone."""
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.02)
    return False


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


@pytest.mark.parametrize("code", [0, 1, 5, 255])
def test_exit_codes_pass_through(probe_image: Path, code: int) -> None:
    assert run_cli("run", probe_image, "code", str(code)).code == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_ending_by_a_signal_passes_through(probe_image: Path, number: signal.Signals) -> None:
    assert run_cli("run", probe_image, "die", str(int(number))).code == -number


def test_standard_input(probe_image: Path) -> None:
    assert run_cli("run", probe_image, "echo", stdin="a\nb").out == "a\nb"


def test_arguments_belong_to_the_agent(probe_image: Path) -> None:
    assert run_cli("run", probe_image, "--", "hello", "--help", "-v", "--").out == "hello --help -v --\n"
    assert run_cli("run", probe_image, "hello", "--network").out == "hello --network\n"


def test_sigterm_reaches_the_agent_once_and_its_answer_counts(probe_image: Path) -> None:
    process = subprocess.Popen(command(probe_image, "sleep"), stdout=subprocess.PIPE, text=True, env=ENV)
    wait_for(process, "ready")
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert out == "caught SIGTERM\n"
    assert process.returncode == 7


def test_killing_the_launcher_ends_everything(probe_image: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    process = subprocess.Popen(command(probe_image, "sleep"), stdout=subprocess.PIPE, text=True, env=ENV)
    wait_for(process, "ready")
    below = descendants(process.pid)
    assert len(below) == 2  # the supervisor and the agent
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in below)
    assert Path("/proc/self/mountinfo").read_text() == before
    assert process.stdout
    process.stdout.close()


def test_children_that_the_agent_leaves_behind_are_ended(probe_image: Path) -> None:
    started = time.monotonic()
    assert run_cli("run", probe_image, "orphan").out == "left\n"
    assert time.monotonic() - started < 30  # the child would sleep for 60 s


def on_terminal(words: list[str], rows: int, columns: int) -> tuple[int, int]:
    """Start a program as the leader of a terminal of that size; return (pid, terminal)."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, ENV)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return pid, terminal


def read_until(terminal: int, word: str) -> str:
    text = ""
    while word not in text:
        try:
            text += os.read(terminal, 4096).decode()
        except OSError:
            break
    assert word in text, text
    return text


def test_terminal_size(probe_image: Path) -> None:
    run_cli("run", probe_image, "hello")  # unpacked: else the size might be asked for before it is set
    pid, terminal = on_terminal(command(probe_image, "size"), 33, 77)
    assert "77 33" in read_until(terminal, "33")
    os.waitpid(pid, 0)
    os.close(terminal)


def test_ctrl_c_reaches_the_agent_exactly_once(probe_image: Path) -> None:
    pid, terminal = on_terminal(command(probe_image, "interrupted"), 24, 80)
    read_until(terminal, "ready")
    os.write(terminal, b"\x03")
    assert "interrupts 1" in read_until(terminal, "interrupts ")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    os.close(terminal)


def test_ctrl_c_ends_an_agent_that_does_not_care(probe_image: Path) -> None:
    pid, terminal = on_terminal(command(probe_image, "sleep"), 24, 80)
    read_until(terminal, "ready")
    os.write(terminal, b"\x03")
    read_until(terminal, "KeyboardInterrupt")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGINT
    os.close(terminal)


def test_files_are_written_to_the_current_folder(probe_image: Path, tmp_path: Path) -> None:
    assert run_cli("run", probe_image, "write", "made.txt", "by the agent", cwd=tmp_path).code == 0
    assert (tmp_path / "made.txt").read_text() == "by the agent"
    assert (tmp_path / "made.txt").stat().st_uid == os.getuid()


def test_no_cwd(probe_image: Path, tmp_path: Path) -> None:
    assert run_cli("run", "--no-cwd", probe_image, "write", "made.txt", cwd=tmp_path).code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["/usr/x", "/app/x", "/x", "/etc/x"])
def test_the_image_is_read_only(probe_image: Path, place: str) -> None:
    result = run_cli("run", probe_image, "write", place)
    assert result.code == 1
    assert "Read-only file system" in result.err or place == "/etc/x"


def test_volumes(probe_image: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "in.txt").write_text("input")
    assert (
        run_cli("run", "-v", f"{tmp_path}/data:/data", probe_image, "read", "/data/in.txt").out == "input\n"
    )
    relative = run_cli("run", "-v", "data:/data:ro", probe_image, "read", "/data/in.txt", cwd=tmp_path)
    assert relative.out == "input\n"
    refused = run_cli("run", "-v", f"{tmp_path}/data:/data:ro", probe_image, "write", "/data/out.txt")
    assert "Read-only file system" in refused.err


def test_a_store_behind_a_link(alone: Path, tmp_path: Path) -> None:
    """The home folder of many users is one; the sandbox sees the host's paths from below another root."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    done = run_cli("run", alone, "hello", cwd=tmp_path, env={"RVBUNDLE_CACHE": str(tmp_path / "link/cache")})
    assert (done.code, done.out) == (0, "hello\n"), done.err


def test_a_working_folder_with_spaces_links_and_no_utf8(probe_image: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with spaces ü"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    assert run_cli("run", probe_image, "write", "x", cwd=tmp_path / "link").code == 0
    assert (folder / "x").exists()


def test_a_current_folder_that_is_gone(probe_image: Path, tmp_path: Path) -> None:
    script = f'mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command(probe_image, "hello")], capture_output=True, text=True, env=ENV
    )
    assert done.returncode == 109
    assert done.stderr == (
        "error: the current folder can't be used: No such file or directory\n\nhint: cd to another\n"
    )


def test_kernels_without_mount_setattr(probe_image: Path, tmp_path: Path) -> None:
    """Before Linux 5.12 a mount is made read-only by a remount that keeps the flags it must keep."""
    code = (
        "import sys, rvbundle_runtime.syscalls as s; s._MOUNT_SETATTR = 9999\n"
        "from rvbundle.__main__ import main; main()"
    )
    words = [sys.executable, "-c", code, "run", "-v", f"{tmp_path}:/data:ro", str(probe_image), "write"]
    for place in ("/usr/x", "/data/x"):
        done = subprocess.run([*words, place], capture_output=True, text=True, env=ENV)
        assert "Read-only file system" in done.stderr
    assert subprocess.run([*words, "x"], cwd=tmp_path, env=ENV).returncode == 0


def test_as_a_plain_user(probe_image: Path, tmp_path: Path) -> None:
    """Nothing of a run needs root. Its own files only, and an interpreter that every user can execute."""
    shutil.copy(probe_image, tmp_path)
    shutil.copytree(REPOSITORY / "bundler" / "rvbundle", tmp_path / "src" / "rvbundle")
    shutil.copytree(REPOSITORY / "runtime" / "rvbundle_runtime", tmp_path / "src" / "rvbundle_runtime")
    cache = tmp_path / "cache"  # unpacked before: the decoder here is compiled for this Python only
    assert run_cli("run", probe_image, "hello", env={"RVBUNDLE_CACHE": str(cache)}).code == 0
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "-i", "PATH=/usr/bin:/bin"]
    words += [f"RVBUNDLE_CACHE={cache}", f"PYTHONPATH={tmp_path}/src", "/usr/bin/python3", "-m", "rvbundle"]
    words += ["run", str(tmp_path / probe_image.name)]
    done = subprocess.run([*words, "facts"], cwd=tmp_path, capture_output=True, text=True)
    facts = json.loads(done.stdout)
    assert (facts["uid"], facts["capabilities"], facts["env"]["USER"]) == (65534, "0000000000000000", "agent")
    assert subprocess.run([*words, "write", "made"], cwd=tmp_path).returncode == 0
    assert (tmp_path / "made").stat().st_uid == 65534


def test_env(probe_image: Path) -> None:
    result = run_cli("run", "-e", "A=1=2", "--env", "FROM_HOST", probe_image, "facts", env={"FROM_HOST": "h"})
    env = json.loads(result.out)["env"]
    assert (env["A"], env["FROM_HOST"]) == ("1=2", "h")


def test_no_network_by_default(probe_image: Path) -> None:
    assert run_cli("run", probe_image, "connect").out == "OSError 101\n"  # ENETUNREACH: no interface is up


def test_memory(probe_image: Path) -> None:
    assert run_cli("run", "--memory", "64m", probe_image, "memory", "100").out == "refused\n"
    assert run_cli("run", "--memory", "1g", probe_image, "memory", "100").out == "got 100\n"


def test_device(probe_image: Path) -> None:
    with_device = json.loads(run_cli("run", "--device", "kmsg", probe_image, "facts").out)
    without = json.loads(run_cli("run", probe_image, "facts").out)
    assert set(with_device["dev"]) - set(without["dev"]) == {"kmsg"}


def test_no_sandbox(probe_image: Path, tmp_path: Path) -> None:
    facts = json.loads(run_cli("run", "--no-sandbox", probe_image, "facts", cwd=tmp_path).out)
    assert facts["cwd"] == str(tmp_path)
    assert facts["executable"].endswith("/root/usr/bin/python3")
    result = run_cli("run", "--no-sandbox", probe_image, "load", "colorsys")
    assert result.out == "colorsys\n", result.err


def test_a_shell_inside(probe_image: Path) -> None:
    result = run_cli("shell", probe_image, stdin="import sys; print(sys.prefix, 6 * 7)\n")
    assert result.out == "/usr 42\n"


def test_verbose_prints_the_plan(probe_image: Path) -> None:
    result = run_cli("run", "--verbose", probe_image, "hello")
    assert result.out == "hello\n"
    assert "rvbundle: sandbox: namespaces (user namespaces work here)" in result.err


def test_a_warm_start_imports_little() -> None:
    """Typer, rich and zstandard cost more than a start may take."""
    code = (
        "import sys, rvbundle.__main__, rvbundle_runtime.launch, rvbundle_runtime.supervisor\n"
        "print(sorted({'typer', 'rich', 'zstandard', 'lief', 'argparse', 'subprocess', 'concurrent.futures'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
