"""The processor itself runs the payload."""

from rvbundle_runtime.host import Host
from rvbundle_runtime.launchers.start import Start
from rvbundle_runtime.machine import Model

name = "native"
probe = ()


def why_not(host: Host, arch: str) -> str:
    """Return "" if `arch` is the host's own."""
    return "" if arch == host.arch else f"this machine is {host.arch}"


def start(host: Host, arch: str, root: str, model: Model) -> Start:  # noqa: ARG001
    """Return nothing: programs start by themselves."""
    return Start()
