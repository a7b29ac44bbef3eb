"""The payload for RISC-V, here and on a host of its own architecture; torch under a forced emulator."""

import csv
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rvbundle_runtime import blas
from tests.conftest import RECIPES, TEST_CACHE, build, run_cli

from .conftest import HERE, SUITE
from .hosts import RISCV64, make_host, on_host

POLE, Q = "cartpole-policy-gradient", "tabular-q"


@pytest.fixture(scope="session")
def pole_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of the policy-gradient agent with payloads for x86_64 and riscv64; cold pack beside it."""
    return build(RECIPES / POLE / "riscv64.toml", tmp_path_factory.mktemp("pole"))


@pytest.fixture(scope="session")
def environment(qemu: Path) -> dict[str, str]:
    """The environment of a launcher that finds the emulators."""
    return {"RVBUNDLE_EMULATORS": str(qemu)}


def returns(path: Path) -> list[float]:
    """Return the rewards that a training has written."""
    with path.open(newline="") as file:
        return [float(row["reward"]) for row in csv.DictReader(file)]


@pytest.mark.torch
def test_an_emulated_training_takes_the_same_actions(
    pole_image: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words = ["--", "--episodes", "3", "--evaluate-after", "2", "--out", "."]
    found = []
    for name, options in (("native", ()), ("qemu", ("--emulator", "qemu", "--payload", "x86_64"))):
        (tmp_path / name).mkdir()
        result = run_cli("run", *options, pole_image, *words, cwd=tmp_path / name, env=environment)
        assert result.code == 0, result.err
        found.append((result.out, returns(tmp_path / name / "rewards.csv")))
    assert found[0] == found[1]
    assert len(found[0][1]) == 3


@pytest.mark.torch
def test_the_checkpoint_decides_alike_on_riscv64(pole_image: Path, environment: dict[str, str]) -> None:
    """On 200 observations; the emulated run has no cold pack, so traced pages are enough for it."""
    outputs = []
    for arch in ("x86_64", RISCV64):
        result = run_cli("run", "--payload", arch, pole_image, "--", "--actions", "200", env=environment)
        assert result.code == 0, result.err
        outputs.append(result.out.strip())
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 200
    assert set(outputs[0]) == {"0", "1"}


@pytest.mark.torch
def test_payloads_share_what_is_the_same(pole_image: Path) -> None:
    """The agent's files and gymnasium's data lie in the image once."""
    report = json.loads(run_cli("inspect", pole_image, "--files", "--json").out)
    archs = {payload["arch"]: payload for payload in report["payloads"]}
    assert set(archs) == {"x86_64", RISCV64}
    assert archs[RISCV64]["source"] == f"debian:{SUITE}"
    paths = [{entry["path"] for entry in payload["entries"]} for payload in archs.values()]
    assert {"app/train.py", "app/checkpoints/policy.pt"} <= paths[0] & paths[1]
    total = sum(sum(e["compressed"] for e in payload["entries"]) for payload in archs.values())
    assert total >= report["size"] * 0.9  # what is shared is counted in each
    (shared,) = {e["size"] for p in archs.values() for e in p["entries"] if e["path"] == "app/train.py"}
    assert shared == (RECIPES / POLE / "train.py").stat().st_size


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a riscv64 machine that has busybox and nothing else."""
    return make_host(tmp_path_factory.mktemp("host"), TEST_CACHE)


def self_running(recipe: Path, output: Path, *options: str) -> Path:
    """Build a self-running file for riscv64; return its path."""
    words = ["--output", output, "--self-running", RISCV64, *options]
    result = run_cli("build", recipe, *words, timeout=1800)
    assert result.code == 0, result.err
    (found,) = output.glob("*.run")
    return found


