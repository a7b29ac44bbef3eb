"""Records of runs: what an agent had to restore from the cold pack, so that the next build keeps it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.launch import RECORD_FORMAT

_AGAIN = "`rvbundle run --record FILE IMAGE` writes one"


@dataclass(frozen=True)
class Recorded:
    """What runs had to restore: paths of the tree, and runs (see `absent.py`) of trimmed libraries."""

    paths: frozenset[str] = frozenset()
    runs: Mapping[str, frozenset[int]] = field(default_factory=dict)


def read_records(paths: Iterable[Path]) -> Recorded:
    """Return what the records at `paths` name together; raises ImageError for what is no record."""
    found: set[str] = set()
    runs: dict[str, frozenset[int]] = {}
    for path in paths:
        try:
            value = json.loads(path.read_text())
            if value["format"] != RECORD_FORMAT:
                raise ImageError(f"{path}: record format {value['format']} is not {RECORD_FORMAT}", _AGAIN)
            found.update(str(item) for item in value["restored"])
            for library, numbers in value["pages"].items():
                runs[library] = runs.get(library, frozenset()) | {int(number) for number in numbers}
        except OSError as error:
            raise ImageError(f"{path}: {error.strerror}", _AGAIN) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ImageError(f"{path} is no record of a run", _AGAIN) from None
    return Recorded(frozenset(found), runs)
