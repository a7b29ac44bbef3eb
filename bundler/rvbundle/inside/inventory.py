"""Print, as JSON, what the environment of this interpreter holds: its distributions and their files."""

import importlib.metadata
import json
import os
import sys
from typing import Any, Dict


def _describe(distribution: importlib.metadata.Distribution) -> Dict[str, Any]:
    """Return name, version, absolute file paths, top-level names and whether it is an editable install."""
    files = []
    for file in distribution.files or ():
        path = os.path.normpath(str(distribution.locate_file(file)))
        if not path.endswith(".pyc"):
            files.append(path)
    top = distribution.read_text("top_level.txt") or ""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    return {
        "name": distribution.metadata["Name"],
        "version": distribution.version,
        "files": files,
        "top_level": top.split(),
        "editable": bool(direct.get("dir_info", {}).get("editable")),
    }


def main() -> None:
    """Write the inventory to standard output."""
    found = [_describe(d) for d in importlib.metadata.distributions() if d.metadata["Name"]]
    found.sort(key=lambda d: d["name"].lower())
    stdlib = sorted(getattr(sys, "stdlib_module_names", ()))  # Python 3.10 and newer
    json.dump({"prefix": sys.prefix, "distributions": found, "stdlib": stdlib}, sys.stdout)


main()
