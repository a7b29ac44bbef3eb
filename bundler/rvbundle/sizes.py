"""Where the bytes of an image are: by package, library and section, hot and cold, raw and compressed.

`measure` is pure reading, `print_sizes` a table, `to_html` one self-contained page with a treemap and a map
of each trimmed library's pages.
"""

import html
import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rvbundle.inspection import NO_PACKAGE, compressed_sizes
from rvbundle.progress import line, wide_console
from rvbundle_runtime import format as fmt
from rvbundle_runtime import store
from rvbundle_runtime.absent import RUN
from rvbundle_runtime.host import CachePlace
from rvbundle_runtime.image import Reader
from rvbundle_runtime.launch import find_cold

_AGENT = "(the agent)"
_KINDS = ("library", "bytecode", "source", "data", "symbols")
_COLOURS = {
    "library": "#4c78a8",
    "bytecode": "#59a14f",
    "source": "#edc948",
    "data": "#f28e2b",
    "symbols": "#9c9c9c",
}
_WIDTH, _HEIGHT = 1200.0, 520.0  # of the treemap, in CSS pixels
_LABEL_MIN = 46.0  # a box narrower than this gets no text
_LIBRARIES_SHOWN = 15
_TRIMMED_SHOWN, _SECTIONS_SHOWN, _SECTION_MIN = 3, 8, 64 << 10  # the last in bytes
# What sections are, for people who have never met them.
_MEANINGS = {
    ".text": "machine code",
    ".rodata": "constants",
    ".eh_frame": "how to unwind the stack",
    ".eh_frame_hdr": "index of that",
    ".gcc_except_table": "who catches exceptions",
    ".rela.dyn": "addresses to fill in at the start",
    ".dynstr": "names of functions",
    ".dynsym": "addresses of functions",
    ".gnu.hash": "index of names",
    ".data": "variables",
    ".data.rel.ro": "tables of addresses",
    ".symtab": "names for debuggers",
    ".strtab": "names for debuggers",
}
_MAP_COLUMNS, _MAP_CELLS = 100, 1000
_HOT, _COLD, _RESTORED = "#d1495b", "#dfe5ea", "#edae49"


@dataclass(frozen=True)
class Box:
    """A rectangle of a treemap, in CSS pixels."""

    x: float
    y: float
    width: float
    height: float


def measure(path: Path, place: CachePlace | None = None) -> dict[str, Any]:
    """Return sizes in bytes of an image and its cold pack; raises ImageError.

    `place` is where the store is, for what runs on this machine have restored.
    """
    rows: list[dict[str, Any]] = []
    with Reader(path) as reader:
        index = reader.index()
        rows += _rows(reader, "hot")
        trimmed = _trimmed(reader, _restored(reader, place))
        cold, _ = (None, None) if reader.bound_to else find_cold(path, None, reader.identity)
        if cold:
            with cold:
                rows += _rows(cold, "cold")
                _add_cold(cold, trimmed)
        return {
            "name": index.name,
            "version": index.version,
            "image": reader.footer.image_size,
            "cold_pack": cold.footer.image_size if cold else None,
            "packages": _sum_by(rows, "package"),
            "libraries": _sum_by([row for row in rows if row["what"] == "library"], "path"),
            "trimmed": sorted(trimmed.values(), key=lambda library: -int(library["size"])),
            "whole": {
                index.label(arch, path): why
                for arch, whole in index.details.get("whole", {}).items()
                for path, why in whole.items()
            },
            "parts": _parts([row for row in rows if row["side"] == "hot"]),
        }


