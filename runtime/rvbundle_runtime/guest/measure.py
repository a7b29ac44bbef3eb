"""Measures how an agent's payload runs as it has been started: `measure.py REQUEST RESULT`.

Runs inside a payload, as `python measure.py`, with the modules measure_*.py in the same folder. REQUEST and
RESULT are paths of JSON files. The request's keys, all optional:

    modules       which of "torch" and "numpy" the agent uses
    workload      {"argv": [file, argument, …], "seconds": s, "repeats": n}: the agent's program
    profile       true: the program's second run is profiled, and what numeric libraries print is read
    gate          true: check the kernels; "precision" ("float32", "tf32", "bf16") says to what they may round
    cold          false: no cold pack is at hand: convolutions are left out, unless the agent has some
    kernels       true: time kernels within "kernel_seconds"
    layers, convolutions      their sizes; without them those of the program's own layers are taken

The result is written after each part, first under another name; "finished" is true in the last one. What the
program prints is in RESULT.out and RESULT.err while it runs, and after a crash. The program comes first, in
a process where nothing has been imported or started yet.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Callable, NoReturn

_HERE = os.path.dirname(os.path.abspath(__file__))
if __name__ == "__main__" and sys.path[:1] != [_HERE]:  # an isolated Python
    sys.path.insert(0, _HERE)

import measure_profile  # noqa: E402 they lie beside this file, wherever that is
from measure_gate import gate  # noqa: E402
from measure_kernels import LAYERS, kernels  # noqa: E402
from measure_layers import LayerWatch  # noqa: E402
from measure_workload import Workload  # noqa: E402

__all__ = ["gate", "main"]

_KERNEL_SECONDS = 2.0


class Measurement:
    """One request and the result so far."""

    def __init__(self, request: dict[str, Any], request_path: str, result_path: str) -> None:
        """Begin; nothing is measured yet."""
        self._request, self._request_path, self._path = request, request_path, result_path
        self._modules: list[str] = list(request.get("modules") or [])
        self._workload: Workload | None = None
        self._watch: LayerWatch | None = None
        self._seen: list[str] = []
        self.result: dict[str, Any] = {
            "finished": False,
            "gate": [],
            "kernels": [],
            "workload": None,
            "layers": request.get("layers") or [],
            "convolutions": request.get("convolutions") or [],
            "profile": None,
            "errors": [],
        }

    def write(self) -> None:
        """Write the result as it is now."""
        self.result.update(versions=_versions(), threads=_threads(), libraries=self._libraries())
        temporary = f"{self._path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(self.result, file, allow_nan=False)
        os.replace(temporary, self._path)

    def run_workload(self) -> None:
        """Run the agent's program, if there is one in the request."""
        asked = self._request.get("workload")
        if not asked:
            return
        keep = (self._request_path, self._path, f"{self._path}.{os.getpid()}")
        profiling = bool(self._request.get("profile"))
        if profiling and hasattr(sys.stdout, "reconfigure"):
            # Whole lines at once, so that no library's line begins in the middle of one.
            sys.stdout.reconfigure(line_buffering=True)
        filtered = (lambda text: measure_profile.split(text)[0]) if profiling else str
        self._workload = Workload(asked["argv"], self._path, keep, filtered)
        self.result["workload"] = self._workload.record
        try:
            self._first()
            if profiling:
                self.result["profile"] = self._workload.with_profile(measure_profile.profiled)
                if self.result["profile"] is not None:
                    found = measure_profile.kernel_calls(self._library_lines())
                    self.result["profile"]["kernels"] = found
                self.write()
            repeats = int(asked.get("repeats", 1))
            if repeats and not self._workload.record["note"]:
                self._workload.again(float(asked.get("seconds", 0)), repeats, self.write)
        finally:
            self._workload.close()
            self._workload = None

    def _first(self) -> None:
        assert self._workload is not None
        self._watch = LayerWatch() if "torch" in self._modules else None
        try:
            self._workload.first()
        finally:
            self._note_layers()
        self._library_lines()
        self.write()

    def _note_layers(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self.result["layers"] = self.result["layers"] or self._watch.layers
            self.result["convolutions"] = self.result["convolutions"] or self._watch.convolutions
            self._watch = None

    def _library_lines(self) -> list[str]:
        """Return the lines of numeric libraries in what the last run printed, if they were told to print."""
        if self._workload is None or not self._request.get("profile"):
            return []
        lines: list[str] = measure_profile.split(self._workload.printed)[1]
        self._seen += [line for line in lines if line not in self._seen and measure_profile.families([line])]
        return lines

    def run_gate(self) -> None:
        """Check the kernels."""
        if self._request.get("gate"):
            convolution = bool(self._request.get("cold", True) or self.result["convolutions"])
            precision = self._request.get("precision") or "float32"
            self.result["gate"] = gate(self._modules, precision, convolution)

    def run_kernels(self) -> None:
        """Time the kernels."""
        if self._request.get("kernels"):
            self.result["kernels"] = kernels(
                self._modules,
                self.result["layers"] or ([] if self._request.get("cold", True) else LAYERS),
                self.result["convolutions"],
                float(self._request.get("kernel_seconds") or _KERNEL_SECONDS),
                self._report_kernels,
            )

    def _report_kernels(self, found: list[dict[str, Any]]) -> None:
        self.result["kernels"] = found
        self.write()

    def finish(self, parts: list[Callable[[], None]]) -> None:
        """Do what is left; a part that fails is told of and is no reason to leave out the others."""
        for part in parts:
            try:
                part()
            except Exception as error:  # noqa: BLE001 the launcher decides what to make of it
                text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                self.result["errors"].append(f"{part.__name__[len('run_') :]}: {text}")
            self.write()
        self.result["finished"] = True
        self.write()

    def before_exit(self, code: int) -> None:
        """The program calls os._exit: note its run, and do what it would else leave undone."""
        assert self._workload is not None
        self._note_layers()
        self._workload.left(code)
        self._library_lines()
        self._workload.close()
        self._workload = None
        self.finish([self.run_gate, self.run_kernels])

    @property
    def in_workload(self) -> bool:
        """Whether the agent's program runs now."""
        return self._workload is not None

    def _libraries(self) -> dict[str, str]:
        return {**measure_profile.loaded_families(), **measure_profile.families(self._seen)}


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "numpy"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def _threads() -> int | None:
    count = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return int(count()) if count is not None else None


def main(request_path: str, result_path: str) -> NoReturn:
    """Do what the request says, write the result, and end the process."""
    request_path, result_path = os.path.abspath(request_path), os.path.abspath(result_path)
    with open(request_path, encoding="utf-8") as file:
        measurement = Measurement(json.load(file), request_path, result_path)
    leave, own = os._exit, os.getpid()

    def exit_of_a_program(status: int) -> NoReturn:
        """Stand for os._exit; processes that the program forks end as usual."""
        if os.getpid() != own or not measurement.in_workload:
            leave(status)
        measurement.before_exit(status)
        leave(0)

    os._exit = exit_of_a_program
    measurement.write()
    measurement.finish([measurement.run_workload, measurement.run_gate, measurement.run_kernels])
    sys.stdout.flush()
    leave(0)  # no waiting for threads that the program has left, nor for torch's long good-bye


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
