import pytest

from rvbundle_runtime.errors import UsageError
from rvbundle_runtime.options import (
    RunOptions,
    Volume,
    parse_device,
    parse_env,
    parse_run,
    parse_size,
    parse_volume,
)

IMAGE = "a.rvb"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a.rvb", RunOptions(IMAGE)),
        ("-- a.rvb", RunOptions(IMAGE)),
        ("a.rvb x --y", RunOptions(IMAGE, ("x", "--y"))),
        ("a.rvb -- x -- y", RunOptions(IMAGE, ("x", "--", "y"))),
        ("-- a.rvb -- x", RunOptions(IMAGE, ("x",))),
        ("a.rvb --verbose", RunOptions(IMAGE, ("--verbose",))),
        ("--verbose a.rvb", RunOptions(IMAGE, verbose=True)),
        ("-v /a:/data a.rvb", RunOptions(IMAGE, volumes=(Volume("/a", "/data"),))),
        (
            "-v b:/b --volume=a:/a:ro a.rvb",
            RunOptions(IMAGE, volumes=(Volume("b", "/b"), Volume("a", "/a", True))),
        ),
        ("-e A=1 -e B --env=C= a.rvb", RunOptions(IMAGE, env=(("A", "1"), ("B", None), ("C", "")))),
        ("--env A=x=y a.rvb", RunOptions(IMAGE, env=(("A", "x=y"),))),
        ("--device dri --device snd a.rvb", RunOptions(IMAGE, devices=("/dev/dri", "/dev/snd"))),
        ("-m 1g --memory 2g a.rvb", RunOptions(IMAGE, memory=2 << 30)),
        ("-m2g a.rvb", RunOptions(IMAGE, memory=2 << 30)),
        ("-eA=1 a.rvb", RunOptions(IMAGE, env=(("A", "1"),))),
        ("-v/a:/data a.rvb", RunOptions(IMAGE, volumes=(Volume("/a", "/data"),))),
        ("--cold x.cold.rvb a.rvb", RunOptions(IMAGE, cold="x.cold.rvb")),
        ("--backend avx2 --threads 3 a.rvb", RunOptions(IMAGE, backend="avx2", threads=3)),
        ("--backend auto --threads auto --precision=auto a.rvb", RunOptions(IMAGE, precision="auto")),
        ("--precision bf16 a.rvb", RunOptions(IMAGE, precision="bf16")),
        ("--network a.rvb", RunOptions(IMAGE, network=True)),
        ("--no-network a.rvb", RunOptions(IMAGE, network=False)),
        ("--no-cwd --no-sandbox a.rvb", RunOptions(IMAGE, cwd=False, sandbox=False)),
        ("- x", RunOptions("-", ("x",))),
        ("--cold --verbose a.rvb", RunOptions(IMAGE, cold="--verbose")),
    ],
    ids=str,
)
def test_parse_run(line: str, expected: RunOptions) -> None:
    assert parse_run(line.split(" ")) == expected


def test_empty_words_are_arguments() -> None:
    assert parse_run(["a.rvb", "", "--", ""]) == RunOptions(IMAGE, ("", "--", ""))


