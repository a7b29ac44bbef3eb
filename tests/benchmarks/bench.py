"""`make bench`: sizes and times of two agents, image against plain venv, in one run.

Prints a Markdown table; every pair is measured alternately, and medians are shown.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rvbundle_runtime import absent
from rvbundle_runtime import format as fmt
from rvbundle_runtime.image import Reader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.emulation.hosts import make_host, on_host

REPOSITORY = Path(__file__).resolve().parents[2]
AGENT = REPOSITORY / "recipes" / "cartpole-policy-gradient"
AGENTS = REPOSITORY / "tests" / "benchmarks" / "agents"
SB3 = REPOSITORY / "recipes" / "sb3-ppo"
TORCH = "usr/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so"
STEM = "cartpole-policy-gradient-1.0.0"
REQUIRES = ["torch==2.13.0", "gymnasium==1.4.0"]
MIB, MB = 1 << 20, 1_000_000


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    what: str
    bar: str
    measured: str
    met: bool


class Bench:
    """The places and programs of one run."""

    def __init__(self, work: Path, pairs: int) -> None:
        self.work = work
        self.pairs = pairs
        self.env = {**os.environ, "RVBUNDLE_CACHE": str(work / "cache")}
        # As most people have them: bytecode is written, OpenBLAS picks its own kernel.
        for name in ("PYTHONDONTWRITEBYTECODE", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
            self.env.pop(name, None)
        self.agent = Path(shutil.copytree(AGENT, work / "agent"))
        self.image = work / "out" / f"{STEM}.rvb"
        self.venv = work / "venv" / "bin" / "python"
        self.peaks: dict[str, list[int]] = {}  # bytes of memory by the program that was started

    def rvbundle(self, *words: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "rvbundle", *map(str, words)]
        done = subprocess.run(
            command, env={**self.env, **env}, capture_output=True, text=True, cwd=self.scratch(), check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        return done

    def scratch(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.work))

    def make_venv(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", self.work / "venv"], check=True)
        command = [self.venv, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIRES]
        subprocess.run(command, check=True, env=self.env)

    def in_venv(self) -> list[str]:
        return [str(self.venv), str(self.agent / "train.py")]

    def in_image(self) -> list[str]:
        return [sys.executable, "-m", "rvbundle", "run", str(self.image)]


def first_line(bench: Bench, command: list[str], **env: str) -> float:
    """Return the seconds from the start of a program to its first line on stdout."""
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, "--episodes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**bench.env, **env},
        cwd=bench.scratch(),
    )
    assert process.stdout
    process.stdout.readline()
    seconds = time.monotonic() - started
    process.communicate()
    if process.returncode:
        sys.exit(f"{command} failed")
    return seconds


SHORT, LONG = 2, 120  # episodes


def training(bench: Bench, command: list[str]) -> float:
    """Return the seconds that LONG - SHORT episodes take, of two whole runs; note the peak memory."""
    return whole_run(bench, command, LONG) - whole_run(bench, command, SHORT)


def whole_run(bench: Bench, command: list[str], episodes: int) -> float:
    """Return the seconds that a run takes from start to end; note its peak memory if it is a long one."""
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, "--episodes", str(episodes)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=bench.env,
        cwd=bench.scratch(),
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    assert status == 0, command
    if episodes == LONG:
        peak = usage.ru_maxrss << 10  # of the largest process below it
        bench.peaks.setdefault(command[0], []).append(peak)
    return seconds


def pairs(bench: Bench, measure: Callable[[list[str]], float]) -> tuple[float, float, float]:
    """Measure venv and image alternately; return medians of both, and the ratio of their means."""
    plain, packed = [], []
    for number in range(bench.pairs):
        order = [(plain, bench.in_venv()), (packed, bench.in_image())]
        for results, command in order if number % 2 else reversed(order):
            results.append(measure(command))
    return statistics.median(plain), statistics.median(packed), sum(packed) / sum(plain)


def phase_seconds(progress: str, *names: str) -> float:
    """Return the seconds that the named phases took, from a build's progress lines."""
    found = re.findall(r"^(?:done|reused)\s+(\w+).*\(([\d.]+) s\)$", progress, re.MULTILINE)
    return sum(float(seconds) for name, seconds in found if name in names)


