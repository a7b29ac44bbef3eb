"""Facts recorded of real machines: one TOML file each, whose `source` says where the facts were seen.

`cpuinfo` is /proc/cpuinfo of one or two processors, or of the first of each kind; `hwcap` and `hwcap2` are of
the auxiliary vector, `hwprobe` of riscv_hwprobe (key to value, as hexadecimal text), `capacities` are the
files cpu_capacity in order of the processors, `hybrid` x86's lists of cores by kind. `cpus` is how many
there are, `usable` a list as the kernel writes it, of those that programs may run on (all if it is left out).
What no dump tells of a machine is left out. `expected` is what must be made of all this; in its `plan`, the
backend of a payload that is `whole`, of one that is `held` to kernels traced on an Intel processor, with
`bf16` asked for, with an OpenBLAS that is `wrong`, and the number of `threads` (0: the libraries choose).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rvbundle_runtime import processor
from rvbundle_runtime.host import Host
from rvbundle_runtime.machine import parse_cpu_list

FOLDER = Path(__file__).parent
ALL = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
_KEYS = frozenset(
    "source arch page_size cpus cpuinfo hwcap hwcap2 hwprobe vlen capacities hybrid usable expected".split()
)


@dataclass(frozen=True)
class Machine:
    """The recorded facts; what is not known is as empty as it is for `processor.combine`."""

    name: str
    source: str
    arch: str
    page_size: int
    cpus: tuple[int, ...]
    cpuinfo: str
    usable: tuple[int, ...]
    hwcap: int
    hwcap2: int
    hwprobe: Mapping[int, int]
    vlen: int
    capacities: Mapping[int, int]
    hybrid: Mapping[str, tuple[int, ...]]
    expected: Mapping[str, Any]


def load(name: str) -> Machine:
    """Read the facts of one machine; raises KeyError or ValueError if its file is not as described above."""
    value = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    if unknown := set(value) - _KEYS:
        raise ValueError(f"{name}: {sorted(unknown)}")
    cpus = tuple(range(value["cpus"]))
    return Machine(
        name=name,
        source=value["source"],
        arch=value["arch"],
        page_size=value.get("page_size", 4096),
        cpus=cpus,
        cpuinfo=value["cpuinfo"],
        usable=parse_cpu_list(value["usable"]) if "usable" in value else cpus,
        hwcap=value.get("hwcap", 0),
        hwcap2=value.get("hwcap2", 0),
        hwprobe={int(key): int(text, 16) for key, text in value.get("hwprobe", {}).items()},
        vlen=value.get("vlen", 0),
        capacities=dict(enumerate(value.get("capacities", ()))),
        hybrid={name: parse_cpu_list(text) for name, text in value.get("hybrid", {}).items()},
        expected=value["expected"],
    )


def to_host(machine: Machine) -> Host:
    """Return what `host.read_host` would, for a caller who is nobody in particular."""
    return Host(
        arch=machine.arch,
        kernel="6.12",
        page_size=machine.page_size,
        uid=1000,
        gid=1000,
        cwd="/",
        environ={},
        namespaces_denied="",
        namespaces_fix="",
        processor=processor.combine(
            machine.arch,
            machine.cpuinfo,
            machine.hwcap,
            machine.hwcap2,
            machine.hwprobe,
            machine.vlen,
            machine.usable,
        ),
        cpus=machine.cpus,
        usable=machine.usable,
        clusters=processor.clusters(machine.cpus, machine.cpuinfo, machine.capacities, machine.hybrid),
    )
