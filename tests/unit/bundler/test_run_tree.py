from dataclasses import replace
from typing import Any

import pytest

from rvbundle import run_tree
from rvbundle_runtime import launch as launch_
from rvbundle_runtime.selection import Launch
from tests.unit.runtime.test_plan import HOST, INFO
from tests.unit.runtime.test_selection import QEMU

REQUEST: dict[str, Any] = {"tree": "/tree", "mounts": []}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (REQUEST, ("-cpu", "rv64,v=false")),
        ({**REQUEST, "processor": ""}, ("-cpu", "rv64,v=false")),
        ({**REQUEST, "processor": "rv64,v=true,vlen=256"}, ("-cpu", "rv64,v=true,vlen=256")),
    ],
    ids=["not told", "told nothing", "told"],
)
def test_the_processor_of_a_traced_run(
    monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any], words: tuple[str, ...]
) -> None:
    emulator = replace(QEMU, guest="riscv64", path="/q/qemu-riscv64")
    host = replace(HOST, arch="x86_64", emulators=(emulator,), binfmt_denied="no")
    launch = Launch("riscv64", "qemu", "x", "y")
    monkeypatch.setattr(launch_, "choose", lambda *_: (host, launch))
    made = run_tree.make_plan(host, INFO, request_)
    assert made.command[1:3] == words
    assert "OPENBLAS_CORETYPE" not in made.env
