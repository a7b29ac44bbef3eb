import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rvbundle import __version__, bootstrap, licences, process
from rvbundle.licences import DebianPackage, Licence, Origin, of_copyright, of_metadata

QEMU = DebianPackage("qemu-user", "1:10.0.13+ds-0+deb13u1+b2", "qemu", "1:10.0.13+ds-0+deb13u1")
DEP5 = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: demo\n\n"


def metadata(*lines: str) -> str:
    return "\n".join(
        ["Metadata-Version: 2.4", "Name: demo", "Version: 1.2", *lines, "", "License: not a field"]
    )


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["License-Expression: BSD-3-Clause AND MIT", "License: ignored"], "BSD-3-Clause AND MIT"),
        (["License: BSD-3-Clause", "Classifier: License :: OSI Approved :: BSD License"], "BSD-3-Clause"),
        (["Classifier: License :: OSI Approved :: BSD License"], "BSD"),
        (
            [
                "License: UNKNOWN",
                "Classifier: License :: OSI Approved",
                "Classifier: License :: OSI Approved :: MIT License",
                "Classifier: License :: OSI Approved :: Zope Public License",
                "Classifier: Programming Language :: Python",
            ],
            "MIT, Zope Public License",
        ),
        (["License: MIT License", "        ", "        Copyright (c) 2020 Nobody"], "MIT"),
        (["License: Do what you want", "        but do not blame us"], "unknown"),
        (["License: " + "All rights reserved, and so on. " * 4], "unknown"),
        ([], "unknown"),
    ],
    ids=[
        "expression",
        "license",
        "classifier",
        "classifiers",
        "MIT's text",
        "a text",
        "a long line",
        "nothing",
    ],
)
def test_the_licence_of_a_wheel(lines: list[str], name: str) -> None:
    found = of_metadata(metadata(*lines))
    assert (found.component, found.version, found.licence) == ("demo", "1.2", name)


@pytest.mark.parametrize(
    ("lines", "source"),
    [
        (
            ["Project-URL: Homepage, https://a.org", "Project-URL: Source Code, https://b.org"],
            "https://b.org",
        ),
        (["Project-URL: Changelog, https://a.org", "Project-URL: GitHub, https://b.org"], "https://b.org"),
        (
            ["Project-URL: Repository, https://b.org", "Project-URL: source, https://a.org/x,y"],
            "https://a.org/x,y",
        ),
        (["Project-URL: Homepage, https://a.org", "Home-page: https://b.org"], "https://a.org"),
        (["Home-page: https://a.org", "Download-URL: https://b.org"], "https://a.org"),
        (["Home-page: UNKNOWN", "Download-URL: https://b.org"], "https://b.org"),
        (["Project-URL: Tracker, https://a.org"], ""),
    ],
)
def test_the_source_of_a_wheel(lines: list[str], source: str) -> None:
    assert of_metadata(metadata(*lines)).source == source


