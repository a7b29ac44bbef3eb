"""Records of runs: what an agent had to restore from the cold pack, so that the next build keeps it."""

import json
from collections.abc import Iterable
from pathlib import Path

from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.launch import RECORD_FORMAT

_AGAIN = "`rvbundle run --record FILE IMAGE` writes one"


def read_records(paths: Iterable[Path]) -> frozenset[str]:
    """Return the tree paths that the records at `paths` name; raises ImageError for what is no record."""
    found: set[str] = set()
    for path in paths:
        try:
            value = json.loads(path.read_text())
            if value["format"] != RECORD_FORMAT:
                raise ImageError(f"{path}: record format {value['format']} is not {RECORD_FORMAT}", _AGAIN)
            found.update(str(item) for item in value["restored"])
        except OSError as error:
            raise ImageError(f"{path}: {error.strerror}", _AGAIN) from None
        except (ValueError, KeyError, TypeError):
            raise ImageError(f"{path} is no record of a run", _AGAIN) from None
    return frozenset(found)
