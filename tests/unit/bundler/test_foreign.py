import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rvbundle import debian, foreign, hostpython
from rvbundle.debian import Archive, Package, Unpacked
from rvbundle.environment import Environment, Interpreter
from rvbundle.foreign import choose_wheels, debian_name
from rvbundle.licences import DebianPackage
from rvbundle.lock import Lock, LockedDebian, LockedPackage
from rvbundle_runtime.errors import EnvironmentSetupError
from tests.debs import make_deb

from .test_lock import HEX, recipe

MACHINE = os.uname().machine
PYTHON = Interpreter(Path("/p"), "3.13.5", "3.13", Path("/s"), Path("/b"), "cpython-313", False)
MARKERS = foreign._markers("riscv64", PYTHON)
PACKAGES = (Package("dash", "0.5", HEX), Package("python3-numpy", "1:2.2.4-1", HEX))
PART = LockedDebian("riscv64", "trixie", MACHINE, PACKAGES, PACKAGES[:1], PACKAGES[1:])


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("numpy", "python3-numpy"),
        ("typing-extensions", "python3-typing-extensions"),
        ("pillow", "python3-pil"),
        ("pyyaml", "python3-yaml"),
        ("scikit-learn", "python3-sklearn"),
        ("opencv-python-headless", "python3-opencv"),
    ],
)
def test_names_of_packages(name: str, package: str) -> None:
    assert debian_name(name) == package


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch==2.13.0", "torch"),
        ("Ale_Py >= 0.11  # the emulator", "ale-py"),
        ("# only a comment", ""),
        ('numpy; python_version < "3.14"', "numpy"),
        ("gymnasium[classic-control]==1.4.0", "gymnasium"),
        ("torch @ https://x.example/torch-2.13.0-cp311-cp311-linux_x86_64.whl#sha256=00", "torch"),
        ("https://x.example/Some_Thing-1.0-cp311-cp311-linux_x86_64.whl#sha256=00", "some-thing"),
        ("./wheels/tiny-1.0-py3-none-any.whl", "tiny"),
        ("wheels/tiny-1.0-py3-none-any.whl ; python_version > '3'", "tiny"),
        ("--index-url https://x.example/simple", ""),
        ("-r other.txt", ""),
        ("./folder", ""),
        ("", ""),
    ],
)
def test_what_a_line_of_requirements_asks_for(line: str, name: str) -> None:
    assert foreign._asked_for(line) == name


Pure = Mapping[str, tuple[str, tuple[str, ...]]]
GYM: Pure = {
    "gymnasium": ("1.4.0", ("numpy>=1.21", "cloudpickle>=1.2", 'farama-notifications; extra == "x"')),
    "cloudpickle": ("3.1.1", ()),
    "farama-notifications": ("0.0.4", ()),
}


@pytest.mark.parametrize(
    ("pure", "theirs", "kept", "notes"),
    [
        ({}, {"numpy": "2.2.4"}, set(), []),
        (GYM, {"numpy": "2.2.4"}, set(GYM), []),
        (GYM, {"numpy": "2.2.4", "cloudpickle": "3.0"}, {"gymnasium", "farama-notifications"}, []),
        (GYM, {"numpy": "2.2.4", "cloudpickle": "1.1"}, set(GYM), []),
        (
            {"a": ("1", ("b>=2",)), "b": ("2", ("c>=3",)), "c": ("3", ())},
            {"b": "1", "c": "1"},
            {"a", "b", "c"},
            [],
        ),
        (
            {"a": ("1", ("numpy>=2.3",))},
            {"numpy": "2.2.4"},
            {"a"},
            ["a wants numpy>=2.3, and Debian has numpy 2.2.4"],
        ),
        ({"a": ("1", ("b>=1",)), "b": ("1", ("a",))}, {"numpy": "1"}, {"a", "b"}, []),
        ({"a": ("1", ("b>=1",)), "b": ("1", ())}, {"b": "1.0rc1"}, {"a", "b"}, []),
        ({"a": ("1", ("b>=1",)), "b": ("1", ())}, {"b": "1.1rc1"}, {"a"}, []),
        ({"a": ("1", ("b",)), "b": ("1", ())}, {"b": "no version"}, {"a"}, []),
        ({"a": ("1", ("b>=1",)), "b": ("1", ())}, {"b": "no version"}, {"a", "b"}, []),
        ({"a": ("1", ("Zope_Interface (>=1)",))}, {"zope-interface": "7"}, {"a"}, []),
        ({"a": ("1", ("not a requirement !",))}, {}, {"a"}, []),
    ],
    ids=[
        *(
            "nothing",
            "nothing of Debian's",
            "Debian's is preferred",
            "Debian's is too old",
            "chain of too old",
        ),
        *(
            "compiled and too old",
            "cycle",
            "pre-release too old",
            "pre-release",
            "no version",
            "no version meets",
        ),
        *("other spellings", "not standard"),
    ],
)
def test_choose_wheels(pure: Pure, theirs: dict[str, str], kept: set[str], notes: list[str]) -> None:
    assert choose_wheels(pure, theirs, MARKERS) == (kept, notes)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (("networkx==3.4",), {"networkx"}),
        (("NetworkX == 3.4  # for its layout",), {"networkx"}),
        (("networkx>=2",), set()),
        (("networkx",), set()),
        (('networkx==3.4; python_version < "3.12"',), set()),
        (("torch==9",), set()),
        (("--no-index", "./x.whl", "networkx==3.4"), {"networkx"}),
    ],
    ids=["exact", "comment", "met", "any", "for another Python", "compiled", "options"],
)
def test_the_recipe_may_ask_for_another_version_than_debians(asked: tuple[str, ...], kept: set[str]) -> None:
    pure = {"networkx": ("3.4", ())}
    theirs = {"networkx": "3.2", "torch": "2.6"}
    assert choose_wheels(pure, theirs, MARKERS, frozenset({"torch"}), asked) == (kept, [])


