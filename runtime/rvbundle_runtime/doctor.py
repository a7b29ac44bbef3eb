"""`rvbundle doctor`: what this machine lacks to run images well, and what to do about it.

Pure, but for `main`: `checkup.py` reads the facts, `examine` judges them.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rvbundle_runtime import binfmt, emulators
from rvbundle_runtime.checkup import GUESTS, Facts, read_facts
from rvbundle_runtime.errors import HostError, UsageError
from rvbundle_runtime.host import Emulator, read_host
from rvbundle_runtime.launchers import qemu
from rvbundle_runtime.launchers.start import SMALL_PAGES
from rvbundle_runtime.processor import XTHEADVECTOR, Processor
from rvbundle_runtime.trials import Outcome

OK, WARN, FAIL = "ok", "warn", "fail"

# memfd_create(2), and what Debian's glibc for riscv64 is built for.
_KERNEL_MIN = {"x86_64": (3, 17), "aarch64": (3, 17), "riscv64": (4, 15)}
_PAGE = 4096  # bytes: what libraries are laid out for and trimmed by, but for aarch64 (64 KiB)
_FREE_FAIL, _FREE_WARN = 16 << 20, 512 << 20  # bytes: the store's spare, and an unpacked agent with torch
_MEMORY_WARN = 512 << 20  # bytes: recipes/cartpole-policy-gradient peaks at 278 MiB (make bench)
_SHM_WARN = 64 << 20  # bytes: what Docker gives to a container
# What numeric libraries pick their kernels by, in the kernel's words.
_FEATURES = {
    "x86_64": (
        *("sse4_2", "avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
        *("amx_tile", "amx_bf16", "amx_int8"),
    ),
    "aarch64": ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
}
_RISCV_BASE = "imafdc"  # rv64gc, which Debian is built for
_RISCV_LETTERS = "imafdqcbvh"  # in the order of an ISA string
_RISCV_FEATURES = ("zvl", "zvfh", "zvfbf", "zfbf", "zfh", "zba", "zbb", "zbs")  # names that begin like these
_DECIMAL = ("family", "model", "stepping", "variant", "revision")  # numbers that the kernel writes so
_CONTAINERS = {
    "docker": "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined",
    "podman": "podman run --security-opt seccomp=unconfined --security-opt unmask=ALL",
}


@dataclass(frozen=True)
class Finding:
    """One line: how bad it is, what it is about, what was found, and what to do ("" for nothing)."""

    level: str
    topic: str
    text: str
    advice: str = ""


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Judge `facts`; every topic has a finding, the good ones too."""
    return (
        _kernel(facts),
        *_sandbox(facts),
        _binfmt(facts),
        *_emulators(facts),
        _page_size(facts),
        _addresses(facts),
        *_processors(facts),
        *_trials(facts),
        _memory(facts),
        _store(facts),
        _shared_memory(facts),
        _decoder(facts),
    )


def _kernel(facts: Facts) -> Finding:
    name = f"Linux {facts.kernel} on {facts.arch}"
    least = _KERNEL_MIN.get(facts.arch)
    if least is None:
        known = ", ".join(sorted(_KERNEL_MIN))
        return Finding(FAIL, "kernel", f"{name}: there are payloads for {known} only", "use such a machine")
    if _version(facts.kernel) < least:
        return Finding(
            FAIL, "kernel", f"{name} is too old", f"use Linux {least[0]}.{least[1]} or newer ({_KERNEL_WHY})"
        )
    return Finding(OK, "kernel", name)


_KERNEL_WHY = "what payloads' C library and rvbundle call is not in older ones"


def _version(kernel: str) -> tuple[int, int]:
    """Read major and minor version of a kernel's release; what can't be read counts as new."""
    found = re.match(r"(\d+)\.(\d+)", kernel)
    return (int(found[1]), int(found[2])) if found else (99, 0)


