"""Trimmed libraries inside a real image: what was cut away comes back, or it is said what is missing."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from rvbundle_runtime.image import Reader
from tests.conftest import AGENTS, Result, build, run_cli

pytestmark = pytest.mark.torch

# What an untrimmed venv printed for `torchprobe untraced`.
UNTRACED = ["2.59965", "13.43959", "error inconsistent tensor size, expe"]
TORCH = "usr/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image whose only trace is one training step; its cold pack lies beside it."""
    return build(AGENTS / "torchprobe", tmp_path_factory.mktemp("torchprobe"))


@pytest.fixture
def fresh(tmp_path: Path) -> dict[str, str]:
    """The environment of a store in which nothing is restored yet."""
    return {"RVBUNDLE_CACHE": str(tmp_path / "fresh")}


@pytest.fixture
def bare(image: Path, tmp_path: Path) -> Path:
    """The image without its cold pack."""
    folder = tmp_path / "bare"
    folder.mkdir()
    os.link(image, folder / image.name)
    return folder / image.name


def lines(image: Path, *words: str, env: dict[str, str]) -> list[str]:
    result = run_cli("run", image, "--", *words, env=env)
    assert result.code == 0, result.err
    return result.out.splitlines()


def cold_of(image: Path) -> Path:
    return image.with_name(image.name.replace(".rvb", ".cold.rvb"))


def sparse_libraries(cache: Path) -> list[Path]:
    """Return the trimmed libraries of the one image in a store, the largest first."""
    (root,) = (cache / "store").glob("*-*/root")
    found = [p for p in root.rglob("*.so*") if p.is_file() and not p.is_symlink()]
    return sorted(found, key=lambda p: -p.stat().st_size)


