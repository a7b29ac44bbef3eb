"""Runs an agent's program several times in one process, each time as if it were `python FILE ARGUMENT…`."""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import os
import signal
import sys
import time
import traceback
import types
from _frozen_importlib_external import SourceFileLoader
from typing import Any, Callable, Iterable, Sequence

# Of a run's stdout; what is longer ends with a line that says so, and can't be the recorded text.
TEXT_MAX = 256 << 10
_CUT = "\n[rvbundle: the rest is left out]\n"


class Output:
    """Files that stand for fd 1 and 2 while a program runs, for its children as well."""

    def __init__(self, base: str) -> None:
        """Use `base`.out and `base`.err, which stay: after a crash they tell what the program printed."""
        self.paths = (base + ".out", base + ".err")
        self._saved: list[int] = []

    def start(self) -> None:
        """Send fd 1 and 2 to the files, emptied."""
        _flush()
        self._saved = [os.dup(1), os.dup(2)]
        for fd, path in zip((1, 2), self.paths):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            os.dup2(file, fd)
            os.close(file)

    def stop(self) -> None:
        """Bring fd 1 and 2 back."""
        _flush()
        for fd, saved in zip((1, 2), self._saved):
            os.dup2(saved, fd)
            os.close(saved)
        self._saved = []

    def read(self) -> tuple[str, str]:
        """Return what was printed to stdout and stderr."""
        texts = []
        for path in self.paths:
            with open(path, "rb") as file:
                texts.append(file.read().decode("utf-8", "replace"))
        return texts[0], texts[1]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def shorten(text: str) -> str:
    """Return at most TEXT_MAX characters."""
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - len(_CUT)] + _CUT


class Folder:
    """The current folder as it was: what a run writes there is removed again before the next one."""

    def __init__(self, keep: Iterable[str]) -> None:
        """Remember the current folder; the files `keep` (paths) in it are none of the runs' business."""
        self._path = os.getcwd()
        self._keep = {os.path.abspath(path) for path in keep}
        self._copy = ""
        entries = self._entries()
        self._known = {entry.name for entry in entries}
        if entries:
            import shutil
            import tempfile

            self._copy = tempfile.mkdtemp(prefix="rvbundle-measure-")
            for entry in entries:
                _copy(entry.path, os.path.join(self._copy, entry.name), shutil)

    def _entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self._path) as entries:
            return [entry for entry in entries if os.path.abspath(entry.path) not in self._keep]

    def restore(self) -> None:
        """Go back to the folder and make it what it was."""
        os.chdir(self._path)
        entries = self._entries()
        if not entries and not self._known:
            return
        import shutil

        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        for name in self._known:
            _copy(os.path.join(self._copy, name), os.path.join(self._path, name), shutil)

    def close(self) -> None:
        """Remove the copy."""
        if self._copy:
            import shutil

            shutil.rmtree(self._copy, ignore_errors=True)


def _copy(source: str, target: str, shutil: Any) -> None:
    if os.path.isdir(source) and not os.path.islink(source):
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


class Fresh:
    """What a new process would have, brought back between the runs. Modules stay imported, as is meant."""

    def __init__(self) -> None:
        """Remember it."""
        self._argv, self._path, self._env = list(sys.argv), list(sys.path), dict(os.environ)
        self._main = sys.modules["__main__"]
        self._streams = (sys.stdin, sys.stdout, sys.stderr)
        self._hooks = (sys.excepthook, sys.displayhook)
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore(self) -> None:
        """Bring it back."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        sys.argv[:], sys.path[:] = self._argv, self._path
        sys.modules["__main__"] = self._main
        sys.excepthook, sys.displayhook = self._hooks
        sys.settrace(None)
        sys.setprofile(None)
        if dict(os.environ) != self._env:
            os.environ.clear()
            os.environ.update(self._env)
        torch: Any = sys.modules.get("torch")
        if hasattr(torch, "set_default_dtype"):  # else its import failed half-way
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)
        numpy: Any = sys.modules.get("numpy")
        if hasattr(numpy, "seterr"):
            numpy.seterr(divide="warn", over="warn", under="ignore", invalid="warn")
        gc.enable()
        gc.collect()

    def restore_streams(self) -> None:
        """Flush what a program printed, and put the first stdin, stdout and stderr in place of its own."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not getattr(stream, "closed", True):
                stream.flush()
        stdin, stdout, stderr = self._streams
        if stdout is not None and stdout.closed:
            stdout = os.fdopen(1, "w", closefd=False)
        if stderr is not None and stderr.closed:
            stderr = os.fdopen(2, "w", closefd=False)
        self._streams = sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr


def _wait_for_threads() -> None:
    """Wait for threads that a process waits for when it ends."""
    threading, pools = sys.modules.get("threading"), sys.modules.get("concurrent.futures.thread")
    if threading is None:
        return
    # Those of an executor wait for work for ever: at the end of a process they are told to end.
    idle = set(pools._threads_queues) if pools is not None else set()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon and thread not in idle:
            thread.join()


