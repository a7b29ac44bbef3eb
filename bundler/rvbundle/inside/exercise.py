"""Runs in a traced tree beside the workloads: uses what no good run uses, so that it is hot as well.

Argument: JSON with "modules" (to import), "traced" (top-level modules that the workloads imported), "measure"
(the folder of the scripts that measure in a payload: what these use) and "errors" (whether to meet them).
What fails here fails as it would in an agent; nothing of it matters to the build.
"""

import json
import os
import sys


def _quietly(action):
    try:
        return action()
    except (Exception, SystemExit) as error:  # noqa: BLE001 whatever it is, it has been provoked
        return error


def _import_all(names):
    import importlib

    for name in names:
        _quietly(lambda name=name: importlib.import_module(name))


def _go_wrong():
    """Meet errors as programs do: raise, format, warn, dump."""
    import contextlib
    import faulthandler
    import traceback
    import warnings

    def fail(depth):
        return 1 // depth if depth == 0 else fail(depth - 1)

    for action in (
        lambda: fail(3),
        lambda: {}["missing"],
        lambda: int("x"),
        lambda: os.stat("/nonexistent/file"),
        lambda: "\udc80".encode(),
        lambda: b"\xff".decode(),
        lambda: __import__("no_such_module"),
        lambda: exec("def f(:"),
        lambda: None.attribute,
        lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    ):
        try:
            action()
        except BaseException:  # noqa: BLE001
            traceback.format_exc()
    with open(os.devnull, "w") as null:
        faulthandler.dump_traceback(file=null)
        faulthandler.dump_traceback(file=null, all_threads=False)
        print("text", file=null)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
            warnings.warn("seen", stacklevel=1)
            sys.excepthook(*_exception_info())


def _import_from_a_folder():
    """Import a source from a folder that can be written: Python compiles it and keeps the bytecode."""
    import importlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "_rvbundle_written.py"), "w") as file:
            file.write("def twice(x):\n    return [y * 2 for y in x]\n")
        sys.path.insert(0, folder)
        try:
            for _ in range(2):  # the second time from its bytecode
                importlib.invalidate_caches()
                sys.modules.pop("_rvbundle_written", None)
                importlib.import_module("_rvbundle_written").twice([1])
        finally:
            sys.path.remove(folder)


def _exception_info():
    try:
        raise ValueError("raised to be printed") from KeyError("cause")
    except ValueError:
        return sys.exc_info()


def _numpy_goes_wrong():
    import numpy

    for action in (
        lambda: numpy.zeros(3) + numpy.zeros(4),
        lambda: numpy.zeros((2, 3)) @ numpy.zeros((4, 5)),
        lambda: numpy.zeros(3)[7],
        lambda: numpy.zeros(3).reshape(2, 2),
        lambda: numpy.array([1.0]) / numpy.array([0.0]),
        lambda: repr(numpy.arange(3000.0)),
        lambda: numpy.array(["a"]).astype(float),
    ):
        _quietly(action)


def _torch_goes_wrong():
    import torch

    def backward_twice():
        x = torch.ones(2, requires_grad=True)
        y = (x * x).sum()
        y.backward()
        y.backward()

    for action in (
        lambda: torch.ones(2, 3) @ torch.ones(4, 5),
        lambda: torch.ones(3) + torch.ones(4),
        lambda: torch.ones(3)[7],
        lambda: torch.ones(3).view(2, 2),
        lambda: torch.nn.Linear(2, 2)(torch.ones(3)),
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.tensor([[1], [2, 3]]),
        lambda: torch.load("/nonexistent/file"),
        lambda: torch.nn.Linear(2, 2).load_state_dict({}),
        backward_twice,
    ):
        error = _quietly(action)
        if isinstance(error, Exception):
            str(error)


_TOY = """
try:
    import torch
    torch.nn.Linear(4, 4)(torch.ones(1, 4))
except ImportError:
    pass
print("ran")
"""


def _start_measuring(folder, traced):
    """Do what `rvbundle tune` does in a payload, in a process of its own; return its id.

    It is forked before anything has started threads: OpenMP's do not survive that.
    """
    import tempfile

    modules = [name for name in ("torch", "numpy") if name in traced]
    place = tempfile.mkdtemp()
    toy, request, result = (os.path.join(place, name) for name in ("toy.py", "request", "result"))
    with open(toy, "w") as file:
        file.write(_TOY)
    with open(request, "w") as file:
        workload = {"argv": [toy], "seconds": 0, "repeats": 1}
        asked = {"modules": modules, "workload": workload, "kernels": True, "gate": True, "cold": False}
        json.dump(asked, file)
    child = os.fork()
    if child == 0:
        try:
            sys.path.insert(0, folder)
            import measure

            measure.main(request, result)
        finally:
            os._exit(1)
    return child


def main():
    """Do it all."""
    request = json.loads(sys.argv[1])
    child = _start_measuring(request["measure"], request["traced"])
    if request["errors"]:
        _meet_errors(request)
    os.waitpid(child, 0)


def _meet_errors(request):
    _go_wrong()
    _quietly(_import_from_a_folder)
    if "numpy" in request["traced"]:
        _quietly(_numpy_goes_wrong)
    if "torch" in request["traced"]:
        _quietly(_torch_goes_wrong)
    _import_all(request["modules"])


main()
