"""What Python can do inside an image, with the cold pack beside it and without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import run_cli


def lines(image: Path, *words: str, code: int = 0) -> list[str]:
    result = run_cli("run", image, "--", *words)
    assert result.code == code, result.err
    return result.out.splitlines()


def test_the_agent_sees_only_what_it_should(probe_image: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    hostile = {"LD_PRELOAD": "/nonexistent.so", "OMP_NUM_THREADS": "7", "PYTHONPATH": "/x", "SECRET": "1"}
    kept = {"TERM": "vt100", "TZ": "Europe/Berlin", "NO_COLOR": "1"}
    here = {**hostile, **kept}
    # LD_PRELOAD would make the host's own programs complain: the launcher must not care either
    result = run_cli("run", "--network", probe_image, "facts", cwd=tmp_path, env=here)
    facts = json.loads(result.out)
    assert facts["cwd"] == "/agent"
    assert facts["files"] == ["mine.txt"]
    assert set(facts["env"]) == {
        *kept,
        *(
            "HOME",
            "LANG",
            "LOGNAME",
            "PATH",
            "RVBUNDLE_RUNTIME",
            "SDL_AUDIODRIVER",
            "SDL_VIDEODRIVER",
            "SHELL",
            "USER",
        ),
        *(name for name in ("COLUMNS", "LINES", "COLORTERM", "FORCE_COLOR") if name in facts["env"]),
        *(name for name in facts["env"] if name.lower().endswith("_proxy")),
    }
    assert facts["executable"] == "/usr/bin/python3"
    assert facts["prefix"] == "/usr"
    assert facts["file"] == "/app/probe.py"
    assert facts["path"][0] == "/app"
    root = "agent app bin dev etc home lib lib64 proc run sbin sys tmp usr var"
    assert facts["root"] == root.split()
    assert facts["capabilities"] == "0000000000000000"
    assert facts["no_new_privs"] == "1"
    assert facts["processes"] == [1, facts["pid"]]
    assert facts["hostname"] == "agent"


def test_children_of_every_kind(probe_image: Path) -> None:
    assert lines(probe_image, "children") == [
        "child 0",
        "child 1",
        "child 0",
        "shell 2",
        "bare 1",
        "script 9",
    ]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(probe_image: Path, method: str) -> None:
    assert lines(probe_image, "pool", method) == [f"{method} [0, 2, 4, 6]"]


def test_cold_modules_come_from_the_pack(probe_image: Path) -> None:
    assert lines(probe_image, "load", "colorsys") == ["colorsys"]
    assert lines(probe_image, "load", "xml.dom.minidom") == ["xml.dom.minidom"]
    # an extension module that is cold, with a shared library that is cold
    assert lines(probe_image, "load", "sqlite3", "sqlite_version")[0].startswith("3.")


def test_cold_modules_look_as_in_an_environment(probe_image: Path) -> None:
    stdlib = "/usr/lib/python3.11"
    cached = f"{stdlib}/__pycache__/colorsys.cpython-311.pyc"
    assert lines(probe_image, "origin", "colorsys") == [f"{stdlib}/colorsys.py {stdlib}/colorsys.py {cached}"]
    assert lines(probe_image, "find", "sqlite3") == [f"{stdlib}/sqlite3/__init__.py"]
    assert lines(probe_image, "find", "no_such_module") == ["None"]
    expected = subprocess.run(
        [
            sys.executable,
            "-c",
            "import pkgutil, wsgiref; print(*[m.name for m in pkgutil.iter_modules(wsgiref.__path__)])",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert lines(probe_image, "modules", "wsgiref") == expected


def test_sources_and_data_come_from_the_pack(probe_image: Path) -> None:
    assert lines(probe_image, "source", "tarfile", "TarFile") == ["class TarFile(object):"]
    assert int(lines(probe_image, "resource", "idlelib", "help.html")[0]) > 10_000


def test_a_restored_module_needs_the_pack_no_more(probe_image: Path, tmp_path: Path) -> None:
    env = {"RVBUNDLE_CACHE": str(tmp_path / "cache")}
    alone = tmp_path / probe_image.name
    alone.write_bytes(probe_image.read_bytes())
    assert run_cli("run", alone, "load", "colorsys", env=env).code == 1
    cold = probe_image.with_name("probe-1.0.cold.rvb")
    assert run_cli("run", "--cold", cold, alone, "load", "colorsys", env=env).out == "colorsys\n"
    assert run_cli("run", alone, "load", "colorsys", env=env).out == "colorsys\n"


def test_without_the_pack_the_error_says_what_to_do(alone: Path, tmp_path: Path) -> None:
    env = {"RVBUNDLE_CACHE": str(tmp_path / "cache")}
    result = run_cli("run", alone, "load", "colorsys", env=env)
    assert result.code == 1
    message = (
        "colorsys was left out of this image (no trace used it, and the cold pack is not here): keep it in "
        "the image with [keep] in the recipe or with a [[trace]] that uses it, or put the cold pack "
        "(.cold.rvb) beside the image"
    )
    assert result.err.splitlines()[0] == f"rvbundle: {message}"
    assert result.err.splitlines()[-1] == f"ImportError: {message}"


def test_without_the_pack_an_optional_import_is_not_swallowed_in_silence(alone: Path, tmp_path: Path) -> None:
    env = {"RVBUNDLE_CACHE": str(tmp_path / "cache")}
    result = run_cli("run", alone, "optional", "colorsys", env=env)
    assert result.out == "absent ImportError colorsys\n"
    assert "colorsys was left out of this image" in result.err
    result = run_cli("run", alone, "optional", "no_such_module", env=env)
    assert result.out == "absent ModuleNotFoundError no_such_module\n"
    assert result.err == ""


def test_a_cold_module_is_not_replaced_by_another_of_its_name(alone: Path, tmp_path: Path) -> None:
    """`find_spec` must answer for a cold module where it would be, even if it can't be loaded."""
    env = {"RVBUNDLE_CACHE": str(tmp_path / "cache")}
    result = run_cli("run", alone, "find", "sqlite3", env=env)
    assert result.out == "/usr/lib/python3.11/sqlite3/__init__.py\n"


def test_tracebacks_name_the_agents_files(probe_image: Path) -> None:
    result = run_cli("run", probe_image, "crash")
    assert result.code == 1
    assert 'File "/app/probe.py", line ' in result.err
    assert result.err.endswith("RuntimeError: on purpose\n")
