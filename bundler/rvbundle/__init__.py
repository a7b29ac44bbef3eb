"""The build side of rvbundle and its command line. Read `build.py` first."""

from rvbundle_runtime import __version__

__all__ = ["__version__"]
