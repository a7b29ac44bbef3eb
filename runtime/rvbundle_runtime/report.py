"""The one place where errors are printed: as a message and a hint, never as a traceback."""

import os
import sys
from collections.abc import Callable

from rvbundle_runtime.errors import RvbundleError


def reported(work: Callable[[], int], reword: Callable[[str], str] = str) -> int:
    """Return what `work()` returns, or the exit code of the error that it raises, once that is printed.

    `reword` puts texts into the words of the command that the user has given.
    """
    try:
        return work()
    except RvbundleError as error:
        print_error(error, reword)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a program that SIGPIPE ends


def print_error(error: RvbundleError, reword: Callable[[str], str] = str) -> None:
    """Print message and hint on stderr."""
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    red, off = ("\x1b[1;31m", "\x1b[0m") if colour else ("", "")
    print(f"{red}error:{off} {reword(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {reword(error.hint)}", file=sys.stderr)
