import os
import re
from pathlib import Path

import pytest

from rvbundle import sizes
from rvbundle.sizes import Box, treemap
from rvbundle_runtime import store
from rvbundle_runtime.host import CachePlace
from tests.unit.images import build, chunk, item, ranges, sparse

ARCH = os.uname().machine


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


def test_a_page_map_shares_hot_and_restored_pages_out() -> None:
    cells = sizes._page_map(8 * 65536, [(0, 65536), (3 * 65536, 32768)], [2, 7])
    assert len(cells) == 128  # of 4 KiB: no cell is smaller than a page
    assert [hot for hot, _ in cells] == [1.0] * 16 + [0.0] * 32 + [1.0] * 8 + [0.0] * 72
    assert [number for number, (_, restored) in enumerate(cells) if restored] == [
        *range(32, 48),
        *range(112, 128),
    ]
    large = sizes._page_map(1 << 30, [(0, 1 << 29)], [])
    assert len(large) == 1000
    assert sum(hot for hot, _ in large) == pytest.approx(500)
    assert sizes._page_map(100, [(0, 100)], [0]) == [[1.0, 1.0]]


def test_sections_of_a_trimmed_library(tmp_path: Path) -> None:
    """Hot and cold bytes and compressed shares by section, and the page that shows them."""
    content = bytes(range(256)) * 1024  # 256 KiB, the second half of them cold
    image, pack = tmp_path / "x.rvb", tmp_path / "x.cold.rvb"
    half = len(content) // 2
    details = {
        "trim": "traced",
        "trimmed": {
            ARCH: {
                "usr/lib/libtoy.so": {
                    "size": len(content),
                    "hot": half,
                    "sections": [[".text", 0, half + 65536, half], [".rodata", half + 65536, 65536, 0]],
                    "notes": [],
                }
            }
        },
        "whole": {ARCH: {"usr/lib/libc.so.6": "part of the C library"}},
    }
    hot = sparse("usr/lib/libtoy.so", len(content), chunk(content[:half], (0, half)))
    identity = build(image, [hot], details=details)
    header = chunk(content[:64], (0, 64))
    cold = ranges("usr/lib/libtoy.so", len(content), header, chunk(content[half:], (half, half)))
    build(pack, [cold], bound_to=identity)
    report = sizes.measure(image)
    (library,) = report["trimmed"]
    text, rodata = library["sections"]
    assert (text["hot"], text["cold"], rodata["hot"], rodata["cold"]) == (half, 65536, 0, 65536)
    assert text["hot_compressed"] > 0 == rodata["hot_compressed"]
    assert text["cold_compressed"] == pytest.approx(rodata["cold_compressed"], abs=100)  # and the header
    assert report["whole"] == {"usr/lib/libc.so.6": "part of the C library"}
    page = sizes.to_html(report)
    assert "usr/lib/libtoy.so" in page
    assert ".text (machine code)" in page
    assert page.count("<svg") == page.count("</svg>") == 2
    assert "<script" not in page


def test_colours_are_mixed_in_proportion() -> None:
    assert sizes._mix("#000000", "#ffffff", 0.0) == "#000000"
    assert sizes._mix("#000000", "#ff8000", 1.0) == "#ff8000"
    assert sizes._mix("#000000", "#ffffff", 0.5) == "#808080"


OTHER = "riscv64" if ARCH != "riscv64" else "x86_64"


def test_several_payloads(tmp_path: Path) -> None:
    """Paths are told apart by their payloads; what both have is counted once."""
    image, pack = tmp_path / "x.rvb", tmp_path / "x.cold.rvb"
    agent = item("app/agent.py", b"a" * 100)
    size = 64 << 10
    sections = [[".text", 0, size, size // 2]]
    about = {"size": size, "hot": size // 2, "sections": sections, "notes": []}
    libraries = {
        arch: sparse("usr/lib/libtoy.so", size, chunk(letter * (size // 2), (0, size // 2)))
        for arch, letter in ((ARCH, b"o"), (OTHER, b"t"))
    }
    details = {
        "trimmed": {arch: {"usr/lib/libtoy.so": about} for arch in libraries},
        "whole": {ARCH: {"usr/lib/libc.so.6": "part of the C library"}, OTHER: {"usr/lib/libc.so.6": "too"}},
    }
    others = {OTHER: [agent, libraries[OTHER]]}
    identity = build(image, [agent, libraries[ARCH]], others=others, details=details)
    cold = {
        arch: ranges("usr/lib/libtoy.so", size, chunk(arch.encode() * 100, (size // 2, len(arch) * 100)))
        for arch in libraries
    }
    build(pack, [cold[ARCH]], others={OTHER: [cold[OTHER]]}, bound_to=identity)
    report = sizes.measure(image)
    names = {f"{arch}: usr/lib/libtoy.so" for arch in libraries}
    assert {row["name"] for row in report["libraries"]} == names
    assert {library["path"] for library in report["trimmed"]} == names
    for library in report["trimmed"]:
        (text,) = library["sections"]
        assert text["hot_compressed"] > 0
        assert text["cold_compressed"] > 0
    assert report["whole"] == {
        f"{ARCH}: usr/lib/libc.so.6": "part of the C library",
        f"{OTHER}: usr/lib/libc.so.6": "too",
    }
    (row,) = [row for row in report["packages"] if row["name"] == "(the agent)"]
    single = tmp_path / "single.rvb"
    build(single, [agent, libraries[ARCH]])
    (alone,) = [row for row in sizes.measure(single)["packages"] if row["name"] == "(the agent)"]
    assert row["hot_compressed"] == alone["hot_compressed"]
    assert sum(part["size"] for part in report["parts"]) <= image.stat().st_size
    page = sizes.to_html(report)
    assert all(page.count(f"<h3>{name}</h3>") == 1 for name in names)


def test_runs_have_restored_pages_of_each_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 256 << 10
    about = {"size": size, "hot": 4096, "sections": [[".text", 0, size, 4096]], "notes": []}
    library = sparse("usr/lib/libtoy.so", size, chunk(b"x" * 4096, (0, 4096)))
    details = {"trimmed": {arch: {"usr/lib/libtoy.so": about} for arch in (ARCH, OTHER)}}
    build(tmp_path / "x.rvb", [library], others={OTHER: [library]}, details=details)
    monkeypatch.setattr(store, "find", lambda *words: words[2])
    runs = {ARCH: frozenset({1}), OTHER: frozenset({2, 3})}
    monkeypatch.setattr(store, "restored_runs", lambda arch: {"usr/lib/libtoy.so": runs[arch]})
    report = sizes.measure(tmp_path / "x.rvb", CachePlace(tmp_path, "a test"))
    restored = {library["path"]: library["restored"] for library in report["trimmed"]}
    assert restored == {f"{ARCH}: usr/lib/libtoy.so": 1, f"{OTHER}: usr/lib/libtoy.so": 2}
