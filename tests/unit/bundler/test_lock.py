import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rvbundle import lock, process
from rvbundle.debian import Package
from rvbundle.lock import Lock, LockedDebian, LockedPackage
from rvbundle.recipe import Recipe, Workload
from rvbundle_runtime.errors import EnvironmentSetupError, LockError

HEX = hashlib.sha256(b"wheel").hexdigest()
LOCK = Lock(
    "3.11",
    ("torch==2.13.0", "numpy"),
    (LockedPackage("numpy", "2.4.6", HEX), LockedPackage("torch", "2.13.0", HEX)),
)
MACHINE = os.uname().machine
OTHER = "aarch64" if MACHINE != "aarch64" else "x86_64"
DASH, NUMPY = Package("dash", "0.5.12-12", HEX), Package("python3-numpy", "1:2.2.4+ds-1", "ab" * 32)
PURE = LockedPackage("gymnasium", "1.4.0", HEX, pure=True)
PART = LockedDebian(OTHER, "trixie", MACHINE, (DASH, NUMPY), (DASH,), (Package("qemu-user", "1:10", HEX),))
PARTS = (PART, replace(PART, arch="riscv64", suite="sid"))
BOTH = replace(LOCK, packages=(PURE, *LOCK.packages), debian=PARTS)
AGAIN = "write it anew: rvbundle lock recipe.toml"


def recipe(folder: Path, *requires: str, python: str = "3.11") -> Recipe:
    return Recipe(
        folder / "recipe.toml",
        "demo",
        "1.0",
        "play.py",
        (),
        python,
        requires,
        None,
        (Workload((), False, None, 1.0),),
        "traced",
        False,
        (),
        (),
        False,
        {},
    )


def test_text() -> None:
    assert lock.dumps(LOCK) == (
        "# Written by `rvbundle lock`. Every build from this file installs exactly these wheels.\n"
        "format = 1\n"
        'python = "3.11"\n'
        'requires = ["torch==2.13.0", "numpy"]\n'
        "\n[[package]]\n"
        f'name = "numpy"\nversion = "2.4.6"\nsha256 = "{HEX}"\n'
        "\n[[package]]\n"
        f'name = "torch"\nversion = "2.13.0"\nsha256 = "{HEX}"\n'
    )


@pytest.mark.parametrize(
    "value",
    [
        LOCK,
        Lock("3.9", (), ()),
        Lock("3.9", ('a; python_version < "3.12"', "b @ file:///x\\y", "c # ü"), ()),
        Lock("3.9", ("a # \N{ROCKET}",), ()),
        Lock("3.9", ("a # \x7f",), ()),
        BOTH,
        replace(LOCK, debian=(replace(PART, packages=(), python=(), emulators=()),)),
    ],
    ids=["usual", "empty", "quotes", "beyond the BMP", "delete character", "debian", "empty debian"],
)
def test_round_trip(value: Lock) -> None:
    assert lock.loads(lock.dumps(value), Path("x")) == value


def test_text_of_other_payloads() -> None:
    """One package a line, so that a version control system shows what has changed."""
    assert lock.dumps(replace(LOCK, packages=(PURE,), debian=(PART,))).partition("[[package]]")[2] == (
        f'\nname = "gymnasium"\nversion = "1.4.0"\nsha256 = "{HEX}"\npure = true\n'
        f'\n[[debian]]\narch = "{OTHER}"\nsuite = "trixie"\nbuilder = "{MACHINE}"\n'
        f'packages = [\n    ["dash", "0.5.12-12", "{HEX}"],\n'
        f'    ["python3-numpy", "1:2.2.4+ds-1", "{"ab" * 32}"],\n]\n'
        f'python = [\n    ["dash", "0.5.12-12", "{HEX}"],\n]\n'
        f'emulators = [\n    ["qemu-user", "1:10", "{HEX}"],\n]\n'
    )


def test_the_digest_is_of_this_machines_environment() -> None:
    """Other packages of Debian's must not make the environment anew."""
    assert BOTH.digest() == replace(BOTH, debian=()).digest() != LOCK.digest()
    assert replace(PURE, pure=False) != PURE


def test_what_one_payload_takes() -> None:
    assert BOTH.debian_for(OTHER) == PART
    assert BOTH.debian_for("riscv64").suite == "sid"
    with pytest.raises(KeyError):
        LOCK.debian_for("riscv64")


def test_digest_depends_on_everything() -> None:
    changed = [
        LOCK,
        replace(LOCK, python="3.12"),
        replace(LOCK, requires=("numpy",)),
        replace(LOCK, packages=LOCK.packages[:1]),
        replace(LOCK, packages=(replace(LOCK.packages[0], version="2.4.7"), LOCK.packages[1])),
    ]
    assert len({value.digest() for value in changed}) == len(changed)
    assert LOCK.digest() == hashlib.sha256(lock.dumps(LOCK).encode()).hexdigest()


