"""Where the compiled C lies that comes with this package: libraries for guests, and programs."""

import os

EMULATE, PROBE = "emulate.so", "probe"


def path(arch: str, name: str) -> str:
    """Return the path of `name`, one of the names above, for an architecture; "" if it was not compiled."""
    found = os.path.join(os.path.dirname(os.path.abspath(__file__)), "native", arch, name)
    return found if os.path.isfile(found) else ""
