import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rvbundle import explain as explaining
from rvbundle import inspection
from rvbundle.elf import split_tail
from rvbundle.licences import Licence
from rvbundle_runtime import bootstraps
from rvbundle_runtime import format as fmt
from rvbundle_runtime.bootstraps import Section, Table
from rvbundle_runtime.errors import ImageError, StoreError, UsageError
from rvbundle_runtime.host import CachePlace
from rvbundle_runtime.image import Reader

from ..images import ARCH, SMALL, SMALL_TREE, build, folder, forge, item, link, tree
from ..runtime.test_plan import HOST


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "demo-1.0.rvb"
    build(path)
    return path


def cold_for(image: Path, *items: Any) -> Path:
    with Reader(image) as reader:
        identity = reader.identity
    path = image.with_name("demo-1.0.cold.rvb")
    build(
        path, items or [item("usr/lib/cold.txt", b"cold", reason="a source: its bytecode")], bound_to=identity
    )
    return path


def test_inspect(image: Path) -> None:
    report = inspection.inspect(image, files=False)
    json.dumps(report)
    with Reader(image) as reader:
        assert report["identity"] == reader.identity
    assert (report["kind"], report["name"], report["version"], report["bound_to"]) == (
        "image",
        "demo",
        "1.0",
        None,
    )
    assert report["size"] == image.stat().st_size
    (payload,) = report["payloads"]
    assert (payload["arch"], payload["argv"]) == (ARCH, ["/usr/bin/agent", "--now"])
    assert "entries" not in payload


def test_sizes_by_package(image: Path) -> None:
    (payload,) = inspection.inspect(image, files=False)["payloads"]
    sizes = {row["name"]: (row["size"], row["version"]) for row in payload["packages"]}
    assert sizes == {
        "numpy": (200, "2.4.6"),
        "(Python and system)": (221, None),  # the program and the other name of numpy's data
        "(the agent)": (9, None),
    }
    with Reader(image) as reader:
        frames = sum(frame.size for frame in reader.index().frames)
    assert sum(row["compressed"] for row in payload["packages"]) == pytest.approx(frames, abs=3)


def test_inspect_files(image: Path) -> None:
    (payload,) = inspection.inspect(image, files=True)["payloads"]
    rows = {row["path"]: row for row in payload["entries"]}
    assert sorted(rows) == sorted(i.path for i in SMALL)
    assert (rows["app/train.py"]["size"], rows["app/train.py"]["package"]) == (9, "(the agent)")
    assert rows["app/train.py"]["reason"] == "a test"
    assert rows["bin"]["kind"] == "l"


def test_inspect_cold_pack(image: Path) -> None:
    report = inspection.inspect(cold_for(image), files=False)
    with Reader(image) as reader:
        assert (report["kind"], report["bound_to"]) == ("cold pack", reader.identity)


def test_shares_of_frames() -> None:
    digest = bytes(32)
    frames = (fmt.Frame(16, 100, 1000, digest), fmt.Frame(116, 50, 500, digest))
    blobs = (fmt.Blob(digest, 0, 0, 900), fmt.Blob(digest, 0, 900, 350), fmt.Blob(digest, 1, 250, 250))
    index = fmt.Index("n", "v", "c", False, {}, frames, (*blobs, fmt.Blob(digest, 0, 0, 0)), (), {})
    assert inspection.compressed_sizes(index) == pytest.approx([90.0, 35.0, 25.0, 0.0])


