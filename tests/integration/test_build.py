"""`rvbundle build`: stages and their cache, locks, determinism; and the commands that look at an image."""

import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import AGENTS, REPOSITORY, TEST_CACHE, run_cli

ARCH = os.uname().machine


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """A copy of the probe agent's folder."""
    return Path(shutil.copytree(AGENTS / "probe", tmp_path / "probe"))


def phases(err: str) -> dict[str, str]:
    """Return {phase: "done" or "reused"} from a build's progress."""
    rows = [line.split() for line in err.splitlines() if line.startswith(("done", "reused"))]
    return {row[1].rstrip(":"): row[0] for row in rows}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_unchanged_recipe_is_not_built_again(probe: Path, tmp_path: Path) -> None:
    assert run_cli("build", probe, "-o", tmp_path / "out").code == 0
    again = run_cli("build", probe, "-o", tmp_path / "out", "--verbose")
    assert set(phases(again.err).values()) == {"reused"}
    assert "nothing that it depends on has changed" in again.err


def test_a_changed_agent_keeps_the_environment(probe: Path, tmp_path: Path) -> None:
    assert run_cli("build", probe, "-o", tmp_path / "out").code == 0
    with (probe / "probe.py").open("a") as file:
        file.write(f"\n# {tmp_path}\n")
    again = run_cli("build", probe, "-o", tmp_path / "out", "--verbose")
    done = phases(again.err)
    assert [done[name] for name in ("lock", "environment", "freeze", "analysis")] == ["reused"] * 4
    assert [done[name] for name in ("trace", "pack", "prove")] == ["done"] * 3
    assert "changed since the last build: agent" in again.err


def test_two_builds_give_identical_bytes(probe: Path, tmp_path: Path) -> None:
    """Also from two empty caches: bytecode, order, times and compression are all fixed."""
    images = []
    for name in ("a", "b"):
        env = {"RVBUNDLE_CACHE": str(tmp_path / f"cache-{name}")}
        folder = tmp_path / name
        assert run_cli("lock", probe, env=env).code == 0
        result = run_cli("build", probe, "-o", folder, env=env)
        assert result.code == 0, result.err
        images.append(folder)
    assert sha256(images[0] / "probe-1.0.rvb") == sha256(images[1] / "probe-1.0.rvb")
    assert sha256(images[0] / "probe-1.0.cold.rvb") == sha256(images[1] / "probe-1.0.cold.rvb")


def test_a_lock_keeps_the_trace_record_beside_it(probe: Path, tmp_path: Path) -> None:
    result = run_cli("lock", probe)
    assert result.code == 0, result.err
    assert Path(result.out.strip()) == probe / "recipe.lock"
    assert run_cli("build", probe, "-o", tmp_path / "out").code == 0
    record = json.loads((probe / "recipe.trace").read_text())
    assert record["workloads"][0]["stdout"] == "hello world\n"
    assert any(path.endswith("lib-dynload") is False for path in record["workloads"][0]["opened"])
    again = run_cli("build", probe, "-o", tmp_path / "out", "--verbose")
    assert "reused  trace: recipe.trace" in again.err
    # and from an empty cache, in another folder: what was traced is known by its content
    moved = Path(shutil.copytree(probe, tmp_path / "elsewhere" / "probe"))
    env = {"RVBUNDLE_CACHE": str(tmp_path / "cache")}
    fresh = run_cli("build", moved, "-o", tmp_path / "out2", env=env)
    assert "reused  trace: recipe.trace" in fresh.err
    assert sha256(tmp_path / "out" / "probe-1.0.rvb") == sha256(tmp_path / "out2" / "probe-1.0.rvb")