def _sandbox(facts: Facts) -> Iterator[Finding]:
    confinement = facts.confinement
    if facts.namespaces_denied and facts.uid:
        advice = f"{facts.namespaces_fix}{_container_advice(facts)}"
        advice += "; or, if you trust the agent as you trust yourself: rvbundle run --no-sandbox"
        yield Finding(FAIL, "namespaces", f"no user namespaces: {facts.namespaces_denied}", advice)
        return
    if facts.namespaces_denied:
        text = f"no user namespaces: {facts.namespaces_denied}; root can do without, other users can't"
        yield Finding(WARN, "namespaces", text, facts.namespaces_fix)
    else:
        yield Finding(OK, "namespaces", "user namespaces can be had, and mounts in them")
    if confinement.failed:
        advice = f"{confinement.hint or 'see the kernel log (dmesg)'}{_container_advice(facts)}"
        yield Finding(FAIL, "sandbox", confinement.failed, advice)
    elif confinement.shared_proc:
        text = "it can be made, but agents see the processes of this container: no new /proc is allowed"
        yield Finding(
            WARN, "sandbox", text, f"nothing, or{_container_advice(facts)[1:]}" if _engine(facts) else ""
        )
    else:
        yield Finding(OK, "sandbox", "it can be made")


def _engine(facts: Facts) -> str:
    return facts.container if facts.container in _CONTAINERS else ""


def _container_advice(facts: Facts) -> str:
    """Return what to add to an advice where a container's engine may be what denies something."""
    if facts.namespaces_fix.startswith("sudo sysctl"):  # then the kernel itself has said why
        return ""
    if _engine(facts):
        return f"; in this container: start it with {_CONTAINERS[facts.container]}"
    if facts.container:
        return f"; in this container ({facts.container}): let its engine allow user namespaces and mounts"
    if facts.seccomp:
        return "; a seccomp filter is in force here: what set it up (a container engine?) must allow them"
    return ""


def _binfmt(facts: Facts) -> Finding:
    if not facts.binfmt:
        text = "a sandbox can have a binfmt_misc of its own: the kernel emulates children"
        return Finding(OK, "binfmt", text)
    advice = "nothing: children of emulated agents are started through the emulator by a preloaded library"
    if facts.binfmt == binfmt.NO_BINFMT:
        advice = f"sudo modprobe binfmt_misc; or {advice}"
    return Finding(WARN, "binfmt", f"a sandbox can have no binfmt_misc of its own: {facts.binfmt}", advice)


def _emulators(facts: Facts) -> Iterator[Finding]:
    """Judge what emulates other machines; one that fails matters only where no other does its work."""
    for guest in GUESTS:
        found = [emulator for emulator in facts.emulators if emulator.guest == guest]
        works = any(not emulator.probe for emulator in found)
        for emulator in found:
            text = f"{guest}: {emulator.path}"
            if not emulator.probe:
                yield Finding(OK, "emulators", f"{text}, version {emulator.version}, passes its probe")
            elif works:
                yield Finding(OK, "emulators", f"{text} {emulator.probe}: not used")
            else:
                yield Finding(WARN, "emulators", f"{text} {emulator.probe}", _emulator_advice(emulator))
        if not found and guest != facts.arch:
            yield _no_emulator(facts, guest)


def _no_emulator(facts: Facts, guest: str) -> Finding:
    # Images have a payload for x86-64 before they have one for anything else.
    if guest == "x86_64":
        text = f"{guest}: none: images without a payload for {facts.arch} can't run"
        return Finding(WARN, "emulators", text, _INSTALL)
    return Finding(OK, "emulators", f"{guest}: none, and none is needed for payloads of {facts.arch}")


_INSTALL = f"{qemu.INSTALL}, or name a folder that has one: RVBUNDLE_EMULATORS=FOLDER"


def _emulator_advice(emulator: Emulator) -> str:
    if emulator.probe == emulators.NOT_EXECUTABLE:
        return f"chmod +x {emulator.path}"
    return _INSTALL


def _page_size(facts: Facts) -> Finding:
    text = f"{facts.page_size >> 10} KiB"
    if facts.page_size == _PAGE:
        return Finding(OK, "page size", text)
    if facts.arch != "aarch64":
        return Finding(
            FAIL,
            "page size",
            f"{text}: payloads for {facts.arch} need 4 KiB",
            "boot a kernel with pages of 4 KiB",
        )
    text += ": arm64 payloads run (they are laid out for up to 64 KiB); "
    text += "emulated x86_64 and riscv64 ones need 4 KiB"
    return Finding(WARN, "page size", text, f"to emulate, {SMALL_PAGES}")