@pytest.mark.parametrize(
    ("marker", "needed"),
    [
        ('python_version >= "3.13"', True),
        ('python_version < "3.13"', False),
        ('python_full_version >= "3.13.5"', True),
        ('platform_machine == "riscv64"', True),
        ('platform_machine == "x86_64"', False),
        ('sys_platform == "linux" and os_name == "posix"', True),
        ('sys_platform == "win32"', False),
        ('implementation_name == "cpython" and platform_python_implementation == "CPython"', True),
        ('platform_system == "Linux"', True),
        ('extra == "dev"', False),
    ],
)
def test_markers_are_of_the_payload(marker: str, needed: bool) -> None:
    pure = {"a": ("1", (f"gone; {marker}",))}
    if not needed:
        assert choose_wheels(pure, {}, MARKERS) == ({"a"}, [])
        return
    with pytest.raises(EnvironmentSetupError):
        choose_wheels(pure, {}, MARKERS)


def test_a_wheel_that_needs_what_nobody_has() -> None:
    with pytest.raises(EnvironmentSetupError) as caught:
        choose_wheels({"a": ("1", ('legacy-cgi; python_version >= "3.13"',))}, {}, MARKERS)
    assert caught.value.message == (
        'a needs legacy-cgi; python_version >= "3.13" on Python 3.13, and neither the lock nor Debian\'s '
        "packages have it"
    )
    assert caught.value.hint == "add legacy-cgi to [python] requires"


def test_a_wheel_that_needs_what_is_compiled_and_not_in_debian() -> None:
    with pytest.raises(EnvironmentSetupError) as caught:
        choose_wheels({"a": ("1", ("Fast_Thing>=2",))}, {}, MARKERS, frozenset({"fast-thing"}))
    assert caught.value.message == (
        "a needs Fast_Thing>=2, which has compiled code, and Debian's packages have no python3-fast-thing"
    )
    assert caught.value.hint == "another suite may have it (debian:sid), or do without a"


def locked(*packages: LockedPackage, requires: tuple[str, ...] = ()) -> Lock:
    return Lock("3.11", requires, packages)


TORCH = LockedPackage("torch", "2.13.0", HEX)
GYMNASIUM = LockedPackage("gymnasium", "1.4.0", HEX, pure=True)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Archive, tuple[str, ...]]]:
    """Let every suite have numpy and torch; return what was asked of which archive."""
    asked: list[tuple[Archive, tuple[str, ...]]] = []

    def resolve(archive: Archive, names: tuple[str, ...]) -> tuple[Package, ...]:
        asked.append((archive, tuple(names)))
        return tuple(Package(name, "1", HEX) for name in names)

    monkeypatch.setattr(debian, "resolve", resolve)
    have = {"python3-numpy", "python3-torch", "python3-pil"}
    monkeypatch.setattr(debian, "known_packages", lambda _, names: have.intersection(names))
    return asked


def test_a_recipe_without_other_payloads(tmp_path: Path, suite: list[object]) -> None:
    value = locked(TORCH)
    assert foreign.lock_payloads(recipe(tmp_path, "torch"), value, tmp_path / "cache") is value
    assert suite == []


