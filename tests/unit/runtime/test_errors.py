import re
from pathlib import Path

import pytest

from rvbundle_runtime import errors

DOC = Path(__file__).parents[3] / "docs/exit-codes.md"


def subclasses(root: type[errors.RvbundleError]) -> list[type[errors.RvbundleError]]:
    return [root, *(c for child in root.__subclasses__() for c in subclasses(child))]


CLASSES = subclasses(errors.RvbundleError)


def test_codes_are_distinct() -> None:
    codes = [c.exit_code for c in CLASSES]
    assert len(codes) == len(set(codes))
    assert errors.UsageError.exit_code == 2
    assert all(100 <= c.exit_code < 126 for c in CLASSES if c is not errors.UsageError)


def test_all_are_in_the_one_module() -> None:
    named = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)}
    assert set(CLASSES) == named


def test_message_and_hint() -> None:
    error = errors.StoreError("what", "what to do")
    assert (error.message, error.hint, str(error)) == ("what", "what to do", "what")
    assert errors.StoreError("what").hint == ""


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_code_is_documented(error: type[errors.RvbundleError]) -> None:
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("|")]
    assert any(re.search(rf"\b{error.exit_code}\b", row) for row in rows)


def test_no_code_is_documented_that_does_not_exist() -> None:
    documented = {int(code) for code in re.findall(r"(?m)^\|\s*`?(\d{3})`?\s*\|", DOC.read_text())}
    rvbundles = {code for code in documented if 100 <= code < 126}
    assert rvbundles == {c.exit_code for c in CLASSES if c.exit_code >= 100}
