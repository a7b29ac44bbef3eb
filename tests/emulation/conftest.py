"""The emulators that these tests use, and the agent that they run."""

import os
from pathlib import Path

import pytest

from rvbundle import debian, hostpython
from rvbundle.stages import StageCache
from tests.conftest import TEST_CACHE, build

from .hosts import SUITE

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def qemu() -> Path:
    """A folder with this machine's qemu-x86_64: RVBUNDLE_TEST_QEMU, or out of Debian's packages."""
    if os.environ.get("RVBUNDLE_TEST_QEMU"):
        return Path(os.environ["RVBUNDLE_TEST_QEMU"])
    archive = hostpython.archive(TEST_CACHE, SUITE, hostpython.machine())
    packages = debian.resolve(archive, hostpython.EMULATORS)
    return hostpython.emulators(SUITE, packages, StageCache(TEST_CACHE / "build", "emulation-tests"))


@pytest.fixture(scope="session")
def emulated_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of the agent that says which processor it runs on; its cold pack lies beside it."""
    return build(HERE / "agents" / "emulated", tmp_path_factory.mktemp("emulated"))