def _rows(reader: Reader, side: str) -> list[dict[str, Any]]:
    index = reader.index()
    shares = compressed_sizes(index)
    rows: list[dict[str, Any]] = []
    seen: set[int] = set()
    for payload in index.payloads:
        for entry in payload.entries:
            if not entry.blobs:
                continue
            package = payload.packages[entry.package].name if entry.package >= 0 else NO_PACKAGE
            rows.append(
                {
                    "path": index.label(payload.arch, entry.path),
                    "package": _AGENT if entry.path.startswith("app/") else package,
                    "what": _what(entry),
                    "side": side,
                    "raw": sum(index.blobs[blob].size for blob in entry.blobs),
                    "compressed": sum(shares[blob] for blob in entry.blobs if blob not in seen),
                }
            )
            seen.update(entry.blobs)
    return rows


_Place = tuple[str, str]  # architecture and path


def _restored(reader: Reader, place: CachePlace | None) -> dict[_Place, frozenset[int]]:
    found: dict[_Place, frozenset[int]] = {}
    for payload in reader.index().payloads if place else ():
        unpacked = store.find(place.base, reader.identity, payload.arch) if place else None
        runs = store.restored_runs(unpacked) if unpacked else {}
        found |= {(payload.arch, path): numbers for path, numbers in runs.items()}
    return found


def _trimmed(reader: Reader, restored: dict[_Place, frozenset[int]]) -> dict[_Place, dict[str, Any]]:
    """Return {architecture and path: sizes, sections, map of pages} of every trimmed library."""
    found = {}
    for payload in reader.index().payloads:
        details = reader.index().details.get("trimmed", {}).get(payload.arch, {})
        for entry in payload.entries:
            if entry.kind == fmt.SPARSE and entry.path in details:
                about = details[entry.path]
                hot = [pair for piece in entry.pieces for pair in piece.ranges]
                runs = sorted(restored.get((payload.arch, entry.path), ()))
                sections = [
                    {"name": name, "offset": offset, "size": size, "hot": hot_size, "cold": size - hot_size}
                    for name, offset, size, hot_size in about["sections"]
                ]
                for section, share in zip(sections, _shares(reader, entry, sections), strict=True):
                    section |= {"hot_compressed": round(share), "cold_compressed": 0}
                found[payload.arch, entry.path] = {
                    "path": reader.index().label(payload.arch, entry.path),
                    "size": about["size"],
                    "hot": about["hot"],
                    "sections": sections,
                    "notes": about["notes"],
                    "restored": len(runs),
                    "map": _page_map(int(about["size"]), hot, runs),
                }
    return found


def _add_cold(cold: Reader, trimmed: dict[_Place, dict[str, Any]]) -> None:
    for payload in cold.index().payloads:
        for entry in payload.entries:
            if entry.kind == fmt.RANGES and (payload.arch, entry.path) in trimmed:
                sections = trimmed[payload.arch, entry.path]["sections"]
                for section, share in zip(sections, _shares(cold, entry, sections), strict=True):
                    section["cold_compressed"] = round(share)


def _shares(reader: Reader, entry: fmt.Entry, sections: list[dict[str, Any]]) -> list[float]:
    """Return each section's share of the compressed bytes of the frames that hold it."""
    shares = [0.0] * len(sections)
    order = sorted(range(len(sections)), key=lambda n: int(sections[n]["offset"]))
    starts = [int(sections[n]["offset"]) for n in order]
    frames = reader.index().frames
    for piece in entry.pieces:
        for number, place, start, stop in store.placed(reader, piece):
            ratio = frames[number].size / frames[number].raw_size
            end = place + stop - start
            for at in range(max(0, bisect_right(starts, place) - 1), bisect_left(starts, end)):
                first = starts[at]
                last = first + int(sections[order[at]]["size"])
                shares[order[at]] += max(0, min(end, last) - max(place, first)) * ratio
    return shares


