"""Phases with names and times on stderr: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

Part = str | tuple[str, str]


class Progress:
    """Prints phases. `verbose` adds why each stage was or was not reused."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

    @contextmanager
    def phase(self, name: str) -> Iterator["Phase"]:
        """Show the phase `name` until the block ends, then its time in seconds."""
        phase = Phase()
        started = time.monotonic()
        try:
            if self.console.is_terminal:
                with self.console.status(line(f"{name} …")):
                    yield phase
            else:
                yield phase
        except BaseException:
            self.say(("failed", "red"), f"  {name} ({time.monotonic() - started:.1f} s)")
            raise
        word = ("reused", "dim") if phase.reused else ("done  ", "green")
        detail = f": {phase.result}" if phase.result else ""
        self.say(word, f"  {name}{detail} ", (f"({time.monotonic() - started:.1f} s)", "dim"))
        if self.verbose and phase.why:
            self.say((f"        {phase.why}", "dim"))
        for note in phase.notes:
            self.say("        ", ("note:", "yellow"), f" {note}")

    def say(self, *parts: Part) -> None:
        """Print a line made of plain and of (text, style) parts."""
        self.console.print(line(*parts))


class Phase:
    """A phase under way: what it finds is printed when it ends.

    `result` goes behind the name, `why` is for verbose builds, `notes` are lines of their own.
    """

    def __init__(self) -> None:
        self.result = ""
        self.reused = False
        self.why = ""
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Add a line that stays, such as a finding that the user should know of."""
        self.notes.append(text)


def line(*parts: Part) -> Text:
    """Return one text of plain and of (text, style) parts; nothing in them is taken for markup."""
    return Text.assemble(*parts)


def mib(size: int) -> str:
    """Return a size in bytes as people read it."""
    return f"{size / (1 << 20):.1f} MiB"


def wide_console() -> Console:
    """Return a console on stdout for reports; where it is no terminal, tables are not cut to 80 columns."""
    width = None if sys.stdout.isatty() else 200
    return Console(highlight=False, soft_wrap=True, markup=False, width=width)
