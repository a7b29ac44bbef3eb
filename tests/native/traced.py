"""Runs toys under the tracer, and reads what it recorded."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from tests.native.toys import Toys


@dataclass
class Record:
    first: int
    touched: list[bool]
    watched: list[bool]


def read_record(path: Path) -> Record:
    data = path.read_bytes()
    magic, page_size, first, pages = struct.unpack_from("<8sQQQ", data)
    assert (magic, page_size) == (b"RVPAGES1", 4096)
    size = (pages + 7) // 8
    assert len(data) == 32 + 2 * size
    maps = [data[32 : 32 + size], data[32 + size :]]
    bits = [[bool(m[i // 8] >> (i % 8) & 1) for i in range(pages)] for m in maps]
    for m in maps:  # no bits beyond the end
        assert int.from_bytes(m, "little") >> pages == 0
    assert all(t or w for t, w in zip(*bits, strict=True)), "not watched must count as touched"
    return Record(first, *bits)


class TracerToys(Toys):
    """Runs programs under the tracer."""

    def __init__(self, folder: Path, tracer: Path) -> None:
        super().__init__(folder)
        self.tracer = tracer
        self.pages = folder / "pages"
        self.pages.mkdir()

    def environment(self, **more: str) -> dict[str, str]:
        own = {
            "LD_AUDIT": str(self.tracer),
            "RVBUNDLE_TRACE_PAGES": str(self.pages),
            "RVBUNDLE_TRACE_PREFIX": f"{self.folder}/",
        }
        return {**os.environ, **own, **more}

    def run(self, *words: str | Path, code: int = 0, **more: str) -> str:
        output = super().run(*words, code=code, **more)
        assert "tracer" not in output
        return output

    def record_path(self, name: str = "libtoy.so") -> Path:
        return self.pages / str(self.folder / name).replace("/", "%")

    def touched(self, name: str = "libtoy.so", prefix: str = "f") -> set[str]:
        """The functions PREFIX<number> whose page was touched; all must have been watched."""
        record = read_record(self.record_path(name))
        result = set()
        for symbol, page in self.symbols(name).items():
            if symbol.startswith(prefix) and symbol[len(prefix) :].isdigit():
                assert record.watched[page - record.first], symbol
                if record.touched[page - record.first]:
                    result.add(symbol)
        return result

    def skipped(self) -> dict[str, str]:
        path = self.pages / "skipped"
        lines = path.read_text().splitlines() if path.exists() else []
        return dict(line.split("\t") for line in lines)