def _addresses(facts: Facts) -> Finding:
    mode = re.fullmatch(r"sv(\d+)", facts.mmu) if facts.arch == "riscv64" else None
    if mode:
        bits, name = int(mode[1]) - 1, f"Sv{mode[1]}, "  # half of them are the kernel's
    else:
        bits, name = facts.top_address.bit_length(), ""
    text = f"{name}programs have {bits} bits"
    if bits < 47:
        text += (
            ": enough, for nothing of an image has a fixed address; "
            f"other emulated programs that ask for addresses above 2^{bits} fail"
        )
    return Finding(OK, "addresses", text)


def _processors(facts: Facts) -> Iterator[Finding]:
    features = _features(facts)
    text = f"{len(facts.usable)} of {len(facts.cpus)} may be used; "
    text += ", ".join(features) or "no vector extension known"
    if facts.processor.name or facts.processor.ids:
        text = f"{_name(facts.processor)}: {text}"
    missing = _missing(facts)
    if missing:
        level = FAIL if facts.arch == "riscv64" else WARN
        yield Finding(level, "processors", f"{text}; {missing[0]}", missing[1])
    else:
        yield Finding(OK, "processors", text)
    if len(facts.clusters) > 1:
        yield Finding(OK, "processors", _clusters(facts))
    if facts.quota is not None and facts.quota < len(facts.usable):
        threads = max(1, int(facts.quota))
        yield Finding(
            WARN,
            "processors",
            f"the control group gives the time of {facts.quota:g} of them; "
            "numeric libraries start a thread for each that may be used",
            f"rvbundle run --env OMP_NUM_THREADS={threads}, or raise the limit",
        )


def _name(processor: Processor) -> str:
    """Return its name, and the numbers by which libraries and compilers know it."""
    numbers = ", ".join(
        f"{name} {number if name in _DECIMAL else hex(number)}" for name, number in processor.ids
    )
    return f"{processor.name} ({numbers})" if processor.name and numbers else processor.name or numbers


def _clusters(facts: Facts) -> str:
    parts = []
    for cluster in facts.clusters:
        part = f"{_ranges(cluster.cpus)} {cluster.name}".rstrip()
        part += f" (capacity {cluster.capacity})" if cluster.capacity else ""
        part += "" if set(cluster.cpus) & set(facts.usable) else ", not for this process"
        parts.append(part)
    return f"they are of {len(parts)} kinds: {'; '.join(parts)}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers, in order, as the kernel does: 0-3,8."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and groups[-1][-1] == number - 1:
            groups[-1][1:] = [number]
        else:
            groups.append([number])
    return ",".join("-".join(map(str, group)) for group in groups)


def _features(facts: Facts) -> list[str]:
    """Return the features that numeric libraries care about."""
    flags = facts.processor.flags
    if facts.arch != "riscv64":
        return [name for name in _FEATURES.get(facts.arch, ()) if name in flags]
    letters = "".join(letter for letter in _RISCV_LETTERS if letter in flags)
    found = [f"rv64{letters}"] if letters else []
    if XTHEADVECTOR in flags:
        found.append(f"{XTHEADVECTOR}: vectors of version 0.7, for which libraries use scalar code")
    elif letters and "v" not in letters:
        found.append("no vector extension: numeric code is scalar")
    elif facts.processor.vlen:
        found.append(f"vectors of {facts.processor.vlen} bits")
    return found + sorted(name for name in flags if name.startswith(_RISCV_FEATURES))


def _missing(facts: Facts) -> tuple[str, str] | None:
    """Return what the processor lacks, and what to do; None if nothing that matters."""
    flags = facts.processor.flags
    if facts.arch == "riscv64" and flags:
        lacking = [letter for letter in _RISCV_BASE if letter not in flags]
        if lacking:
            return f"without {', '.join(lacking)}", "payloads are built for rv64gc: use a board that has it"
    if facts.arch == "x86_64" and flags and "sse4_2" not in flags:
        return (
            "no SSE4.2: kernels of numeric libraries that builds trace need it",
            "keep the cold pack at hand",
        )
    return None


