"""The entry point."""

import sys

from rvbundle_runtime.report import reported


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(_main(sys.argv[1:]))


def _main(argv: list[str]) -> int:
    return reported(lambda: _dispatch(argv))


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


if __name__ == "__main__":
    main()