@pytest.mark.parametrize(
    ("files", "where"),
    [
        (["d.dist-info/METADATA", "d.dist-info/licenses/LICENSE", "d.dist-info/licenses/a/LICENSE"], 1),
        (["d.dist-info/RECORD", "d.dist-info/COPYING.txt"], 1),
        (["d.dist-info/METADATA", "d.dist-info/Licence.md"], 1),
        (["d.dist-info/licenses/NOTICE", "d.dist-info/licenses/AUTHORS", "d.dist-info/licenses/LICENSE"], 2),
        (["d.dist-info/METADATA", "d.dist-info/top_level.txt"], None),
    ],
)
def test_the_text_of_a_wheel(files: list[str], where: int | None) -> None:
    assert of_metadata(metadata(), files).where == ("" if where is None else files[where])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            DEP5 + "Files: debian/*\nCopyright: x\nLicense: GPL-3+\n\n"
            "Files: lib/* src/b.c\nCopyright: x\nLicense: BSD-3-clause\n text\n\n"
            "Files: *\nCopyright: x\nLicense: LGPL-2.1+  and   Expat\n\nLicense: LGPL-2.1+\n text",
            "LGPL-2.1+ and Expat, BSD-3-clause",
        ),
        (
            "Format-Specification: https://dep.debian.net/deps/dep5/\n\nFiles: *\nLicense: MIT\n",
            "MIT",
        ),
        # QEMU's says it in words only.
        (
            DEP5 + "Files: *\nCopyright: many\nLicense:\n Released under version 2.\n"
            " See /usr/share/common-licenses/GPL-2.\n",
            "GPL-2",
        ),
        (DEP5.replace("Upstream-Name: demo", "License: Zlib"), "Zlib"),
        (
            "glibc's LGPL: /usr/share/common-licenses/LGPL-2.1, also\n/usr/share/common-licenses/GPL-2.\n",
            "see its text (names LGPL-2.1, GPL-2)",
        ),
        ("Do what you want.", "see usr/share/doc/qemu-user/copyright"),
        (DEP5 + "Nothing: else\n", "see usr/share/doc/qemu-user/copyright"),
    ],
    ids=[
        "DEP 5",
        "older DEP 5",
        "DEP 5 in words",
        "DEP 5 header",
        "free text",
        "no name",
        "DEP 5 without files",
    ],
)
def test_the_licence_of_a_debian_package(text: str, name: str) -> None:
    found = of_copyright(QEMU, text)
    source = "Debian source package qemu 1:10.0.13+ds-0+deb13u1"
    assert found == Licence("qemu-user", QEMU.version, name, source, "usr/share/doc/qemu-user/copyright")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("gcc-14", "GPL-3+ with GCC runtime library exception (see its text)"),
        ("python3.13", "PSF-2.0 (see its text)"),
        ("python3.13-extras", "see its text (names GPL-2)"),
    ],
)
def test_what_is_known_of_texts_in_words(source: str, name: str) -> None:
    text = "In words, with /usr/share/common-licenses/GPL-2."
    assert of_copyright(DebianPackage("lib", "1", source, "1"), text).licence == name


def test_a_debian_package_without_a_text() -> None:
    found = of_copyright(QEMU, "")
    assert (found.licence, found.where) == ("unknown", "")


def test_of_many_names_those_that_ask_for_the_source_are_shown() -> None:
    names = ["Apache-2.0", "A", "B", "C", "D", "E", "F", "GPL-2+", "LGPL-3+", "A"]
    text = DEP5 + "\n\n".join(f"Files: {n if n else '*'}\nLicense: {name}" for n, name in enumerate(names))
    assert of_copyright(QEMU, text).licence == "Apache-2.0, A, B, C, GPL-2+, LGPL-3+, and 3 more"


@pytest.mark.parametrize(
    ("name", "wants"),
    [
        ("GPL-2", True),
        ("LGPL-2.1+ and MIT", True),
        ("AGPL-3.0", True),
        ("MPL-2.0", True),
        ("GNU Lesser General Public License", True),
        ("BSD-3-Clause AND MIT", False),
        ("Apache-2.0", False),
        ("PSF-2.0", False),
        ("SIMPLE", False),
    ],
)
def test_which_ask_for_the_source(name: str, wants: bool) -> None:
    assert Licence("c", "1", name, "", "").wants_source == wants


@dataclass(frozen=True)
class File:
    path: str
    source: Path
    package: str = ""


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def payload(tmp_path: Path) -> tuple[list[File], Origin]:
    """A payload of a wheel, files of two Debian packages, a Python and a library of unknown origin."""
    root, venv = tmp_path / "root", tmp_path / "venv"
    site = "usr/lib/python3.11/site-packages"
    info = f"{site}/demo-1.2.dist-info"
    files = [
        File(f"{info}/METADATA", write(venv / "METADATA", metadata("License: MIT")), "demo"),
        File(f"{info}/licenses/LICENSE", write(venv / "LICENSE"), "demo"),
        File(f"{site}/demo/__init__.py", write(venv / "init.py"), "demo"),
        File(f"{site}/_rvbundle_boot.py", write(venv / "boot.py"), "rvbundle"),
        File("usr/bin/python3.11", write(venv / "python")),
        File("usr/lib/python3.11/LICENSE.txt", write(venv / "LICENSE.txt")),
        File("usr/lib/libpython3.11.so.1.0", write(venv / "libpython")),
        File("usr/lib/x/libc.so.6", write(root / "usr/lib/x/libc.so.6")),
        File("usr/lib/x/libm.so.6", write(root / "usr/lib/x/libm.so.6")),
        File("usr/bin/sh", write(root / "usr/bin/dash")),
        File("usr/lib/x/libodd.so", write(venv / "libodd.so")),
    ]
    write(root / "usr/share/doc/libc6/copyright", "see /usr/share/common-licenses/LGPL-2.1 and\n"
          "/usr/share/common-licenses/No-Such")  # fmt: skip
    write(root / "usr/share/common-licenses/LGPL-2.1", "Lesser")
    owners = {"usr/lib/x/libc.so.6": "libc6", "lib/x/libm.so.6": "libc6", "usr/bin/dash": "dash"}
    packages = {
        "libc6": DebianPackage("libc6", "2.41-12", "glibc", "2.41-12"),
        "dash": DebianPackage("dash", "0.5", "dash", "0.5"),
    }
    return files, Origin(root, owners, packages)