def test_what_a_payload_takes_from_debian(
    tmp_path: Path, suite: list[tuple[Archive, tuple[str, ...]]]
) -> None:
    """What is compiled, Python, a shell, two BLAS; of this machine's own: Python and emulators."""
    asked = recipe(tmp_path, "torch==2.13.0", "gymnasium", "--no-index", "pillow # for render()")
    asked = replace(asked, debian={"riscv64": "trixie", "aarch64": "sid"})
    packages = (GYMNASIUM, LockedPackage("pillow", "11", HEX), TORCH, LockedPackage("nvidia-x", "1", HEX))
    found = foreign.lock_payloads(asked, locked(*packages), tmp_path / "cache")
    assert [(part.arch, part.suite, part.builder) for part in found.debian] == [
        ("aarch64", "sid", MACHINE),
        ("riscv64", "trixie", MACHINE),
    ]
    assert replace(found, debian=()) == locked(*packages)
    folder = tmp_path / "cache/build/debian"
    base = ("python3-minimal", "libpython3-stdlib")
    blas = ("libopenblas0-pthread", "libblas3", "liblapack3")
    theirs = (*base, "dash", "python3-pil", "python3-torch", *blas)
    assert suite == [
        (Archive(folder, "sid", "aarch64"), theirs),
        (Archive(folder, "sid", MACHINE), base),
        (Archive(folder, "sid", MACHINE), ("qemu-user",)),
        (Archive(folder, "trixie", "riscv64"), theirs),
        (Archive(folder, "trixie", MACHINE), base),
        (Archive(folder, "trixie", MACHINE), ("qemu-user",)),
    ]
    part = found.debian_for("riscv64")
    assert [p.name for p in part.packages] == list(theirs)
    assert [p.name for p in (*part.python, *part.emulators)] == [*base, "qemu-user"]


def test_no_blas_where_nothing_uses_it(tmp_path: Path, suite: list[tuple[Archive, tuple[str, ...]]]) -> None:
    asked = replace(recipe(tmp_path, "gymnasium"), debian={"riscv64": "trixie"})
    foreign.lock_payloads(asked, locked(GYMNASIUM), tmp_path)
    assert suite[0][1] == ("python3-minimal", "libpython3-stdlib", "dash")


@pytest.mark.parametrize("line", ["ale-py==0.11", "./wheels/ale_py-0.11-cp311-cp311-linux_x86_64.whl"])
def test_compiled_code_that_the_suite_has_not(tmp_path: Path, suite: list[object], line: str) -> None:
    asked = replace(recipe(tmp_path, "torch", line), debian={"riscv64": "trixie"})
    with pytest.raises(EnvironmentSetupError) as caught:
        foreign.lock_payloads(asked, locked(LockedPackage("ale-py", "0.11", HEX), TORCH), tmp_path)
    assert caught.value.message == (
        "ale-py has compiled code, and Debian's trixie has no package python3-ale-py for riscv64"
    )
    assert caught.value.hint == (
        "take ale-py out of the requirements, or riscv64 out of [payloads]; without a payload of its own "
        "such a machine runs the one for x86_64 through an emulator"
    )
    assert suite == []


def test_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = hostpython.archive(tmp_path, "trixie", "riscv64")
    files = [
        make_deb(tmp_path / "a.deb", "dash", version="0.5"),
        make_deb(tmp_path / "b.deb", "python3-numpy", version="1:2.2.4-1"),
    ]

    def unpack(found: Archive, packages: tuple[Package, ...], root: Path) -> Unpacked:
        assert (found, packages) == (archive, PACKAGES)
        return Unpacked(root, {"usr/bin/dash": "dash"})

    monkeypatch.setattr(debian, "unpack", unpack)
    monkeypatch.setattr(debian, "fetch", lambda *words: files if words == (archive, PACKAGES) else [])
    foreign.unpack(PART, tmp_path, tmp_path)
    assert json.loads((tmp_path / "owners.json").read_text()) == {"usr/bin/dash": "dash"}
    assert json.loads((tmp_path / "packages.json").read_text()) == DESCRIBED


# Package, version, source package, version of that.
DESCRIBED = [["dash", "0.5", "dash", "0.5"], ["python3-numpy", "1:2.2.4-1", "python3-numpy", "1:2.2.4-1"]]


def distribution(
    site: Path, name: str, version: str, files: Mapping[str, str], *metadata: str, record: bool = True
) -> None:
    """Install a distribution of `files` into the package folder `site`, with more lines of metadata."""
    info = f"{name}-{version}.dist-info"
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata, ""])
    everything = {**files, f"{info}/METADATA": text}
    rows = [f"{path},," for path in (*everything, f"{info}/RECORD", "__pycache__/x.cpython-311.pyc")]
    if record:
        everything[f"{info}/RECORD"] = "\n".join(rows) + "\n"
    for path, content in everything.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(content)


