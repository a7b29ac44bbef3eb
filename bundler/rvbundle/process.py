"""The one place that starts other programs at build time."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rvbundle_runtime.errors import ToolError

_TAIL_LINES = 15


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


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes = b"",
    timeout: float | None = None,
    check: bool = True,
) -> Finished:
    """Run `command` to its end (at most `timeout` seconds) and return what it did.

    With `check`, an exit code other than 0 raises ToolError showing the command so that it can be pasted.
    """
    words = [str(word) for word in command]
    shown = shlex.join(words)
    try:
        done = subprocess.run(
            words, env=env, cwd=cwd, input=stdin, capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        stderr = (error.stderr or b"").decode("utf-8", "replace")
        return Finished(shown, -9, error.stdout or b"", stderr, timed_out=True)
    except OSError as error:
        raise ToolError(f"can't start {words[0]}: {error.strerror}", f"the command was: {shown}") from None
    result = Finished(shown, done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))
    if check and result.code != 0:
        raise ToolError(
            f"{Path(words[0]).name} failed with exit code {result.code}:\n{result.tail()}",
            f"the command was: {shown}",
        )
    return result
