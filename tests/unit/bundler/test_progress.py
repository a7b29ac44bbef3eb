import re

import pytest

from rvbundle.progress import Progress


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    return re.sub(r"\(\d+\.\d s\)", "(T s)", err)


def test_phases(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    with progress.phase("freeze") as phase:
        phase.result = "3 files"
        phase.why = "not shown"
    with progress.phase("lock") as phase:
        phase.reused = True
    assert shown(capsys) == "done    freeze: 3 files (T s)\nreused  lock (T s)\n"


def test_verbose_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(verbose=True).phase("freeze") as phase:
        phase.why = "changed since the last build: python"
    assert shown(capsys) == "done    freeze (T s)\n        changed since the last build: python\n"


def test_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), Progress().phase("freeze"):
        raise KeyError("x")
    assert shown(capsys) == "failed  freeze (T s)\n"


@pytest.mark.parametrize("text", ["plain", "[/x]", "[trim]", "a [b] c", "\\["])
def test_any_text(capsys: pytest.CaptureFixture[str], text: str) -> None:
    progress = Progress(verbose=True)
    with progress.phase("freeze") as phase:
        phase.result = phase.why = text
        phase.note(text)
    progress.say(text)
    assert shown(capsys) == (f"done    freeze: {text} (T s)\n        {text}\n        note: {text}\n{text}\n")


def test_long_notes_stay_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress().phase("freeze") as phase:
        phase.note("word " * 60)
    assert len(shown(capsys).splitlines()) == 2
