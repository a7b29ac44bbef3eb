"""Phases with names and times on stderr: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console


class Phase(Protocol):
    """What a stage may say while it runs."""

    def note(self, text: str) -> None:
        """Add a line that stays, such as a finding that the user should know of."""

    def update(self, text: str) -> None:
        """Say what is going on now; replaced by the next one."""


class Progress:
    """Prints phases. `verbose` adds why each stage was or was not reused."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str) -> Iterator["_Running"]:
        """Show the phase `name` until the block ends, then its time in seconds."""
        running = _Running(self.console, name)
        started = time.monotonic()
        try:
            if self.console.is_terminal:
                with self.console.status(f"{name} …") as status:
                    running.status = status
                    yield running
            else:
                yield running
        except BaseException:
            self.console.print(f"[red]failed[/red]  {name} ({time.monotonic() - started:.1f} s)")
            raise
        word = "[dim]reused[/dim]" if running.reused else "[green]done[/green]  "
        detail = f": {running.result}" if running.result else ""
        self.console.print(f"{word}  {name}{detail} [dim]({time.monotonic() - started:.1f} s)[/dim]")
        if self.verbose and running.why:
            self.console.print(f"        [dim]{running.why}[/dim]", markup=True)
        for note in running.notes:
            self.console.print(f"        [yellow]note:[/yellow] {note}")

    def say(self, text: str) -> None:
        """Print a plain line."""
        self.console.print(text, markup=False)


class _Running:
    """A phase under way: what it found is printed when it ends."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name
        self.status: object = None
        self.result = ""
        self.reused = False
        self.why = ""
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def update(self, text: str) -> None:
        if self.status is not None:
            self.status.update(f"{self._name}: {text}")  # type: ignore[attr-defined]


def wide_console() -> Console:
    """Return a console on stdout for reports; where it is no terminal, tables are not cut to 80 columns."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
