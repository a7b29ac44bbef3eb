"""measure.py, started as it is in a payload, with small programs that need nothing but Python."""

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rvbundle_runtime
from rvbundle_runtime.guest import measure_layers, measure_workload
from rvbundle_runtime.measured import SCRIPTS, STDERR_SUFFIX, STDOUT_SUFFIX, from_json, from_result
from rvbundle_runtime.profiling import from_result as profile_from_result

CLEAN = {"PATH": os.environ["PATH"]}  # no PYTHONUNBUFFERED and the like, as in a sandbox
MEASURE = Path(rvbundle_runtime.__file__).parent / "guest" / SCRIPTS[0]


@dataclass(frozen=True)
class Done:
    """What a measurement left: its exit code, its result, and what it printed itself."""

    code: int
    result: Any
    out: str
    err: str
    folder: Path

    @property
    def workload(self) -> Any:
        return self.result["workload"]


@dataclass(frozen=True)
class Measure:
    """Measures programs in a folder of the test's own."""

    folder: Path

    def __call__(self, program: str, *args: str, options: tuple[str, ...] = (), **request: object) -> Done:
        app = self.folder / "app"
        app.mkdir(exist_ok=True)
        (app / "train.py").write_text(textwrap.dedent(program))
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        workload = {"argv": [str(app / "train.py"), *args], "seconds": 0.0, "repeats": 1}
        workload |= request.pop("workload", {})  # type: ignore[arg-type]
        asked, result = self.folder / "request.json", self.folder / "result.json"
        asked.write_text(json.dumps({"modules": [], "workload": workload, **request}))
        done = subprocess.run(
            [sys.executable, *options, MEASURE, asked, result],
            cwd=scratch,
            env=CLEAN,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        value = from_json(result.read_bytes()) if result.exists() else None
        return Done(done.returncode, value, done.stdout, done.stderr, self.folder)


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    return Measure(tmp_path)


def test_a_program_is_run_as_python_does_it_and_then_again(measure: Measure) -> None:
    program = """
        import os, sys, time
        import beside
        print(__name__, __file__ == sys.argv[0], sys.argv[1:], sys.path[0] == os.path.dirname(__file__))
        print(sys.modules["__main__"].__dict__ is globals(), beside.VALUE, "seen" in globals())
        os.system("echo child")
        seen = True
        time.sleep(0.02)
    """
    (measure.folder / "app").mkdir()
    (measure.folder / "app" / "beside.py").write_text("VALUE = 7\n")
    done = measure(program, "--episodes", "3", workload={"repeats": 3, "seconds": 10})
    assert (done.code, done.out, done.err) == (0, "", "")
    assert done.workload["stdout"] == (
        # The child comes first: Python writes to a file when it ends, as it does for `python FILE > file`.
        "child\n__main__ True ['--episodes', '3'] True\nTrue 7 False\n"
    )
    assert done.workload["code"] == 0
    assert len(done.workload["again"]) == 3
    assert all(0.02 <= seconds < 5 for seconds in [done.workload["first"], *done.workload["again"]])
    assert done.result["finished"] is True
    assert done.workload["note"] == ""
    measured = from_result(done.result)
    assert measured.workload is not None
    assert dict(measured.versions)["python"] == sys.version.split()[0]


def test_the_result_is_the_same_as_pythons_own(measure: Measure) -> None:
    program = """
        import atexit, sys, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        print("main")
        sys.exit("told on stderr")
    """
    done = measure(program)
    own = subprocess.run(
        [sys.executable, measure.folder / "app" / "train.py"],
        env=CLEAN,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.workload["stdout"], done.workload["code"]) == (own.stdout, own.returncode)
    assert done.workload["stdout"] == "main\nthread\nat exit\n"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit(True)", 1),
        ("sys.exit(-1)", 255),
        ("sys.exit('text')", 1),
        ("raise ValueError('text')", 1),
        ("raise KeyboardInterrupt", 1),
    ],
)
def test_exit_codes(measure: Measure, end: str, code: int) -> None:
    done = measure(f"import sys\nprint('before')\n{end}\n")
    assert (done.code, done.workload["code"], done.workload["stdout"]) == (0, code, "before\n")
    assert len(done.workload["again"]) == 1  # the same code again is no failure