def test_every_byte_of_a_library_comes_back(image: Path, fresh: dict[str, str], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    assert run_cli("extract", image, tree).code == 0
    first = lines(image, "flood", env=fresh)
    assert first[0].startswith("True ")
    assert lines(image, "flood", env=fresh)[0].split()[1] == first[0].split()[1]
    # the file in the store is now the original with another header, and a table behind its end
    (stored, *_) = sparse_libraries(Path(fresh["RVBUNDLE_CACHE"]))
    original = (tree / TORCH).read_bytes()
    with stored.open("rb") as file:
        there = file.read(len(original))
    end = whole_of_loads(original)
    assert there[64:end] == original[64:end]


def test_tables_of_constants_are_absent_too(image: Path) -> None:
    """And come back with the rest, see above; text is never among them."""
    report = json.loads(run_cli("inspect", image, "--json").out)
    about = report["details"]["trimmed"][report["payloads"][0]["arch"]][TORCH]
    ((_, _, size, hot),) = (row for row in about["sections"] if row[0] == ".rodata")
    assert size / 2 < hot < size * 0.9


def whole_of_loads(data: bytes) -> int:
    """Return where what is loaded of an ELF file ends (symbol tables behind it stay cold)."""
    (offset,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    programs = [struct.unpack_from("<IIQQQQQQ", data, offset + 56 * n) for n in range(count)]
    return max(p[2] + p[5] for p in programs if p[0] == 1)


def test_restored_pages_stay_for_runs_without_a_pack(image: Path, bare: Path, fresh: dict[str, str]) -> None:
    # with the pack any kernel may run; held to the one that a run without it will use, its pages are there
    settings = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    options = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
    assert run_cli("run", *options, image, "--", "untraced", env=fresh).out.splitlines() == UNTRACED
    without = run_cli("run", *options, bare, "--", "untraced", env=fresh)
    assert without.out.splitlines() == UNTRACED, without.err


def test_without_a_pack_one_clear_message(bare: Path, fresh: dict[str, str]) -> None:
    result = run_cli("run", bare, "--", "untraced", env=fresh)
    assert result.code == 112
    library = re.search(
        r"^rvbundle: the agent needs code that was left out of its image: (\S+), "
        r"(near \S+ )?\(address 0x[0-9a-f]+\): no trace used it, and the cold pack is not here$",
        result.err,
        re.MULTILINE,
    )
    assert library, result.err
    assert re.search(r'^  File "/app/torchprobe\.py", line \d+ in untraced$', result.err, re.MULTILINE)
    assert (
        "hint: put the cold pack (.cold.rvb) beside the image; or add a [[trace]] that does this to the "
        f'recipe and build again; or keep the library whole with [keep] files = ["*/{library[1]}"]\n'
    ) in result.err


def test_what_was_recorded_needs_no_pack_next_time(
    image: Path, fresh: dict[str, str], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    # as a run without a pack is: the record is of the kernels that it will use
    family = json.loads(run_cli("inspect", image, "--json").out)["payloads"][0]["families"][0]
    options = [word for name, value in family["env"].items() for word in ("--env", f"{name}={value}")]
    options += ["--env", f"NPY_DISABLE_CPU_FEATURES={' '.join(family['numpy'])}"]
    result = run_cli("run", "--record", record, *options, image, "--", "untraced", env=fresh)
    assert result.code == 0, result.err
    value = json.loads(record.read_text())
    assert any(path.endswith("libtorch_cpu.so") for path in value["pages"])
    again = run_cli(
        "build", AGENTS / "torchprobe", "--with-record", record, "--cold", "drop", "-o", tmp_path / "out"
    )
    assert again.code == 0, again.err
    built = Path(again.out.split()[0])
    assert not cold_of(built).exists()
    assert lines(built, "untraced", env=fresh) == UNTRACED


def test_children_of_every_kind(image: Path, fresh: dict[str, str]) -> None:
    ones = "[1.0, 1.0, 1.0]"
    assert lines(image, "children", env=fresh) == [
        ones,
        ones,
        "fork [9.0, 18.0]",
        "spawn [9.0, 18.0]",
        "forkserver [9.0, 18.0]",
        ones,
    ]


def test_handlers_and_masks_of_the_agent(image: Path, fresh: dict[str, str]) -> None:
    assert lines(image, "handlers", env=fresh) == ["[1.0, 1.0]", "[4.0]"]


def test_a_real_fault_stays_one(image: Path, fresh: dict[str, str]) -> None:
    result = run_cli("run", image, "--", "crash", env=fresh)
    assert result.code == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in result.err
    assert "in crash\n" in result.err


def test_without_a_sandbox(image: Path, fresh: dict[str, str]) -> None:
    result = run_cli("run", "--no-sandbox", image, "--", "untraced", env=fresh)
    assert result.out.splitlines() == UNTRACED, result.err


# Faults


@pytest.fixture
def movable(image: Path, tmp_path: Path) -> Path:
    """Copies of image and pack that a test may spoil."""
    folder = tmp_path / "movable"
    folder.mkdir()
    shutil.copyfile(image, folder / image.name)
    shutil.copyfile(cold_of(image), folder / cold_of(image).name)
    return folder / image.name


def spoil_pages(pack: Path) -> None:
    """Flip a bit in every frame that holds pages."""
    with Reader(pack) as reader:
        index = reader.index()
        frames = {
            index.blobs[blob].frame
            for payload in index.payloads
            for entry in payload.entries
            if entry.kind == "r"
            for blob in entry.blobs
        }
    with pack.open("r+b") as file:
        for number in frames:
            place = index.frames[number].offset + index.frames[number].size // 2
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))


def expect_refusal(result: Result, reason: str) -> None:
    assert result.code == 112, (result.code, result.err)
    assert re.search(rf"left out of its image: .*{reason}", result.err), result.err


def test_pages_that_are_damaged_are_not_given_out(movable: Path, fresh: dict[str, str]) -> None:
    spoil_pages(cold_of(movable))
    result = run_cli("run", movable, "--", "untraced", env=fresh)
    expect_refusal(result, r"frame \d+ is damaged \(its digest is not what the image says\)")


def test_a_pack_that_is_cut_while_the_agent_runs(
    movable: Path, fresh: dict[str, str], tmp_path: Path
) -> None:
    result = run_with_fault(movable, fresh, tmp_path, lambda: os.truncate(cold_of(movable), 1 << 16))
    expect_refusal(result, "is damaged")


def test_a_pack_that_is_replaced_while_the_agent_runs(
    movable: Path, fresh: dict[str, str], tmp_path: Path
) -> None:
    def replace() -> None:
        cold_of(movable).unlink()
        cold_of(movable).write_bytes(b"something else")

    result = run_with_fault(movable, fresh, tmp_path, replace)
    assert (result.code, result.out.splitlines()) == (0, UNTRACED), result.err  # the old one is still open


def run_with_fault(image: Path, env: dict[str, str], folder: Path, fault: Callable[[], object]) -> Result:
    """Start the agent, let `fault` happen once it is up, then let it need what is cold."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rvbundle", "run", str(image), "--", "waits"],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    assert process.stdin
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    fault()
    out, err = process.communicate("go\n", timeout=120)
    return Result(process.returncode, out, err)


def test_a_store_that_is_full(image: Path, tmp_path: Path) -> None:
    """On a small disk the image fits and what is restored does not: it stays in memory."""
    cache = tmp_path / "small"
    cache.mkdir()
    run = f"{sys.executable} -m rvbundle run {image} --"
    script = (
        f"mount -t tmpfs -o size=170m none {cache} && {run} step && "
        f"dd if=/dev/zero of={cache}/filler bs=64k 2>/dev/null; {run} untraced"
    )
    done = in_own_mounts(script, {"RVBUNDLE_CACHE": str(cache)})
    assert done.out.splitlines()[-3:] == UNTRACED, done.err


def test_a_store_that_is_read_only(image: Path, tmp_path: Path) -> None:
    cache = tmp_path / "store"
    cache.mkdir()
    python = sys.executable
    script = (
        f"{python} -m rvbundle run {image} -- step && mount --bind {cache} {cache} && "
        f"mount -o remount,bind,ro {cache} && {python} -m rvbundle run {image} -- untraced"
    )
    done = in_own_mounts(script, {"RVBUNDLE_CACHE": str(cache)})
    assert done.out.splitlines()[-3:] == UNTRACED, done.err


def in_own_mounts(script: str, env: dict[str, str]) -> Result:
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_a_pager_that_is_killed(image: Path, fresh: dict[str, str], tmp_path: Path) -> None:
    """Without a sandbox the agent outlives its launcher only until it needs something cold."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rvbundle", "run", "--no-sandbox", str(image), "--", "waits"],
        env={**os.environ, **fresh},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.kill()
    out, _ = process.communicate(timeout=60)
    assert out == ""  # PR_SET_PDEATHSIG took the agent with it: it neither hangs nor prints something wrong


def test_a_guest_that_floods_the_pager(image: Path, fresh: dict[str, str]) -> None:
    assert lines(image, "nonsense", env=fresh) == ["[1.0, 1.0]"]


def test_report_in_a_browser(image: Path, fresh: dict[str, str], tmp_path: Path) -> None:
    """The page is drawn: red for hot, grey for cold, orange for what was restored."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs chromium")
    lines(image, "untraced", env=fresh)
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    assert run_cli("explain", image, "--html", page, env=fresh).code == 0
    subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,2400"),
            *(f"--screenshot={picture}", page.as_uri()),
        ],
        capture_output=True,
        check=True,
        timeout=120,
    )
    colours = colours_of(picture)
    for colour in ((0xD1, 0x49, 0x5B), (0xDF, 0xE5, 0xEA), (0xED, 0xAE, 0x49), (0x4C, 0x78, 0xA8)):
        assert colours.get(colour, 0) > 500, colour


def colours_of(picture: Path) -> dict[tuple[int, int, int], int]:
    """Return how many pixels of each colour a picture has."""
    with Image.open(picture) as opened:
        pixels = opened.convert("RGB")
        counts = pixels.getcolors(pixels.width * pixels.height)
    return {colour: count for count, colour in counts or ()}
