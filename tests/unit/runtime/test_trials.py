import os
import platform
import signal
from pathlib import Path

import pytest

from rvbundle_runtime import syscalls, trials
from rvbundle_runtime.trials import Outcome, Trial

# Fields of instructions, by the names of the ISA manuals.


def op_v(funct6: int, vm: int, vs2: int, vs1: int, funct3: int, vd: int) -> int:
    """A vector arithmetic instruction of RISC-V ("Vector Arithmetic Instruction encoding")."""
    return funct6 << 26 | vm << 25 | vs2 << 20 | vs1 << 15 | funct3 << 12 | vd << 7 | 0b1010111


OPFVV, OPCFG = 0b001, 0b111
VFUNARY0, VFWCVTBF16 = 0b010010, 0b01101


def vtype(vma: int, vta: int, vsew: int, vlmul: int) -> int:
    return vma << 7 | vta << 6 | vsew << 3 | vlmul


def vsetvli(rd: int, rs1: int, zimm: int) -> int:
    return 0 << 31 | zimm << 20 | rs1 << 15 | OPCFG << 12 | rd << 7 | 0b1010111


def vsetivli(rd: int, uimm: int, zimm: int) -> int:
    return 0b11 << 30 | zimm << 20 | uimm << 15 | OPCFG << 12 | rd << 7 | 0b1010111


def csrrs(rd: int, csr: int, rs1: int) -> int:
    return csr << 20 | rs1 << 15 | 0b010 << 12 | rd << 7 | 0b1110011


def op_imm(funct3: int, rd: int, rs1: int, imm: int) -> int:
    return (imm & 0xFFF) << 20 | rs1 << 15 | funct3 << 12 | rd << 7 | 0b0010011


def op(funct7: int, funct3: int, rd: int, rs1: int, rs2: int) -> int:
    return funct7 << 25 | rs2 << 20 | rs1 << 15 | funct3 << 12 | rd << 7 | 0b0110011


ZERO, RA, T0, A0 = 0, 1, 5, 10
ADDI, XORI, SRAI, AND = 0b000, 0b100, 0b101, 0b111
RISCV_RET = RA << 15 | 0b1100111  # jalr zero, 0(ra)
VTYPE, VLENB = 0xC21, 0xC22
E8, E16, M1 = 0b000, 0b001, 0b000
RISCV_END = [op_imm(ADDI, A0, ZERO, 1), RISCV_RET]
SET_E16 = vsetivli(ZERO, 1, vtype(1, 1, E16, M1))


def three_same_extra(q: int, u: int, size: int, rm: int, opcode: int, rn: int, rd: int) -> int:
    """Arm's "Advanced SIMD three-register extension"."""
    return (
        q << 30
        | u << 29
        | 0b01110 << 24
        | size << 22
        | rm << 16
        | 1 << 15
        | opcode << 11
        | 1 << 10
        | (rn << 5 | rd)
    )


def movz(sf: int, imm16: int, rd: int) -> int:
    return sf << 31 | 0b10100101 << 23 | imm16 << 5 | rd


def evex(mmm: int, w: int, vvvv: int, pp: int, vector_length: int, opcode: int, reg: int, rm: int) -> bytes:
    """Intel's EVEX, for registers below 8 and no mask."""
    p0 = 1 << 7 | 1 << 6 | 1 << 5 | 1 << 4 | mmm
    p1 = w << 7 | (~vvvv & 15) << 3 | 1 << 2 | pp
    p2 = vector_length << 5 | 1 << 3
    return bytes([0x62, p0, p1, p2, opcode, 0b11 << 6 | reg << 3 | rm])