def _end_children() -> None:
    """End what multiprocessing has started: a process that ends does so too."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
        child.join()


class Program:
    """The agent's program."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Take the file and its arguments."""
        self.argv = list(argv)
        self._at_exit: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def run(self) -> int:
        """Run it; return the exit code that its process would have had."""
        try:
            try:
                self._execute()
            finally:
                _wait_for_threads()
                self._run_at_exit()
                _end_children()
        except SystemExit as end:
            return exit_code(end.code)
        except BaseException:  # noqa: BLE001 whatever the program lets through ends its run, not this process
            traceback.print_exc()
            return 1
        return 0

    def _execute(self) -> None:
        path = self.argv[0]
        main = types.ModuleType("__main__")
        loader = SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __cached__=None, __builtins__=builtins, __loader__=loader)
        sys.modules["__main__"] = main
        sys.argv[:] = self.argv
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        register, unregister = atexit.register, atexit.unregister
        atexit.register = self._register(main)
        atexit.unregister = self._unregister(unregister)
        try:
            exec(_code(path), main.__dict__)
        finally:
            atexit.register, atexit.unregister = register, unregister

    def _register(self, main: types.ModuleType) -> Callable[..., Any]:
        """Return what keeps the program's own functions for the end of its run; libraries' go on as usual."""
        register, folder = atexit.register, os.path.join(sys.path[0], "")

        def wrapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            caller = sys._getframe(1).f_globals
            source = str(caller.get("__file__", ""))
            own_module = source.startswith(folder) and "-packages" not in source[len(folder) :]
            if caller is main.__dict__ or own_module:
                self._at_exit.append((function, args, kwargs))
                return function
            return register(function, *args, **kwargs)

        return wrapped

    def _unregister(self, unregister: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(function: Callable[..., Any]) -> None:
            self._at_exit = [entry for entry in self._at_exit if entry[0] != function]
            unregister(function)

        return wrapped

    def _run_at_exit(self) -> None:
        while self._at_exit:
            function, args, kwargs = self._at_exit.pop()
            try:
                function(*args, **kwargs)
            except Exception:  # noqa: BLE001 as at the end of a process: printed, and the next one runs
                traceback.print_exc()


def _code(path: str) -> Any:
    if path.endswith(".pyc"):
        import marshal

        with io.open_code(path) as file:
            return marshal.loads(file.read()[16:])
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def exit_code(value: object) -> int:
    """Return the exit code for what SystemExit was given; text is printed, as Python does it."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Workload:
    """The runs of a program, and what became of them."""

    def __init__(self, argv: Sequence[str], base: str, keep: Iterable[str], filtered: Callable[[str], str]):
        """Prepare. `base`: see Output; `keep`: see Folder; `filtered` takes others' lines out of stdout."""
        self.program = Program(argv)
        self.output = Output(base)
        self.record: dict[str, Any] = {
            "stdout": "",
            "code": None,
            "first": None,
            "again": [],
            "cpu": 0.0,
            "note": "",
        }
        self.printed = ""  # all of the last run, stdout and stderr
        self._filtered = filtered
        self._folder = Folder([*keep, *self.output.paths])
        self._fresh = Fresh()
        self._start = self._cpu = 0.0

    def first(self) -> None:
        """Run it for the first time, with its imports."""
        code, seconds, stdout = self._once(self.program.run)
        self.record.update(stdout=shorten(self._filtered(stdout)), code=code, first=seconds)

    def again(self, seconds: float, repeats: int, report: Callable[[], None]) -> None:
        """Run it again, at least once, until `seconds` or `repeats` are used up; `report` after each run."""
        deadline = time.perf_counter() + seconds
        times: list[float] = []
        while not times or (len(times) < repeats and time.perf_counter() < deadline):
            code, taken, _ = self._once(self.program.run)
            if code != self.record["code"]:
                self._can_not(code)
                return
            times.append(taken)
            self.record["cpu"] += self._cpu
            self.record["again"] = list(times)
            report()

    def with_profile(self, profiled: Callable[[Callable[[], Any]], Any]) -> dict[str, Any] | None:
        """Run it under `profiled`; return the profile, None if the program can't be run again."""
        made: list[Any] = []

        def run() -> int:
            code, profile = profiled(self.program.run)
            made.append(profile)
            return int(code)

        code, _, _ = self._once(run)
        if code != self.record["code"]:
            self._can_not(code)
            return None
        profile: dict[str, Any] = made[0]
        return profile

    def _once(self, run: Callable[[], int]) -> tuple[int, float, str]:
        self.output.start()
        cpu = cpu_seconds()
        start = self._start = time.perf_counter()
        try:
            code = run()
        finally:
            self._fresh.restore_streams()
            taken = time.perf_counter() - start
            self._cpu = cpu_seconds() - cpu
            self.output.stop()
        stdout, stderr = self.output.read()
        self.printed = stdout + stderr
        self._fresh.restore()
        self._folder.restore()
        return code, taken, stdout

    def left(self, code: int) -> None:
        """Take note that the program is about to end this process by os._exit."""
        taken = time.perf_counter() - self._start
        # What Python has not flushed yet is lost, as in any process.
        stdout, stderr = self.output.read()
        self.printed = stdout + stderr
        if self.record["first"] is None:
            self.record.update(stdout=shorten(self._filtered(stdout)), code=code & 0xFF, first=taken)
        self.record["note"] = "it ends its process by os._exit: it can be run only once in a process"
        self.record.update(again=[], cpu=0.0)

    def close(self) -> None:
        """Remove what was copied."""
        self._folder.close()

    def _can_not(self, code: int) -> None:
        lines = self.output.read()[1].strip().splitlines()
        why = f": {lines[-1][:300]}" if lines else ""
        self.record["note"] = f"run again in the same process it ended with exit code {code}{why}"
        self.record.update(again=[], cpu=0.0)