EMPTY = "[[debian]]\narch = 'riscv64'\nsuite = 'sid'\nbuilder = 'x86_64'\npackages = []\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format = ", "recipe.lock: damaged: not valid TOML: "),
        ("", "recipe.lock: damaged: 'format' is missing"),
        ("format = 2\n", "recipe.lock: lock format 2 is not 1"),
        ('format = 1\npython = "3.11"\n', "recipe.lock: damaged: 'requires' is missing"),
        ("format = 1\npython = '3.11'\nrequires = 5\n", "recipe.lock: damaged: a value has the wrong type"),
        (lock.dumps(LOCK).replace(f'"{HEX}"', '""'), "recipe.lock: numpy has no SHA-256 digest"),
        (lock.dumps(LOCK).replace(HEX, HEX.upper()), "recipe.lock: numpy has no SHA-256 digest"),
        (lock.dumps(LOCK).replace(HEX, HEX[:-1]), "recipe.lock: numpy has no SHA-256 digest"),
        (lock.dumps(LOCK).replace("version =", "vers ="), "recipe.lock: damaged: 'version' is missing"),
        (
            "format = 1\npython = '3'\nrequires = []\npackage = 3\n",
            "recipe.lock: damaged: a value has the wrong type",
        ),
        (
            "format = 1\npython = '3'\nrequires = []\npackage = ['x']\n",
            "recipe.lock: damaged: a value has the wrong type",
        ),
        *(
            (f"format = 1\npython = '3'\nrequires = []\n{text}", f"recipe.lock: damaged: {what}")
            for text, what in (
                ("debian = 3\n", "a value has the wrong type"),
                ("debian = ['x']\n", "a value has the wrong type"),
                ("[debian]\narch = 'x'\n", "a value has the wrong type"),
                ("[[debian]]\narch = 'riscv64'\n", "'suite' is missing"),
                (f"{EMPTY}python = []\n", "'emulators' is missing"),
                (f"{EMPTY}python = [['a', '1']]\nemulators = []\n", "a value has the wrong type"),
                (f"{EMPTY}python = [5]\nemulators = []\n", "a value has the wrong type"),
                (f"{EMPTY}python = 5\nemulators = []\n", "a value has the wrong type"),
            )
        ),
        (lock.dumps(BOTH).replace("ab" * 32, "xy"), "recipe.lock: python3-numpy has no SHA-256 digest"),
        (
            lock.dumps(BOTH).replace(f'["qemu-user", "1:10", "{HEX}"]', '["qemu-user", "1:10", ""]'),
            "recipe.lock: qemu-user has no SHA-256 digest",
        ),
    ],
    ids=[
        "no toml",
        "empty",
        "newer",
        "no requires",
        "number",
        "no digest",
        "capitals",
        "short digest",
        "no version",
        "no list",
        "no table",
        "debian no list",
        "debian no table",
        "debian one table",
        "debian without a suite",
        "debian without emulators",
        "debian short package",
        "debian no package",
        "debian no packages",
        "debian no digest",
        "debian no digest of an emulator",
    ],
)
def test_damaged(text: str, message: str) -> None:
    with pytest.raises(LockError) as caught:
        lock.loads(text, Path("recipe.lock"))
    assert caught.value.message.startswith(message)
    assert caught.value.hint == AGAIN


def test_none_beside(tmp_path: Path) -> None:
    assert lock.read_beside(recipe(tmp_path)) is None


def test_beside(tmp_path: Path) -> None:
    (tmp_path / "recipe.lock").write_text(lock.dumps(LOCK))
    assert lock.read_beside(recipe(tmp_path, "torch==2.13.0", "numpy")) == LOCK


@pytest.mark.parametrize(
    ("requires", "python"),
    [(("torch==2.12.0", "numpy"), "3.11"), (("torch==2.13.0", "numpy"), "3.12"), ((), "3.11")],
    ids=["version", "python", "none"],
)
def test_made_for_another_request(tmp_path: Path, requires: tuple[str, ...], python: str) -> None:
    (tmp_path / "recipe.lock").write_text(lock.dumps(LOCK))
    with pytest.raises(LockError) as caught:
        lock.read_beside(recipe(tmp_path, *requires, python=python))
    assert caught.value.message == (
        f"{tmp_path}/recipe.lock was made for other requirements than those in recipe.toml"
    )
    assert caught.value.hint == f"write it anew: rvbundle lock {tmp_path}/recipe.toml"


def asks(folder: Path, **payloads: str) -> Recipe:
    return replace(recipe(folder, *LOCK.requires), debian=payloads)


def test_beside_with_other_payloads(tmp_path: Path) -> None:
    (tmp_path / "recipe.lock").write_text(lock.dumps(BOTH))
    assert lock.read_beside(asks(tmp_path, riscv64="sid", **{OTHER: "trixie"})) == BOTH


