"""The machine that an emulated agent sees: which processor model, and what /proc/cpuinfo says of it. Pure.

An emulator answers uname(2) as the emulated machine would, and CPUID as the model that it is told to be. QEMU
also answers for /proc/cpuinfo, but for x86-64 (linux-user/x86_64/target_proc.h has nothing of the kind):
there the host's text would show through, with another processor's flags or, on a RISC-V board, none at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rvbundle_runtime.processor import Processor

E_MACHINE = {"x86_64": 62, "aarch64": 183, "riscv64": 243}  # by which ELF files name it: the ELF psABIs


@dataclass(frozen=True)
class Model:
    """A processor model of an emulator: `option` is its name there, "" for the emulator's default.

    `family`, `model` and `stepping` are those of CPUID leaf 1; `flags` are names as in Linux's /proc/cpuinfo;
    `name` is the brand text, "" where the emulator writes /proc/cpuinfo; `reason` says why it is emulated.
    """

    option: str
    reason: str
    vendor: str = ""
    family: int = 0
    model: int = 0
    stepping: int = 0
    name: str = ""
    flags: tuple[str, ...] = ()

    @property
    def processor(self) -> Processor:
        """What numeric libraries will find out about it."""
        ids = (("family", self.family), ("model", self.model), ("stepping", self.stepping))
        return Processor(self.vendor, frozenset(self.flags), self.name, ids if self.family else ())


# CPUID of `qemu-x86_64 -cpu Nehalem` (a test asks it): target/i386/cpu.c, limited to what TCG can do. It has
# what the kernel family `baseline` needs and nothing above: AVX and FMA are emulated in software. 256³ sgemm
# took 0.17 s with it and 0.38 s with `max`, which OpenBLAS takes for an Athlon besides.
_NEHALEM_FLAGS = (
    "fpu de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 syscall "
    "nx lm nopl cpuid pni ssse3 cx16 sse4_1 sse4_2 popcnt hypervisor lahf_lm"
)
NEHALEM = Model(
    option="Nehalem",
    reason="wider vectors are emulated in software, and slower",
    vendor="GenuineIntel",
    family=6,
    model=26,
    stepping=3,
    name="Intel Core i7 9xx (Nehalem Class Core i7)",
    flags=tuple(_NEHALEM_FLAGS.split()),
)
# box64's own CPUID without AVX (BOX64_AVX=0): src/os/my_cpuid.c. It writes /proc/cpuinfo itself.
BOX64 = Model(
    option="",
    reason="box64 has no fast AVX on most hosts",
    vendor="GenuineIntel",
    flags=tuple(
        "fpu tsc cx8 cmov clflush mmx fxsr sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm".split()
    ),
)
DEFAULT = Model(option="", reason="the emulator's own choice")

# CPUID leaf 0x80000008 and the CLFLUSH size of leaf 1, in bits and bytes.
_PHYSICAL_BITS, _VIRTUAL_BITS, _CLFLUSH = 40, 48, 64
_TABS = ("\t", "\t\t")  # by which the kernel brings all colons to one column: some programs look for them


def model_for(kind: str, guest: str) -> Model:
    """Return the processor that the emulator `kind` ("qemu", "box64") shows to programs for `guest`."""
    if guest != "x86_64":
        return DEFAULT
    return NEHALEM if kind == "qemu" else BOX64


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