def test_repeats_end_with_the_time(measure: Measure) -> None:
    done = measure("import time; time.sleep(0.2)", workload={"repeats": 50, "seconds": 0.5})
    assert 2 <= len(done.workload["again"]) <= 4


def test_once_is_the_least_and_none_if_none_is_asked_for(measure: Measure) -> None:
    assert len(measure("print()", workload={"repeats": 9, "seconds": 0.0}).workload["again"]) == 1
    assert measure("print()", workload={"repeats": 0, "seconds": 9.0}).workload["again"] == []


def test_imports_count_in_the_first_run_only(measure: Measure) -> None:
    (measure.folder / "app").mkdir()
    (measure.folder / "app" / "slow.py").write_text("import time\ntime.sleep(0.3)\n")
    done = measure("import slow", workload={"repeats": 3, "seconds": 5})
    assert done.workload["first"] >= 0.3
    assert max(done.workload["again"]) < 0.2


def test_processor_time_is_that_of_the_repeats(measure: Measure) -> None:
    program = """
        import time
        end = time.process_time() + 0.2
        while time.process_time() < end: pass
    """
    done = measure(program, workload={"repeats": 2, "seconds": 5})
    assert 0.35 <= done.workload["cpu"] <= 0.7


def test_a_program_that_can_be_run_only_once(measure: Measure) -> None:
    program = """
        import sys
        if hasattr(sys, "already"):
            raise RuntimeError("cannot set number of interop threads")
        sys.already = True
        print("done")
    """
    done = measure(program, workload={"repeats": 5, "seconds": 5})
    assert done.workload["stdout"] == "done\n"
    assert done.workload["again"] == []
    assert done.workload["note"] == (
        "run again in the same process it ended with exit code 1: "
        "RuntimeError: cannot set number of interop threads"
    )
    assert done.result["finished"] is True


def test_what_a_run_changes_is_as_before_in_the_next(measure: Measure) -> None:
    scratch = measure.folder / "scratch"
    (scratch / "data").mkdir(parents=True)
    (scratch / "data" / "kept.txt").write_text("old")
    (scratch / "link").symlink_to("data")
    program = """
        import os, signal, sys
        print(sorted(os.listdir()), os.listdir("data"), open("data/kept.txt").read(), os.path.islink("link"))
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.getitimer(signal.ITIMER_REAL)[0])
        print(os.environ.get("ADDED"), "added" in sys.path, sys.argv[1:], len(sys.argv))
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 1000)
        os.environ["ADDED"] = "1"
        sys.path.append("added")
        sys.argv.append("more")
        open("data/kept.txt", "w").write("new")
        open("model.pt", "w").write("x")
        os.makedirs("runs/1")
        os.chdir("runs")
        sys.stdout = sys.stderr = open(os.devnull, "w")
    """
    # The second run must print the same: its text is in the file that stays.
    done = measure(program)
    assert done.workload["note"] == ""
    expected = "['data', 'link'] ['kept.txt'] old True\nTrue 0.0\nNone False [] 1\n"
    assert done.workload["stdout"] == expected
    assert (done.folder / f"result.json{STDOUT_SUFFIX}").read_text() == expected
    assert sorted(path.name for path in scratch.iterdir()) == ["data", "link"]
    assert (scratch / "data" / "kept.txt").read_text() == "old"


def test_the_results_own_files_may_lie_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import os\nprint(os.listdir())\n")
    request = {"workload": {"argv": [str(tmp_path / "p.py")], "seconds": 0, "repeats": 2}}
    (tmp_path / "request").write_text(json.dumps(request))
    subprocess.run([sys.executable, MEASURE, "request", "result"], cwd=tmp_path, check=True, timeout=60)
    assert from_result(from_json((tmp_path / "result").read_bytes())).finished