def build_rows(bench: Bench) -> list[Row]:
    """Measure builds: the first, without changes, with a changed agent."""
    started = time.monotonic()
    first = bench.rvbundle("build", bench.agent, "-o", bench.work / "out")
    total = time.monotonic() - started
    after = total - phase_seconds(first.stderr, "lock", "environment")
    size = bench.image.stat().st_size
    cold = bench.image.with_name(f"{STEM}.cold.rvb").stat().st_size
    unchanged = [timed(bench) for _ in range(5)]
    changed = []
    for number in range(3):
        with (bench.agent / "train.py").open("a") as file:
            file.write(f"# change {number}\n")
        changed.append(timed(bench))
    rebuilt, edited = statistics.median(unchanged), statistics.median(changed)
    return [
        Row(
            "image (cold pack beside it)",
            "30 MB",
            f"{size / MB:.1f} MB ({cold / MB:.1f} MB)",
            size <= 30 * MB,
        ),
        Row("first build, environment there", "97 s", f"{after:.0f} s ({total:.0f} s with it)", after <= 97),
        Row("rebuild, nothing changed", "2 s", f"{rebuilt:.2f} s", rebuilt <= 2),
        Row("rebuild, agent changed", "20 s", f"{edited:.1f} s", edited <= 20),
    ]


def kept_rows(bench: Bench) -> list[Row]:
    """Measure what is left of libtorch_cpu.so, and what another image needs."""
    report = json.loads(bench.rvbundle("inspect", bench.image, "--json").stdout)
    about = report["details"]["trimmed"][report["payloads"][0]["arch"]][TORCH]
    text = next(row for row in about["sections"] if row[0] == ".text")
    share = text[3] / text[2]
    code, gone = _code_of(bench.image, TORCH)
    kept = (code - gone) / code
    bench.rvbundle("build", shutil.copytree(SB3, bench.work / "sb3"), "-o", bench.work / "out")
    (sb3,) = (p for p in (bench.work / "out").glob("sb3-*.rvb") if not p.name.endswith(".cold.rvb"))
    size = sb3.stat().st_size
    return [
        Row("image of sb3-ppo", "40 MB", f"{size / MB:.1f} MB", size <= 40 * MB),
        Row(
            ".text of libtorch_cpu.so kept",
            "8 %",
            f"{share:.1%} of {text[2] / MB:.0f} MB",
            share <= 0.08,
        ),
        Row(
            "its read/execute segment kept",
            "18 %",
            f"{kept:.1%} of {code / MB:.0f} MB",
            kept <= 0.18,
        ),
    ]


def changed_rows(bench: Bench) -> list[Row]:
    """Measure what of the image changes with the agent alone: frames and parts of the index by digest."""
    before = _chunks(bench.image)
    with (bench.agent / "train.py").open("a") as file:
        file.write("# one more line\n")
    bench.rvbundle("build", bench.agent, "-o", bench.work / "out")
    changed = sum(size for digest, size in _chunks(bench.image).items() if digest not in before)
    own = sum(p.stat().st_size for p in bench.agent.rglob("*") if p.is_file() and p.name != "recipe.toml")
    bar = 2 * own + (64 << 10)
    return [
        Row(
            "bytes of the image that change with the agent's files",
            f"{bar / 1000:.0f} kB (twice their size + 64 KiB)",
            f"{changed / 1000:.0f} kB",
            changed <= bar,
        )
    ]


