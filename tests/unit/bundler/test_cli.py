import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from rvbundle import __main__ as entry
from rvbundle import __version__, cli
from rvbundle_runtime import launch
from rvbundle_runtime.errors import ImageError, RvbundleError, UsageError
from rvbundle_runtime.options import OPTIONS, SHORT, RunOptions, parse_run
from rvbundle_runtime.report import print_error

from ..images import build


def run_command() -> Any:
    return typer.main.get_command(cli.app).commands["run"]  # type: ignore[attr-defined]


def declared() -> dict[str, Any]:
    """Return Typer's options of `run` by their long names."""
    found = {}
    for parameter in run_command().params:
        if parameter.param_type_name == "option":
            (long,) = [name for name in parameter.opts if name.startswith("--")]
            found[long] = parameter
    return found


def test_both_declarations_have_the_same_options() -> None:
    assert set(declared()) - {"--help"} == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_both_declarations_agree(name: str) -> None:
    metavar, repeated = OPTIONS[name]
    option = declared()[name]
    shorts = sorted(text for text in option.opts if not text.startswith("--"))
    assert shorts == sorted(short for short, long in SHORT.items() if long == name)
    assert option.secondary_opts == []
    assert option.is_flag == (not metavar)
    assert option.multiple == repeated
    assert (option.metavar or "") == metavar
    assert option.help


def test_short_names_stand_for_long_ones() -> None:
    assert set(SHORT.values()) <= set(OPTIONS)


@pytest.fixture
def typer_options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from a command line to the RunOptions that Typer makes of it."""
    seen: list[RunOptions] = []

    def run(host: object, options: RunOptions, place: object, entry: tuple[str, ...] = ()) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(launch, "run", run)

    def parse(words: list[str]) -> RunOptions:
        assert cli.invoke(["run", *words]) == 0
        return seen[-1]

    return parse


@pytest.mark.parametrize(
    "line",
    [
        "a.rvb",
        "dir/a.rvb x y",
        "a.rvb --episodes 3 -v",
        "a.rvb -- --episodes 3",
        "a.rvb -- x -- y",
        "a.rvb -x -- y",
        "-- a.rvb x",
        "-- a.rvb -- x",
        "--verbose a.rvb --verbose",
        "-v /a:/b a.rvb",
        "-v/a:/b a.rvb",
        "-v /a:/b -v c:/d:ro --volume=e:/f a.rvb",
        "-e A=1 -e B --env=C=x=y --env D= a.rvb",
        "-eA=1 a.rvb",
        "--device dri --device=/dev/snd a.rvb",
        "-m 512m a.rvb",
        "-m512m a.rvb",
        "-m 1g --memory=2g a.rvb",
        "--cold x.cold.rvb a.rvb",
        "--network a.rvb",
        "--no-network a.rvb",
        "--no-cwd --no-sandbox a.rvb",
        "--network --network a.rvb",
    ],
    ids=str,
)
def test_both_parsers_agree(typer_options: Any, line: str) -> None:
    words = line.split()
    assert parse_run(words) == typer_options(words)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--verbose",
        "--nothing a.rvb",
        "-x a.rvb",
        "--memory",
        "-v",
        "--verbose=1 a.rvb",
        "-m 0 a.rvb",
        "-v /a a.rvb",
        "-e 1=2 a.rvb",
        "--network --no-network a.rvb",
        "--verb a.rvb",
    ],
    ids=str,
)
def test_both_parsers_refuse(typer_options: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = line.split()
    with pytest.raises(UsageError):
        parse_run(words)
    try:
        code = cli.invoke(["run", *words])
    except UsageError as error:
        code = error.exit_code
    assert code == 2


def test_errors_are_printed_with_their_hint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert entry._main(["verify", str(tmp_path / "nothing.rvb")]) == ImageError.exit_code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: can't open {tmp_path}/nothing.rvb: No such file or directory\n")
    print_error(RvbundleError("what", "do this"))
    assert capsys.readouterr().err == "error: what\n\nhint: do this\n"


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (ImageError("x"), 107), (UsageError("x"), 2)], ids=repr
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(entry, "_dispatch", fail)
    assert entry._main([]) == code


@pytest.mark.parametrize(
    ("argv", "launcher"),
    [
        (["run", "a.rvb"], True),
        (["run", "a.rvb", "--help"], True),
        (["run", "a.rvb", "--", "-h"], True),
        (["run", "--verbose", "a.rvb", "-h"], True),
        (["run", "-v", "/a:/b", "a.rvb", "--help"], True),
        (["run", "--help"], False),
        (["run", "-h"], False),
        (["run", "--verbose", "--help"], False),
        (["run", "-v", "/a:/b", "--help"], False),
        (["build", "x"], False),
        ([], False),
    ],
    ids=str,
)
def test_run_goes_past_typer_but_for_help(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], launcher: bool
) -> None:
    taken = []
    monkeypatch.setattr(launch, "main", lambda words: taken.append(("launcher", words)) or 0)
    monkeypatch.setattr(cli, "invoke", lambda words: taken.append(("typer", words)) or 0)
    entry._dispatch(argv)
    assert taken == [("launcher", argv[1:])] if launcher else [("typer", argv)]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry._main(["--version"]) == 0
    assert capsys.readouterr().out == f"rvbundle {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        "build",
        "run",
        "explain",
        "inspect",
        "verify",
        "lock",
        "init",
        "extract",
        "shell",
        "cache",
        "cache ls",
        "cache prune",
    ],
)
def test_help_of_every_command(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert entry._main([*command.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert "Usage:" in out
    assert err == ""


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["bulid"], "bulid"),
        (["build"], "RECIPE"),
        (["verify", "--nothing", "x"], "--nothing"),
        (["extract", "x"], "DIR"),
    ],
    ids=str,
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], argv: list[str], text: str) -> None:
    assert entry._main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err


def test_json_of_inspect_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "x.rvb")
    for command in (
        ["inspect", "--files"],
        ["inspect"],
        ["verify"],
        ["explain"],
        ["explain", "--files", "*"],
    ):
        assert entry._main([*command, str(tmp_path / "x.rvb"), "--json"]) == 0
        json.loads(capsys.readouterr().out)


def test_the_examples_of_the_help_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epilog shows a command line; its options must exist."""
    group: Any = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        for line in str(command.epilog or "").removeprefix("Example: ").split("&&"):
            words = [word.strip("'") for word in line.split()]
            if words[:1] == ["rvbundle"] and words[1] == name:
                context = command.make_context(name, words[2:], resilient_parsing=False)
                assert context.args == [] or name == "run"


def test_cache_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RVBUNDLE_CACHE", str(tmp_path / "cache"))
    assert entry._main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/cache\nno unpacked images\nno build stages\n"
    assert entry._main(["cache", "ls", "--json"]) == 0
    empty = {"images": [], "stages": [], "bootstraps": []}
    assert json.loads(capsys.readouterr().out) == {"base": f"{tmp_path}/cache", **empty}
    assert entry._main(["cache", "prune"]) == 0
    assert capsys.readouterr().out == "removed 0 unpacked images (0 MiB)\nremoved the build stages (0 MiB)\n"
    assert entry._main(["cache", "prune", "--images"]) == 0
    assert capsys.readouterr().out == "removed 0 unpacked images (0 MiB)\n"
    assert entry._main(["cache", "prune", "--stages"]) == 0
    assert capsys.readouterr().out == "removed the build stages (0 MiB)\n"


def test_a_reader_that_went_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import subprocess
    import sys

    build(tmp_path / "x.rvb")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rvbundle", "inspect", "--json", str(tmp_path / "x.rvb")]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