@pytest.mark.parametrize("name", ["plain", "[/x]", "[bold]", "[red]a[/red]", "\\[x"])
def test_reports_print_any_text(
    tmp_path: Path, image: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def change(value: dict[str, Any]) -> None:
        value["name"] = value["created_by"] = name
        value["payloads"][0]["argv"] = ["/usr/bin/x", name]
        value["payloads"][0]["packages"] = [[name, "1"]]
        value["payloads"][0]["entries"].append([f"usr/lib/{name}.so", "f", 0, 0, 0])
        value["details"] = {"trim": name, "traces": [[name]]}

    path = forge(image, tmp_path / "x.rvb", change)
    inspection.print_report(inspection.inspect(path, files=False))
    out = capsys.readouterr().out
    assert out.startswith(f"{name} 1.0  image, ")
    assert f"starts /usr/bin/x {name}\n" in out
    assert f"usr/lib/{name}.so" in out
    explaining.print_plan(explaining.explain(path, HOST_HERE, CachePlace(tmp_path / "cache", "a test")))
    out = capsys.readouterr().out
    assert out.startswith(f"{name} 1.0 on this machine:\n")
    assert f"  1. {name}\n" in out


HOST_HERE = type(HOST)(**{**vars(HOST), "arch": ARCH})


def test_listing_prints_long_paths_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = "usr/lib/" + "x" * 200 + ".so"
    build(tmp_path / "x.rvb", [item(path, b"1")])
    inspection.print_report(inspection.inspect(tmp_path / "x.rvb", files=True))
    assert f"{path}\n" in capsys.readouterr().out


def test_verify(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspection.verify(image)
    assert [row["file"] for row in report["verified"]] == [str(image)]
    inspection.print_verified(report)
    assert capsys.readouterr().out == f"{image}: intact (image, 3 frames, 4 blobs)\n"


def test_verify_looks_at_the_cold_pack_too(image: Path) -> None:
    cold = cold_for(image)
    assert [row["file"] for row in inspection.verify(image)["verified"]] == [str(image), str(cold)]
    data = bytearray(cold.read_bytes())
    data[20] ^= 1
    cold.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        inspection.verify(image)
    assert caught.value.message == (
        f"{cold} is damaged in 1 of 1 frames; files that are affected:\n    usr/lib/cold.txt"
    )


def test_verify_names_what_is_damaged(image: Path) -> None:
    with Reader(image) as reader:
        index = reader.index()
        entry = next(e for e in index.payloads[0].entries if e.path == "usr/lib/data.txt")
        frame = index.frames[index.blobs[entry.blob].frame]
    data = bytearray(image.read_bytes())
    data[frame.offset + 8] ^= 0xFF
    image.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        inspection.verify(image)
    assert caught.value.message == (
        f"{image} is damaged in 1 of 3 frames; files that are affected:\n"
        "    usr/lib/copy.txt\n    usr/lib/data.txt"
    )
    assert caught.value.hint == "copy it again from its source"


def test_verify_cuts_long_lists(tmp_path: Path) -> None:
    build(tmp_path / "x.rvb", [item(f"f{n:02}", bytes([n])) for n in range(25)])
    data = bytearray((tmp_path / "x.rvb").read_bytes())
    data[20] ^= 1
    (tmp_path / "x.rvb").write_bytes(data)
    with pytest.raises(ImageError) as caught:
        inspection.verify(tmp_path / "x.rvb")
    lines = caught.value.message.splitlines()
    assert (len(lines), lines[1], lines[20], lines[21]) == (22, "    f00", "    f19", "    … and 5 more")


def test_verify_a_foreign_cold_pack(image: Path) -> None:
    cold = image.with_name("demo-1.0.cold.rvb")
    build(cold, bound_to="ab" * 32)
    with pytest.raises(ImageError) as caught:
        inspection.verify(image)
    assert caught.value.message == f"{cold} belongs to another image than {image}"
    assert caught.value.hint == "build both again, or remove it"


def test_extract_the_hot_part(image: Path, tmp_path: Path) -> None:
    result = inspection.extract(image, tmp_path / "out")
    assert tree(tmp_path / "out") == SMALL_TREE
    assert result.note == "the hot part only (no demo-1.0.cold.rvb beside the image)"
    assert (result.files, result.size) == (8, 21 + 200 + 200 + 9)


def test_extract_both(image: Path, tmp_path: Path) -> None:
    cold_for(image)
    result = inspection.extract(image, tmp_path / "out")
    assert tree(tmp_path / "out") == {**SMALL_TREE, "usr/lib/cold.txt": ("file", "", b"cold")}
    assert result.note == "whole"


def test_extract_puts_libraries_together(tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text("int f(void) { return 1; }")
    subprocess.run(["gcc", "-g", "-shared", "-fPIC", "-o", tmp_path / "x.so", tmp_path / "x.c"], check=True)
    parts = split_tail(tmp_path / "x.so")
    assert parts is not None
    image = tmp_path / "demo-1.0.rvb"
    build(image, [item("usr/lib/x.so", parts[0])])
    cold_for(image, item("usr/lib/x.so", parts[1], kind=fmt.TAIL))
    inspection.extract(image, tmp_path / "out")
    assert (tmp_path / "out/usr/lib/x.so").read_bytes() == (tmp_path / "x.so").read_bytes()


def test_extract_ignores_a_foreign_cold_pack(image: Path, tmp_path: Path) -> None:
    build(image.with_name("demo-1.0.cold.rvb"), bound_to="ab" * 32)
    result = inspection.extract(image, tmp_path / "out")
    assert tree(tmp_path / "out") == SMALL_TREE
    assert result.note != "whole"


def test_extract_into_a_folder_that_is_there(image: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    inspection.extract(image, tmp_path / "out")
    assert tree(tmp_path / "out") == SMALL_TREE
    with pytest.raises(StoreError) as caught:
        inspection.extract(image, tmp_path / "out")
    assert (caught.value.message, caught.value.hint) == (f"{tmp_path}/out is not empty", "name a new folder")


def test_extract_onto_a_file(image: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError) as caught:
        inspection.extract(image, tmp_path / "out")
    assert caught.value.message == f"{tmp_path}/out is a file"


def test_extract_where_nothing_can_be_written(image: Path) -> None:
    with pytest.raises(StoreError) as caught:
        inspection.extract(image, Path("/proc/nothing/here"))
    assert caught.value.message.startswith("can't write /proc/nothing")


@pytest.mark.parametrize(
    ("hot", "cold"),
    [
        ([link("evil", "d/.."), link("d", ".")], [item("evil/owned", b"x")]),
        ([link("evil", "usr"), item("usr/x", b"")], [item("evil/owned", b"x")]),
        (
            [link("evil", "d/../owned"), link("d", ".")],
            [item("evil", (64).to_bytes(8, "little") + bytes(64) + b"x", kind=fmt.TAIL)],
        ),
    ],
    ids=["link out of the tree", "link inside the tree", "tail onto a link"],
)
def test_a_cold_pack_never_writes_through_the_links_of_its_image(tmp_path: Path, hot: Any, cold: Any) -> None:
    """Each file alone is checked for entries below links; together they must be as safe."""
    image = tmp_path / "demo-1.0.rvb"
    (tmp_path / "owned").write_bytes(b"precious")
    build(image, hot)
    cold_for(image, *cold)
    with pytest.raises((ImageError, StoreError)):
        inspection.extract(image, tmp_path / "out")
    assert (tmp_path / "owned").read_bytes() == b"precious"


def test_extract_a_damaged_tail(tmp_path: Path) -> None:
    image = tmp_path / "demo-1.0.rvb"
    build(image, [item("usr/lib/x.so", b"library")])
    cold_for(image, item("usr/lib/x.so", b"cut", kind=fmt.TAIL))
    with pytest.raises(ImageError):
        inspection.extract(image, tmp_path / "out")


def test_explain_files(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold_for(image)
    rows = explaining.explain_files(image, "c*.txt")
    assert rows == [
        {"path": "usr/lib/cold.txt", "kind": "f", "side": "cold", "reason": "a source: its bytecode"},
        {"path": "usr/lib/copy.txt", "kind": "f", "side": "hot", "reason": "a test"},
    ]
    explaining.print_files(rows)
    assert capsys.readouterr().out == (
        "cold  usr/lib/cold.txt\n      a source: its bytecode\nhot   usr/lib/copy.txt\n      a test\n"
    )
    assert explaining.explain_files(image, "usr/lib/c*") == rows
    explaining.print_files(explaining.explain_files(image, "nothing"))
    assert capsys.readouterr().out == "no such file in the image or beside it in a cold pack\n"


def test_explain_counts_by_reason(image: Path, tmp_path: Path) -> None:
    place = CachePlace(tmp_path / "cache", "a test")
    report = explaining.explain(image, HOST_HERE, place)
    json.dumps(report)
    assert (report["hot"], report["cold"]) == ({"a test": 8}, None)
    cold_for(image)
    assert explaining.explain(image, HOST_HERE, place)["cold"] == {"a source": 1}
    assert report["choices"][-1] == {
        "what": "store",
        "value": str(tmp_path / "cache"),
        "reason": "a test; will be unpacked there at the first run",
    }
    assert not (tmp_path / "cache").exists()


def test_explain_where_run_would_refuse(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = type(HOST)(
        **{**vars(HOST_HERE), "namespaces_denied": "they are off", "namespaces_fix": "turn them on"}
    )
    report = explaining.explain(image, host, CachePlace(tmp_path / "cache", "a test"))
    assert report["refused"]["message"].endswith("they can't be had: they are off")
    explaining.print_plan(report)
    assert "run would refuse: the sandbox needs user namespaces" in capsys.readouterr().out


def test_explain_with_a_damaged_cold_pack(image: Path, tmp_path: Path) -> None:
    """`run` goes on without it, so `explain` says so instead of failing."""
    image.with_name("demo-1.0.cold.rvb").write_bytes(b"")
    report = explaining.explain(image, HOST_HERE, CachePlace(tmp_path / "cache", "a test"))
    (row,) = [c for c in report["choices"] if c["what"] == "cold pack"]
    assert row["value"] == "none"
    assert "is not usable" in row["reason"]
    assert report["cold"] is None


def with_licences(path: Path, *components: str, bound_to: str = "") -> str:
    rows = [
        [name, "1.0", "GPL-2" if name == "qemu" else "MIT", f"https://{name}.org", ""] for name in components
    ]
    return build(path, details={"licences": {"payload x": rows}}, bound_to=bound_to)


def test_licences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "demo.rvb"
    with_licences(image, "numpy", "qemu")
    report = json.loads(json.dumps(inspection.list_licences(image)))
    assert (report["name"], report["version"], report["file"]) == ("demo", "1.0", str(image))
    assert report["licences"]["payload x"][1] == {
        "component": "qemu",
        "version": "1.0",
        "licence": "GPL-2",
        "source": "https://qemu.org",
        "where": "",
        "wants_source": True,
    }
    inspection.print_licences(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "payload x"
    assert [line.split() for line in lines[1:4]] == [
        ["component", "version", "licence", "source"],
        ["numpy", "1.0", "MIT", "https://numpy.org"],
        ["qemu", "1.0", "GPL-2", "https://qemu.org"],
    ]
    assert lines[4:6] == [
        "1 component whose licence asks for its source beside the file",
        "2 components whose licence text is not at hand",
    ]


def test_licences_of_a_cold_pack_inside(tmp_path: Path) -> None:
    image, cold = tmp_path / "demo.rvb", tmp_path / "cold.rvb"
    identity = with_licences(image, "numpy")
    with_licences(cold, "torch", bound_to=identity)
    both = tmp_path / "both.rvb"
    both.write_bytes(cold.read_bytes() + image.read_bytes())
    names = {
        n: [r["component"] for r in rows] for n, rows in inspection.list_licences(both)["licences"].items()
    }
    assert names == {"payload x": ["numpy"], "cold pack, payload x": ["torch"]}


def test_licences_do_not_come_from_what_is_not_of_the_image(tmp_path: Path) -> None:
    image, other = tmp_path / "demo.rvb", tmp_path / "other.rvb"
    with_licences(image, "numpy")
    with_licences(other, "torch", bound_to="11" * 32)
    for before in (other.read_bytes(), b"#!/bin/sh\nexit 0\n"):
        both = tmp_path / "both.rvb"
        both.write_bytes(before + image.read_bytes())
        assert list(inspection.list_licences(both)["licences"]) == ["payload x"]


def test_an_image_without_a_list_of_licences(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspection.list_licences(image)
    assert report["licences"] is None
    inspection.print_licences(report)
    assert capsys.readouterr().out == f"{image} has no list of licences: an older rvbundle has built it\n"


def test_a_list_of_licences_that_makes_no_sense(tmp_path: Path) -> None:
    build(tmp_path / "demo.rvb", details={"licences": ["MIT"]})
    with pytest.raises(ImageError, match="its list of licences can't be read: expected a table of lists"):
        inspection.list_licences(tmp_path / "demo.rvb")


def self_running(path: Path, image: Path, licences: tuple[tuple[str, ...], ...]) -> None:
    """Write a file with a table as a self-running one has it, and with no bootstrap."""
    script = bootstraps.padded(bootstraps.MAGIC + b"a test\nexit 1\n")
    section = Section("riscv64", 0, 0, "", "", (("qemu-user", "10.0"),), ("qemu-x86_64",), licences)
    size = 0
    for _ in range(2):  # the table tells the size of the whole file
        head = script + bootstraps.dump_table(Table(size, "demo", "1.0", "", (section,)), script)
        size = len(head) + image.stat().st_size
    path.write_bytes(head + image.read_bytes())


def test_licences_of_the_bootstraps_of_a_self_running_file(tmp_path: Path) -> None:
    image = tmp_path / "demo.rvb"
    with_licences(image, "numpy")
    row = ("qemu-user", "10.0", "GPL-2", "Debian source package qemu 10.0", "share/doc/qemu-user/copyright")
    self_running(tmp_path / "demo.run", image, (row,))
    parts = inspection.list_licences(tmp_path / "demo.run")["licences"]
    assert list(parts) == ["payload x", "bootstrap riscv64"]
    assert parts["bootstrap riscv64"] == [{**asdict(Licence(*row)), "wants_source": True}]


def test_a_bootstraps_list_of_licences_that_makes_no_sense(tmp_path: Path) -> None:
    image = tmp_path / "demo.rvb"
    with_licences(image, "numpy")
    self_running(tmp_path / "demo.run", image, (("qemu-user", "10.0"),))
    with pytest.raises(ImageError, match="a row of licences that has not five texts"):
        inspection.list_licences(tmp_path / "demo.run")


OTHER = "riscv64" if ARCH != "riscv64" else "x86_64"
THEIRS = [item("usr/lib/data.txt", b"data " * 40), item("usr/lib/theirs.txt", b"theirs"), folder("app/empty")]


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """An image with payloads for this machine and for another."""
    path = tmp_path / "demo-1.0.rvb"
    build(path, others={OTHER: THEIRS})
    return path


def test_extract_the_payload_of_this_machine(both: Path, tmp_path: Path) -> None:
    inspection.extract(both, tmp_path / "out")
    assert tree(tmp_path / "out") == SMALL_TREE


def test_extract_a_named_payload(both: Path, tmp_path: Path) -> None:
    for arch, name in ((OTHER, "usr/lib/theirs.txt"), (ARCH, "usr/lib/copy.txt")):
        result = inspection.extract(both, tmp_path / arch, arch)
        assert result.note == "the hot part only (no demo-1.0.cold.rvb beside the image)"
        assert name in tree(tmp_path / arch)
    assert sorted(tree(tmp_path / OTHER)) == sorted(
        ["app", "app/empty", "usr", "usr/lib", "usr/lib/data.txt", "usr/lib/theirs.txt"]
    )


def test_extract_a_named_payload_with_its_cold_part(both: Path, tmp_path: Path) -> None:
    """The same path may hold something else in each payload of the cold pack."""
    with Reader(both) as reader:
        identity = reader.identity
    cold = {arch: [item("usr/lib/cold.txt", arch.encode())] for arch in (ARCH, OTHER)}
    build(tmp_path / "demo-1.0.cold.rvb", cold[ARCH], others={OTHER: cold[OTHER]}, bound_to=identity)
    for arch in (ARCH, OTHER):
        assert inspection.extract(both, tmp_path / arch, arch).note == "whole"
        assert (tmp_path / arch / "usr/lib/cold.txt").read_bytes() == arch.encode()


@pytest.mark.parametrize("arch", [None, "s390x", ""])
def test_extract_a_payload_that_is_not_there(tmp_path: Path, arch: str | None) -> None:
    others = [a for a in ("x86_64", "aarch64", "riscv64") if a != ARCH][:2]
    build(tmp_path / "x.rvb", THEIRS, arch=others[0], others={others[1]: THEIRS})
    with pytest.raises(UsageError) as caught:
        inspection.extract(tmp_path / "x.rvb", tmp_path / "out", arch)
    wanted = ARCH if arch is None else arch
    assert caught.value.message == (
        f"{tmp_path}/x.rvb has no payload for {wanted}; it has: {', '.join(others)}"
    )
    assert caught.value.hint == "name one of these: --payload ARCH"
    assert not (tmp_path / "out").exists()


def test_extract_the_only_payload(tmp_path: Path) -> None:
    """Whatever machine it is for: to look into it is not to run it."""
    build(tmp_path / "x.rvb", THEIRS, arch=OTHER)
    inspection.extract(tmp_path / "x.rvb", tmp_path / "out")
    assert (tmp_path / "out/usr/lib/theirs.txt").read_bytes() == b"theirs"


def test_inspect_several_payloads(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspection.inspect(both, files=True)
    assert [payload["arch"] for payload in report["payloads"]] == [ARCH, OTHER]
    assert [row["path"] for row in report["payloads"][1]["entries"]] == sorted(i.path for i in THEIRS)
    inspection.print_report(report)
    out = capsys.readouterr().out
    assert f"payload {ARCH} from wheels, Python 3.11.7, 8 files" in out
    assert f"payload {OTHER} from wheels, Python 3.11.7, 3 files" in out


def test_verify_several_payloads(both: Path) -> None:
    """What both share is named for each."""
    inspection.verify(both)
    with Reader(both) as reader:
        index = reader.index()
        entry = next(e for e in index.payloads[1].entries if e.path == "usr/lib/data.txt")
        frame = index.frames[index.blobs[entry.blob].frame]
    data = bytearray(both.read_bytes())
    data[frame.offset + 8] ^= 0xFF
    both.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        inspection.verify(both)
    assert caught.value.message.splitlines()[1:] == [
        f"    {ARCH}: usr/lib/copy.txt",
        f"    {ARCH}: usr/lib/data.txt",
        f"    {OTHER}: usr/lib/data.txt",
    ]