def _chunks(image: Path) -> dict[bytes, int]:
    """Return {digest: size in bytes} of the frames and of both parts of the index, and of the ends."""
    with Reader(image) as reader:
        index, footer = reader.index(), reader.footer
        found = {frame.sha256: frame.size for frame in index.frames}
        data = image.read_bytes()[reader.start :]
    head = data[footer.index_offset :][: fmt.INDEX_HEAD.size]
    cut = footer.index_offset + fmt.INDEX_HEAD.size + fmt.INDEX_HEAD.unpack(head)[0]
    for part in (data[footer.index_offset : cut], data[cut:]):
        found[hashlib.sha256(part).digest()] = len(part)
    return found


TOUCH = """
import ctypes, random, re, sys, time
import torch
ranges = []
for line in open("/proc/self/maps"):
    match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ---p .*libtorch_cpu.so$", line)
    if match:
        start, stop = (int(text, 16) for text in match.groups())
        ranges += range(start, stop, 1 << 17)
random.seed(1)
times = []
for address in random.sample(ranges, 300):
    started = time.perf_counter()
    ctypes.string_at(address, 1)
    times.append(time.perf_counter() - started)
times.sort()
print(times[len(times) // 2] * 1000, times[len(times) * 95 // 100] * 1000)
"""


def page_rows(bench: Bench) -> list[Row]:
    """Measure how long code waits for a page that has to be restored."""
    env = {**bench.env, "RVBUNDLE_CACHE": str(bench.work / "pages")}
    command = [sys.executable, "-m", "rvbundle", "shell", str(bench.image)]
    done = subprocess.run(
        command, input=TOUCH, capture_output=True, text=True, env=env, cwd=bench.scratch(), check=True
    )
    median, late = map(float, done.stdout.split())
    text = f"median {median:.2f} ms, 95 % within {late:.2f} ms"
    return [Row("one cold page restored, pack on local disk", "1 ms", text, median <= 1)]


def timed(bench: Bench) -> float:
    started = time.monotonic()
    bench.rvbundle("build", bench.agent, "-o", bench.work / "out")
    return time.monotonic() - started


def run_rows(bench: Bench) -> list[Row]:
    """Measure starts and training, image against venv."""
    first_line(bench, bench.in_venv())  # bytecode written, files in the page cache
    fresh = []
    for number in range(3):
        with_cache = {"RVBUNDLE_CACHE": str(bench.work / f"fresh-{number}")}
        fresh.append(first_line(bench, bench.in_image(), **with_cache))
        shutil.rmtree(with_cache["RVBUNDLE_CACHE"])
    first_line(bench, bench.in_image())
    plain, packed, _ = pairs(bench, lambda command: first_line(bench, command))
    unpacked = statistics.median(fresh)
    train_plain, train_packed, ratio = pairs(bench, lambda command: training(bench, command))
    return [
        Row(
            "warm run to the first line of output",
            "venv + 0.2 s",
            f"{packed:.2f} s (venv {plain:.2f} s: {packed - plain:+.2f} s)",
            packed <= plain + 0.2,
        ),
        Row(
            "first run after download, unpacking included",
            "venv + 3 s",
            f"{unpacked:.2f} s ({unpacked - plain:+.2f} s)",
            unpacked <= plain + 3,
        ),
        Row(
            f"training, {LONG - SHORT} episodes",
            "within 2 %",
            f"{train_packed:.2f} s (venv {train_plain:.2f} s, ratio of means {ratio:.3f})",
            ratio <= 1.02,
        ),
        _memory_row(bench),
    ]


def _memory_row(bench: Bench) -> Row:
    plain, packed = (statistics.median(bench.peaks[c[0]]) for c in (bench.in_venv(), bench.in_image()))
    text = f"{packed / MIB:.0f} MiB (venv {plain / MIB:.0f} MiB)"
    return Row("peak memory of that training", "not more", text, packed <= plain)


RISCV64 = "riscv64"
RISCV_TORCH = f"usr/lib/{RISCV64}-linux-gnu/libtorch_cpu.so.2.6"
# What a build keeps of a payload for RISC-V, but for the packages themselves.
RISCV_STAGES = ("debian", "freeze", "agent", "trace")


