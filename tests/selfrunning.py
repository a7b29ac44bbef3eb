"""Self-running files for tests: built once, started under the shells that boards have."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import Result, run_cli

# What a board may have as `sh`. None is skipped: .ci/run installs them.
SHELLS = {"dash": ("dash",), "bash": ("bash", "--posix"), "busybox": ("busybox", "sh")}
PLAIN_USER = 65534  # nobody
TIMEOUT = 120


def build(recipe: Path, output: Path, arches: str, *options: str) -> Path:
    """Build a recipe; return the path of its self-running file."""
    result = run_cli("build", recipe, "-o", output, "--self-running", arches, *options, timeout=1200)
    assert result.code == 0, result.err
    (path,) = output.glob("*.run")
    return path


@dataclass(frozen=True)
class Board:
    """A machine to start files on: a home, an environment that is nobody else's, perhaps mounts.

    `setup` are shell commands in a private mount namespace before each start; `uid` who starts.
    """

    folder: Path
    uid: int = 0
    setup: str = ""
    env: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def bootstraps(self) -> Path:
        return self.home / ".cache/rvbundle/bootstrap"

    def command(self, *words: str | Path) -> tuple[list[str], dict[str, str]]:
        """Return the words and the environment that start `words` here."""
        command = list(map(str, words))
        if self.uid:
            command = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", *command]
        if self.setup:
            command = ["unshare", "--mount", "sh", "-euc", f'{self.setup}\nexec "$@"', "sh", *command]
        return command, {"PATH": os.environ["PATH"], "HOME": str(self.home), **self.env}

    def start(self, *words: str | Path) -> Result:
        """Start something here to its end."""
        command, env = self.command(*words)
        done = subprocess.run(
            command,
            cwd=self.cwd or self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def popen(self, *words: str | Path) -> "subprocess.Popen[str]":
        """Start something here."""
        command, env = self.command(*words)
        return subprocess.Popen(
            command,
            cwd=self.cwd or self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def installed(self) -> list[str]:
        """Return what lies in the folder of bootstraps, but for the lock."""
        if not self.bootstraps.exists():
            return []
        return sorted(path.name for path in self.bootstraps.iterdir() if path.name != "lock")


def make_board(folder: Path, **values: object) -> Board:
    """Return a board with an empty home that its user owns."""
    board = Board(folder / "board", **values)  # type: ignore[arg-type]
    board.folder.mkdir()
    board.home.mkdir()
    for path in (board.folder, board.home):
        os.chown(path, board.uid, board.uid)
    return board


def changed(path: Path, target: Path, offset: int, bits: int = 0xFF) -> Path:
    """Copy a file and change one byte of the copy."""
    shutil.copy(path, target)
    with target.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bits]))
    return target


def cut(path: Path, target: Path, size: int) -> Path:
    """Copy the first `size` bytes of a file."""
    shutil.copy(path, target)
    os.truncate(target, size)
    return target


def tools(folder: Path, names: Sequence[str]) -> Path:
    """Return a folder with links to these programs and no others, to be a PATH."""
    folder.mkdir()
    for name in names:
        program = shutil.which(name)
        assert program, f"{name} is needed by the tests"
        (folder / name).symlink_to(program)
    return folder
