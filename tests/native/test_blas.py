"""The native BLAS: products that blas.so hands to blasworker are right, and what fails is computed anyway.

The client runs natively, by a preload, as it would in a guest. RVBUNDLE_TEST_QEMU: a folder with emulators,
for the workers of other architectures and for a client that is emulated.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.native.toys import EMULATOR, TARGET, zig_build

MACHINES = ("x86_64", "aarch64", "riscv64")
pytestmark = pytest.mark.skipif(
    bool(EMULATOR) or platform.machine() not in MACHINES, reason="the client is native"
)
HERE = platform.machine()

# The definition that a program would find without the preload. It counts its calls.
FALLBACK = r"""
static int calls;
int fallback_calls(void) { return calls; }
#define IS(t) ((*t | 32) == 't' || (*t | 32) == 'c')
#define GEMM(name, real) \
    void name(const char *ta, const char *tb, const int *m, const int *n, const int *k, const real *alpha, \
              const real *a, const int *lda, const real *b, const int *ldb, const real *beta, real *c, \
              const int *ldc) \
    { \
        __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST); \
        for (long j = 0; j < *n; j++) \
            for (long i = 0; i < *m; i++) { \
                real sum = 0; \
                for (long p = 0; p < *k && *alpha != 0; p++) \
                    sum += a[IS(ta) ? i * *lda + p : p * *lda + i] * \
                           b[IS(tb) ? p * *ldb + j : j * *ldb + p]; \
                real *to = &c[j * *ldc + i]; \
                *to = (*alpha == 0 ? 0 : *alpha * sum) + (*beta == 0 ? 0 : *beta * *to); \
            } \
    }
GEMM(sgemm_, float)
GEMM(dgemm_, double)
"""
# What calls it, as an extension of Python does: by way of the PLT. `check` returns how many numbers are
# wrong.
CALLER = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#define GEMM(name, real) \
    void name(const char *, const char *, const int *, const int *, const int *, const real *, const real *, \
              const int *, const real *, const int *, const real *, real *, const int *);
GEMM(sgemm_, float)
GEMM(dgemm_, double)
enum { NAN_IN_A = 1, INFINITY_IN_B = 2, NAN_IN_C = 4 };
static double next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)*state / 9.3e18;
}
#define CHECK(name, gemm, real, epsilon) \
    static int name(char ta, char tb, int m, int n, int k, int pad, double alpha, double beta, int special) \
    { \
        int a_rows = ta == 'N' ? m : k, b_rows = tb == 'N' ? k : n, lda = a_rows + pad; \
        int ldb = b_rows + 2 * pad, ldc = m + pad, wrong = 0; \
        size_t na = (size_t)lda * (ta == 'N' ? k : m), nb = (size_t)ldb * (tb == 'N' ? n : k); \
        size_t nc = (size_t)ldc * n; \
        real *a = malloc(na * sizeof *a), *b = malloc(nb * sizeof *b), *c = malloc(nc * sizeof *c); \
        real *old = malloc(nc * sizeof *c), x = alpha, y = beta; \
        uint64_t state = m * 31 + n * 37 + k; \
        for (size_t i = 0; i < na; i++) a[i] = next(&state); \
        for (size_t i = 0; i < nb; i++) b[i] = next(&state); \
        for (size_t i = 0; i < nc; i++) old[i] = c[i] = special & NAN_IN_C ? NAN : next(&state); \
        if (special & NAN_IN_A) a[0] = NAN; \
        if (special & INFINITY_IN_B) b[0] = INFINITY; \
        gemm(&ta, &tb, &m, &n, &k, &x, a, &lda, b, &ldb, &y, c, &ldc); \
        for (int j = 0; j < n; j++) \
            for (int i = 0; i < ldc; i++) { \
                double before = old[(size_t)j * ldc + i], got = c[(size_t)j * ldc + i], sum = 0, size = 0; \
                if (i >= m) { \
                    wrong += !(got == before || (isnan(got) && isnan(before))); \
                    continue; \
                } \
                for (size_t p = 0; p < k; p++) { \
                    double product = (double)a[ta == 'N' ? p * lda + i : (size_t)i * lda + p] * \
                                     b[tb == 'N' ? (size_t)j * ldb + p : p * ldb + j]; \
                    sum += product; \
                    size += fabs(product); \
                } \
                double want = x * sum + (y == 0 ? 0 : y * before); \
                size = fabs(x) * size + (y == 0 ? 0 : fabs(y * before)); \
                wrong += isnan(want) ? !isnan(got) : isinf(want) ? got != want : \
                         !(fabs(got - want) <= epsilon * (k + 4) * size); \
            } \
        free(a), free(b), free(c), free(old); \
        return wrong; \
    }
CHECK(check_float, sgemm_, float, 1.2e-7)
CHECK(check_double, dgemm_, double, 2.3e-16)
int check(int is_double, char ta, char tb, int m, int n, int k, int pad, double alpha, double beta,
          int special)
{
    return (is_double ? check_double : check_float)(ta, tb, m, n, k, pad, alpha, beta, special);
}
int wrong(void)
{
    static float a[4096], one = 1;
    int n = 64, small = 1;
    sgemm_("N", "N", &n, &n, &n, &one, a, &small, a, &n, &one, a, &n);
    sgemm_("X", "N", &n, &n, &n, &one, a, &n, a, &n, &one, a, &n);
    return 0;
}
"""
# Runs under the preload. TEXT uses check(), calls() and whatever Python has; it sets `result`.
CLIENT = """
import ctypes, json, os, signal, sys, threading, time
fallback = ctypes.CDLL(sys.argv[1])
caller = ctypes.CDLL(sys.argv[2])
worker = int(sys.argv[3])
char, number = ctypes.c_char, ctypes.c_double
def check(double, ta, tb, m, n, k, pad=0, alpha=1.0, beta=0.0, special=0):
    return caller.check(double, char(ta.encode()), char(tb.encode()), m, n, k, pad, number(alpha),
                        number(beta), special)
def calls():
    return fallback.fallback_calls()
"""


