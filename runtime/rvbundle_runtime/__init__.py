"""The run side of rvbundle: standard library only, plus a zstd decoder.

Read `plan.py` first: it decides everything that a run does, and says why.
"""

__version__ = "0.1.0"
