"""Does one thing at a time, named on the command line: what the tests want to see inside an image."""

import json
import os
import signal
import subprocess
import sys
import time

CHECKS = {}


def check(function):
    """Make a function available by its name."""
    CHECKS[function.__name__] = function
    return function


def _double(number):
    return 2 * number


@check
def hello(*words):
    print("hello", *words)


@check
def code(number):
    sys.exit(int(number))


@check
def die(number):
    os.kill(os.getpid(), int(number))


@check
def facts():
    """Print what the process sees of its surroundings."""
    print(
        json.dumps(
            {
                "cwd": os.getcwd(),
                "files": sorted(os.listdir(".")),
                "root": sorted(os.listdir("/")),
                "env": dict(os.environ),
                "uid": os.getuid(),
                "executable": sys.executable,
                "prefix": sys.prefix,
                "file": __file__,
                "path": sys.path,
                "hostname": os.uname().nodename,
                "pid": os.getpid(),
                "home": os.path.expanduser("~"),
                "capabilities": _status("CapEff"),
                "no_new_privs": _status("NoNewPrivs"),
                "interfaces": sorted(os.listdir("/sys/class/net"))
                if os.path.exists("/sys/class/net")
                else None,
                "dev": sorted(os.listdir("/dev")),
                "processes": sorted(int(p) for p in os.listdir("/proc") if p.isdigit()),
            }
        )
    )


def _status(key):
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(key + ":"))


@check
def write(path, text="text"):
    with open(path, "w") as file:
        file.write(text)
    print("written", path)


@check
def read(path):
    with open(path) as file:
        print(file.read())


@check
def echo():
    """Copy standard input."""
    print(sys.stdin.read(), end="")


@check
def size():
    """Print the terminal's size."""
    print(*os.get_terminal_size(0))


@check
def sleep(seconds="60"):
    """Sleep until a signal; SIGTERM is caught and answered."""

    def on_term(number, frame):
        # not print: the signal may arrive while the main program is still inside one
        os.write(1, f"caught {signal.Signals(number).name}\n".encode())
        sys.exit(7)

    signal.signal(signal.SIGTERM, on_term)
    print("ready", os.getpid(), flush=True)
    time.sleep(float(seconds))


@check
def interrupted():
    """Count the interrupts that arrive within a second of the first."""
    count = 0

    def on_int(number, frame):
        nonlocal count
        count += 1

    signal.signal(signal.SIGINT, on_int)
    print("ready", flush=True)
    while not count:
        time.sleep(0.01)
    time.sleep(1)
    print("interrupts", count, flush=True)


@check
def children():
    """Start children in every usual way."""
    flags = ["-c", "import sys; print('child', sys.flags.no_site)"]
    for extra in ([], ["-S"], ["-I"]):
        print(subprocess.run([sys.executable, *extra, *flags], capture_output=True, text=True).stdout.strip())
    print(subprocess.run("echo shell $((1+1))", shell=True, capture_output=True, text=True).stdout.strip())
    code = "import json, decimal; print('bare', json.dumps(1))"
    print(subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True).stdout.strip())
    print("script", subprocess.run([sys.executable, __file__, "code", "9"]).returncode)


@check
def pool(method):
    """Run a pool of two worker processes."""
    import multiprocessing

    with multiprocessing.get_context(method).Pool(2) as workers:
        print(method, workers.map(_double, range(4)))


@check
def orphan():
    """Leave a child behind that would run for a minute."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("left")


@check
def load(module, attribute="__name__"):
    """Import a module by name."""
    import importlib

    print(getattr(importlib.import_module(module), attribute))


@check
def find(module):
    """Say where a module would come from."""
    import importlib.util

    spec = importlib.util.find_spec(module)
    print(spec.origin if spec else None)


@check
def modules(package):
    """List a package's modules."""
    import importlib
    import pkgutil

    print(*[m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)])


@check
def source(module, name):
    """Print the first line of a function's or class's source."""
    import importlib
    import inspect

    print(inspect.getsource(getattr(importlib.import_module(module), name)).splitlines()[0])


@check
def resource(package, name):
    """Read a data file through importlib.resources."""
    import importlib.resources

    print(len(importlib.resources.files(package).joinpath(name).read_bytes()))


@check
def origin(module):
    """Print where a module says that it comes from."""
    import importlib

    loaded = importlib.import_module(module)
    print(loaded.__file__, loaded.__spec__.origin, loaded.__spec__.cached)


@check
def metadata(name):
    """Print what importlib.metadata knows of a distribution."""
    import importlib.metadata

    print(importlib.metadata.version(name), bool(importlib.metadata.files(name)))


@check
def memory(mebibytes):
    """Try to use that much memory."""
    try:
        print("got", len(bytearray(int(mebibytes) << 20)) >> 20)
    except MemoryError:
        print("refused")


@check
def connect():
    """Try to reach another machine."""
    import socket

    try:
        socket.create_connection(("192.0.2.1", 9), timeout=5)  # RFC 5737: never answers
    except OSError as error:
        print(type(error).__name__, error.errno)


@check
def crash():
    """Print a traceback."""
    raise RuntimeError("on purpose")


@check
def optional(module):
    """Import a module as an optional one."""
    try:
        __import__(module)
        print("there")
    except ImportError as error:
        print("absent", type(error).__name__, error.name)


if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