@dataclass(frozen=True)
class Built:
    """What was compiled: a folder with ARCHITECTURE/blas.so and so on, and what calls it."""

    out: Path
    fallback: Path
    caller: Path


def build_callers(folder: Path) -> tuple[Path, Path]:
    """Compile FALLBACK and CALLER into libraries in a folder that may be moved."""
    fallback, caller = folder / "libfallback.so", folder / "libcaller.so"
    for path, source, flags in ((fallback, FALLBACK, []), (caller, CALLER, ["-lfallback"])):
        path.with_suffix(".c").write_text(source)
        command = ["gcc", "-O2", "-w", "-shared", "-fPIC", "-o", path, path.with_suffix(".c"), f"-L{folder}"]
        subprocess.run([*command, "-Wl,-rpath,$ORIGIN", *flags, "-lm"], check=True)
    return fallback, caller


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("blas")
    zig_build(out, [TARGET[machine] for machine in MACHINES])
    return Built(out, *build_callers(out))


def qemu(machine: str) -> str:
    """Return the path of an emulator; skips the test where there is none."""
    folders = [os.environ.get("RVBUNDLE_TEST_QEMU", ""), "/usr/bin"]
    found = shutil.which(f"qemu-{machine}", path=":".join(filter(None, folders)))
    if found is None:
        pytest.skip(f"no qemu-{machine}")
    return found


