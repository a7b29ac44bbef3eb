import re
from pathlib import Path

import pytest

from rvbundle import sizes
from rvbundle.sizes import Box, treemap
from tests.unit.images import build, item


@pytest.mark.parametrize(
    "values", [[1.0], [6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], [1000.0, 1.0, 0.001], [5.0] * 50], ids=str
)
def test_a_treemap_fills_its_box_in_proportion(values: list[float]) -> None:
    boxes = treemap(values, Box(10, 20, 600, 400))
    for value, box in zip(values, boxes, strict=True):
        assert box.width * box.height == pytest.approx(600 * 400 * value / sum(values))
        assert box.x >= 10 - 1e-6
        assert box.x + box.width <= 610 + 1e-6
        assert box.y >= 20 - 1e-6
        assert box.y + box.height <= 420 + 1e-6
    for number, a in enumerate(boxes):
        for b in boxes[number + 1 :]:
            across = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            down = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert min(across, down) <= 1e-6


def test_the_example_of_the_paper() -> None:
    """Bruls, Huizing & van Wijk 2000, figure 4: areas 6 6 4 3 2 2 1 in a box of 6 by 4."""
    boxes = treemap([6, 6, 4, 3, 2, 2, 1], Box(0, 0, 6, 4))
    assert [(round(b.width, 2), round(b.height, 2)) for b in boxes[:4]] == [
        (3.0, 2.0),
        (3.0, 2.0),
        (1.71, 2.33),
        (1.29, 2.33),
    ]


def test_nothing_to_lay_out() -> None:
    assert treemap([], Box(0, 0, 6, 4)) == []


def test_measure(tmp_path: Path) -> None:
    image = tmp_path / "x.rvb"
    build(
        image,
        [
            item("usr/lib/libx.so.1", b"x" * 5000),
            item("usr/lib/copy.so", b"x" * 5000),
            item("usr/lib/m.pyc", b"m" * 3000),
            item("app/agent.py", b"a" * 100),
        ],
    )
    report = sizes.measure(image)
    packages = {row["name"]: row for row in report["packages"]}
    assert packages["(the agent)"]["hot"] == 100
    assert sum(row["hot"] for row in report["packages"]) == 13100
    assert {row["name"]: row["hot"] for row in report["libraries"]} == {
        "usr/lib/libx.so.1": 5000,
        "usr/lib/copy.so": 5000,
    }
    # what is stored once is counted once
    assert sum(row["hot_compressed"] > 0 for row in report["libraries"]) == 1
    assert {part["what"] for part in report["parts"]} == {"library", "bytecode", "source"}
    assert report["cold_pack"] is None


def test_the_page_is_whole_and_escapes_what_it_shows(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", [item("usr/lib/<b>&.so", b"x" * 5000)])
    page = sizes.to_html(sizes.measure(tmp_path / "x.rvb"))
    assert "&lt;b&gt;&amp;.so" in page
    assert "<b>" not in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    assert len(re.findall("<title>", page)) == 2  # the page's, and one box's
