import os
import sys
from pathlib import Path

import pytest

from rvbundle import environment
from rvbundle.environment import Interpreter, find_interpreter
from rvbundle_runtime.errors import EnvironmentSetupError

from .test_lock import recipe


def fake(path: Path, version: str, implementation: str = "cpython") -> Path:
    """Write a program that answers like a Python of that version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    short = ".".join(version.split(".")[:2])
    answer = (
        f'{{"version": "{version}", "short": "{short}", "executable": "x", "base_prefix": "/b", '
        f'"stdlib": "/s", "implementation": "{implementation}", "cache_tag": "c", "usual_site": true}}'
    )
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = fake(tmp_path / "own/bin/python3", "3.11.4")
    monkeypatch.setattr(sys, "_base_executable", str(path))
    return path


def test_the_one_that_runs_rvbundle(own_interpreter: Path) -> None:
    assert find_interpreter("3.11", {}) == Interpreter(
        own_interpreter, "3.11.4", "3.11", Path("/s"), Path("/b"), "c", True
    )


@pytest.mark.parametrize(
    ("place", "environ"),
    [
        ("bin/python3.12", {"PATH": "{}/bin"}),
        ("versions/3.12.1/bin/python3.12", {"PYENV_ROOT": "{}"}),
        (".pyenv/versions/3.12.1/bin/python3.12", {"HOME": "{}"}),
        ("uv/cpython-3.12/bin/python3.12", {"UV_PYTHON_INSTALL_DIR": "{}/uv"}),
        (".local/share/uv/python/cpython-3.12/bin/python3.12", {"HOME": "{}"}),
    ],
    ids=["path", "pyenv", "pyenv at home", "uv", "uv at home"],
)
def test_places(tmp_path: Path, place: str, environ: dict[str, str]) -> None:
    path = fake(tmp_path / place, "3.12.1")
    variables = {"PATH": "", **{name: value.format(tmp_path) for name, value in environ.items()}}
    assert find_interpreter("3.12", variables).executable == path


def test_none_of_the_version(tmp_path: Path, own_interpreter: Path) -> None:
    fake(tmp_path / "bin/python3.12", "3.12.1")
    fake(tmp_path / "bin/python3.13", "3.13.0")
    with pytest.raises(EnvironmentSetupError) as caught:
        find_interpreter("3.9", {"PATH": f"{tmp_path}/bin"})
    assert caught.value.message == (
        f"no CPython 3.9 on this machine; found: 3.11 ({own_interpreter}), 3.12 ({tmp_path}/bin/python3.12), "
        f"3.13 ({tmp_path}/bin/python3.13)"
    )
    assert caught.value.hint == (
        "install it (apt install python3.9, pyenv install 3.9, uv python install 3.9), "
        "or change [python] version in the recipe"
    )


def test_what_is_passed_over(tmp_path: Path) -> None:
    fake(tmp_path / "bin/python3.12-config", "3.12.1")
    fake(tmp_path / "shims/python3.12", "3.12.1")
    fake(tmp_path / "pypy/python3.12", "3.12.1", "pypy")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/python3.12").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "broken/python3.12").chmod(0o755)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/python3.12").write_text("")
    path = ":".join(f"{tmp_path}/{name}" for name in ("bin", "shims", "pypy", "broken", "plain", "gone"))
    with pytest.raises(EnvironmentSetupError) as caught:
        find_interpreter("3.12", {"PATH": f"{path}:relative:"})
    assert "found: 3.11 (" in caught.value.message
    assert "3.12 (" not in caught.value.message


def test_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentSetupError) as caught:
        environment.pip_command(Path("python"))
    assert caught.value.message == "there is no pip beside rvbundle, and environments are made by pip"


def test_index_options_of_requirements(tmp_path: Path) -> None:
    value = recipe(
        tmp_path,
        "torch",
        "--index-url https://x",
        "--extra-index-url=https://y",
        "-f ./wheels",
        "--no-index",
        "numpy",
    )
    words = environment._index_options(value)
    assert words[:2] == ["--index-url", "https://x"]
    assert "--extra-index-url=https://y" in words
    assert words[words.index("-f") + 1] == "./wheels"
    assert "--no-index" in words
    assert not any(word.startswith(("torch", "numpy")) for word in words)


def test_paths_of_an_environment() -> None:
    interpreter = Interpreter(Path("/p"), "3.12.1", "3.12", Path("/s"), Path("/b"), "c", True)
    value = environment.Environment(Path("/e"), interpreter)
    assert value.python == Path("/e/venv/bin/python")
    assert value.site_packages == Path("/e/venv/lib/python3.12/site-packages")


def test_a_virtual_environment_that_can_not_be_made(tmp_path: Path) -> None:
    broken = tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\necho 'no ensurepip' >&2\nexit 1\n")
    broken.chmod(0o755)
    interpreter = Interpreter(broken, "3.12.1", "3.12", Path("/s"), Path("/b"), "c", True)
    with pytest.raises(EnvironmentSetupError) as caught:
        environment.make_venv(interpreter, tmp_path / "venv")
    assert caught.value.message == f"{broken} can't make a virtual environment:\n    no ensurepip"
    assert caught.value.hint == "on Debian and Ubuntu: apt install python3.12-venv"
    assert os.path.isabs(broken)
