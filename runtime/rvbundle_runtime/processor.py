"""What a processor is, by what the kernel says: its maker, name, features, vectors, kinds of cores. Pure.

Linux tells it in several places, none of which is enough: /proc/cpuinfo, the auxiliary vector (HWCAP), on
RISC-V the system call riscv_hwprobe. `host.py` reads them, `combine` makes one answer of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Processor:
    """What the kernel says of the processor, where it says so.

    `vendor` is the maker: x86's vendor_id, else a number as hexadecimal text (Arm: the implementer, RISC-V:
    mvendorid). `flags` are features by the kernel's names in /proc/cpuinfo (RISC-V: extensions in small
    letters). `ids` are numbers with their names, `vlen` the bits of a RISC-V vector register (0: there are
    none, or it is unknown).
    """

    vendor: str = ""
    flags: frozenset[str] = frozenset()
    name: str = ""
    ids: tuple[tuple[str, int], ...] = ()
    vlen: int = 0


@dataclass(frozen=True)
class Cluster:
    """Cores of one kind. `capacity` is the kernel's measure, 1024 for the biggest core, 0 if it has none."""

    cpus: tuple[int, ...]
    capacity: int = 0
    name: str = ""


XTHEADVECTOR = "xtheadvector"  # vectors of version 0.7.1, as T-Head's processors had them before version 1.0

# Linux's arch/arm64/include/asm/cputype.h and Arm's reference manuals (MIDR_EL1): implementer, part.
_ARM_CORES = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse N1",
    (0x41, 0xD40): "Neoverse V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD44): "Cortex-X1",
    (0x41, 0xD46): "Cortex-A510",
    (0x41, 0xD47): "Cortex-A710",
    (0x41, 0xD48): "Cortex-X2",
    (0x41, 0xD49): "Neoverse N2",
    (0x41, 0xD4D): "Cortex-A715",
    (0x41, 0xD4E): "Cortex-X3",
    (0x41, 0xD4F): "Neoverse V2",
    (0x41, 0xD80): "Cortex-A520",
    (0x41, 0xD81): "Cortex-A720",
    (0x41, 0xD82): "Cortex-X4",
    (0x41, 0xD84): "Neoverse V3",
}

# The names of the bits, from bit 0: Linux's arch/arm64/include/uapi/asm/hwcap.h, spelt as in /proc/cpuinfo.
_ARM_HWCAP = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop "
    "sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg gcs cmpbr fprcvt "
    "f8mm8 f8mm4 svef16mm sveeltperm sveaes2 svebfscale sve2p2 sme2p2 smesbitperm smeaes smesfexpa smestmop "
    "smesmop4"
).split()
_ARM_HWCAP2 = (
    "dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 "
    "i8mm bf16 dgh rng bti mte ecv afp rpres mte3 sme smei16i64 smef64f64 smei8i32 smef16f32 smeb16f32 "
    "smef32f32 smefa64 wfxt ebf16 sveebf16 cssc rprfm sve2p1 sme2 sme2p1 smei16i32 smebi32i32 smeb16b16 "
    "smef16f16 mops hbc sveb16b16 lrcpc3 lse128 fpmr lut faminmax f8cvt f8fma f8dp4 f8dp2 f8e4m3 f8e5m2 "
    "smelutv2 smef8f16 smef8f32 smesf8fma smesf8dp4 smesf8dp2 poe"
).split()

# Linux's arch/riscv/include/uapi/asm/hwprobe.h: keys, and the bits of IMA_EXT_0 from bit 3.
MVENDORID, MARCHID, MIMPID, BASE_BEHAVIOR, IMA_EXT_0, CPUPERF_0 = range(6)
VENDOR_EXT_THEAD_0 = 11
HWPROBE_KEYS = (MVENDORID, MARCHID, MIMPID, BASE_BEHAVIOR, IMA_EXT_0, CPUPERF_0, VENDOR_EXT_THEAD_0)
IMA_V = 1 << 2
_IMA_EXT_0 = (
    "zba zbb zbs zicboz zbc zbkb zbkc zbkx zknd zkne zknh zksed zksh zkt zvbb zvbc zvkb zvkg zvkned zvknha "
    "zvknhb zvksed zvksh zvkt zfh zfhmin zihintntl zvfh zvfhmin zfa ztso zacas zicond zihintpause zve32x "
    "zve32f zve64x zve64f zve64d zimop zca zcb zcd zcf zcmop zawrs supm zicntr zihpm zfbfmin zvfbfmin "
    "zvfbfwma zicbom zaamo zalrsc zabha zalasr zicbop zilsd zclsd zicfilp"
).split()
_DIFFERS = (1 << 64) - 1  # the value of a key that is not the same on all processors that were asked about

_THEAD = 0x5B7  # mvendorid
_RISCV_LETTERS = "imafdqcbvh"
_RISCV_IDS = ("mvendorid", "marchid", "mimpid")
_AT_HWCAP, _AT_HWCAP2 = 16, 26  # getauxval(3)


