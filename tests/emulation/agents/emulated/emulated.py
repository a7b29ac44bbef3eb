"""Says which processor each of its processes runs on: what the tests want to know of an emulated agent."""

import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time

CHECKS = {}
# push rbx; mov eax, 1; cpuid; pop rbx; ret
_CPUID_1 = b"\x53\xb8\x01\x00\x00\x00\x0f\xa2\x5b\xc3"
_PAGE = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
_PAGE.write(_CPUID_1)
_ASK = ctypes.CFUNCTYPE(ctypes.c_uint32)(ctypes.addressof(ctypes.c_char.from_buffer(_PAGE)))


def check(function):
    """Make a function available by its name."""
    CHECKS[function.__name__] = function
    return function


@check
def signature():
    """Print the processor's family, model and stepping as CPUID's leaf 1 has them: no file can hide it."""
    print(f"{_ASK():08x}", flush=True)


def signature_of(_):
    """The same, for workers of a pool."""
    return f"{_ASK():08x}"


def _run(*words, **options):
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, **options)
    return done.stdout.strip() or done.returncode


@check
def children():
    """Let children of every kind print their processor's signature."""
    me = os.path.abspath(__file__)
    python = sys.executable
    script = "/tmp/script"
    with open(script, "w") as file:
        file.write(f'#!/bin/sh\nexec "{python}" "{me}" "$@"\n')
    os.chmod(script, 0o755)
    direct = "/tmp/direct"
    with open(direct, "w") as file:
        file.write(f"#!{python}\nimport sys; sys.argv[1:] = ['signature']\nexec(open({me!r}).read())\n")
    os.chmod(direct, 0o755)
    words = [python, me, "signature"]
    results = {
        "subprocess": _run(*words),
        "bare": _run(*words, env={}),
        "shell": _run(" ".join(words), shell=True),
        "script": _run(script, "signature"),
        "#!python": _run(direct),
        "by name": _run("python3", me, "signature"),
        "argv[0]": _run("odd name", "-c", 'echo "$0"', executable="/bin/sh"),
        "popen": os.popen(" ".join(words)).read().strip(),
    }
    reading, writing = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1)]
    os.waitpid(os.posix_spawn(python, words, dict(os.environ), file_actions=actions), 0)
    results["posix_spawn"] = os.read(reading, 100).decode().strip()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        os.execv(python, words)
    os.waitpid(pid, 0)
    results["execv"] = os.read(reading, 100).decode().strip()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        os._exit(os.waitstatus_to_exitcode(os.system(" ".join(words))))
    os.waitpid(pid, 0)
    results["system"] = os.read(reading, 100).decode().strip()
    try:
        subprocess.run(["/nowhere/program"])
    except FileNotFoundError as error:
        results["absent"] = error.strerror
    results["code"] = _run(python, "-c", "raise SystemExit(7)")
    results["signal"] = _run(python, "-c", "import os; os.kill(os.getpid(), 15)")
    print(json.dumps(results))


@check
def pools():
    """Let two workers of each kind of pool say theirs."""
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as workers:
            print(method, *workers.map(signature_of, range(2)))


@check
def facts():
    """Print what the process sees of the machine and of its surroundings."""
    with open("/proc/cpuinfo") as file:
        cpuinfo = file.read()
    with open("/proc/self/maps") as file:
        files = sorted({line.split(None, 5)[5].strip() for line in file if "/" in line})
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split()[4] for line in file]
    uname = os.uname()
    print(
        json.dumps(
            {
                "uid": os.getuid(),
                "machine": uname.machine,
                "system": uname.sysname,
                "cpuinfo": cpuinfo,
                "cpu_count": os.cpu_count(),
                "affinity": len(os.sched_getaffinity(0)),
                "env": dict(os.environ),
                "maps": files,
                "executable": sys.executable,
                "argv": sys.orig_argv,
                "exe": os.readlink("/proc/self/exe"),
                "run": sorted(os.listdir("/run/rvbundle")) if os.path.isdir("/run/rvbundle") else [],
                "mounts": mounts,
            }
        )
    )


@check
def grab(*paths):
    """Try to change each of these files; print what happened."""
    for path in paths:
        try:
            os.utime(path)
            print(path, "can be changed")
        except OSError as error:
            print(path, error.strerror)


@check
def numbers():
    """Use functions of which libm has a variant for each kind of processor."""
    import math

    print([f"{f(0.7):.12f}" for f in (math.sin, math.cos, math.tan, math.exp, math.log, math.atan)])
    print(f"{math.pow(1.7, 0.7):.12f} {math.atan2(1, 3):.12f}")


@check
def untraced():
    """Use parts of the standard library, and of libm, that no trace used."""
    import cmath
    import decimal
    import fractions
    import math
    import re
    import statistics
    import unicodedata

    print(f"{math.lgamma(7.5):.9f} {math.erf(0.3):.9f} {cmath.atanh(0.5 + 0.25j):.9f} {math.cbrt(5):.9f}")
    print(f"{math.sinh(1.5):.12f} {math.asin(0.3):.12f} {math.gamma(4.5):.12f}")
    print(decimal.Decimal(2).sqrt(), fractions.Fraction(3, 7) ** 3, statistics.stdev([1, 2, 4]))
    print(re.sub(r"(?<=a)(b+)(?!c)", "x", "abbbd abc"), unicodedata.normalize("NFD", "é").encode())
    print(sorted({1: 2, 3: 4}.items(), key=lambda p: -p[1]), "ß".casefold(), 3**200 % 10**9)


@check
def memory(mebibytes):
    """Try to use that much memory."""
    try:
        print("got", len(bytearray(int(mebibytes) << 20)) >> 20)
    except MemoryError:
        print("refused")


@check
def code(number):
    sys.exit(int(number))


@check
def die(number):
    os.kill(os.getpid(), int(number))


@check
def echo():
    """Copy standard input."""
    print(sys.stdin.read(), end="")


@check
def sleep(seconds="60"):
    """Sleep until a signal; SIGTERM and SIGINT are caught and answered."""

    def answer(number, frame):
        os.write(1, f"caught {signal.Signals(number).name}\n".encode())
        sys.exit(7)

    signal.signal(signal.SIGTERM, answer)
    signal.signal(signal.SIGINT, answer)
    print("ready", flush=True)
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:  # in steps: a signal just before a sleep is answered after it
        time.sleep(0.05)


@check
def wait(seconds="60"):
    """Sleep, and do not care about signals."""
    print("ready", flush=True)
    time.sleep(float(seconds))


def _products():
    """Multiply matrices; return how many numbers are wrong, and how many products were emulated."""
    library = ctypes.CDLL("/agent/libcaller.so")
    how, half = (ctypes.c_char(b"N"), ctypes.c_char(b"T")), ctypes.c_double(0.5)
    wrong = [library.check(double, *how, 100, 100, 100, 3, half, half, 0) for double in (0, 1)]
    return [sum(wrong), ctypes.CDLL("/agent/libfallback.so").fallback_calls()]


@check
def products(child=""):
    """Print what comes of products, also of a forked child's and of another program's."""
    print(_products(), flush=True)
    if not child:
        pid = os.fork()
        if pid == 0:
            print(_products(), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        subprocess.run([sys.executable, os.path.abspath(__file__), "products", "child"], check=True)


if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