@pytest.fixture
def venv(tmp_path: Path) -> Environment:
    """An environment with gymnasium, networkx and (compiled) torch and numpy."""
    found = Environment(tmp_path / "env", replace(PYTHON, version="3.11.7", short="3.11"))
    site = found.site_packages
    distribution(
        site,
        "gymnasium",
        "1.4.0",
        {"gymnasium/__init__.py": "", "../../../bin/gym": ""},
        "Requires-Dist: numpy>=1.21",
    )
    distribution(site, "networkx", "3.4", {"networkx/__init__.py": ""}, "Requires-Python: >=3.10,<3.13")
    distribution(site, "torch", "2.13.0", {"torch/_C.so": ""})
    distribution(site, "numpy", "2.2.4", {"numpy/x.so": ""})
    return found


LOCKED = locked(
    GYMNASIUM,
    LockedPackage("networkx", "3.4", HEX, pure=True),
    LockedPackage("numpy", "2.2.4", HEX),
    TORCH,
    requires=("torch==2.13.0", "gymnasium"),
)


def unpacked(folder: Path, theirs: Mapping[str, str]) -> Path:
    """Make what `unpack` leaves, with distributions {name: version} of Debian's."""
    site = folder / "root" / foreign.PACKAGES
    site.mkdir(parents=True)
    for name, version in theirs.items():
        distribution(site, name, version, {f"{name}/__init__.py": ""}, record=False)
    (site / "odd.egg-info").mkdir()  # without a name
    (folder / "owners.json").write_text('{"usr/bin/dash": "dash"}')
    (folder / "packages.json").write_text(json.dumps(DESCRIBED))
    return folder


def test_assemble(tmp_path: Path, venv: Environment) -> None:
    folder = unpacked(tmp_path / "f", {"numpy": "2.2.4+ds", "torch": "2.6.0", "networkx": "3.2.1"})
    found = foreign.assemble(PART, LOCKED, folder, venv, PYTHON)
    site = venv.site_packages
    assert (found.arch, found.suite, found.root, found.site) == ("riscv64", "trixie", folder / "root", site)
    assert (found.owners, found.interpreter) == ({"usr/bin/dash": "dash"}, PYTHON)
    assert found.packages == {row[0]: DebianPackage(*row) for row in DESCRIBED}
    (wheel,) = found.wheels
    assert (wheel.name, wheel.version) == ("gymnasium", "1.4.0")
    assert set(wheel.files) == {
        f"{site}/gymnasium/__init__.py",
        f"{venv.folder}/venv/bin/gym",
        f"{site}/gymnasium-1.4.0.dist-info/METADATA",
        f"{site}/gymnasium-1.4.0.dist-info/RECORD",
    }
    assert found.notes == (
        "Python 3.13.5 of Debian's trixie, where the recipe has 3.11",
        "networkx 3.2.1 of Debian's trixie, where the recipe has 3.4",
        "torch 2.6.0 of Debian's trixie, where the recipe has 2.13.0",
    )


def test_a_wheel_for_another_python(tmp_path: Path, venv: Environment) -> None:
    folder = unpacked(tmp_path / "f", {"numpy": "2.2.4"})
    found = foreign.assemble(PART, LOCKED, folder, venv, PYTHON)
    assert [wheel.name for wheel in found.wheels] == ["gymnasium", "networkx"]
    assert found.notes[1:] == ("networkx 3.4 asks for Python >=3.10,<3.13, and Debian has 3.13.5",)


def test_the_same_python_is_no_news(tmp_path: Path, venv: Environment) -> None:
    folder = unpacked(tmp_path / "f", {"numpy": "2.2.4", "networkx": "3.4"})
    python = replace(PYTHON, version="3.11.2", short="3.11")
    assert foreign.assemble(PART, LOCKED, folder, venv, python).notes == ()


@pytest.mark.parametrize(
    ("theirs", "ours", "differ"),
    [
        ("2.2.4", "2.2.4", False),
        ("2.2.4+ds", "2.2.4", False),
        ("2.2.4rc1", "2.2.4", False),
        ("2.2", "2.2.0", False),
        ("2.2.4", "2.2.5", True),
        ("odd", "2.2.5", True),
    ],
)
def test_which_versions_differ(theirs: str, ours: str, differ: bool) -> None:
    assert foreign._differs(theirs, LockedPackage("x", ours, HEX)) is differ
