"""With which kernels, on which processors and with which BLAS a tree's workloads are traced. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rvbundle.freeze import Frozen
from rvbundle_runtime import backends, blas, families, kernels
from rvbundle_runtime.blas import OPENBLAS, REFERENCE
from rvbundle_runtime.families import Family
from rvbundle_runtime.machine import Model
from rvbundle_runtime.processor import Processor


@dataclass(frozen=True)
class KernelRun:
    """How a workload is run: what holds libraries, and the processor to emulate ("": the usual one)."""

    env: Mapping[str, str]
    processor: str = ""


@dataclass(frozen=True)
class KernelRuns:
    """The families of kernels that a trace has the pages of, the best first, and the runs that it takes.

    The output of the first run is the one that counts: of an emulated tree that on the usual processor.
    """

    families: tuple[Family, ...]
    watched: tuple[KernelRun, ...]


def kernel_runs(frozen: Frozen, processor: Processor, dispatch: tuple[str, ...]) -> KernelRuns:
    """Decide how the workloads of `frozen` are traced; `processor` is this machine's.

    `dispatch` are the features that its numpy can pick among.
    """
    if frozen.emulators:
        return _emulated(frozen, dispatch)
    fit = families.to_trace(frozen.arch, processor, dispatch)
    own = tuple(family for family in fit if not _useless(family, processor, frozen))
    return KernelRuns(own, tuple(KernelRun(families.environment(family, processor)) for family in own))


def _emulated(frozen: Frozen, dispatch: tuple[str, ...]) -> KernelRuns:
    found: list[Family] = []
    watched: list[KernelRun] = []
    models = _models(frozen.arch)
    for model in models:
        for family in families.to_trace(frozen.arch, model.processor, dispatch):
            if family in found or _useless(family, model.processor, frozen):
                continue
            found.append(family)
            watched.append(KernelRun(families.environment(family, model.processor), model.option))
            off = KernelRun(families.held_back(family))
            if not model.option and off not in watched:
                watched.append(off)  # it may have every feature; run natively, numpy is told not to use them
    if OPENBLAS in frozen.blas and REFERENCE in frozen.blas:
        chosen = {**watched[0].env, **blas.environment(REFERENCE, frozen.libdir)}
        watched.insert(1, replace(watched[0], env=chosen))
    best_first = families.to_trace(frozen.arch, models[-1].processor, dispatch)
    return KernelRuns(tuple(family for family in best_first if family in found), tuple(watched))


def _models(arch: str) -> list[Model]:
    """Return the processors that QEMU may show to an emulated run: the usual one first, the best last."""
    found = backends.load_table()
    names = [row.processor for row in found.backends if row.arch == arch and "qemu" in row.launchers]
    return [found.processors["qemu", name] for name in dict.fromkeys(names)]


def _useless(family: Family, processor: Processor, frozen: Frozen) -> bool:
    """Tell whether only OpenBLAS has such kernels, and it is not there, or wrong with them."""
    if family.vlen and OPENBLAS not in frozen.blas:
        return True
    return bool(kernels.why_not(family, processor, frozen.blas))
