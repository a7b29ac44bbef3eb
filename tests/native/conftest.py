"""What the tests of both libraries share: they are built once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native.payload import Payload
from tests.native.toys import MACHINE, TARGET, zig_build
from tests.native.traced import TracerToys


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with tracer.so and guard.so for the machine that the tests are for."""
    out = tmp_path_factory.mktemp("libraries")
    zig_build(out, [TARGET[MACHINE]])
    return out / MACHINE


@pytest.fixture
def payload(tmp_path: Path, libraries: Path) -> Iterator[Payload]:
    """A payload without libraries, whose programs run under the guard."""
    made = Payload(tmp_path, libraries / "guard.so")
    yield made
    made.close()


@pytest.fixture
def traced(tmp_path: Path, libraries: Path) -> TracerToys:
    """Programs run under the tracer."""
    return TracerToys(tmp_path, libraries / "tracer.so")
