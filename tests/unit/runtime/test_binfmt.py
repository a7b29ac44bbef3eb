import os
import struct

import pytest

from rvbundle_runtime import binfmt

BOTH = ("x86_64", "aarch64", "riscv64")
MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}


def parse(line: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Read a line as the kernel does; return magic, mask, interpreter and flags."""
    _, name, kind, offset, magic, mask, interpreter, flags = line.split(b":")
    assert (name, kind, offset) == (b"rvbundle", b"M", b"")
    raw = [bytes.fromhex(text.replace(b"\\x", b"").decode()) for text in (magic, mask)]
    return raw[0], raw[1], interpreter, flags


def header(machine: int, kind: int, osabi: int = 0, elf_class: int = 2, padding: bytes = bytes(7)) -> bytes:
    identity = b"\x7fELF" + bytes([elf_class, 1, 1, osabi, 0]) + padding
    return identity + struct.pack("<HHI", kind, machine, 1)


def matches(line: bytes, data: bytes) -> bool:
    magic, mask, _, _ = parse(line)
    return all((a ^ b) & m == 0 for a, b, m in zip(magic, data, mask, strict=False))


@pytest.mark.parametrize("guest", BOTH)
def test_rules(guest: str) -> None:
    line = binfmt.rule(guest, "/opt/q emu")
    magic, mask, interpreter, flags = parse(line)
    assert (len(magic), len(mask), interpreter, flags) == (20, 20, b"/opt/q emu", b"PF")
    for kind, osabi in ((2, 0), (3, 0), (2, 3), (3, 3)):
        assert matches(line, header(MACHINES[guest], kind, osabi))
    assert not matches(line, header(MACHINES[guest], 1))  # ET_REL
    assert not matches(line, header(MACHINES[guest], 3, elf_class=1))
    assert not matches(line, header(MACHINES[guest], 3, padding=b"\0\0\0\0\0\0\1"))  # marked
    assert not any(matches(line, header(MACHINES[other], 3)) for other in BOTH if other != guest)
    assert not matches(line, b"#!/bin/sh\n" + bytes(20))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "the kernel gives a user namespace none of its own (Linux 6.7 and newer do)"),
        (19, "the kernel has none"),
        (28, "no space left on device"),
    ],
)
def test_why_denied(code: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(uid: int, gid: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(binfmt, "enter", enter)
    assert binfmt.why_denied(os.getuid(), os.getgid()) == text