def words(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


MAP_0F38, PP_F3, BITS_512 = 0b010, 0b10, 0b10
EXPECTED = {
    "v": words(
        vsetvli(T0, ZERO, vtype(1, 1, E8, M1)),
        csrrs(T0, VTYPE, ZERO),
        op_imm(SRAI, T0, T0, 0b010000 << 6 | 63),
        op_imm(XORI, T0, T0, -1),
        csrrs(A0, VLENB, ZERO),
        op(0, AND, A0, A0, T0),
        RISCV_RET,
    ),
    "zvfh": words(SET_E16, op_v(0b000000, 1, 2, 1, OPFVV, 4), *RISCV_END),
    "zvfbfmin": words(SET_E16, op_v(VFUNARY0, 1, 2, VFWCVTBF16, OPFVV, 4), *RISCV_END),
    "zvfbfwma": words(SET_E16, op_v(0b111011, 1, 2, 1, OPFVV, 4), *RISCV_END),
    "bf16": words(
        three_same_extra(1, 1, 0b01, 2, 0b1111, 1, 0),
        three_same_extra(1, 1, 0b01, 2, 0b1101, 1, 0),
        movz(0, 1, 0),
        0b1101011 << 25 | 0b0010 << 21 | 0b11111 << 16 | 30 << 5,  # ret x30
    ),
    "avx512_bf16": evex(MAP_0F38, 0, 1, PP_F3, BITS_512, 0x52, 0, 2)
    + bytes([0xC5, 0b11111000, 0x77])  # VEX.128.0F.WIG 77
    + bytes([0xB8 + 0, 1, 0, 0, 0])  # B8+rd id
    + bytes([0xC3]),
}


@pytest.mark.parametrize("trial", trials.TRIALS, ids=lambda trial: trial.name)
def test_encodings(trial: Trial) -> None:
    assert trial.code.hex(" ", 4) == EXPECTED[trial.name].hex(" ", 4)


def test_every_trial_has_a_name_of_its_own() -> None:
    names = [trial.name for trial in trials.TRIALS]
    assert sorted(names) == sorted(EXPECTED)
    assert {trial.needs for trial in trials.TRIALS} <= {"", *names}


# Of any machine that the tests run on: "return 32" and an instruction that is none.
RETURN_32 = {
    "x86_64": bytes.fromhex("b820000000c3"),
    "aarch64": words(movz(0, 32, 0), 0xD65F03C0),
    "riscv64": words(op_imm(ADDI, A0, ZERO, 32), RISCV_RET),
}
ILLEGAL = {"x86_64": bytes.fromhex("0f0b"), "aarch64": words(0), "riscv64": words(0)}
MACHINE = platform.machine()


def test_code_that_returns() -> None:
    assert syscalls.call_code(RETURN_32[MACHINE]) == 32
    assert trials.attempt(Trial("x", MACHINE, RETURN_32[MACHINE])) == Outcome("x", True, 32)


def test_code_that_is_refused() -> None:
    assert trials.attempt(Trial("x", MACHINE, ILLEGAL[MACHINE])) == Outcome("x", False)


def test_where_no_code_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: bytes) -> int:
        raise PermissionError(13, "Permission denied", "mprotect")

    monkeypatch.setattr(syscalls, "call_code", refuse)
    expected = Outcome("x", False, unknown="code can't be run from memory here")
    assert trials.attempt(Trial("x", MACHINE, b"")) == expected


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, Outcome("x", False)),
        (1, Outcome("x", True, 1)),
        (6, Outcome("x", True, 32)),
        (-signal.SIGILL, Outcome("x", False)),
        (-signal.SIGSEGV, Outcome("x", False, unknown="the trial was ended by signal 11")),
        (100, Outcome("x", False, unknown="code can't be run from memory here")),
    ],
)
def test_outcomes(code: int, outcome: Outcome) -> None:
    assert trials.read_outcome("x", code) == outcome


def test_extensions_of_vectors_are_not_tried_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def attempt(trial: Trial) -> Outcome:
        tried.append(trial.name)
        return Outcome(trial.name, works, 1)

    monkeypatch.setattr(trials, "attempt", attempt)
    works = False
    names = [trial.name for trial in trials.TRIALS if trial.arch == "riscv64"]
    made = trials.make("riscv64")
    assert (tried, [outcome.name for outcome in made]) == (["v"], names)
    assert not any(outcome.works for outcome in made)
    works = True
    assert len(trials.make("riscv64")) == len(names)
    assert tried == ["v", *names]
    assert trials.make("s390x") == ()


@pytest.mark.skipif(MACHINE != "x86_64", reason="an instruction of x86-64")
def test_the_kernel_of_this_machine_says_the_same() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert trials.make(MACHINE) == (
        Outcome("avx512_bf16", "avx512_bf16" in flags, int("avx512_bf16" in flags)),
    )


def test_no_child_is_left() -> None:
    trials.make(MACHINE)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
