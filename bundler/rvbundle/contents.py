"""What goes into the two files, pure: the items of the image and of the cold pack."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from rvbundle import freeze
from rvbundle.freeze import Frozen, FrozenFile
from rvbundle.pack import Item
from rvbundle.split import COLD_LIST, Split
from rvbundle.stage_agent import APP, StagedAgent
from rvbundle_runtime import format as fmt

_GROUPS = {
    freeze.BYTECODE: "python",
    freeze.SOURCE: "sources",
    freeze.EXTENSION: "libraries",
    freeze.LIBRARY: "libraries",
    freeze.PROGRAM: "libraries",
    freeze.METADATA: "metadata",
    freeze.DATA: "data",
    freeze.TAIL: "tails",
}


@dataclass(frozen=True)
class Contents:
    """The items of both files."""

    hot: tuple[Item, ...]
    cold: tuple[Item, ...]


def contents(frozen: Frozen, agent: StagedAgent, split: Split) -> Contents:
    """Turn placed files and the agent's own into what is packed."""
    hot = [_item(p.file, p.reason, frozen.folder) for p in split.placed if p.hot]
    cold = [_item(p.file, p.reason, frozen.folder) for p in split.placed if not p.hot]
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


def _agent_item(path: str, folder: Path) -> Item:
    data = (folder / path).read_bytes()
    return _bytes_item(f"{APP}/{path}", data, "agent", "the agent's own")


def _bytes_item(path: str, data: bytes, group: str, reason: str) -> Item:
    digest = hashlib.sha256(data).hexdigest()
    return Item(path, fmt.FILE, group, data, len(data), digest, "", "", reason)