def _page_map(size: int, hot: list[tuple[int, int]], runs: list[int]) -> list[list[float]]:
    """Return, for equal parts of a file, which share of it is hot and which was restored (0 to 1)."""
    cells = min(_MAP_CELLS, max(1, size // 4096))
    wide = size / cells

    def shares(ranges: list[tuple[int, int]]) -> list[float]:
        sums = [0.0] * cells
        for offset, length in ranges:
            end = min(offset + length, size)
            for cell in range(int(offset / wide), min(cells, int((end - 1) / wide) + 1)):
                sums[cell] += max(0.0, min(end, (cell + 1) * wide) - max(offset, cell * wide)) / wide
        return sums

    both = zip(shares(hot), shares([(run * RUN, RUN) for run in runs]), strict=True)
    return [[round(min(a, 1.0), 3), round(min(b, 1.0), 3)] for a, b in both]


def _what(entry: fmt.Entry) -> str:
    name = os.path.basename(entry.path)
    if entry.kind == fmt.TAIL:
        return "symbols"
    if name.endswith(".so") or ".so." in name:
        return "library"
    return {".pyc": "bytecode", ".py": "source"}.get(os.path.splitext(name)[1], "data")


def _sum_by(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return one row per value of `key`: hot and cold, raw and compressed; the largest image share first."""
    sums: dict[str, dict[str, float]] = {}
    for row in rows:
        total = sums.setdefault(
            row[key], {"hot": 0, "hot_compressed": 0.0, "cold": 0, "cold_compressed": 0.0}
        )
        total[row["side"]] += row["raw"]
        total[f"{row['side']}_compressed"] += row["compressed"]
    ordered = sorted(sums.items(), key=lambda item: (-item[1]["hot_compressed"], item[0]))
    return [{"name": name, **{k: round(v) for k, v in total.items()}} for name, total in ordered]


def _parts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the treemap's leaves: each library alone, the other files of a package by kind."""
    leaves: dict[tuple[str, str, str], float] = {}
    for row in rows:
        label = os.path.basename(row["path"]) if row["what"] == "library" else row["what"]
        key = (row["package"], row["what"], label)
        leaves[key] = leaves.get(key, 0.0) + row["compressed"]
    return [
        {"package": package, "what": what, "label": label, "size": size}
        for (package, what, label), size in sorted(leaves.items())
        if size > 0
    ]


def print_sizes(report: dict[str, Any]) -> None:
    """Print what `measure` returned."""
    console = wide_console()
    console.print(
        line((f"{report['name']} {report['version']}", "bold"), f"  image {_mib(report['image'])} MiB")
    )
    for title, rows in (("package", report["packages"]), ("library", report["libraries"][:_LIBRARIES_SHOWN])):
        table = Table(title, "hot", "in the image", "cold", "in the cold pack", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            cells = (row[k] for k in ("hot", "hot_compressed", "cold", "cold_compressed"))
            table.add_row(line(row["name"]), *(_mib(cell) for cell in cells))
        console.print(table)
    for library in report["trimmed"][:_TRIMMED_SHOWN]:
        console.print(_section_table(library))
    console.print("MiB; 'in the image' and 'in the cold pack' are compressed", style="dim")


def _section_table(library: dict[str, Any]) -> Table:
    name = os.path.basename(library["path"])
    table = Table(f"sections of {name}", "hot", "in the image", "cold", "in the cold pack", box=None)
    table.pad_edge = False
    for column in table.columns[1:]:
        column.justify = "right"
    for row in _large_sections(library):
        cells = (row[k] for k in ("hot", "hot_compressed", "cold", "cold_compressed"))
        table.add_row(line(row["name"]), *(_mib(cell) for cell in cells))
    if library["restored"]:
        table.add_row(line(f"(runs here have restored {library['restored']} × 64 KiB of it)"))
    return table


def _large_sections(library: dict[str, Any]) -> list[dict[str, Any]]:
    rows = sorted(library["sections"], key=lambda row: -int(row["size"]))
    large = [row for row in rows if row["size"] >= _SECTION_MIN][:_SECTIONS_SHOWN]
    return [{**row, "name": _explained(row["name"])} for row in large]


def _explained(section: str) -> str:
    meaning = _MEANINGS.get(section)
    return f"{section} ({meaning})" if meaning else section


def treemap(sizes: list[float], box: Box) -> list[Box]:
    """Lay out `sizes` (descending, above 0) as rectangles that fill `box`, with areas in proportion.

    Squarified: Bruls, Huizing & van Wijk 2000, "Squarified treemaps": rows are closed when one more
    rectangle would make the worst aspect ratio in them worse.
    """
    total = sum(sizes)
    scale = box.width * box.height / total if total else 0.0
    areas = [size * scale for size in sizes]
    boxes: list[Box] = []
    start = 0
    while start < len(areas):
        side = min(box.width, box.height)
        stop = start + 1
        while stop < len(areas) and _worst(areas[start : stop + 1], side) <= _worst(areas[start:stop], side):
            stop += 1
        row, box = _lay_row(areas[start:stop], box)
        boxes += row
        start = stop
    return boxes


def _worst(areas: list[float], side: float) -> float:
    total = sum(areas)
    return max(side * side * max(areas) / (total * total), total * total / (side * side * min(areas)))


def _lay_row(areas: list[float], box: Box) -> tuple[list[Box], Box]:
    """Put a row along the shorter side of `box`; return its boxes and what is left of `box`."""
    total, boxes = sum(areas), []
    if box.width >= box.height:
        thick, y = total / box.height if box.height else 0.0, box.y
        for area in areas:
            height = area / thick if thick else 0.0
            boxes.append(Box(box.x, y, thick, height))
            y += height
        return boxes, Box(box.x + thick, box.y, max(0.0, box.width - thick), box.height)
    thick, x = total / box.width if box.width else 0.0, box.x
    for area in areas:
        width = area / thick if thick else 0.0
        boxes.append(Box(x, box.y, width, thick))
        x += width
    return boxes, Box(box.x, box.y + thick, box.width, max(0.0, box.height - thick))


def to_html(report: dict[str, Any]) -> str:
    """Return one page without scripts or outside files: a treemap of the image, and tables."""
    title = html.escape(f"{report['name']} {report['version']}")
    cold = f", cold pack {_mib(report['cold_pack'])} MiB" if report["cold_pack"] else ""
    legend = "".join(
        f'<span><i style="background:{_COLOURS[kind]}"></i>{kind}</span>'
        for kind in _KINDS
        if any(part["what"] == kind for part in report["parts"])
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{title}</h1>\n"
        f"<p>Image {_mib(report['image'])} MiB{cold}. Areas are compressed bytes in the image; "
        f"hover for names and sizes.</p>\n<p class=legend>{legend}</p>\n{_svg(report['parts'])}\n"
        f"<h2>Packages</h2>\n{_html_table(report['packages'])}\n"
        f"<h2>Libraries</h2>\n{_html_table(report['libraries'][:_LIBRARIES_SHOWN])}\n"
        f"{_html_maps(report['trimmed'])}</body></html>\n"
    )


_STYLE = (
    "body{font:15px/1.4 system-ui,sans-serif;margin:2em auto;max-width:1200px;color:#222}"
    "table{border-collapse:collapse;width:100%}th,td{padding:3px 8px;text-align:right;"
    "border-bottom:1px solid #eee}th:first-child,td:first-child{text-align:left;word-break:break-all}"
    "svg{width:100%;height:auto}rect{stroke:#fff}text{font-size:12px;fill:#fff;pointer-events:none}"
    ".frame{fill:none;stroke:#222;stroke-width:2}.legend span{margin-right:1.2em}"
    ".legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}"
)


_MAP_TEXT = (
    "Each map is a library's file, from left to right and row by row. Red pages are in the image, grey ones "
    "come from the cold pack when they are needed."
)


def _html_maps(libraries: list[dict[str, Any]]) -> str:
    """Return a map of the pages of each trimmed library, with its sections."""
    if not libraries:
        return ""
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{text}</span>'
        for text, colour in (("hot", _HOT), ("cold", _COLD), ("restored by runs here", _RESTORED))
    )
    parts = [f"<h2>Pages of the trimmed libraries</h2>\n<p>{_MAP_TEXT}</p>\n<p class=legend>{legend}</p>\n"]
    for library in libraries:
        name = html.escape(library["path"])
        what = f"{_mib(library['hot'])} of {_mib(library['size'])} MiB hot"
        if library["restored"]:
            what += f", {library['restored']} runs of 64 KiB restored"
        parts.append(f"<h3>{name}</h3>\n<p>{what}</p>\n{_map_svg(library)}\n")
        parts.append(_html_table(_large_sections(library)) + "\n")
    return "".join(parts)


def _map_svg(library: dict[str, Any]) -> str:
    """Draw the file from left to right, row by row: a cell is mixed of hot and cold as its pages are."""
    cells = library["map"]
    side = _WIDTH / _MAP_COLUMNS
    shapes = []
    for number, (hot, restored) in enumerate(cells):
        x, y = number % _MAP_COLUMNS * side, number // _MAP_COLUMNS * side
        colour = _RESTORED if restored else _mix(_COLD, _HOT, hot**0.5)  # a little heat is to be seen
        shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}" fill="{colour}" />'
        )
    height = -(-len(cells) // _MAP_COLUMNS) * side
    label = html.escape(f"pages of {os.path.basename(library['path'])}")
    drawing = "".join(shapes)
    return f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="{label}">{drawing}</svg>'


def _mix(first: str, second: str, share: float) -> str:
    pairs = ((int(first[n : n + 2], 16), int(second[n : n + 2], 16)) for n in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _svg(parts: list[dict[str, Any]]) -> str:
    packages: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        packages.setdefault(part["package"], []).append(part)
    ordered = sorted(packages.items(), key=lambda item: -sum(p["size"] for p in item[1]))
    boxes = treemap([sum(p["size"] for p in group) for _, group in ordered], Box(0, 0, _WIDTH, _HEIGHT))
    shapes = []
    for (_, group), box in zip(ordered, boxes, strict=True):
        group = sorted(group, key=lambda part: -part["size"])
        inner = treemap([part["size"] for part in group], box)
        labels = [f"{group[0]['package']}: {group[0]['label']}", *(part["label"] for part in group[1:])]
        shapes += [_rectangle(*three) for three in zip(group, labels, inner, strict=True)]
        shapes.append(f"<rect class=frame {_place(box)} />")
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        f'aria-label="treemap of the image">{"".join(shapes)}</svg>'
    )


def _place(box: Box) -> str:
    return f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'


def _rectangle(part: dict[str, Any], label: str, box: Box) -> str:
    name = html.escape(f"{part['package']}: {part['label']}")
    title = f"<title>{name}, {_mib(part['size'])} MiB</title>"
    shape = f'<g><rect {_place(box)} fill="{_COLOURS[part["what"]]}" />{title}'
    letters = int(box.width / 7)
    if box.width >= _LABEL_MIN and box.height >= 16:
        text = html.escape(label[:letters])
        shape += f'<text x="{box.x + 4:.1f}" y="{box.y + 14:.1f}">{text}</text>'
    return shape + "</g>"


def _html_table(rows: list[dict[str, Any]]) -> str:
    head = "".join(
        f"<th>{text}</th>"
        for text in ("", "hot, MiB", "in the image, MiB", "cold, MiB", "in the cold pack, MiB")
    )
    body = "".join(
        f"<tr><td>{html.escape(row['name'])}</td>"
        + "".join(
            f"<td>{_mib(row[key])}</td>" for key in ("hot", "hot_compressed", "cold", "cold_compressed")
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _mib(size: float) -> str:
    return f"{size / (1 << 20):.2f}"
