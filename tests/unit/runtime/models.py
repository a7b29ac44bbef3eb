"""Rows of backends.toml that tests name."""

from rvbundle_runtime import families, machine

NEHALEM = machine.processors()["qemu", "nehalem"]
BOX64 = machine.processors()["box64", "box64-sse"]
V128 = machine.processors()["qemu", "rv64-v128"]
V256 = machine.processors()["qemu", "rv64-v256"]
ZVL256B, ZVL128B, GENERIC = families.of("riscv64")