def _trials(facts: Facts) -> Iterator[Finding]:
    """Say which instructions were tried, and where they tell something else than the kernel."""
    if not facts.trials:
        return
    unknown = next((outcome.unknown for outcome in facts.trials if outcome.unknown), "")
    if unknown:
        yield Finding(OK, "trials", f"not all could be made: {unknown}")
    told = [outcome for outcome in facts.trials if not outcome.unknown]
    works = [_tried(outcome) for outcome in told if outcome.works]
    fails = [outcome.name for outcome in told if not outcome.works]
    parts = [
        f"instructions that work: {', '.join(works)}" if works else "",
        f"instructions that do not: {', '.join(fails)}" if fails else "",
    ]
    if told:
        yield Finding(OK, "trials", "; ".join(part for part in parts if part))
    for outcome in told:
        claimed = outcome.name in facts.processor.flags
        if claimed and not outcome.works:
            text = f"{outcome.name}: the kernel says that it is there, but its instructions are refused"
            yield Finding(WARN, "trials", text, "nothing, but do not ask libraries for it")
        elif outcome.works and not claimed:
            yield Finding(OK, "trials", f"{outcome.name}: it works, but the kernel does not tell of it")


def _tried(outcome: Outcome) -> str:
    return f"v ({outcome.value * 8} bits)" if outcome.name == "v" else outcome.name


def _memory(facts: Facts) -> Finding:
    memory = facts.memory
    usable = memory.available if memory.limit is None else min(memory.available, memory.limit)
    text = f"{_mib(usable)} available of {_mib(memory.total)}"
    if memory.limit is not None:
        text += f", the control group allows {_mib(memory.limit)}"
    if usable < _MEMORY_WARN:
        return Finding(
            WARN, "memory", f"{text}: an agent with torch may not fit", "end other programs, or add swap"
        )
    return Finding(OK, "memory", text)


def _store(facts: Facts) -> Finding:
    place = facts.store
    if place.unusable:
        advice = "set RVBUNDLE_CACHE to a folder of yours on a file system that is not read-only or noexec"
        return Finding(FAIL, "store", f"images can't be unpacked and run: {place.unusable}", advice)
    text = f"{place.base} ({place.reason}), {_mib(place.free)} free"
    advice = "free some space (rvbundle cache prune), or set RVBUNDLE_CACHE to a folder on a larger disk"
    if place.free < _FREE_FAIL:
        return Finding(FAIL, "store", f"{text}: too little for any image", advice)
    if place.free < _FREE_WARN:
        return Finding(WARN, "store", f"{text}: an agent with torch may not fit", advice)
    return Finding(OK, "store", text)


def _shared_memory(facts: Facts) -> Finding:
    if facts.shm_free is None:
        text = "there is no /dev/shm: with --no-sandbox, processes can't share memory (a sandbox has its own)"
        return Finding(WARN, "/dev/shm", text, "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
    text = f"{_mib(facts.shm_free)} free"
    if facts.shm_free < _SHM_WARN:
        text += ": little for processes that share tensors, with --no-sandbox (a sandbox has its own)"
        advice = (
            "docker run --shm-size 1g"
            if facts.container == "docker"
            else "sudo mount -o remount,size=50% /dev/shm"
        )
        return Finding(WARN, "/dev/shm", text, advice)
    return Finding(OK, "/dev/shm", text)


def _decoder(facts: Facts) -> Finding:
    if facts.zstd:
        return Finding(FAIL, "zstd", facts.zstd, "pip install zstandard, or use Python 3.14 or newer")
    return Finding(OK, "zstd", "images can be decoded")


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


USAGE = """\
usage: doctor [--json]

Say what this machine lacks to run images well, and what to do about it."""


def main(argv: list[str]) -> int:
    """Print the findings; return 0, or HostError's exit code if one is a failure. Raises UsageError."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    for word in argv:
        if word != "--json":
            raise UsageError(f"doctor: no such option: {word}", "the only one is --json")
    findings = examine(read_facts(read_host()))
    if argv:
        import json

        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        sys.stdout.write("".join(f"{line}\n" for finding in findings for line in to_lines(finding)))
    return HostError.exit_code if any(finding.level == FAIL for finding in findings) else 0


def to_lines(finding: Finding) -> list[str]:
    """Return a finding as text: a line, and one with what to do if something is to be done."""
    lines = [f"{finding.level:<4}  {finding.topic:<10}  {finding.text}"]
    if finding.advice:
        lines.append(f"{'':18}-> {finding.advice}")
    return lines
