"""The one place that starts other programs at build time."""

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rvbundle_runtime.errors import ToolError

_TAIL_LINES = 15
_STOP_LATENCY = 0.3  # seconds until a set `stop` is noticed


@dataclass(frozen=True)
class Finished:
    """A program that ended: its exit code (negative: the signal), what it wrote, whether it was stopped."""

    command: str
    code: int
    stdout: bytes
    stderr: str
    timed_out: bool = False

    def tail(self) -> str:
        """Return the last lines of stderr, indented for a message."""
        return indent_tail(self.stderr)


def indent_tail(text: str) -> str:
    """Return the last lines of `text`, each indented by four columns."""
    lines = [line for line in text.rstrip().splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])


def own_environment() -> dict[str, str]:
    """Return the environment for a child that runs rvbundle itself: it finds what this process finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes = b"",
    timeout: float | None = None,
    stop: threading.Event | None = None,
    check: bool = True,
) -> Finished:
    """Run `command` to its end (at most `timeout` seconds, or until `stop` is set) and return what it did.

    With `check`, an exit code other than 0 raises ToolError showing the command so that it can be pasted.
    """
    words = [str(word) for word in command]
    shown = shlex.join(words)
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(words, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise ToolError(f"can't start {words[0]}: {error.strerror}", f"the command was: {shown}") from None
    out, err, ended = _communicate(child, stdin, timeout, stop)
    stderr = err.decode("utf-8", "replace")
    if not ended:
        if check:
            raise ToolError(f"{Path(words[0]).name} was stopped", f"the command was: {shown}")
        return Finished(shown, -9, out, stderr, timed_out=True)
    result = Finished(shown, child.returncode, out, stderr)
    if check and result.code != 0:
        raise ToolError(
            f"{Path(words[0]).name} failed with exit code {result.code}:\n{result.tail()}",
            f"the command was: {shown}",
        )
    return result


def _communicate(
    child: "subprocess.Popen[bytes]", stdin: bytes, timeout: float | None, stop: threading.Event | None
) -> tuple[bytes, bytes, bool]:
    """Feed and read a child to its end; kill it if time is up. Returns stdout, stderr, ended by itself."""
    pending: bytes | None = stdin
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if stop is not None:
                left = _STOP_LATENCY if left is None else min(left, _STOP_LATENCY)
            try:
                out, err = child.communicate(pending, left)
                return out, err, True
            except subprocess.TimeoutExpired:
                pending = None  # communicate keeps what it could not write yet
                late = deadline is not None and time.monotonic() >= deadline
                if late or (stop is not None and stop.is_set()):
                    child.kill()
                    out, err = child.communicate()
                    return out, err, False
    except BaseException:  # Ctrl-C: leave no child behind
        child.kill()
        child.wait()
        raise
