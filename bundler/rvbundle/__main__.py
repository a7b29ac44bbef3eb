"""The entry point: errors are printed here and nowhere else."""

import os
import sys

from rvbundle_runtime.errors import RvbundleError


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(_main(sys.argv[1:]))


def _main(argv: list[str]) -> int:
    try:
        return _dispatch(argv)
    except RvbundleError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a program that SIGPIPE ends


def _dispatch(argv: list[str]) -> int:
    # `run` is on the path of every start of an agent: Typer and rich (0.2 s) are not.
    if argv[:1] == ["run"] and not {"--help", "-h"} & set(_launcher_words(argv[1:])):
        from rvbundle_runtime import launch

        return launch.main(argv[1:])
    from rvbundle.cli import invoke

    return invoke(argv)


def _launcher_words(argv: list[str]) -> list[str]:
    """Return the words before the image: what follows belongs to the agent."""
    words = []
    for word in argv:
        if not word.startswith("-"):
            break
        words.append(word)
    return words


def print_error(error: RvbundleError) -> None:
    """Print message and hint on stderr."""
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    red, off = ("\x1b[1;31m", "\x1b[0m") if colour else ("", "")
    print(f"{red}error:{off} {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    main()