def riscv_rows(bench: Bench) -> list[Row]:
    """Measure the payload for RISC-V and its self-running files."""
    recipe, out = bench.agent / "riscv64.toml", bench.work / "riscv"
    alone = ("--payload", RISCV64)
    bench.rvbundle("build", recipe, "-o", out, *alone)  # what is downloaded
    stages = bench.work / "cache" / "build"
    for name in (*(f"{stage}-{RISCV64}" for stage in RISCV_STAGES), "image", "frames", "host-python"):
        shutil.rmtree(stages / name, ignore_errors=True)
    started = time.monotonic()
    bench.rvbundle("build", recipe, "-o", out, *alone)
    seconds = time.monotonic() - started
    image = out / f"{STEM}.rvb"
    bare = image.stat().st_size
    code, gone = _code_of(image, RISCV_TORCH)
    kept = (code - gone) / code
    native = _run_file(bench, recipe, *alone, "--emulators", "none")
    both = _run_file(bench, recipe, "--emulators", "always")
    return [
        Row("building the riscv64 payload, downloads cached", "300 s", f"{seconds:.0f} s", seconds <= 300),
        Row(
            "its libtorch_cpu.so: read/execute bytes kept",
            "22 %",
            f"{kept:.1%} of {code / MB:.0f} MB",
            kept <= 0.22,
        ),
        Row(
            "bootstrap for riscv64, no emulators",
            "8 MB",
            f"{(native - bare) / MB:.1f} MB",
            native - bare <= 8 * MB,
        ),
        Row(".run for riscv64, native payload", "40 MB", f"{native / MB:.1f} MB", native <= 40 * MB),
        Row(".run with x86-64 payload and qemu too", "75 MB", f"{both / MB:.1f} MB", both <= 75 * MB),
    ]


def _code_of(image: Path, library: str) -> tuple[int, int]:
    """Return the bytes of a library's largest executable segment, and how many of them are absent."""
    with Reader(image) as reader:
        (payload,) = reader.index().payloads
        (entry,) = (e for e in payload.entries if e.path == absent.TABLE)
        table = absent.load(reader.read_blob(entry.blob))
    (found,) = (x for x in table if x.path == library)
    code = max(found.segments, key=lambda s: s.size if s.protection & 4 else 0)
    gone = sum(min(b, code.vaddr + code.size) - max(a, code.vaddr) for a, b in code.ranges)
    return code.size, gone


def _run_file(bench: Bench, recipe: Path, *options: str) -> int:
    """Build a self-running file for RISC-V with its cold pack beside it; return its size in bytes."""
    out = bench.scratch()
    bench.rvbundle("build", recipe, "-o", out, "--self-running", RISCV64, "--cold", "separate", *options)
    return (out / f"{STEM}.run").stat().st_size


EMULATED_PAIRS = 3
EPISODES = 30


def emulated_rows(bench: Bench) -> list[Row]:
    """Measure an emulated training, image against venv, under the same qemu."""
    (folder,) = (bench.work / "cache" / "build" / "emulators").glob("*/root/usr/bin")
    qemu = folder / f"qemu-{platform.machine()}"
    plain_words = [str(qemu), *bench.in_venv()]
    bench.env["RVBUNDLE_EMULATORS"] = str(folder)
    run = [sys.executable, "-m", "rvbundle", "run", "--emulator", "qemu", "--payload", platform.machine()]
    packed_words = [*run, str(bench.image)]
    plain, packed = [], []
    for number in range(EMULATED_PAIRS):
        order = [(plain, plain_words), (packed, packed_words)]
        for results, command in order if number % 2 else reversed(order):
            results.append(whole_run(bench, command, EPISODES))
    ratio = statistics.median(packed) / statistics.median(plain)
    text = f"{statistics.median(packed):.0f} s (venv {statistics.median(plain):.0f} s, ratio {ratio:.2f})"
    return [Row(f"emulated: {EPISODES} episodes, start to end", "venv × 1.0", text, ratio <= 1.0)]


