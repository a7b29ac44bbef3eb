"""The parts of the emulated board (tests/machine) that need no board."""

from pathlib import Path

import pytest

from tests.machine.machine import MachineError, Outcome, _Log, in_order, parse

SAID = """\
@@ boot seconds=3.80 kernel=6.12.1
@@ begin one
hello
@@ end two code=0 seconds=1.0 peak=1

@@ end one code=3 seconds=2.36 peak=1286144
@@ begin two

@@ end two code=0 seconds=0.10 peak=4096
"""


def log(folder: Path, jobs: str, console: str = "") -> _Log:
    made = _Log(folder / "board.log", echo=False)
    made.add("console", console.encode(), last=True)
    made.add("jobs", jobs.encode(), last=True)
    return made


def test_what_the_jobs_did_is_read_from_the_port(tmp_path: Path) -> None:
    session = parse(log(tmp_path, SAID + "@@ off\n"))
    assert (session.boot_seconds, session.kernel) == (3.8, "6.12.1")
    assert session.outcomes == {
        "one": Outcome(3, 2.36, 1286144, "hello\n@@ end two code=0 seconds=1.0 peak=1\n"),
        "two": Outcome(0, 0.1, 4096, ""),
    }


def test_the_log_has_whole_lines(tmp_path: Path) -> None:
    made = _Log(tmp_path / "board.log", echo=False)
    for piece in (b"one\r\ntw", b"o\r\nthr"):
        made.add("console", piece)
    assert [line.split("| ")[1] for line in made.path.read_text().splitlines()] == ["one", "two"]
    made.add("console", b"", last=True)
    assert made.path.read_text().endswith("console | thr\n")


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ("", "the machine did not boot:\n    Kernel panic"),
        (SAID, "the machine stopped before its last job ended"),
    ],
    ids=["no-boot", "stops"],
)
def test_a_machine_that_fails_is_an_error(tmp_path: Path, jobs: str, message: str) -> None:
    with pytest.raises(MachineError) as caught:
        parse(log(tmp_path, jobs, "Kernel panic\n"))
    assert caught.value.message == message
    assert caught.value.hint == f"all that it said is in {tmp_path}/board.log"


def test_modules_come_after_what_they_depend_on() -> None:
    depends = {"ext4": "jbd2,mbcache,crc16", "jbd2": "crc32c-generic"}

    def read(name: str) -> bytes:
        return f"\0license=GPL\0depends={depends.get(name, '')}\0".encode()

    order = [name for name, _ in in_order(["ext4", "jbd2"], read)]
    assert order == ["crc32c_generic", "jbd2", "mbcache", "crc16", "ext4"]
