"""The machine that an emulated agent sees: which processor model, and what /proc/cpuinfo says of it. Pure.

An emulator answers uname(2) as the emulated machine would, and CPUID as the model that it is told to be. QEMU
also answers for /proc/cpuinfo, but for x86-64 (linux-user/x86_64/target_proc.h has nothing of the kind):
there the host's text would show through, with another processor's flags or, on a RISC-V board, none at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rvbundle_runtime import table
from rvbundle_runtime.processor import Processor

E_MACHINE = {"x86_64": 62, "aarch64": 183, "riscv64": 243}  # by which ELF files name it: the ELF psABIs


@dataclass(frozen=True)
class Model:
    """A processor model of an emulator: `option` is its name there, "" for the emulator's default.

    `family`, `model` and `stepping` are those of CPUID leaf 1; `flags` are names as in Linux's /proc/cpuinfo,
    `vlen` the bits of its vectors where their length is not the architecture's (RISC-V); `name` is the brand
    text, "" where the emulator writes /proc/cpuinfo; `reason` says why it is emulated.
    """

    option: str
    reason: str
    vendor: str = ""
    family: int = 0
    model: int = 0
    stepping: int = 0
    name: str = ""
    flags: tuple[str, ...] = ()
    vlen: int = 0

    @property
    def processor(self) -> Processor:
        """What numeric libraries will find out about it."""
        ids = (("family", self.family), ("model", self.model), ("stepping", self.stepping))
        return Processor(self.vendor, frozenset(self.flags), self.name, ids if self.family else (), self.vlen)


DEFAULT = Model(option="", reason="the emulator's own choice")

# CPUID leaf 0x80000008 and the CLFLUSH size of leaf 1, in bits and bytes.
_PHYSICAL_BITS, _VIRTUAL_BITS, _CLFLUSH = 40, 48, 64
_TABS = ("\t", "\t\t")  # by which the kernel brings all colons to one column: some programs look for them


def processors() -> dict[tuple[str, str], Model]:
    """Return {(emulator, name): processor} as backends.toml has them; raises ValueError."""
    found = {}
    for row in table.read()["processor"]:
        values = {k: v for k, v in row.items() if k not in ("name", "title", "emulator", "guest")}
        values |= {"name": row.get("title", ""), "flags": tuple(row.get("flags", "").split())}
        try:
            found[row["emulator"], row["name"]] = Model(**{"option": "", **values})
        except (KeyError, TypeError) as error:
            raise ValueError(f"processor {row.get('name')}: {error}") from None
    return found


def cpuinfo(model: Model, cpus: Iterable[int]) -> str:
    """Return /proc/cpuinfo's text for x86-64: the processors `cpus`, each a core of its own in one package.

    The lines are those of the kernel's arch/x86/kernel/cpu/proc.c; "" where the emulator writes it.
    """
    numbers = list(cpus)
    blocks = []
    for core, number in enumerate(numbers) if model.name else ():
        lines = {
            "processor": number,
            "vendor_id": model.vendor,
            "cpu family": model.family,
            "model": model.model,
            "model name": model.name,
            "stepping": model.stepping,
            "physical id": 0,
            "siblings": len(numbers),
            "core id": core,
            "cpu cores": len(numbers),
            "apicid": core,
            "initial apicid": core,
            "fpu": "yes",
            "fpu_exception": "yes",
            "cpuid level": 11,
            "wp": "yes",
            "flags": " ".join(model.flags),
            "bugs": "",
            "clflush size": _CLFLUSH,
            "cache_alignment": _CLFLUSH,
            "address sizes": f"{_PHYSICAL_BITS} bits physical, {_VIRTUAL_BITS} bits virtual",
        }
        text = "".join(f"{name}{_TABS[len(name) < 8]}: {value}\n" for name, value in lines.items())
        blocks.append(f"{text}power management:\n\n")
    return "".join(blocks)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read the numbers of a list such as "0-3,8" (/sys/devices/system/cpu/online); raises ValueError."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
