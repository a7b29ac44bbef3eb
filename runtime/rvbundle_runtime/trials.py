"""Instructions that are tried, for the kernel does not tell of them, or tells wrongly.

Each is run in a child process, which an unknown instruction ends (SIGILL). An old kernel has no name for what
its processor can do; a processor may refuse what its maker lists. `doctor` makes these trials, not every run.
"""

import os
import signal
from dataclasses import dataclass

from rvbundle_runtime import syscalls


@dataclass(frozen=True)
class Trial:
    """Machine code that shows whether `arch` has the feature `name` (by the name of a processor's flag).

    The code is a C function that returns a number other than 0 if all is well; a trial of a vector extension
    of RISC-V `needs` that of vectors to pass.
    """

    name: str
    arch: str
    code: bytes
    needs: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: what the code returned, or why there is no knowing (`unknown`)."""

    name: str
    works: bool
    value: int = 0
    unknown: str = ""


def _words(*words: int) -> bytes:
    return b"".join(word.to_bytes(4, "little") for word in words)


# Encodings: the RISC-V ISA manual ("V", "Zvfbfmin", "Zvfbfwma", "Zvfh"), Arm's reference manual (BFDOT,
# BFMMLA), Intel's manual (VDPBF16PS). A unit test makes them again of their fields. All registers that are
# written belong to the callee by the C calling conventions.
_RISCV_ONE = (
    0x00100513,  # li a0, 1
    0x00008067,  # ret
)
_VSET_E16 = 0xCC80F057  # vsetivli zero, 1, e16, m1, ta, ma

# Returns vlenb, the bytes of a vector register. Vectors of version 0.7 have other types: for them the one
# that is set here is no legal one, which shows in vtype's sign (vill).
VLENB = _words(
    0x0C0072D7,  # vsetvli t0, zero, e8, m1, ta, ma
    0xC21022F3,  # csrr t0, vtype
    0x43F2D293,  # srai t0, t0, 63
    0xFFF2C293,  # not t0, t0
    0xC2202573,  # csrr a0, vlenb
    0x00557533,  # and a0, a0, t0
    0x00008067,  # ret
)
TRIALS = (
    Trial("v", "riscv64", VLENB),
    Trial("zvfh", "riscv64", _words(_VSET_E16, 0x02209257, *_RISCV_ONE), "v"),  # vfadd.vv v4, v2, v1
    Trial("zvfbfmin", "riscv64", _words(_VSET_E16, 0x4A269257, *_RISCV_ONE), "v"),  # vfwcvtbf16.f.f.v v4, v2
    Trial(
        "zvfbfwma", "riscv64", _words(_VSET_E16, 0xEE209257, *_RISCV_ONE), "v"
    ),  # vfwmaccbf16.vv v4, v1, v2
    Trial(
        "bf16",
        "aarch64",
        _words(
            0x6E42FC20,  # bfdot v0.4s, v1.8h, v2.8h
            0x6E42EC20,  # bfmmla v0.4s, v1.8h, v2.8h
            0x52800020,  # mov w0, #1
            0xD65F03C0,  # ret
        ),
    ),
    Trial(
        "avx512_bf16",
        "x86_64",
        bytes.fromhex(
            "62f2764852c2"  # vdpbf16ps zmm0, zmm1, zmm2
            "c5f877"  # vzeroupper
            "b801000000"  # mov eax, 1
            "c3"  # ret
        ),
    ),
)


def make(arch: str) -> tuple[Outcome, ...]:
    """Make all trials for `arch`, which must be this machine's; costs a short-lived child each."""
    made: dict[str, Outcome] = {}
    for trial in TRIALS:
        if trial.arch == arch:
            needed = made.get(trial.needs)
            missing = needed is not None and not needed.works
            made[trial.name] = Outcome(trial.name, False) if missing else attempt(trial)
    return tuple(made.values())


# Exit codes of a child: the number that the code returned as its count of bits, or that it could not be run.
_NO_CODE = 100


def attempt(trial: Trial) -> Outcome:
    """Run the code of one trial in a child process."""
    pid = os.fork()
    if pid == 0:
        status = _NO_CODE
        try:
            signal.signal(signal.SIGILL, signal.SIG_DFL)  # it may be expected: no report of it, no core file
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
            status = min(syscalls.call_code(trial.code).bit_length(), 64)
        finally:
            os._exit(status)  # whatever happens, this process must not run on as its parent
    _, ended = os.waitpid(pid, 0)
    return read_outcome(trial.name, os.waitstatus_to_exitcode(ended))


def read_outcome(name: str, code: int) -> Outcome:
    """Return what a child's exit code means; a number that it returned is a power of two, or 0."""
    if code == _NO_CODE:
        return Outcome(name, False, unknown="code can't be run from memory here")
    if code < 0 and -code != signal.SIGILL:
        return Outcome(name, False, unknown=f"the trial was ended by signal {-code}")
    return Outcome(name, code > 0, 1 << (code - 1) if code > 0 else 0)
