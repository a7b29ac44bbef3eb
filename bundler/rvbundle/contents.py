"""What goes into the two files: the items of the image and of the cold pack."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from rvbundle import freeze, native
from rvbundle.freeze import Frozen, FrozenFile
from rvbundle.pack import AGENT, LIBRARIES, PAGES, Item
from rvbundle.split import COLD_LIST, Placed, Split
from rvbundle.stage_agent import APP, StagedAgent
from rvbundle.trimming import Trimmed, Trims
from rvbundle_runtime import absent
from rvbundle_runtime import format as fmt

_PRELOAD = "etc/ld.so.preload"  # what the dynamic loader loads into every process, whatever its environment

_GROUPS = {
    freeze.BYTECODE: "python",
    freeze.SOURCE: "sources",
    freeze.EXTENSION: LIBRARIES,
    freeze.LIBRARY: LIBRARIES,
    freeze.PROGRAM: LIBRARIES,
    freeze.METADATA: "metadata",
    freeze.DATA: "data",
    freeze.TAIL: "tails",
}


@dataclass(frozen=True)
class Contents:
    """The items of both files."""

    hot: tuple[Item, ...]
    cold: tuple[Item, ...]


def contents(frozen: Frozen, agent: StagedAgent, split: Split, trims: Trims) -> Contents:
    """Turn placed files, trimmed or whole, and the agent's own into what is packed."""
    hot, cold = [], []
    for placed in split.placed:
        trimmed = trims.trimmed.get(placed.file.path)
        if trimmed and placed.hot:
            hot.append(_sparse_item(placed, trimmed))
            cold.append(_ranges_item(placed, trimmed))
        else:
            (hot if placed.hot else cold).append(_item(placed.file, placed.reason, frozen.folder))
    if trims.trimmed:
        hot += _guard_items(frozen.arch, trims)
    hot += [_agent_item(path, agent.folder) for path in agent.files]
    text = split.cold_list.encode()
    hot.append(_bytes_item(COLD_LIST, text, "index", "the list of what is cold"))
    return Contents(tuple(hot), tuple(cold))


def _item(file: FrozenFile, reason: str, folder: Path) -> Item:
    kinds = {freeze.LINK: fmt.LINK, freeze.DIRECTORY: fmt.DIRECTORY, freeze.TAIL: fmt.TAIL}
    kind = kinds.get(file.role, fmt.EXECUTABLE if file.executable else fmt.FILE)
    content = folder / file.place if file.place else None
    return Item(
        file.path,
        kind,
        _GROUPS.get(file.role, ""),
        content,
        file.size,
        file.sha256,
        file.target,
        file.package,
        reason,
    )


def _sparse_item(placed: Placed, trimmed: Trimmed) -> Item:
    """Return the pages of a library that are in the image; in a group by itself, so that it stays put."""
    file = placed.file
    reason = f"{placed.reason}; its hot pages"
    size = trimmed.size
    return Item(file.path, fmt.SPARSE, LIBRARIES, None, size, "", "", file.package, reason, trimmed.hot)


def _ranges_item(placed: Placed, trimmed: Trimmed) -> Item:
    file = placed.file
    reason = "pages that no trace touched"
    size, chunks = trimmed.plan.size, trimmed.cold
    return Item(file.path, fmt.RANGES, PAGES, None, size, "", "", file.package, reason, chunks)


def _guard_items(arch: str, trims: Trims) -> list[Item]:
    reason = "the guard restores pages"
    library = native.library(arch, native.GUARD).read_bytes()
    table = absent.dump([trimmed.absent() for trimmed in trims.trimmed.values()])
    return [
        _bytes_item(absent.GUARD, library, "index", reason),
        _bytes_item(absent.TABLE, table, "index", reason),
        _bytes_item(_PRELOAD, f"/{absent.GUARD}\n".encode(), "index", reason),
    ]


def _agent_item(path: str, folder: Path) -> Item:
    data = (folder / path).read_bytes()
    return _bytes_item(f"{APP}/{path}", data, AGENT, "the agent's own")


def _bytes_item(path: str, data: bytes, group: str, reason: str) -> Item:
    digest = hashlib.sha256(data).hexdigest()
    return Item(path, fmt.FILE, group, data, len(data), digest, "", "", reason)