class Worker:
    """A worker that listens."""

    def __init__(
        self, built: Built, folder: Path, machine: str = HERE, threads: int = 2, before: tuple[str, ...] = ()
    ) -> None:
        self.built = built
        self.socket = folder / "blas"
        before = before or (() if machine == HERE else (qemu(machine),))
        words = [*before, str(built.out / machine / "blasworker"), str(self.socket), str(threads)]
        self.process = subprocess.Popen(words, env={})
        end = time.monotonic() + 10
        while not self.socket.exists() and time.monotonic() < end:
            time.sleep(0.005)

    def client(self, text: str) -> object:
        """Return the `result` of a program that has the preload; it must end by itself."""
        script = f"{CLIENT}\n{textwrap.dedent(text)}\nprint(json.dumps(result))"
        done = subprocess.run(
            [sys.executable, "-c", script, self.built.fallback, self.built.caller, str(self.process.pid)],
            env={"LD_PRELOAD": str(self.built.out / HERE / "blas.so"), "RVBUNDLE_BLAS": str(self.socket)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
        )
        return json.loads(done.stdout)

    def connect(self) -> socket.socket:
        """Return a connection of our own."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.connect(str(self.socket))
        made.settimeout(30)
        return made

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def worker(built: Built, tmp_path: Path) -> Iterator[Worker]:
    made = Worker(built, tmp_path)
    yield made
    made.stop()


CASES = """
wrong = []
for double in (0, 1):
    for ta in "NTC":
        for tb in "NTC":
            for m, n, k in SIZES:
                for pad, alpha, beta in ((0, 1, 0), (3, 1, 1), (1, -0.5, 0.25), (700, 2, 0)):
                    if check(double, ta, tb, m, n, k, pad, alpha, beta):
                        wrong.append([double, ta, tb, m, n, k, pad, alpha, beta])
result = [wrong, calls()]
"""
ODD = """
SIZES = (
    (1, 150, 120), (150, 1, 120), (31, 33, 37), (17, 5, 300), (145, 49, 257), (7, 1030, 3), (5, 4, 900)
)
"""


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("threads", [1, 3])
def test_products(built, tmp_path, machine, threads):
    made = Worker(built, tmp_path, machine, threads)
    try:
        assert made.client(ODD + CASES) == [[], 0]
        sizes = "SIZES = ((300, 40, 260), (40, 300, 260), (133, 134, 135))"  # shared among threads
        assert made.client(sizes + CASES.replace('"NTC"', '"NT"')) == [[], 0]
    finally:
        made.stop()


def test_plain_vectors(built, tmp_path):
    """The kernels for a processor without AVX2, on an emulated one."""
    made = Worker(built, tmp_path, "x86_64", 1, (qemu("x86_64"), "-cpu", "Nehalem"))
    try:
        assert made.client(ODD + CASES) == [[], 0]
    finally:
        made.stop()


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_no_number(built, tmp_path, machine):
    """NaN and infinity spread as they should; C is not read where beta is 0."""
    made = Worker(built, tmp_path, machine)
    text = """
    result = [
        [check(double, ta, tb, 40, 41, 42, 1, 1, beta, special) for special in (1, 2, 3, 4, 7)]
        for double in (0, 1) for ta in "NT" for tb in "NT" for beta in (0, 1)
    ]
    result = [sum(map(sum, result)), calls()]
    """
    try:
        assert made.client(text) == [0, 0]
    finally:
        made.stop()


def test_small_and_odd_ones_are_not_sent(worker):
    """Also what the reference BLAS would complain about."""
    text = """
    result = []
    for case in ((32, 32, 16), (32, 32, 15), (0, 400, 400), (400, 400, 0), (400, 0, 400)):
        before = calls()
        result.append([check(0, "N", "T", *case, 1, 1, 0.5), calls() - before])
    before = calls()
    result.append([check(0, "N", "N", 40, 40, 40, 0, 0.0, 0.5, 0), calls() - before])  # alpha is 0
    """
    assert worker.client(text) == [[0, 0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1]]
    text = """
    result = [caller.wrong(), calls()]
    """
    assert worker.client(text) == [0, 2]


def test_threads_at_once(worker):
    text = """
    wrong = []
    def loop(number):
        for i in range(20):
            wrong.append(check(number % 2, "NT"[i % 2], "T", 60 + number, 61 + i, 62, number, 1, 0.5))
    threads = [threading.Thread(target=loop, args=(n,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = [sum(wrong), len(wrong)]
    """
    assert worker.client(text) == [0, 480]  # with more threads than connections, some compute themselves


def test_forked_processes(worker):
    """Each has a connection of its own; also while other threads of the parent compute."""
    text = """
    wrong = [check(0, "N", "N", 100, 100, 100)]
    stop = False
    def loop():
        while not stop:
            wrong.append(check(1, "N", "T", 80, 81, 82))
    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    codes = []
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            bad = sum(check(0, "T", "N", 70, 71 + i, 72, 1, 1, 1) for i in range(20))
            os._exit(1 if bad else 2 if calls() else 0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    stop = True
    for thread in threads:
        thread.join()
    result = [sum(wrong), codes, calls()]
    """
    assert worker.client(text) == [0, [0] * 10, 0]


def test_descriptors_that_the_program_closes(worker, tmp_path):
    """What it opens then has their numbers, and gets nothing of ours."""
    (tmp_path / "file").write_bytes(b"x" * 100)
    text = f"""
    wrong = [check(0, "N", "N", 100, 100, 100)]
    for _ in range(5):
        os.closerange(3, 100)
        files = [os.open({str(tmp_path / "file")!r}, os.O_RDWR) for _ in range(20)]
        wrong.append(check(0, "N", "N", 100, 100, 100))
        wrong.append(check(0, "N", "N", 600, 600, 100))
        for file in files:
            assert os.read(file, 1000) == b"x" * 100
    result = [sum(wrong), calls()]
    """
    assert worker.client(text) == [0, 0]


def test_the_worker_is_killed(worker):
    text = """
    result = [check(0, "N", "N", 100, 100, 100), calls()]
    os.kill(worker, signal.SIGKILL)
    time.sleep(0.1)
    result += [check(0, "N", "N", 100, 100, 100, 1, 1, 1), calls()]
    result += [check(1, "N", "N", 100, 100, 100), calls()]
    """
    assert worker.client(text) == [0, 0, 0, 1, 0, 2]


def test_the_worker_is_killed_at_work(worker):
    text = """
    result = [check(0, "N", "N", 100, 100, 100), calls()]
    os.kill(worker, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (worker, signal.SIGKILL)).start()
    result += [check(0, "N", "N", 200, 200, 200, 1, 1, 1), calls()]
    """
    assert worker.client(text) == [0, 0, 0, 1]


def test_the_worker_hangs(worker):
    """Nobody waits for ever."""
    text = """
    os.kill(worker, signal.SIGSTOP)
    start = time.monotonic()
    result = [check(0, "N", "N", 100, 100, 100, 1, 1, 1), calls(), check(0, "N", "N", 100, 100, 100), calls()]
    result.append(9 < time.monotonic() - start < 30)
    """
    assert worker.client(text) == [0, 1, 0, 2, True]


def test_there_is_no_worker(built, tmp_path):
    made = Worker(built, tmp_path)
    made.stop()
    made.socket.unlink()
    assert made.client('result = [check(0, "N", "N", 100, 100, 100), calls()]') == [0, 1]


def test_interrupted_by_signals(worker):
    text = """
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    wrong = sum(check(0, "N", "N", 150, 150, 150, i % 2, 1, 1) for i in range(200))
    signal.setitimer(signal.ITIMER_REAL, 0)
    result = [wrong, len(seen) > 10, calls()]
    """
    assert worker.client(text) == [0, True, 0]


PROGRAM = r"""
#include <stdio.h>
int check(int, char, char, int, int, int, int, double, double, int);
int fallback_calls(void);
int main(void)
{
    int wrong = 0;
    for (int i = 0; i < 8; i++)
        wrong += check(i % 2, i & 2 ? 'T' : 'N', i & 4 ? 'T' : 'N', 70 + i, 75, 80, i, 1, i & 1, 0);
    printf("%d %d\n", wrong, fallback_calls());
}
"""


@pytest.mark.skipif(HERE != "x86_64", reason="x86-64 under qemu-x86_64")
@pytest.mark.parametrize("preload", [True, False])
def test_an_emulated_program(worker, tmp_path, preload):
    out = worker.built.out
    (tmp_path / "program.c").write_text(PROGRAM)
    command = ["gcc", "-o", tmp_path / "program", tmp_path / "program.c", f"-L{out}", f"-Wl,-rpath,{out}"]
    subprocess.run([*command, "-lcaller", "-lfallback"], check=True)
    words = [qemu(HERE), "-E", f"RVBUNDLE_BLAS={worker.socket}"]
    words += ["-E", f"LD_PRELOAD={out / HERE / 'blas.so'}"] if preload else []
    done = subprocess.run([*words, tmp_path / "program"], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == ("0 0\n" if preload else "0 8\n")


def test_no_other_definition(built, tmp_path):
    """Then the library computes by itself."""
    (tmp_path / "caller.c").write_text(CALLER)
    body = """
    printf("%d %d\\n", check(0, 'N', 'T', 20, 21, 22, 1, 2., .5, 0),
           check(1, 'T', 'N', 9, 40, 50, 1, 1., 0., 4));
    """
    declared = (
        "int printf(const char *, ...), check(int, char, char, int, int, int, int, double, double, int);"
    )
    (tmp_path / "program.c").write_text(f"{declared} int main(void) {{ {body} }}")
    caller = tmp_path / "libalone.so"
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", caller, tmp_path / "caller.c", "-lm"], check=True)
    command = ["gcc", "-w", "-o", tmp_path / "program", tmp_path / "program.c", caller]
    subprocess.run([*command, "-Wl,--allow-shlib-undefined"], check=True)
    env = {"LD_PRELOAD": str(built.out / HERE / "blas.so"), "RVBUNDLE_BLAS": str(tmp_path / "none")}
    done = subprocess.run([tmp_path / "program"], env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "0 0\n"


# ---- what a hostile guest sends ----

REQUEST = "<IIIiii QqQqQq dd".replace(" ", "")
FLOAT, DOUBLE, MAP = 2, 3, 1
SIZE = 1 << 16
BIG = 2**31 - 1


def request(what: int = FLOAT, m: int = 8, n: int = 8, k: int = 8, **more: int) -> bytes:
    at = {"a": 0, "lda": 8, "b": 1024, "ldb": 8, "c": 2048, "ldc": 8, "ta": 0, "tb": 0, **more}
    places = (at["a"], at["lda"], at["b"], at["ldb"], at["c"], at["ldc"])
    return struct.pack(REQUEST, what, at["ta"], at["tb"], m, n, k, *places, 1.0, 0.0)


def shared(size: int = SIZE, seal: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def ask(connection: socket.socket, message: bytes, *fds: int) -> int:
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([message], control)
    (result,) = struct.unpack("<i", connection.recv(100))
    return result


@pytest.fixture
def connection(worker: Worker) -> Iterator[socket.socket]:
    with worker.connect() as made:
        assert ask(made, request(MAP), shared()) == 0
        yield made


@pytest.mark.parametrize("what", [FLOAT, DOUBLE])
@pytest.mark.parametrize(
    "wrong",
    [
        {"what": 0}, {"what": 4}, {"what": BIG},
        {"m": 0}, {"m": -1}, {"n": -BIG}, {"k": -1}, {"m": BIG}, {"n": BIG}, {"k": BIG},
        {"m": BIG, "n": BIG, "k": BIG, "lda": BIG, "ldb": BIG, "ldc": BIG},
        {"m": BIG, "lda": 2**62}, {"lda": 7}, {"lda": -8}, {"lda": -(2**63)}, {"lda": 2**63 - 1},
        {"ldb": 7}, {"ldb": 0}, {"ldc": 7}, {"ldc": -1}, {"ldc": 2**40},
        {"a": SIZE}, {"a": SIZE - 8}, {"a": 2**64 - 8}, {"a": 4}, {"b": SIZE - 248}, {"c": SIZE - 248},
        {"c": 2**63}, {"b": 2**64 - 1024}, {"c": 1}, {"ta": 1, "lda": 7}, {"tb": BIG, "ldb": 1},
    ],
)  # fmt: skip
def test_requests_that_are_refused(connection, worker, wrong, what):
    assert ask(connection, request(**{"what": what, **wrong})) == -22
    assert ask(connection, request()) == 0
    assert worker.process.poll() is None


def test_memory_that_is_refused(worker):
    with worker.connect() as connection:
        assert ask(connection, request()) == -22  # none yet
        assert ask(connection, request(MAP)) == -22  # no descriptor
        assert ask(connection, request(MAP), shared(seal=False)) == -22  # could shrink
        assert ask(connection, request(MAP), os.open("/dev/null", os.O_RDWR)) == -22
        assert ask(connection, request(MAP), shared(0)) == -22
        assert ask(connection, request(), shared()) == -22  # with a product
        assert ask(connection, request(MAP), shared(4096)) == 0
        assert ask(connection, request()) == 0
        assert ask(connection, request(c=4000)) == -22
        assert ask(connection, request(MAP), shared()) == 0
        assert ask(connection, request(c=4000)) == 0
    assert worker.process.poll() is None


@pytest.mark.parametrize("message", [b"x", b"x" * 87, request()[:-1]])
def test_messages_of_another_size_end_the_connection(worker, connection, message):
    connection.send(message)
    assert connection.recv(100) == b""
    with worker.connect() as other:
        assert ask(other, request(MAP), shared()) == 0


def test_many_connections(worker):
    """There is a limit; those that end make room."""
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            made = [stack.enter_context(worker.connect()) for _ in range(300)]
            served = 0
            for connection in made:
                with contextlib.suppress(OSError, struct.error):  # closed
                    served += ask(connection, request(MAP), shared(4096)) == 0
            assert served == 256
        time.sleep(0.3)
    with worker.connect() as connection:
        assert ask(connection, request(MAP), shared()) == 0


def test_it_ends_with_its_parent(built, tmp_path):
    worker = built.out / HERE / "blasworker"
    code = f"""
import subprocess, time, os
made = subprocess.Popen([{str(worker)!r}, "blas", "2"])
while not os.path.exists("blas"): time.sleep(0.01)
print(made.pid)
"""
    pid = int(subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path))
    for _ in range(200):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it lives on")


def test_it_needs_nothing(built):
    """No loader, no libc; segments for pages of 64 KiB. The library has no constructor."""
    for machine in MACHINES:
        headers = subprocess.check_output(["readelf", "-lW", built.out / machine / "blasworker"], text=True)
        assert "INTERP" not in headers
        loads = [line.split() for line in headers.splitlines() if line.split()[:1] == ["LOAD"]]
        assert {int(fields[-1], 16) for fields in loads} == {65536}
        dynamic = subprocess.check_output(["readelf", "-dW", built.out / machine / "blas.so"], text=True)
        assert "INIT" not in dynamic
