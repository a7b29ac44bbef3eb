import json
from dataclasses import replace

from rvbundle_runtime import runinfo

from .test_emulation import plan as emulated_plan
from .test_plan import INFO, plan


def test_what_an_agent_can_read() -> None:
    made = plan(info=replace(INFO, packages={"torch": "2.13.0"}), threads=3)
    value = json.loads(made.report)
    assert value["image"] == {"name": "demo", "version": "1.0", "identity": INFO.identity}
    assert value["packages"] == {"torch": "2.13.0"}
    assert (value["launcher"], value["host"]["arch"]) == ("native", "riscv64")
    backend = value["backend"]
    assert (backend["name"], backend["threads"], backend["measured"]) == ("any", 3, False)
    assert backend["environment"]["OMP_NUM_THREADS"] == "3"
    assert backend["emulated_processor"] is None
    assert {"what": "threads", "value": "3", "reason": "--threads says so"} in value["choices"]
    assert made.env[runinfo.VARIABLE] == runinfo.FILE


def test_emulated() -> None:
    value = json.loads(emulated_plan().report)
    assert (value["launcher"], value["backend"]["emulated_processor"]) == ("qemu", "Nehalem")


def test_without_a_sandbox_the_supervisor_names_it() -> None:
    assert runinfo.VARIABLE not in plan(sandbox=False).env
