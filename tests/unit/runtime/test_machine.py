import pytest

from rvbundle_runtime import families, machine
from rvbundle_runtime.machine import cpuinfo, parse_cpu_list
from rvbundle_runtime.processor import parse_cpuinfo

NEHALEM = machine.processors()["qemu", "nehalem"]
BOX64 = machine.processors()["box64", "box64-sse"]


def test_cpuinfo_says_what_is_emulated() -> None:
    text = cpuinfo(NEHALEM, (0, 1, 5))
    assert parse_cpuinfo(text) == NEHALEM.processor
    blocks = [dict(line.split(":", 1) for line in b.splitlines()) for b in text.split("\n\n")[:-1]]
    fields = [{name.strip(): value.strip() for name, value in block.items()} for block in blocks]
    assert text.startswith("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 26\n")
    assert [f["processor"] for f in fields] == ["0", "1", "5"]
    assert {(f["siblings"], f["cpu cores"], f["vendor_id"]) for f in fields} == {("3", "3", "GenuineIntel")}
    assert (fields[0]["cpu family"], fields[0]["model"], fields[0]["stepping"]) == ("6", "26", "3")


def test_no_text_where_the_emulator_writes_it() -> None:
    assert cpuinfo(machine.DEFAULT, (0, 1)) == cpuinfo(BOX64, (0, 1)) == ""


@pytest.mark.parametrize("model", [NEHALEM, BOX64], ids=["qemu", "box64"])
def test_emulated_processors_have_exactly_the_baseline(model: machine.Model) -> None:
    found = families.to_trace("x86_64", model.processor, ())
    assert [family.name for family in found] == ["baseline"]


@pytest.mark.parametrize(
    ("text", "expected"), [("0\n", (0,)), ("0-3\n", (0, 1, 2, 3)), ("0-1,4,6-7", (0, 1, 4, 6, 7))]
)
def test_cpu_lists(text: str, expected: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1-x", "-"])
def test_what_is_no_cpu_list(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpu_list(text)