def parse_cpuinfo(text: str, cpus: Collection[int] | None = None) -> Processor:
    """Read /proc/cpuinfo's text, of any architecture; a text that was cut will do.

    Only the processors `cpus` count (None, or none of them there: all). Where they differ, the flags are
    those that all have, and the rest is that of the first.
    """
    blocks = _blocks(text)
    chosen = [b for b in blocks if cpus is None or _number(b.get("processor", "")) in cpus] or blocks
    if not chosen:
        return Processor()
    first = chosen[0]
    if "isa" in first:
        return _riscv(chosen)
    if "cpu implementer" in first:
        return _arm(chosen)
    flags = first.get("flags", first.get("features", ""))
    ids = _ids(first, {"family": "cpu family", "model": "model", "stepping": "stepping"})
    return Processor(first.get("vendor_id", ""), frozenset(flags.split()), first.get("model name", ""), ids)


def _blocks(text: str) -> list[dict[str, str]]:
    """Return the fields of each processor; the last line of a cut text counts only if there is no other."""
    if "\n\n" in text and not text.endswith("\n"):
        text = text[: text.rindex("\n") + 1]
    blocks = []
    for block in text.split("\n\n"):
        lines = (line.partition(":") for line in block.splitlines() if line.strip())
        if fields := {name.strip().lower(): value.strip() for name, _, value in lines}:
            blocks.append(fields)
    return blocks


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def _ids(fields: Mapping[str, str], names: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    found = ((name, _number(fields.get(field, ""))) for name, field in names.items())
    return tuple((name, number) for name, number in found if number is not None)


def _arm(blocks: Sequence[Mapping[str, str]]) -> Processor:
    names = {name: f"cpu {name}" for name in ("implementer", "part", "variant", "revision")}
    ids = _ids(blocks[0], names)
    numbers = dict(ids)
    core = _ARM_CORES.get((numbers.get("implementer", -1), numbers.get("part", -1)), "")
    features = [frozenset(b["features"].split()) for b in blocks if "features" in b]
    flags = frozenset.intersection(*features) if features else frozenset()
    return Processor(_hex(numbers.get("implementer")), flags, core, ids)


def _hex(number: int | None) -> str:
    return "" if number is None else hex(number)


def _riscv(blocks: Sequence[Mapping[str, str]]) -> Processor:
    first = blocks[0]
    ids = _ids(first, {name: name for name in _RISCV_IDS})
    # "hart isa" is what this one has; "isa", where both are there, what all have.
    flags = frozenset.intersection(*(_extensions(b.get("hart isa", b["isa"])) for b in blocks if "isa" in b))
    # T-Head's own kernels say the version, in words that differ.
    old = any("0.7" in first.get(name, "") for name in ("cpu-vector", "vector version"))
    name = first.get("uarch", first.get("model name", ""))
    flags = _with_old_vectors(flags, ids, old)
    return Processor(_hex(dict(ids).get("mvendorid")), flags, name, ids, _at_least(flags))


def _extensions(isa: str) -> frozenset[str]:
    """Read an ISA string such as "rv64imafdcv_zicsr_zvl256b": single letters, and names of several."""
    letters, *names = isa.lower().removeprefix("rv64").removeprefix("rv32").split("_")
    found = set(names) - {""}
    for letter in letters:
        if letter == "g":
            found.update("imafd")
        elif letter not in _RISCV_LETTERS:  # old kernels append what is no extension for programs: "su"
            break
        else:
            found.add(letter)
    return frozenset(found)


def _without_vectors(flags: frozenset[str]) -> frozenset[str]:
    return frozenset(flag for flag in flags if flag != "v" and not flag.startswith("zv"))


def _with_old_vectors(
    flags: frozenset[str], ids: tuple[tuple[str, int], ...], old: bool = False
) -> frozenset[str]:
    """Name vectors of version 0.7.1 by their own name, and not "v".

    Linux's riscv_fill_hwcap tells them apart in this way too: T-Head's cores with them have a marchid of 0.
    """
    numbers = dict(ids)
    old = old or (numbers.get("mvendorid") == _THEAD and numbers.get("marchid") == 0)
    if XTHEADVECTOR in flags or (old and "v" in flags):
        return _without_vectors(flags) | {XTHEADVECTOR}
    return flags


def _at_least(flags: frozenset[str]) -> int:
    """Return how many bits a vector register has at least, by the extensions Zvl*b; 0 if none is named."""
    if "v" not in flags:
        return 0
    sizes = (flag[3:-1] for flag in flags if flag.startswith("zvl") and flag.endswith("b"))
    return max((int(size) for size in sizes if size.isdecimal()), default=0)


def parse_auxv(data: bytes) -> tuple[int, int]:
    """Read HWCAP and HWCAP2 from a little-endian 64-bit /proc/self/auxv; 0 for what is not there."""
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]
    values = dict(zip(words[::2], words[1::2], strict=False))
    return values.get(_AT_HWCAP, 0), values.get(_AT_HWCAP2, 0)