# Starts a shell in the image in place of the agent: its end is that of the launcher's work.
SHELL = """
import sys
from rvbundle_runtime import launch
from rvbundle_runtime.host import cache_place, read_host
from rvbundle_runtime.options import parse_run
host = read_host()
place = cache_place(host.environ, host.uid)
sys.exit(launch.run(host, parse_run([sys.argv[1]]), place, entry=("/usr/bin/sh", "-c", ":")))
"""


def launcher_rows(bench: Bench) -> list[Row]:
    """Measure a warm start's own part: a whole run of a program that does nothing, natively."""
    times = []
    for _ in range(21):
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", SHELL, bench.image], env=bench.env, check=True)
        times.append(time.monotonic() - started)
    median = statistics.median(times) * 1000
    return [Row("launcher, warm, native, its own end included", "120 ms", f"{median:.0f} ms", median <= 120)]


def riscv_launcher_rows(bench: Bench) -> list[Row]:
    """Measure a warm start of a self-running file on a riscv64 host, less the same Python without it."""
    recipe = REPOSITORY / "recipes" / "tabular-q" / "riscv64.toml"
    out = bench.scratch()
    bench.rvbundle("build", recipe, "-o", out, "--payload", RISCV64, "--self-running", RISCV64)
    (folder,) = (bench.work / "cache" / "build" / "emulators").glob("*/root/usr/bin")
    host = make_host(bench.scratch(), bench.work / "cache")
    (file,) = out.glob("*.run")
    shutil.copy2(file, host / "srv/x.run")
    launched = ["/srv/x.run", "--episodes", "1"]
    on_host(host, folder, *launched)
    (root,) = (host / "var/tmp").glob("rvbundle-*/store/*/root")
    inside = "/" + str(root.relative_to(host))
    plain_words = ["/bin/chroot", inside, "/usr/bin/python3", "/app/train.py", "--episodes", "1"]
    plain, launch = [], []
    for _ in range(5):
        for results, words in ((plain, plain_words), (launch, launched)):
            started = time.monotonic()
            done = on_host(host, folder, *words)
            assert done.returncode == 0, done.stderr
            results.append(time.monotonic() - started)
    seconds = statistics.median(launch) - statistics.median(plain)
    return [Row("launcher, warm, on riscv64 under qemu-riscv64", "report", f"{seconds:.1f} s", met=True)]


UPDATES, EMULATED_EPISODES = 12, 20  # of the emulated agents
SB3_STEPS = (4096, 40960)  # a short run and a long one: their difference is training


def emulators(bench: Bench) -> Path:
    """Return the folder of the emulators that the builds use, fetched by one that needs them."""
    found = list((bench.work / "cache" / "build" / "emulators").glob("*/root/usr/bin"))
    if not found:
        recipe = REPOSITORY / "recipes" / "tabular-q" / "riscv64.toml"
        bench.rvbundle("build", recipe, "-o", bench.scratch(), "--payload", RISCV64)
        found = list((bench.work / "cache" / "build" / "emulators").glob("*/root/usr/bin"))
    return found[0]


