"""backends.toml as it is: a file of this package, read once by those few commands that need it."""

import functools
import os.path
from typing import Any

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "backends.toml")


@functools.cache
def read() -> dict[str, Any]:
    """Return the tables of the file; the caller must not change them."""
    import tomllib  # late: most runs find a decision that was made before, and need neither

    with open(FILE, "rb") as file:
        return tomllib.load(file)
