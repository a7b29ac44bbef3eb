"""The words of a self-running file: which are ours, and what its messages say."""

import ast
from pathlib import Path

import pytest

from rvbundle_runtime import selfrun
from rvbundle_runtime.errors import UsageError
from rvbundle_runtime.options import OPTIONS
from rvbundle_runtime.selfrun import COMMANDS, HELP, PREFIX, Request, reword, split

RUNTIME = Path(selfrun.__file__).parent


@pytest.mark.parametrize(
    ("words", "options", "arguments"),
    [
        ("", "", ""),
        ("a b", "", "a b"),
        ("--episodes 5 -v", "", "--episodes 5 -v"),
        ("a --rvbundle-verbose b", "--verbose", "a b"),
        ("--rvbundle-memory 2g a", "--memory=2g", "a"),
        ("--rvbundle-memory=2g a", "--memory=2g", "a"),
        ("--rvbundle-memory= a", "--memory=", "a"),
        ("--rvbundle-env A=b=c", "--env=A=b=c", ""),
        ("--rvbundle-env=A=b --rvbundle-env B", "--env=A=b --env=B", ""),
        ("--rvbundle-env --rvbundle-env", "--env=--rvbundle-env", ""),
        ("-- a --rvbundle-verbose", "", "a --rvbundle-verbose"),
        ("--rvbundle-verbose -- --rvbundle-verbose", "--verbose", "--rvbundle-verbose"),
        ("a -- --rvbundle-verbose", "", "a -- --rvbundle-verbose"),
        ("-- --", "", "--"),
        ("--rvbundle --rvbundled", "", "--rvbundle --rvbundled"),
    ],
    ids=str,
)
def test_split(words: str, options: str, arguments: str) -> None:
    assert split(words.split()) == Request("", tuple(options.split()), tuple(arguments.split()))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str) -> None:
    request = split(["a", f"{PREFIX}{command}", f"{PREFIX}no-sandbox", f"{PREFIX}{command}"])
    assert request == Request(command, ("--no-sandbox",), ("a",))


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--rvbundle-helo", "no such option: --rvbundle-helo", "did you mean --rvbundle-help?"),
        ("--rvbundle-", "no such option: --rvbundle-", "see --rvbundle-help"),
        ("--rvbundle-device", "--rvbundle-device needs a value: --rvbundle-device DEVICE", ""),
        ("--rvbundle-explain=yes", "--rvbundle-explain takes no value", ""),
        (
            "--rvbundle-explain --rvbundle-doctor",
            "--rvbundle-doctor and --rvbundle-explain can't be had at once",
            "",
        ),
    ],
)
def test_wrong_words(words: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        split(words.split())
    assert (raised.value.message, raised.value.hint) == (message, hint)


def test_no_command_is_an_option_as_well() -> None:
    assert not {f"--{name}" for name in COMMANDS} & set(OPTIONS)


def test_help_says_something_of_every_option() -> None:
    assert set(HELP) == set(OPTIONS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("copy it again; `rvbundle verify` names it", "copy it again; `./x.run --rvbundle-verify` names it"),
        ("free some (`rvbundle cache prune --images`)", "free some (`./x.run --rvbundle-cache-prune`)"),
        ("or: rvbundle run --no-sandbox", "or: ./x.run --rvbundle-no-sandbox"),
        ("rvbundle run --env OMP_NUM_THREADS=2, or", "./x.run --rvbundle-env OMP_NUM_THREADS=2, or"),
        ("rvbundle run IMAGE --cold FILE", "./x.run --rvbundle-cold FILE"),
        ("run: --memory 5: too little", "--rvbundle-memory 5: too little"),
        ("--volume needs the sandbox", "--rvbundle-volume needs the sandbox"),
        ("leave --payload out, --payloads in", "leave --rvbundle-payload out, --payloads in"),
        ("--no-network and --network", "--rvbundle-no-network and --rvbundle-network"),
        ("`rvbundle build --cold drop` and --cold", "`rvbundle build --cold drop` and --rvbundle-cold"),
        ("the image was not made by rvbundle build", "the image was not made by rvbundle build"),
        ("--rvbundle-memory, --memory-more, x--memory", "--rvbundle-memory, --memory-more, x--memory"),
        ("a run would refuse: --x", "a run would refuse: --x"),
    ],
)
def test_reword(text: str, expected: str) -> None:
    assert reword(text, "./x.run") == expected


def test_reword_takes_any_name() -> None:
    assert reword("rvbundle verify", r"./a \1 \g<0>.run") == r"./a \1 \g<0>.run --rvbundle-verify"


def texts(path: Path) -> list[str]:
    """Return the texts in a source that are not docstrings, formatted ones without what is filled in."""
    tree = ast.parse(path.read_bytes())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    skipped = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    constants = [
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in skipped
    ]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_no_text_of_the_run_side_names_what_a_board_does_not_have() -> None:
    """On a board there is no `rvbundle`: what its messages tell to type must be understood by the file."""
    allowed = ("rvbundle build", "rvbundle doctor: ", "the rvbundle that made", "installation of rvbundle")
    for path in RUNTIME.glob("*.py"):
        for text in texts(path):
            said = reword(text, "x.run")
            for known in allowed:
                said = said.replace(known, "")
            for word in ("rvbundle run ", "rvbundle verify", "rvbundle cache", "rvbundle explain"):
                assert word not in said, (path.name, text)
