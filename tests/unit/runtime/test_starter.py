import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rvbundle_runtime import binfmt, starter
from rvbundle_runtime.host import read_host
from rvbundle_runtime.launchers import Start

from .test_binfmt import BOTH, matches


def test_a_marked_program_does_not_match() -> None:
    """The emulator of the host's own architecture must not be run by itself."""
    original = Path(sys.executable).read_bytes()
    marked = starter.marked(original)
    assert marked[:15] + original[15:16] + marked[16:] == original
    line = binfmt.rule(read_host().arch, "/x")
    assert matches(line, original)
    assert not matches(line, marked)


START = Start(("/e/qemu", "-cpu", "Nehalem"), argv0="-0", argv0_variable="ARG0", env={"A": "1=2", "B": ""})


def test_settings_of_the_starter() -> None:
    text = starter._SETTINGS
    program = b"\x7fELF" + bytes(60) + text + bytes(8192 - len(text)) + b"end"
    result = starter.with_settings(program, START)
    settings = b"\0".join([b"w/e/qemu", b"w-cpu", b"wNehalem", b"0-0", b"aARG0", b"vA=1=2", b"vB=", b"", b""])
    assert len(result) == len(program)
    assert result[64:].startswith(settings)
    assert result.endswith(b"\0end")
    with pytest.raises(OSError, match="Argument list too long"):
        starter.with_settings(program, replace(START, env={"A": "x" * 9000}))


@pytest.mark.parametrize("arch", BOTH)
def test_every_starter_has_room_for_settings(arch: str) -> None:
    program = (Path(binfmt.__file__).parent / "native" / arch / "starter").read_bytes()
    place = program.index(starter._SETTINGS)
    rest = program[place + len(starter._SETTINGS) : place + starter._SETTINGS_SIZE]
    assert rest == bytes(starter._SETTINGS_SIZE - len(starter._SETTINGS))
    assert matches(binfmt.rule(arch, "/x"), program)  # unless marked
    made = starter.with_settings(program, START)
    assert matches(binfmt.rule(arch, "/x"), made)
    assert not matches(binfmt.rule(arch, "/x"), starter.marked(made))