@pytest.mark.parametrize(
    "payloads",
    [{}, {OTHER: "trixie"}, {OTHER: "trixie", "riscv64": "trixie"}, {OTHER: "sid", "riscv64": "sid"}],
    ids=["none", "fewer", "another suite", "another suite of the other"],
)
def test_made_for_other_payloads(tmp_path: Path, payloads: dict[str, str]) -> None:
    (tmp_path / "recipe.lock").write_text(lock.dumps(BOTH))
    with pytest.raises(LockError) as caught:
        lock.read_beside(asks(tmp_path, **payloads))
    assert caught.value.message == (
        f"{tmp_path}/recipe.lock was made for other payloads than those in recipe.toml"
    )
    assert caught.value.hint == f"write it anew: rvbundle lock {tmp_path}/recipe.toml"


def test_made_before_there_were_payloads(tmp_path: Path) -> None:
    (tmp_path / "recipe.lock").write_text(lock.dumps(LOCK))
    with pytest.raises(LockError) as caught:
        lock.read_beside(asks(tmp_path, riscv64="sid"))
    assert "was made for other payloads" in caught.value.message


def test_made_on_another_machine(tmp_path: Path) -> None:
    """The Python that compiles and the emulators are of the machine that builds."""
    elsewhere = replace(LOCK, debian=(replace(PART, builder="s390x"),))
    (tmp_path / "recipe.lock").write_text(lock.dumps(elsewhere))
    with pytest.raises(LockError) as caught:
        lock.read_beside(asks(tmp_path, **{OTHER: "trixie"}))
    assert caught.value.message == (
        f"{tmp_path}/recipe.lock was made on a machine of another architecture (s390x)"
    )
    assert caught.value.hint == f"write it anew: rvbundle lock {tmp_path}/recipe.toml"


def test_unreadable(tmp_path: Path) -> None:
    (tmp_path / "recipe.lock").write_bytes(b"\xff")
    with pytest.raises(LockError) as caught:
        lock.read_beside(recipe(tmp_path))
    assert caught.value.message.startswith(f"{tmp_path}/recipe.lock: can't be read: ")


def answer(
    monkeypatch: pytest.MonkeyPatch, *installs: dict[str, Any], code: int = 0, stderr: str = ""
) -> list[Any]:
    """Let pip say what it will; return the list of the commands that it was started with."""
    commands = []

    def run(command: list[Any], **options: Any) -> process.Finished:
        commands.append((command, options))
        Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": installs}))
        return process.Finished("pip …", code, b"", stderr)

    monkeypatch.setattr(process, "run", run)
    return commands


def install(name: str, version: str, **info: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": version}, "download_info": info}


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "my wheel.whl"
    wheel.write_bytes(b"wheel")
    archive = {"archive_info": {"hashes": {"sha256": "ab" * 32}}}
    commands = answer(
        monkeypatch,
        install("torch", "2.13.0+cpu", url="https://x/torch-2-cp311-cp311-linux_x86_64.whl", **archive),
        install("Farama_Notifications", "0.0.4", url="https://x/f-0-py3-none-any.whl#sha256=ab", **archive),
        install("half", "1", url="https://x/half-1-py3-none-manylinux_2_28_x86_64.whl", **archive),
        install("local", "1", url=f"file://{str(wheel).replace(' ', '%20')}"),
    )
    found = lock.resolve(recipe(tmp_path, "torch"), ["pip"])
    assert found == Lock(
        "3.11",
        ("torch",),
        (
            LockedPackage("farama-notifications", "0.0.4", "ab" * 32, pure=True),
            LockedPackage("half", "1", "ab" * 32),
            LockedPackage("local", "1", HEX),
            LockedPackage("torch", "2.13.0+cpu", "ab" * 32),
        ),
    )
    assert commands[0][1]["cwd"] == tmp_path


def test_nothing_required_needs_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answer(monkeypatch)
    assert lock.resolve(recipe(tmp_path), ["pip"]) == Lock("3.11", (), ())
    assert commands == []


@pytest.mark.parametrize(
    ("stderr", "hint"),
    [
        ("ERROR: No matching distribution found for torhc\n", "the command was: pip …"),
        (
            "Failed to establish a new connection: NewConnectionError\nERROR: none\n",
            "is there a network? With a recipe.lock and pip's cache or --find-links none is needed",
        ),
    ],
    ids=["no such package", "offline"],
)
def test_pip_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, hint: str) -> None:
    answer(monkeypatch, code=1, stderr=stderr)
    with pytest.raises(EnvironmentSetupError) as caught:
        lock.resolve(recipe(tmp_path, "torhc"), ["pip"])
    shown = "".join(f"\n    {line}" for line in stderr.splitlines())
    assert caught.value.message == f"pip could not resolve the requirements:{shown}"
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("info", "scheme"),
    [
        ({"url": "https://git/x", "vcs_info": {"vcs": "git"}}, "https"),
        ({"url": "file:///src/x", "dir_info": {}}, "file"),
    ],
    ids=["git", "folder"],
)
def test_what_can_not_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], scheme: str
) -> None:
    answer(monkeypatch, install("thing", "1", **info))
    with pytest.raises(LockError) as caught:
        lock.resolve(recipe(tmp_path, "thing"), ["pip"])
    assert caught.value.message == f"thing comes from {scheme}:… without a digest: it can't be locked"
    assert caught.value.hint == "require a released wheel of it"