def test_a_program_that_ends_by_exit_leaves_its_first_run(measure: Measure) -> None:
    done = measure("import os\nprint('printed', flush=True)\nprint('lost')\nos._exit(4)", gate=True)
    assert done.code == 0
    assert done.workload["stdout"] == "printed\n"
    assert done.workload["code"] == 4
    assert done.workload["first"] > 0
    assert done.workload["again"] == []
    assert "os._exit" in done.workload["note"]
    assert done.result["finished"] is True  # what came after it was done all the same


def test_forked_processes_end_as_usual(measure: Measure) -> None:
    program = """
        import os
        child = os.fork()
        if not child:
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert measure(program).workload["stdout"] == "5\n"


def test_worker_processes_end_with_the_run(measure: Measure) -> None:
    program = """
        import multiprocessing, time
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
        worker.start()
        print(len(multiprocessing.active_children()))
    """
    started = time.monotonic()
    done = measure(program)
    assert done.workload["stdout"] == "1\n"
    assert len(done.workload["again"]) == 1
    assert time.monotonic() - started < 30


def test_executors_do_not_hold_up_the_next_run(measure: Measure) -> None:
    program = """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        print(pool.submit(sum, [1, 2]).result())
    """
    done = measure(program)
    assert (done.workload["stdout"], len(done.workload["again"])) == ("3\n", 1)


def test_a_crash_leaves_what_there_was(measure: Measure) -> None:
    program = """
        import os, signal, sys
        print("printed", flush=True)
        if hasattr(sys, "already"):
            print("second", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        sys.already = True
    """
    done = measure(program)
    assert done.code == -9
    assert done.result["finished"] is False
    measured = from_result(done.result)
    assert measured.workload is not None
    assert (measured.workload.stdout, measured.workload.code) == ("printed\n", 0)
    assert measured.workload.again == ()
    assert (done.folder / f"result.json{STDERR_SUFFIX}").read_text() == "second\n"


def test_a_crash_in_the_first_run_leaves_what_it_printed(measure: Measure) -> None:
    done = measure("import os\nprint('x', flush=True)\nos.abort()")
    assert done.code == -6
    assert (done.result["finished"], done.workload) == (False, None)
    assert (done.folder / f"result.json{STDOUT_SUFFIX}").read_text() == "x\n"


def test_a_program_that_is_not_there(measure: Measure) -> None:
    done = measure("", workload={"argv": ["/nonexistent/train.py"]})
    assert done.workload["code"] == 1
    assert done.result["finished"] is True


def test_a_program_that_closes_its_stdout(measure: Measure) -> None:
    done = measure("import sys\nprint('x')\nsys.stdout.flush()\nsys.stdout.close()")
    assert (done.workload["stdout"], done.workload["code"], len(done.workload["again"])) == ("x\n", 0, 1)


def test_a_program_as_bytecode(measure: Measure, tmp_path: Path) -> None:
    import py_compile

    source = tmp_path / "m.py"
    source.write_text("print('compiled', __name__)\n")
    compiled = py_compile.compile(str(source), cfile=str(tmp_path / "m.pyc"))
    done = measure("", workload={"argv": [compiled]})
    assert done.workload["stdout"] == "compiled __main__\n"


def test_an_isolated_python(measure: Measure) -> None:
    done = measure("import sys, os\nprint(sys.path[0] == os.path.dirname(__file__))", options=("-I",))
    assert done.workload["stdout"] == "True\n"


def test_long_output_is_cut(measure: Measure) -> None:
    done = measure("print('x' * 10_000_000)")
    assert len(done.workload["stdout"]) == measure_workload.TEXT_MAX
    assert done.workload["stdout"].endswith("left out]\n")
    assert from_result(done.result).finished


def test_a_profile_without_torch(measure: Measure) -> None:
    program = r"""
        import os
        def busy():
            return sum(i * i for i in range(200_000))
        busy()
        print("own line")
        os.system("echo 'MKL_VERBOSE SGEMM(N,N,8,8,8,0x1,0x2,8) 1.5ms CNR:OFF'; echo 'Core: Haswell' >&2")
    """
    done = measure(program, profile=True)
    assert done.workload["stdout"] == "own line\n"
    profile = profile_from_result(done.result)
    assert profile.kind == "functions"
    assert any("busy" in operator.name for operator in profile.operators)
    assert [(k.library, k.name, k.calls, k.seconds) for k in profile.kernels] == [
        ("MKL", "SGEMM (N,N,8,8,8,8)", 1, 0.0015)
    ]
    assert ("OpenBLAS", "Haswell") in profile.families
    assert len(done.workload["again"]) == 1  # without the profiler, after it


def test_lines_of_libraries_are_the_programs_own_if_no_one_asked_for_them(measure: Measure) -> None:
    assert measure("print('Core: Haswell')").workload["stdout"] == "Core: Haswell\n"


def test_a_part_that_fails_does_not_take_the_others_along(measure: Measure) -> None:
    done = measure("print('x')", workload={"seconds": "soon"}, gate=True)
    assert done.result["finished"] is True
    (error,) = done.result["errors"]
    assert error.startswith("workload: ValueError")
    assert done.workload["stdout"] == "x\n"


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "request").write_text("{}")
    subprocess.run([sys.executable, MEASURE, "request", "result"], cwd=tmp_path, check=True, timeout=60)
    measured = from_result(from_json((tmp_path / "result").read_bytes()))
    assert (measured.finished, measured.workload, measured.gate, measured.kernels) == (True, None, (), ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["request", "result"]


def test_layers_are_counted_once_torch_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a package that looks like torch as far as the watch can see."""
    nn = tmp_path / "torch" / "nn"
    (nn / "modules").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("from . import nn\n")
    (nn / "__init__.py").write_text("from .modules.module import Linear, Conv2d\nfrom . import later\n")
    (nn / "later.py").write_text("")
    (nn / "modules" / "__init__.py").write_text("")
    (nn / "modules" / "module.py").write_text(
        textwrap.dedent("""
        hooks = []
        class Handle:
            def remove(self): hooks.clear()
        def register_module_forward_pre_hook(hook):
            hooks.append(hook)
            return Handle()
        class Linear:
            def __init__(self, i, o): self.in_features, self.out_features = i, o
        class Conv2d:
            in_channels, out_channels, kernel_size, stride, padding = 4, 32, (8, 8), (4, 4), (1, 2)
            groups, dilation = 1, (1, 1)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    watch = measure_layers.LayerWatch()
    import torch

    assert sys.meta_path == before
    shape = type("Tensor", (), {"__init__": lambda self, *s: setattr(self, "shape", s)})
    (hook,) = torch.nn.modules.module.hooks
    for module, *inputs in (
        (torch.nn.Linear(64, 2), shape(64)),
        (torch.nn.Linear(4, 64), shape(3, 5, 4)),
        (torch.nn.Linear(4, 64), shape(15, 4)),
        (torch.nn.Conv2d(), shape(2, 4, 84, 80)),
        (torch.nn.Linear(4, 64),),
        (torch.nn.Linear(4, 64), "no tensor"),
        (object(), shape(1)),
    ):
        hook(module, tuple(inputs))
    assert watch.layers == [[4, 64, 15], [64, 2, 1]]
    assert watch.convolutions == [[4, 32, 8, 8, 4, 4, 86, 84, 2]]
    watch.stop()
    assert torch.nn.modules.module.hooks == []
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]


def test_the_watch_leaves_nothing_behind_without_torch() -> None:
    before = list(sys.meta_path)
    watch = measure_layers.LayerWatch()
    watch.stop()
    assert sys.meta_path == before
    assert (watch.layers, watch.convolutions) == ([], [])
