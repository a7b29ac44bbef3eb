"""Where the compiled C lies that comes with this package: libraries for guests, and programs."""

import os

TRACER, TRACE_ALL, GUARD, EMULATE = "tracer.so", "traceall.so", "guard.so", "emulate.so"
BLAS = "blas.so"
MUSL_LICENCE = "musl.COPYRIGHT"  # of what is in BLAS_WORKER; lies in no folder of an architecture
PROBE, STARTER, BLAS_WORKER = "probe", "starter", "blasworker"


def place(arch: str, name: str) -> str:
    """Return where `name`, one of the names above, lies for an architecture, if it was compiled."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "native", arch, name)


def path(arch: str, name: str) -> str:
    """Return the path of `name`, one of the names above, for an architecture; "" if it was not compiled."""
    found = place(arch, name)
    return found if os.path.isfile(found) else ""