def tuned_rows(bench: Bench) -> list[Row]:
    """Measure what `tune` wins where everything is emulated, against QEMU's defaults."""
    bench.env["RVBUNDLE_EMULATORS"] = str(emulators(bench))
    out = bench.scratch()
    bench.rvbundle("build", AGENTS / "wide", "-o", out)
    (wide,) = (path for path in out.glob("*.rvb") if ".cold" not in path.name)
    emulated = ("--emulator", "qemu")
    print(bench.rvbundle("tune", *emulated, "--seconds", "600", wide).stdout, file=sys.stderr)

    def update(*options: str) -> float:
        words = ["run", *emulated, *options, str(wide), "--", "--updates", str(UPDATES)]
        return float(re.findall(r"seconds per update ([\d.]+)", bench.rvbundle(*words).stderr)[-1])

    plain, tuned = alternately(3, lambda: update("--backend", "qemu-default"), update)
    ratio = plain / tuned
    text = f"{tuned * 1000:.0f} ms (QEMU's default {plain * 1000:.0f} ms): {ratio:.1f} times as fast"
    rows = [Row("emulated, layers of 256: one training update, tuned", "2 times as fast", text, ratio >= 2)]
    print(bench.rvbundle("tune", *emulated, "--seconds", "600", bench.image).stdout, file=sys.stderr)
    run = [sys.executable, "-m", "rvbundle", "run", *emulated]

    def training_of(*options: str) -> float:
        words = [*run, *options, str(bench.image)]
        return whole_run(bench, words, EMULATED_EPISODES) - whole_run(bench, words, 2)

    plain, tuned = alternately(2, lambda: training_of("--backend", "qemu-default"), training_of)
    text = f"{tuned:.1f} s (QEMU's default {plain:.1f} s): {plain / tuned:.2f} times as fast"
    what = f"emulated, cartpole-policy-gradient: training, {EMULATED_EPISODES - 2} episodes, tuned"
    return [*rows, Row(what, "not slower", text, tuned <= plain)]