def test_the_list_given_is_left_alone() -> None:
    words = ["--verbose", "a.rvb", "x"]
    parse_run(words)
    assert words == ["--verbose", "a.rvb", "x"]


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("", "run: which image?", "rvbundle run IMAGE [-- ARGUMENTS]; see rvbundle run --help"),
        ("--", "run: which image?", "rvbundle run IMAGE [-- ARGUMENTS]; see rvbundle run --help"),
        ("--verbose", "run: which image?", "rvbundle run IMAGE [-- ARGUMENTS]; see rvbundle run --help"),
        ("--vrebose a.rvb", "run: no such option: --vrebose", "did you mean --verbose?"),
        ("--volumes=x a.rvb", "run: no such option: --volumes=x", "did you mean --volume?"),
        ("-x a.rvb", "run: no such option: -x", "see rvbundle run --help"),
        ("--qqqqq a.rvb", "run: no such option: --qqqqq", "see rvbundle run --help"),
        ("--verbose=1 a.rvb", "run: --verbose takes no value", ""),
        ("--volume", "run: --volume needs a value: --volume SRC:DST[:ro]", ""),
        ("-m", "run: --memory needs a value: --memory SIZE", ""),
        ("-e", "run: --env needs a value: --env NAME[=VALUE]", ""),
        ("--network --no-network a.rvb", "run: --network and --no-network contradict each other", ""),
        ("-m 0 a.rvb", "run: --memory 0: expected a size such as 512m or 2g", ""),
    ],
)
def test_bad_command_line(line: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_run(line.split())
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a:/data", Volume("/a", "/data")),
        ("a:/data", Volume("a", "/data")),
        (".:/data/", Volume(".", "/data")),
        ("/a:/data:ro", Volume("/a", "/data", True)),
        ("/a:/data:rw", Volume("/a", "/data", False)),
        ("/a:/users", Volume("/a", "/users")),
        ("/a:/home/agent/x", Volume("/a", "/home/agent/x")),
    ],
)
def test_parse_volume(text: str, expected: Volume) -> None:
    assert parse_volume(text) == expected


@pytest.mark.parametrize(
    "text", ["", "/a", ":/a", "/a:", "/a:b", "/a:/b:xx", "/a:/b:ro:rw", "/a:/b:", "a:b:ro"]
)
def test_bad_volume(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_volume(text)
    assert caught.value.message == (
        f"run: --volume {text}: expected SRC:DST or SRC:DST:ro, with DST an absolute path"
    )


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/usr",
        "/usr/lib/x",
        "/app",
        "/proc/1",
        "/dev",
        "/etc/passwd",
        "/data/../usr",
        "/..",
        "//usr/lib",
        "/./usr",
        "/data/./../etc",
        "/oldroot",
        "/lib64",
    ],
)
def test_volume_over_the_image(target: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_volume(f"/a:{target}")
    assert caught.value.message == f"run: --volume /a:{target}: {target} belongs to the image"
    assert caught.value.hint == "choose another place, such as /data"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("A=1", ("A", "1")), ("A", ("A", None)), ("A=", ("A", "")), ("_a1=x=y", ("_a1", "x=y"))],
)
def test_parse_env(text: str, expected: tuple[str, str | None]) -> None:
    assert parse_env(text) == expected


@pytest.mark.parametrize("text", ["", "=1", "1A=1", "A B=1", "A-B", "A.B=1"])
def test_bad_env(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_env(text)
    assert caught.value.message == f"run: --env {text}: expected NAME=VALUE or NAME"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("512b", 512),
        ("1k", 1024),
        ("512m", 536870912),
        ("512M", 536870912),
        ("2g", 2147483648),
        ("2GB", 2147483648),
        ("1t", 1099511627776),
        ("007k", 7168),
    ],
)
def test_parse_size(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0g",
        "b",
        "m",
        "g2",
        "-1g",
        "+1g",
        "1.5g",
        "1e3",
        "1 g",
        "2mm",
        "²",
        "١",
        "1_0",
        "9223372036854775808",
        "8388608t",
        "99999999999g",
        "9" * 5000,
    ],
    ids=lambda text: text[:20] or "empty",
)
def test_bad_size(text: str) -> None:
    """The last ones do not fit into what setrlimit takes."""
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.message == f"run: --memory {text}: expected a size such as 512m or 2g"


@pytest.mark.parametrize("text", ["", "/usr", "/dev/", "/dev//x", "../usr", "/dev/../usr", "a/../../usr"])
def test_bad_device(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_device(text)
    assert caught.value.message == f"run: --device {text}: expected a device such as dri or /dev/dri"