def from_hwcap(arch: str, hwcap: int, hwcap2: int = 0) -> frozenset[str]:
    """Return the flags that these bits of the auxiliary vector stand for; of x86, cpuinfo has all."""
    if arch == "aarch64":
        return frozenset(_named(_ARM_HWCAP, hwcap) + _named(_ARM_HWCAP2, hwcap2))
    if arch == "riscv64":  # COMPAT_HWCAP_ISA_I and so on: by the letter
        return frozenset(letter for letter in "imafdcv" if hwcap >> (ord(letter) - ord("a")) & 1)
    return frozenset()


def _named(names: Sequence[str], bits: int) -> list[str]:
    return [name for bit, name in enumerate(names) if bits >> bit & 1]


def from_hwprobe(pairs: Mapping[int, int]) -> Processor:
    """Return what answers of riscv_hwprobe stand for: only keys that the kernel knows may be there."""
    known = {key: value for key, value in pairs.items() if value != _DIFFERS}
    extensions = known.get(IMA_EXT_0, 0)
    flags = set(_named(_IMA_EXT_0, extensions >> 3))
    for bit, letters in enumerate(("fd", "c", "v")):
        flags.update(letters if extensions >> bit & 1 else "")
    if known.get(BASE_BEHAVIOR, 0) & 1:
        flags.update("ima")
    if known.get(VENDOR_EXT_THEAD_0, 0) & 1:
        flags.add(XTHEADVECTOR)
    ids = tuple((name, known[key]) for key, name in enumerate(_RISCV_IDS) if key in known)
    return Processor(_hex(known.get(MVENDORID)), _with_old_vectors(frozenset(flags), ids), ids=ids)


def combine(
    arch: str,
    cpuinfo_text: str,
    hwcap: int = 0,
    hwcap2: int = 0,
    hwprobe_pairs: Mapping[int, int] | None = None,
    vlen: int = 0,
    cpus: Collection[int] | None = None,
) -> Processor:
    """Make one answer of all that the kernel says of the processors `cpus` (None: of all).

    `hwprobe_pairs` must be of the same processors; `vlen` is 0 where it could not be read.
    """
    seen = parse_cpuinfo(cpuinfo_text, cpus)
    flags = seen.flags | from_hwcap(arch, hwcap, hwcap2)
    if arch != "riscv64":
        return replace(seen, flags=flags)
    pairs = hwprobe_pairs or {}
    probed = from_hwprobe(pairs)
    ids = seen.ids or probed.ids
    flags = _with_old_vectors(flags | probed.flags, ids, XTHEADVECTOR in seen.flags)
    # A processor may have vectors that its kernel lets no program use. Whom to believe: hwprobe, which has
    # told of them ever since mainline had them, then HWCAP, and cpuinfo where there is neither.
    believed = probed.flags if IMA_EXT_0 in pairs else from_hwcap(arch, hwcap) if hwcap else flags
    if "v" not in believed:
        flags = _without_vectors(flags)
    bits = (vlen or _at_least(flags)) if "v" in flags else 0
    return Processor(seen.vendor or probed.vendor, flags, seen.name, ids, bits)


def clusters(
    cpus: Sequence[int],
    cpuinfo_text: str,
    capacities: Mapping[int, int] | None = None,
    hybrid: Mapping[str, Collection[int]] | None = None,
) -> tuple[Cluster, ...]:
    """Group the processors `cpus` by kind, the biggest first; an ordinary machine has one group.

    `capacities` are the kernel's, by processor, where it has them; `hybrid` names the kinds of cores of an
    x86 processor that has several, the biggest first. A processor that the text does not tell of is of the
    kind of the one before it. Groups of unknown capacity stay in the order of their processors.
    """
    if hybrid and len(hybrid) > 1:
        groups = ((name, tuple(cpu for cpu in cpus if cpu in members)) for name, members in hybrid.items())
        return tuple(Cluster(members, 0, name) for name, members in groups if members)
    kinds = _kinds(cpuinfo_text)
    found: dict[tuple[int, tuple[str, object]], list[int]] = {}
    kind: tuple[str, object] = next(iter(kinds.values()), ("", None))
    for cpu in sorted(cpus):
        kind = kinds.get(cpu, kind)
        key = ((capacities or {}).get(cpu, 0), kind)
        found.setdefault(key, []).append(cpu)
    order = sorted(found, key=lambda key: (-key[0], found[key][0]))
    return tuple(Cluster(tuple(found[key]), key[0], key[1][0]) for key in order)


def _kinds(text: str) -> dict[int, tuple[str, object]]:
    """Return, by number of a processor, the name of its kind, and what tells it from others."""
    kinds: dict[int, tuple[str, object]] = {}
    for block in _blocks(text):
        number = _number(block.get("processor", ""))
        if number is None:
            continue
        if "isa" in block:
            one = _riscv([block])
        elif "cpu implementer" in block:
            one = _arm([block])
        else:  # x86, where one processor is as the other, unless `hybrid` tells of kinds
            return {number: (block.get("model name", ""), None)}
        numbers = dict(one.ids)
        same = ("implementer", "part", "mvendorid", "marchid")
        kinds[number] = (one.name, tuple(numbers.get(name) for name in same))
    return kinds