def alternately(times: int, first: Callable[[], float], second: Callable[[], float]) -> tuple[float, float]:
    """Return the medians of two measurements that take turns."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(times):
        order = [(found[0], first), (found[1], second)]
        for results, measure in order if number % 2 else reversed(order):
            results.append(measure())
    return statistics.median(found[0]), statistics.median(found[1])


def native_rows(bench: Bench) -> list[Row]:
    """Measure the chosen backends natively, against a plain venv without any settings."""
    print(bench.rvbundle("tune", bench.image).stdout, file=sys.stderr)
    run = [sys.executable, "-m", "rvbundle", "run"]

    def training_of(command: list[str]) -> float:
        return whole_run(bench, command, EPISODES * 4) - whole_run(bench, command, 2)

    packed = [*run, str(bench.image)]
    plain, tuned = alternately(bench.pairs, lambda: training_of(bench.in_venv()), lambda: training_of(packed))
    text = f"{tuned:.2f} s (venv {plain:.2f} s, ratio {tuned / plain:.3f})"
    rows = [
        Row("native: training of cartpole-policy-gradient, tuned", "venv × 1.02", text, tuned <= plain * 1.02)
    ]
    out = bench.scratch()
    bench.rvbundle("build", SB3, "-o", out)
    (image,) = (path for path in out.glob("*.rvb") if ".cold" not in path.name)
    print(bench.rvbundle("tune", image).stdout, file=sys.stderr)
    subprocess.run([bench.venv, "-m", "pip", "install", "-q", "stable-baselines3==2.9.2"], check=True)

    def steps_of(*command: str) -> float:
        times = []
        for steps in SB3_STEPS:
            started = time.monotonic()
            subprocess.run(
                [*command, "--timesteps", str(steps)],
                env=bench.env, cwd=bench.scratch(), check=True, capture_output=True,
            )  # fmt: skip
            times.append(time.monotonic() - started)
        return times[1] - times[0]

    plain, tuned = alternately(
        3, lambda: steps_of(str(bench.venv), str(SB3 / "train.py")), lambda: steps_of(*run, str(image), "--")
    )
    text = f"{tuned:.2f} s (venv {plain:.2f} s, ratio {tuned / plain:.3f})"
    what = f"native: training of sb3-ppo, {SB3_STEPS[1] - SB3_STEPS[0]} steps, tuned"
    return [*rows, Row(what, "venv × 1.02", text, tuned <= plain * 1.02)]


def vector_rows(bench: Bench) -> list[Row]:
    """Let a self-running file choose BLAS and kernels on emulated riscv64 machines with vectors."""
    qemu = emulators(bench)
    out = bench.scratch()
    bench.rvbundle(
        "build",
        AGENTS / "sgemm",
        "-o",
        out,
        "--payload",
        RISCV64,
        "--self-running",
        RISCV64,
        "--cold",
        "embed",
    )
    host = make_host(bench.scratch(), bench.work / "cache")
    (file,) = out.glob("*.run")
    shutil.copy2(file, host / "srv/x.run")
    rows = []
    for vlen in (128, 256):
        cpu = f"QEMU_CPU=rv64,v=true,vlen={vlen}"
        words = ["/bin/env", cpu, "RVBUNDLE_TUNE_SECONDS=900", "/srv/x.run", f"--rvbundle-env={cpu}"]
        done = on_host(host, qemu, *words, "--rvbundle-tune", timeout=1800)
        assert done.returncode == 0, done.stderr
        print(done.stdout, file=sys.stderr)
        times = dict(re.findall(r"^(\S.*?)  +[\d.]+ m?s +\d+ +([\d.]+) ms", done.stdout, re.MULTILINE))
        chosen = re.findall(r"^chosen: (.*?) \(", done.stdout, re.MULTILINE)[0]
        text = f"{chosen}: {times[chosen]} ms (reference {times['reference']} ms)"
        met = float(times[chosen]) <= float(times["reference"])
        rows.append(
            Row(
                f"riscv64 with vectors of {vlen} bits: sgemm of 256, chosen by `tune`", "reference", text, met
            )
        )
    return rows


# What choosing adds to a run: its modules, and finding a decision that was made before.
DECIDE = """
import sys, time
from pathlib import Path
from rvbundle_runtime import selection, store, pager  # a run has them anyway
from rvbundle_runtime.host import read_host
from rvbundle_runtime.store import PayloadInfo
host = read_host()
info = PayloadInfo("ab" * 32, "x", "1", host.arch, "wheels", "3", (), "usr/lib", False, {})
started = time.perf_counter()
from rvbundle_runtime import decisions
from rvbundle_runtime.decision import Situation, Wanted
situation = Situation(host, selection.native_launch(host), info, False)
decisions.decide(situation, Wanted(), Path(sys.argv[1]))
print(time.perf_counter() - started)
"""


def choosing_rows(bench: Bench) -> list[Row]:
    """Measure what choosing adds to a run that finds a decision, with the modules that only it needs."""
    place = bench.scratch()
    words = [sys.executable, "-c", DECIDE, place]
    times = [
        float(subprocess.run(words, env=bench.env, check=True, capture_output=True, text=True).stdout)
        for _ in range(22)
    ][1:]
    median = statistics.median(times) * 1000
    return [Row("choosing a backend that was chosen before", "5 ms", f"{median:.1f} ms", median <= 5)]


PARTS: dict[str, tuple[Callable[[Bench], list[Row]], ...]] = {
    "image": (build_rows, run_rows, page_rows, changed_rows, kept_rows),
    "backends": (choosing_rows, native_rows, tuned_rows, vector_rows),
    "riscv": (launcher_rows, riscv_rows, emulated_rows, riscv_launcher_rows),
}


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="how often each pair is measured")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; repeatable")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="rvbundle-bench-") as work:
        bench = Bench(Path(work), options.pairs)
        bench.make_venv()
        parts = options.part or list(PARTS)
        if "image" not in parts:
            bench.rvbundle("build", bench.agent, "-o", bench.work / "out")
            bench.rvbundle("run", bench.image, "--", "--episodes", "1")
        rows = [row for part in parts for measure in PARTS[part] for row in measure(bench)]
    print(f"Measured on {cores} cores, {platform.machine()}, Python {platform.python_version()}.\n")
    print("| what | bar | measured | |")
    print("|---|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.bar} | {row.measured} | {'met' if row.met else 'MISSED'} |")


if __name__ == "__main__":
    main()