def test_a_trace_leaves_no_mark_in_the_environment(tmp_path: Path) -> None:
    """Every process is traced, also one with an environment of its own, and none can tell."""
    (tmp_path / "agent.py").write_text(
        "import os, subprocess, sys\n"
        "print(sorted(os.environ))\n"
        "code = 'import os, decimal; print(sorted(os.environ), decimal.Decimal(2).sqrt())'\n"
        "for env in ({}, {'ONLY': '1'}, None):\n"
        "    print(subprocess.check_output([sys.executable, '-c', code], env=env, text=True))\n"
    )
    (tmp_path / "recipe.toml").write_text(
        '[agent]\nname = "marks"\nversion = "1"\nentry = "agent.py"\n[python]\nversion = "3.11"\n'
        "[[trace]]\nargs = []\ngolden = true\n"
    )
    built = run_cli("build", tmp_path, "-o", tmp_path / "out")  # which proves that both print the same
    assert built.code == 0, built.err
    image = Path(built.out.split()[0])
    record = json.loads(run_cli("explain", image, "--sizes", "--json").out)
    assert any(library["path"].endswith("libpython3.11.so.1.0") for library in record["trimmed"])
    out = run_cli("run", image).out
    assert "LD_AUDIT" not in out
    assert "RVBUNDLE" not in out.replace("RVBUNDLE_RUNTIME", "")
    assert out.count("1.414213562373095048801688724") == 3


