import sys
import threading
from pathlib import Path

import pytest

from rvbundle import process
from rvbundle_runtime.errors import ToolError


def test_success(tmp_path: Path) -> None:
    done = process.run(
        ["/bin/sh", "-c", 'echo "$A $(pwd -P)"; cat; echo err >&2'], env={"A": "1"}, cwd=tmp_path, stdin=b"in"
    )
    assert done.stdout == f"1 {tmp_path.resolve()}\nin".encode()
    assert (done.stderr, done.code, done.timed_out) == ("err\n", 0, False)


def test_words_may_be_paths(tmp_path: Path) -> None:
    assert process.run([Path("/bin/echo"), tmp_path]).stdout == f"{tmp_path}\n".encode()


def test_failure_shows_a_command_that_can_be_pasted() -> None:
    with pytest.raises(ToolError) as caught:
        process.run(["/bin/sh", "-c", "echo 'a b' >&2; exit 3"])
    assert caught.value.message == "sh failed with exit code 3:\n    a b"
    assert caught.value.hint == """the command was: /bin/sh -c 'echo '"'"'a b'"'"' >&2; exit 3'"""


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("exit 0", 0)])
def test_unchecked(script: str, code: int) -> None:
    assert process.run(["/bin/sh", "-c", script], check=False).code == code


def test_what_can_not_be_started(tmp_path: Path) -> None:
    with pytest.raises(ToolError) as caught:
        process.run(["/nothing/here", "x y"])
    assert caught.value.message == "can't start /nothing/here: No such file or directory"
    assert caught.value.hint == "the command was: /nothing/here 'x y'"


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ToolError) as caught:
        process.run(["/bin/true"], cwd=tmp_path / "gone")
    assert "No such file or directory" in caught.value.message


def test_time_limit() -> None:
    done = process.run(
        [sys.executable, "-c", "import sys\nprint('out', flush=True)\nwhile True: pass"],
        timeout=0.5,
        check=False,
    )
    assert (done.timed_out, done.code) == (True, -9)


def test_time_limit_is_no_success_with_check() -> None:
    """A caller that asked for success must not take a stopped program for one."""
    with pytest.raises(ToolError):
        process.run([sys.executable, "-c", "while True: pass"], timeout=0.2)


def test_stop() -> None:
    stop = threading.Event()
    stop.set()
    done = process.run([sys.executable, "-c", "while True: pass"], stop=stop, check=False)
    assert (done.timed_out, done.code) == (True, -9)


def test_stop_that_is_not_set() -> None:
    assert process.run(["/bin/echo", "x"], stop=threading.Event()).stdout == b"x\n"


def test_a_program_that_does_not_read_its_input() -> None:
    assert process.run(["/bin/true"], stdin=b"x" * 1_000_000).code == 0


def test_output_that_is_no_text() -> None:
    done = process.run(["/bin/sh", "-c", "printf '\\377' >&2"])
    assert done.stderr == "\ufffd"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a\n\n  b\n\n", "    a\n      b"),
        ("\n".join(str(n) for n in range(20)), "\n".join(f"    {n}" for n in range(5, 20))),
    ],
    ids=["empty", "blank lines", "long"],
)
def test_tail(text: str, expected: str) -> None:
    assert process.indent_tail(text) == expected
