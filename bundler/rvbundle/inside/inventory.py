"""Print, as JSON, what the environment of this interpreter holds: its distributions and their files."""

import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any, Dict, List


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


def _numpy_dispatch() -> List[str]:
    """Return the processor features that numpy picks kernels by, in its own words."""
    for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        try:
            return list(importlib.import_module(name).__cpu_dispatch__)
        except (ImportError, AttributeError):
            continue  # no numpy, or of another version
    return []


def main() -> None:
    """Write the inventory to standard output."""
    found = [_describe(d) for d in importlib.metadata.distributions() if d.metadata["Name"]]
    found.sort(key=lambda d: d["name"].lower())
    stdlib = sorted(getattr(sys, "stdlib_module_names", ()))  # Python 3.10 and newer
    value = {"prefix": sys.prefix, "distributions": found, "stdlib": stdlib}
    value["numpy_dispatch"] = _numpy_dispatch()
    json.dump(value, sys.stdout)


main()