def test_what_a_payload_is_made_of(
    payload: tuple[list[File], Origin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(licences, "_own_text", lambda: None)
    files, origin = payload
    found = [component.licence for component in licences.collect(files, origin, "3.11.7")]
    text = "usr/lib/python3.11/site-packages/demo-1.2.dist-info/licenses/LICENSE"
    odd = files[-1].source
    assert found == [
        Licence("dash", "0.5", "unknown", "Debian source package dash 0.5", ""),
        Licence("demo", "1.2", "MIT", "", text),
        Licence(
            "libc6",
            "2.41-12",
            "LGPL-2.1+ (see its text)",
            "Debian source package glibc 2.41-12",
            "usr/share/doc/libc6/copyright",
        ),
        Licence(
            "Python",
            "3.11.7",
            "PSF-2.0",
            "https://www.python.org/downloads/source/",
            "usr/lib/python3.11/LICENSE.txt",
        ),
        Licence("rvbundle", __version__, "Apache-2.0", "", ""),
        Licence("usr/lib/x/libodd.so", "", "unknown", f"copied from {odd}", ""),
    ]


def test_the_python_of_a_package_is_not_listed_twice(payload: tuple[list[File], Origin]) -> None:
    files, origin = payload
    python = DebianPackage("python3.11-minimal", "3.11.2-6", "python3.11", "3.11.2-6")
    source = write(origin.root / "usr/bin/python3.11")
    files = [f for f in files if f.path != "usr/bin/python3.11"] + [File("usr/bin/python3.11", source)]
    origin = Origin(
        origin.root,
        {**origin.owners, "usr/bin/python3.11": python.name},
        {**origin.packages, python.name: python},
    )
    names = [component.licence.component for component in licences.collect(files, origin, "3.11.2")]
    assert names == ["dash", "demo", "libc6", "python3.11-minimal", "rvbundle", "usr/lib/x/libodd.so"]


def test_only_what_is_packed_counts(payload: tuple[list[File], Origin]) -> None:
    files, origin = payload
    components = licences.collect(files, origin, "3.11.7")
    paths = {"usr/lib/x/libm.so.6", "usr/lib/python3.11/site-packages/demo/__init__.pyc"}
    assert [licence.component for licence in licences.held(components, paths)] == ["demo", "libc6"]
    assert licences.held(components, set()) == ()


def test_texts_of_packages_and_the_common_ones_that_they_name(payload: tuple[list[File], Origin]) -> None:
    files, origin = payload
    found = licences.texts(files, origin)
    own = found.pop("usr/share/doc/rvbundle/LICENSE", None)
    assert own is None or "Apache License" in own.read_text()
    assert found == {
        "usr/share/doc/libc6/copyright": origin.root / "usr/share/doc/libc6/copyright",
        "usr/share/common-licenses/LGPL-2.1": origin.root / "usr/share/common-licenses/LGPL-2.1",
    }


def test_save_and_load(payload: tuple[list[File], Origin], tmp_path: Path) -> None:
    files, origin = payload
    components = licences.collect(files, origin, "3.11.7")
    licences.save(components, tmp_path)
    assert licences.load(tmp_path) == components


def test_details() -> None:
    parts = {"payload riscv64": (Licence("c", "1", "MIT", "https://a.org", "x"),), "bootstrap": ()}
    details = json.loads(json.dumps({"trim": "none", **licences.to_details(parts)}))
    assert licences.from_details(details) == parts
    assert licences.from_details({"trim": "none"}) is None


@pytest.mark.parametrize(
    "value", ["text", [], {"a": "b"}, {"a": ["b"]}, {"a": [["b"]]}, {"a": [["b", "1", "MIT", "", 5]]}]
)
def test_details_that_make_no_sense(value: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        licences.from_details({"licences": value})


SEARCHED = """\
diversion by dash from: /bin/sh
dash: /bin/dash
libc6:amd64, libc6:i386: /lib/x86_64-linux-gnu/libc.so.6
"""


def test_ask_dpkg(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(words: list[str], **options: Any) -> process.Finished:
        asked.append(list(words))
        out = SEARCHED if "--search" in words else "dash\t1\tdash\t1\nlibc6\t2+b1\tglibc\t2\n"
        return process.Finished("", 1, out.encode(), "dpkg-query: no path found")

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    origin = licences.ask_dpkg([Path("/usr/lib/x86_64-linux-gnu/libc.so.6"), Path("/usr/bin/dash")])
    assert asked[0][2:] == [
        "/bin/dash",
        "/lib/x86_64-linux-gnu/libc.so.6",
        "/usr/bin/dash",
        "/usr/lib/x86_64-linux-gnu/libc.so.6",
    ]
    assert asked[1][-2:] == ["dash", "libc6"]
    assert origin.packages["libc6"] == DebianPackage("libc6", "2+b1", "glibc", "2")
    assert origin.owner(Path("/usr/lib/x86_64-linux-gnu/libc.so.6")) == "libc6"
    assert origin.owner(Path("/usr/bin/dash")) == "dash"
    assert origin.owner(Path("/opt/dash")) == ""


def test_a_machine_without_dpkg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(process, "run", lambda *_, **__: pytest.fail("a program was started"))
    assert licences.ask_dpkg([Path("/usr/bin/dash")]) == Origin()


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg")
def test_the_file_of_a_package(tmp_path: Path) -> None:
    control = "Package: libdemo1\nVersion: 1.0-2+b3\nSource: demo (1.0-2)\nArchitecture: all\n"
    write(tmp_path / "d/DEBIAN/control", f"{control}Maintainer: N <n@example.org>\nDescription: demo\n")
    process.run(["dpkg-deb", "--build", tmp_path / "d", tmp_path / "d.deb"])
    assert licences.of_file(tmp_path / "d.deb") == DebianPackage("libdemo1", "1.0-2+b3", "demo", "1.0-2")


def test_packages_that_are_unpacked_for_another_machine(payload: tuple[list[File], Origin]) -> None:
    _, origin = payload
    found = licences.of_packages(origin.root, [origin.packages["libc6"], origin.packages["dash"]])
    assert [(row.component, bool(row.where)) for row in found] == [("dash", False), ("libc6", True)]


def test_a_bootstrap_lists_what_its_files_were_made_of(
    payload: tuple[list[File], Origin], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that were unpacked for their dependents alone are not in it."""
    monkeypatch.setattr(licences, "_own_text", lambda: None)
    _, origin = payload
    libc, dash = (origin.root / path for path in ("usr/lib/x/libc.so.6", "usr/bin/dash"))
    qemu = Origin(
        origin.root.parent / "qemu", {"usr/bin/qemu-x86_64": QEMU.name}, {QEMU.name: QEMU, **origin.packages}
    )
    program = write(qemu.root / "usr/bin/qemu-x86_64")
    write(qemu.root / "usr/share/doc/qemu-user/copyright", "/usr/share/common-licenses/GPL-2")
    files = {
        "lib/libc.so.6": bootstrap._File(b"", source=libc),
        "emulators/qemu-x86_64": bootstrap._File(b"", True, program),
        "lib/ours.pyc": bootstrap._File(b""),
    }
    assert dash.exists()
    found = {row.component: row.where for row in bootstrap._licences(files, [origin, qemu])}
    assert found == {
        "libc6": "share/doc/libc6/copyright",
        "qemu-user": "share/doc/qemu-user/copyright",
        "rvbundle": "",
    }
    texts = bootstrap._texts(files, [origin, qemu])
    assert texts["share/doc/qemu-user/copyright"].content == b"/usr/share/common-licenses/GPL-2"
    assert texts["share/common-licenses/LGPL-2.1"].content == b"Lesser"
    assert {path for path in found.values() if path} <= set(texts)