def test_builds_print_where_and_how_large(probe: Path, tmp_path: Path) -> None:
    result = run_cli("build", probe / "recipe.toml", "-o", tmp_path / "out", "--json")
    built = json.loads(result.out)
    image = tmp_path / "out" / "probe-1.0.rvb"
    assert built["image"] == str(image)
    assert built["image_size"] == image.stat().st_size
    assert built["cold_size"] == image.with_name("probe-1.0.cold.rvb").stat().st_size
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_entry_as_function_and_include(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    (agent / "mine").mkdir(parents=True)
    (agent / "data").mkdir()
    (agent / "mine" / "__init__.py").write_text("")
    (agent / "mine" / "start.py").write_text(
        "import pathlib, sys\n\n\ndef main():\n"
        "    text = (pathlib.Path(__file__).parent.parent / 'data' / 'x.txt').read_text()\n"
        "    print(text, sys.argv[1:])\n    return 0\n"
    )
    (agent / "data" / "x.txt").write_text("data")
    (agent / "recipe.toml").write_text(
        '[agent]\nname = "function"\nversion = "1"\nentry = "mine.start:main"\ninclude = ["data"]\n'
        '[python]\nversion = "3.11"\n[[trace]]\nargs = ["a"]\ngolden = true\n'
        "[run]\nenv = { GREETING = 'hi' }\n"
    )
    result = run_cli("build", agent, "-o", tmp_path)
    assert result.code == 0, result.err
    assert run_cli("run", tmp_path / "function-1.rvb", "b").out == "data ['b']\n"


@pytest.mark.parametrize("level", ["reachable", "none"])
def test_trim_levels(probe: Path, tmp_path: Path, level: str) -> None:
    with (probe / "recipe.toml").open("a") as file:
        file.write(f'\n[trim]\nlevel = "{level}"\n')
    assert run_cli("build", probe, "-o", tmp_path / "out").code == 0
    image = tmp_path / "alone.rvb"
    shutil.copy(tmp_path / "out" / "probe-1.0.rvb", image)
    # multiprocessing is imported inside a function that no trace calls
    assert run_cli("run", image, "pool", "spawn").out == "spawn [0, 2, 4, 6]\n"
    left_out = run_cli("run", image, "load", "wsgiref.types")
    assert (left_out.code == 0) == (level == "none")


def test_keep(probe: Path, tmp_path: Path) -> None:
    with (probe / "recipe.toml").open("a") as file:
        file.write('\n[keep]\nmodules = ["wsgiref", "colorsys"]\nfiles = ["tarfile.py", "idlelib/*.html"]\n')
    assert run_cli("build", probe, "-o", tmp_path / "out").code == 0
    rows = json.loads(run_cli("inspect", tmp_path / "out" / "probe-1.0.rvb", "--files", "--json").out)
    reasons = {row["path"]: row["reason"] for row in rows["payloads"][0]["entries"]}
    stdlib = "usr/lib/python3.11"
    assert reasons[f"{stdlib}/wsgiref/types.pyc"] == "[keep] modules has wsgiref"
    assert reasons[f"{stdlib}/colorsys.pyc"] == "[keep] modules has colorsys"
    assert reasons[f"{stdlib}/tarfile.py"] == "[keep] files has tarfile.py"
    assert reasons[f"{stdlib}/idlelib/help.html"] == "[keep] files has idlelib/*.html"


def test_inspect_licences(probe_image: Path) -> None:
    """An image lists what is in it, its cold pack the rest; the texts lie in the cold pack."""
    cold = probe_image.with_name("probe-1.0.cold.rvb")
    lists = [json.loads(run_cli("inspect", path, "--licences", "--json").out) for path in (probe_image, cold)]
    names = [{row["component"] for row in report["licences"][f"payload {ARCH}"]} for report in lists]
    assert {"Python", "rvbundle"} <= names[0]
    every = [row for report in lists for row in report["licences"][f"payload {ARCH}"]]
    everything = {row["component"]: row for row in every}
    assert everything["Python"]["licence"] == "PSF-2.0"
    if shutil.which("dpkg-query"):
        assert everything["libc6"]["source"].startswith("Debian source package glibc ")
        assert everything["libc6"]["wants_source"]
    assert names[1] - names[0]  # libraries of modules that no workload imports
    listed = [json.loads(run_cli("inspect", path, "--files", "--json").out) for path in (probe_image, cold)]
    texts = {entry["path"] for report in listed for entry in report["payloads"][0]["entries"]}
    wanted = {row["where"] for row in everything.values()} - {""}
    assert wanted <= texts
    text = run_cli("inspect", probe_image, "--licences").out
    assert text.startswith(f"payload {ARCH}\ncomponent ")


def test_inspect(probe_image: Path) -> None:
    report = json.loads(run_cli("inspect", probe_image, "--json").out)
    assert (report["kind"], report["name"], report["version"]) == ("image", "probe", "1.0")
    assert report["size"] == probe_image.stat().st_size
    (payload,) = report["payloads"]
    assert payload["arch"] == os.uname().machine
    assert payload["python"].startswith("3.11.")
    assert sum(row["compressed"] for row in payload["packages"]) < report["size"]
    assert any(row["path"].endswith("libc.so.6") for row in payload["libraries"])
    cold = json.loads(run_cli("inspect", probe_image.with_name("probe-1.0.cold.rvb"), "--json").out)
    assert cold["bound_to"] == report["identity"]
    text = run_cli("inspect", probe_image).out
    assert "probe 1.0  image" in text
    assert "(Python and system)" in text
    assert "/app/probe.py" in text


def test_explain(probe_image: Path) -> None:
    text = run_cli("explain", probe_image).out
    for part in (
        "native to this machine",
        "user namespaces work here",
        "found beside the image",
        "hello world",
        "opened by trace 1",
    ):
        assert part in text
    rows = json.loads(run_cli("explain", probe_image, "--files", "json/*.pyc", "--json").out)
    sides = {row["path"].rpartition("/")[2]: (row["side"], row["reason"]) for row in rows}
    assert sides["decoder.pyc"] == ("hot", "opened by trace 1; reachable: probe.py → json")
    assert sides["tool.pyc"][0] == "cold"
    (row,) = json.loads(run_cli("explain", probe_image, "--files", "multiprocessing/pool.pyc", "--json").out)
    assert row["reason"].startswith("no trace imported it, though it is reachable: probe.py")


def test_sizes(probe_image: Path, tmp_path: Path) -> None:
    report = json.loads(run_cli("explain", probe_image, "--sizes", "--json").out)
    assert report["image"] == probe_image.stat().st_size
    shares = sum(row["hot_compressed"] for row in report["packages"])
    assert 0.9 * report["image"] < shares < report["image"]
    assert run_cli("explain", probe_image, "--html", tmp_path / "s.html").out == f"{tmp_path}/s.html\n"
    assert (tmp_path / "s.html").read_text().endswith("</html>\n")
    full = run_cli("explain", probe_image, "--html", tmp_path / "none" / "s.html")
    assert full.code == 108
    assert full.err == f"error: can't write {tmp_path}/none/s.html: No such file or directory\n"


def test_verify(probe_image: Path) -> None:
    result = run_cli("verify", probe_image)
    assert [line.partition(": intact")[0] for line in result.out.splitlines()] == [
        str(probe_image),
        str(probe_image.with_name("probe-1.0.cold.rvb")),
    ]


def test_extract_gives_the_plain_tree(probe_image: Path, tmp_path: Path) -> None:
    result = run_cli("extract", probe_image, tmp_path / "tree")
    assert result.out.endswith("whole\n"), result.err
    tree = tmp_path / "tree"
    frozen = [p for p in (TEST_CACHE / "build" / "environment").glob("*/venv") if p.is_dir()]
    assert frozen
    stdlib = Path(os.__file__).parent
    assert filecmp.cmp(tree / "usr/lib/python3.11/tarfile.py", stdlib / "tarfile.py", shallow=False)
    (extension,) = (tree / "usr/lib/python3.11/lib-dynload").glob("_json.*.so")
    # symbol tables and all: the library is byte for byte the one that was frozen
    assert filecmp.cmp(extension, stdlib / "lib-dynload" / extension.name, shallow=False)


def test_extract_without_the_cold_pack(alone: Path, tmp_path: Path) -> None:
    result = run_cli("extract", alone, tmp_path / "tree")
    assert "the hot part only (no probe-1.0.cold.rvb beside the image)" in result.out
    assert not (tmp_path / "tree/usr/lib/python3.11/tarfile.pyc").exists()


def test_cache(probe: Path, tmp_path: Path) -> None:
    env = {"RVBUNDLE_CACHE": str(tmp_path / "cache")}
    assert run_cli("build", probe, "-o", tmp_path, env=env).code == 0
    assert run_cli("run", tmp_path / "probe-1.0.rvb", "hello", env=env).code == 0
    listing = json.loads(run_cli("cache", "ls", "--json", env=env).out)
    assert [row["name"] for row in listing["images"]] == ["probe"]
    assert {"environment", "freeze", "trace", "image"} <= {row["stage"] for row in listing["stages"]}
    assert "probe" in run_cli("cache", "ls", env=env).out
    pruned = run_cli("cache", "prune", env=env)
    assert pruned.out.startswith("removed 1 unpacked images")
    assert json.loads(run_cli("cache", "ls", "--json", env=env).out) == {
        "base": str(tmp_path / "cache"),
        "images": [],
        "stages": [],
        "bootstraps": [],
    }


def test_init_writes_a_recipe_that_builds(tmp_path: Path) -> None:
    agent = tmp_path / "My Agent"
    agent.mkdir()
    (agent / "helper.py").write_text("VALUE = 3\n")
    (agent / "train.py").write_text(
        "import json\n\nimport helper\n\nif __name__ == '__main__':\n    print(json.dumps(helper.VALUE))\n"
    )
    result = run_cli("init", cwd=agent)
    assert result.code == 0, result.err
    assert (agent / "recipe.toml").exists()
    built = run_cli("build", "recipe.toml", cwd=agent)
    assert built.code == 0, built.err
    assert run_cli("run", "dist/My-Agent-0.1.0.rvb", cwd=agent).out == "3\n"
    refused = run_cli("init", cwd=agent)
    assert (refused.code, refused.err) == (
        101,
        "error: recipe.toml is there already\n\nhint: --force replaces it\n",
    )


def test_debians_python(tmp_path: Path) -> None:
    """Its site module looks for packages elsewhere than others do."""
    debian = Path("/usr/bin/python3").resolve()
    version = debian.name.removeprefix("python")
    agent = Path(shutil.copytree(AGENTS / "probe", tmp_path / "probe"))
    text = (agent / "recipe.toml").read_text().replace('"3.11"', f'"{version}"')
    (agent / "recipe.toml").write_text(text)
    same = version == f"{sys.version_info.major}.{sys.version_info.minor}"
    ours = [sysconfig.get_path("purelib"), str(REPOSITORY / "bundler"), str(REPOSITORY / "runtime")]
    env = {**os.environ, "RVBUNDLE_CACHE": str(TEST_CACHE), "PYTHONPATH": os.pathsep.join(ours)}
    # the interpreter that runs rvbundle comes first where its version fits
    python = str(debian) if same else sys.executable
    for words, expected in (
        (["build", agent, "-o", tmp_path], str(tmp_path / "probe-1.0.rvb")),
        (["run", tmp_path / "probe-1.0.rvb", "load", "colorsys"], "colorsys"),
        (["run", tmp_path / "probe-1.0.rvb", "pool", "spawn"], "spawn [0, 2, 4, 6]"),
    ):
        done = subprocess.run([python, "-m", "rvbundle", *words], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(expected)


def test_help_version_and_completion() -> None:
    assert run_cli("--version").out.startswith("rvbundle 0.")
    text = run_cli("--help").out
    for name in ("build", "run", "explain", "inspect", "verify", "lock", "init", "extract", "shell", "cache"):
        assert name in text
        assert "Example" in run_cli(name, "--help").out or name == "cache"
    assert "complete" in run_cli("--show-completion", "bash", env={"SHELL": "/bin/bash"}).out.lower()


def test_cold_pack_inside_the_file(probe: Path, tmp_path: Path) -> None:
    """One file for everything: the cold pack stands before the image, and is found from its header."""
    result = run_cli("build", probe, "-o", tmp_path / "out", "--cold", "embed")
    assert result.code == 0, result.err
    image = tmp_path / "out" / "probe-1.0.rvb"
    assert [path.name for path in image.parent.iterdir()] == [image.name]
    assert "with its cold pack inside" in result.out
    env = {"RVBUNDLE_CACHE": str(tmp_path / "cache")}
    assert run_cli("run", image, "load", "colorsys", env=env).out == "colorsys\n"
    kinds = [row["kind"] for row in json.loads(run_cli("verify", image, "--json").out)["verified"]]
    assert kinds == ["image", "cold pack"]
    assert "it is inside the image's file" in run_cli("explain", image).out
    assert run_cli("extract", image, tmp_path / "tree").out.endswith("whole\n")
    separate = run_cli("build", probe, "-o", tmp_path / "two", "--json")
    assert (
        json.loads(separate.out)["identity"]
        == json.loads(run_cli("inspect", image, "--json").out)["identity"]
    )


def test_no_cold_pack(probe: Path, tmp_path: Path) -> None:
    result = run_cli("build", probe, "-o", tmp_path / "out", "--cold", "drop")
    assert result.code == 0, result.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["probe-1.0.rvb"]
    wrong = run_cli("build", probe, "--cold", "hide")
    assert (wrong.code, wrong.err) == (2, "error: build: --cold hide: expected separate, embed or drop\n")


def test_learning_from_use(probe: Path, tmp_path: Path) -> None:
    """What a run had to restore is written down, and the next build keeps it."""
    env = {"RVBUNDLE_CACHE": str(tmp_path / "cache")}
    assert run_cli("build", probe, "-o", tmp_path).code == 0
    image, record = tmp_path / "probe-1.0.rvb", tmp_path / "record.json"
    assert run_cli("run", "--record", record, image, "load", "colorsys", env=env).code == 0
    restored = json.loads(record.read_text())["restored"]
    assert restored == ["usr/lib/python3.11/colorsys.pyc"]
    assert "runs needed them" in run_cli("explain", image, env=env).out
    result = run_cli("build", probe, "-o", tmp_path / "learnt", "--with-record", record)
    assert result.code == 0, result.err
    alone = Path(shutil.copy(tmp_path / "learnt" / "probe-1.0.rvb", tmp_path / "alone.rvb"))
    assert run_cli("run", alone, "load", "colorsys").out == "colorsys\n"
    (row,) = json.loads(run_cli("explain", alone, "--files", "colorsys.pyc", "--json").out)
    assert row["reason"] == "restored in a recorded run"
    wrong = run_cli("build", probe, "--with-record", probe / "recipe.toml")
    assert wrong.code == 107
    assert wrong.err == (
        f"error: {probe / 'recipe.toml'} is no record of a run\n\n"
        "hint: `rvbundle run --record FILE IMAGE` writes one\n"
    )
