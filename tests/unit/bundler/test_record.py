import json
from pathlib import Path

import pytest

from rvbundle.record import Recorded, read_records
from rvbundle_runtime.errors import ImageError

GOOD = {"format": 2, "restored": ["a", "b"], "pages": {"lib.so": [1, 5]}}


def write(folder: Path, value: object, name: str = "r.json") -> Path:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder / name


def test_no_records() -> None:
    assert read_records([]) == Recorded(frozenset(), {})


def test_one_record(tmp_path: Path) -> None:
    assert read_records([write(tmp_path, GOOD)]) == Recorded(
        frozenset({"a", "b"}), {"lib.so": frozenset({1, 5})}
    )


def test_several_records(tmp_path: Path) -> None:
    other = {"format": 2, "restored": ["b", "c"], "pages": {"lib.so": [5, 7], "x.so": []}}
    assert read_records([write(tmp_path, GOOD), write(tmp_path, other, "s.json")]) == Recorded(
        frozenset({"a", "b", "c"}), {"lib.so": frozenset({1, 5, 7}), "x.so": frozenset()}
    )


AGAIN = "`rvbundle run --record FILE IMAGE` writes one"


@pytest.mark.parametrize("number", [1, 3, "2"])
def test_another_format(tmp_path: Path, number: object) -> None:
    path = write(tmp_path, {**GOOD, "format": number})
    with pytest.raises(ImageError) as caught:
        read_records([path])
    assert (caught.value.message, caught.value.hint) == (f"{path}: record format {number} is not 2", AGAIN)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "no JSON",
        "[]",
        "null",
        "{}",
        {"format": 2},
        {"format": 2, "restored": []},
        {"format": 2, "pages": {}},
        {**GOOD, "restored": 5},
        {**GOOD, "pages": []},
        {**GOOD, "pages": {"x": 5}},
        {**GOOD, "pages": {"x": ["one"]}},
        {**GOOD, "pages": {"x": [None]}},
    ],
    ids=str,
)
def test_no_record(tmp_path: Path, value: object) -> None:
    path = write(tmp_path, value)
    with pytest.raises(ImageError) as caught:
        read_records([path])
    assert (caught.value.message, caught.value.hint) == (f"{path} is no record of a run", AGAIN)


def test_a_record_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ImageError) as caught:
        read_records([tmp_path / "r.json"])
    assert caught.value.message == f"{tmp_path}/r.json is no record of a run"


def test_a_missing_record(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as caught:
        read_records([tmp_path / "r.json"])
    assert (caught.value.message, caught.value.hint) == (
        f"{tmp_path}/r.json: No such file or directory",
        AGAIN,
    )