def expected(*arguments: str) -> str:
    """Return what tabular-q prints here, outside of any image."""
    script = RECIPES / Q / "train.py"
    words = [_python(), str(script), *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def _python() -> str:
    """Return this machine's Python."""
    return shutil.which("python3.11") or "python3.11"


TINY = ("--episodes", "3", "--evaluate")


def test_a_native_payload_on_a_bare_host(host: Path, qemu: Path, tmp_path: Path) -> None:
    file = self_running(RECIPES / Q / "riscv64.toml", tmp_path, "--payload", RISCV64)
    shutil.copy2(file, host / "srv/native.run")
    explained = on_host(host, qemu, "/srv/native.run", "--rvbundle-explain")
    assert explained.returncode == 0, explained.stderr
    assert "native to this machine (riscv64)" in explained.stdout
    for _ in range(2):  # the first start unpacks
        done = on_host(host, qemu, "/usr/bin/sh", "/srv/native.run", *TINY)
        assert (done.returncode, done.stdout) == (0, expected(*TINY)), done.stderr
    (host / "srv/native.run").unlink()


@pytest.mark.parametrize("emulator", ["qemu", "box64"])
def test_an_emulated_payload_on_a_bare_host(host: Path, qemu: Path, tmp_path: Path, emulator: str) -> None:
    """Two emulators deep. box64 0.3.4 itself crashes now and then under qemu-riscv64: it may try again."""
    file = self_running(RECIPES / Q / "recipe.toml", tmp_path, "--emulators", emulator)
    shutil.copy2(file, host / "srv/foreign.run")
    for _ in range(3 if emulator == "box64" else 1):
        done = on_host(host, qemu, "/srv/foreign.run", "--rvbundle-emulator", emulator, *TINY)
        if done.returncode == 0:
            break
    assert (done.returncode, done.stdout) == (0, expected(*TINY)), done.stderr
    (host / "srv/foreign.run").unlink()


def test_no_emulator_for_the_only_payload(host: Path, qemu: Path, tmp_path: Path) -> None:
    file = self_running(RECIPES / Q / "recipe.toml", tmp_path, "--emulators", "none")
    shutil.copy2(file, host / "srv/none.run")
    done = on_host(host, qemu, "/srv/none.run", *TINY)
    assert done.returncode == 110, done.stderr
    assert "no payload for this machine (riscv64)" in done.stderr
    assert "Traceback" not in done.stderr
    (host / "srv/none.run").unlink()


def test_doctor_on_a_bare_host(host: Path, qemu: Path, tmp_path: Path) -> None:
    file = self_running(RECIPES / Q / "riscv64.toml", tmp_path, "--payload", RISCV64)
    shutil.copy2(file, host / "srv/doctor.run")
    done = on_host(host, qemu, "/srv/doctor.run", "--rvbundle-doctor")
    assert done.returncode in (0, 110), done.stderr
    assert "riscv64" in done.stdout
    assert "namespaces" in done.stdout
    (host / "srv/doctor.run").unlink()


CPUS = {"none": "rv64,v=false", "128": "rv64,v=true,vlen=128", "256": "rv64,v=true,vlen=256"}
LIBDIR = "usr/lib/riscv64-linux-gnu"
REFERENCE = blas.environment(blas.REFERENCE, LIBDIR)


@pytest.fixture(scope="session")
def products_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of the agent that checks numpy's products, without a cold pack."""
    output = tmp_path_factory.mktemp("products")
    words = ["--output", output, "--payload", RISCV64, "--cold", "drop"]
    result = run_cli("build", HERE / "agents" / "products", *words, timeout=1800)
    assert result.code == 0, result.err
    return Path(result.out.split()[0])


@pytest.fixture(scope="session")
def products(host: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The path, on the bare host, of the same agent in a self-running file without a cold pack."""
    folder = tmp_path_factory.mktemp("products-run")
    words = ("--payload", RISCV64, "--cold", "drop")
    file = self_running(HERE / "agents" / "products" / "recipe.toml", folder, *words)
    place = host / "srv/products.run"
    shutil.copy2(file, place)
    yield "/srv/products.run"
    place.unlink()


def test_what_a_payload_says_of_its_blas(products_image: Path) -> None:
    (payload,) = json.loads(run_cli("inspect", products_image, "--json").out)["payloads"]
    assert payload["blas"].keys() == {"openblas", "reference"}
    assert all(version[0].isdigit() for version in payload["blas"].values())
    assert [(f["name"], f["vlen"]) for f in payload["families"]] == [
        *(("zvl256b", 256), ("zvl128b", 128), ("generic", 0)),
    ]


@pytest.mark.parametrize(
    ("vectors", "env", "which"),
    [
        ("none", {}, "riscv64_generic"),
        ("none", REFERENCE, f"/{LIBDIR}/blas/libblas.so.3"),
        ("128", {"OPENBLAS_CORETYPE": "riscv64_generic"}, "riscv64_generic"),
        ("128", {"OPENBLAS_CORETYPE": "riscv64_zvl128b"}, "riscv64_zvl128b"),
        ("256", {"OPENBLAS_CORETYPE": "riscv64_zvl128b"}, "riscv64_zvl128b"),
        ("256", {"OPENBLAS_CORETYPE": "riscv64_zvl256b"}, "riscv64_zvl256b"),
        ("256", REFERENCE, f"/{LIBDIR}/blas/libblas.so.3"),
    ],
    ids=[
        *("as chosen", "reference", "generic on 128 bits", "zvl128b on 128 bits", "zvl128b on 256 bits"),
        *("zvl256b on 256 bits", "reference with vectors"),
    ],
)
def test_every_blas_is_right_on_a_bare_host(
    host: Path, qemu: Path, products: str, vectors: str, env: dict[str, str], which: str
) -> None:
    """All are in the image: there is no cold pack."""
    cpu = CPUS[vectors]
    given = {**env, "QEMU_CPU": cpu}
    options = [word for name, value in given.items() for word in ("--rvbundle-env", f"{name}={value}")]
    done = on_host(host, qemu, products, *options, "which", cpu=cpu)
    assert done.returncode == 0, done.stderr
    verdict, library = done.stdout.splitlines()
    assert verdict == "right"
    assert library.split()[-1] == which


def test_longer_vectors_than_the_processors_are_wrong(host: Path, qemu: Path, products: str) -> None:
    """Why a family says how long its vectors are: nothing fails."""
    options = [f"--rvbundle-env=QEMU_CPU={CPUS['128']}", "--rvbundle-env=OPENBLAS_CORETYPE=riscv64_zvl256b"]
    done = on_host(host, qemu, products, *options, cpu=CPUS["128"])
    assert (done.returncode, done.stdout[:6]) == (0, "wrong:"), done.stderr


def test_vectors_are_refused_on_a_board_without(host: Path, qemu: Path, products: str) -> None:
    done = on_host(host, qemu, products, "--rvbundle-explain", cpu=CPUS["none"])
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "generic" in said
    assert "not zvl256b: this processor has no vectors" in said
    assert "not zvl128b: this processor has no vectors" in said


@pytest.mark.parametrize("env", [{}, REFERENCE], ids=["openblas", "reference"])
def test_every_blas_is_right_emulated(
    products_image: Path, environment: dict[str, str], env: dict[str, str]
) -> None:
    options = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    result = run_cli("run", *options, products_image, "--", "which", env=environment)
    assert result.code == 0, result.err
    verdict, library = result.out.splitlines()
    assert (verdict, library.split()[-1]) == (
        "right",
        f"/{LIBDIR}/blas/libblas.so.3" if env else "riscv64_generic",
    )
