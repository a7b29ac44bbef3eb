"""The prove stage: the workloads again, inside the finished image, without its cold pack."""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rvbundle import process
from rvbundle.freeze import Frozen
from rvbundle.recipe import Recipe, Workload
from rvbundle.stage_agent import StagedAgent
from rvbundle.trace import (
    Trace,
    explain_failure,
    launcher_environment,
    processor_of,
    run_again,
    time_limit,
)
from rvbundle_runtime import families, kernels
from rvbundle_runtime.errors import ProveError, TraceError
from rvbundle_runtime.golden import compare

_LEFT_OUT = (
    "the agent may look for a file that was left out because nothing opened it: name it in [keep] files, "
    'or set [trim] level = "none"; if that is not it, please report it with the recipe'
)


def prove(recipe: Recipe, frozen: Frozen, agent: StagedAgent, trace: Trace, image: Path) -> None:
    """Run every workload in `image` as a user would; raises ProveError or TraceError.

    The store is a fresh one, so that nothing that another run restored can help.
    """
    env, first = _kernels(trace, frozen)
    with tempfile.TemporaryDirectory(prefix="rvbundle-prove-", dir=image.parent) as scratch:
        alone = Path(scratch) / "alone" / image.name  # no cold pack lies beside it
        alone.parent.mkdir()
        try:
            os.link(image, alone)
        except OSError:
            shutil.copyfile(image, alone)
        numbered = list(enumerate(recipe.workloads, 1))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each in a sandbox of its own
            outputs = list(pool.map(lambda p: _run(alone, frozen, p[1], p[0], Path(scratch)), numbered))
        for (number, workload), found in zip(numbered, outputs, strict=True):
            if workload.golden:
                expected = trace.workloads[number - 1].stdout
                difference = compare(expected, found, workload.tolerance)
                if difference and env != first:
                    # The record is of another processor, with kernels that are not used here.
                    expected = run_again(recipe, frozen, agent, workload, number, env)
                    difference = compare(expected, found, workload.tolerance)
                if difference:
                    _explain_difference(recipe, frozen, agent, workload, number, env, expected, difference)


def _kernels(trace: Trace, frozen: Frozen) -> tuple[dict[str, str], dict[str, str]]:
    """Return what `run` without a cold pack holds numeric libraries to here, and what the record is of.

    The record of an emulated tree is of what emulated runs use; a native one, of the first family.
    """
    processor = processor_of(frozen)
    envs = [families.environment(family, processor) for family in trace.families]
    fit = [not kernels.why_not(family, processor, frozen.blas) for family in trace.families]
    chosen = next((env for env, fits in zip(envs, fit, strict=True) if fits), {})
    return chosen, chosen if frozen.emulators or not envs else envs[0]


def _run(image: Path, frozen: Frozen, workload: Workload, number: int, scratch: Path) -> str:
    which = ["--payload", frozen.arch] if frozen.emulators else []
    limit = time_limit(frozen, workload.timeout)
    folder = scratch / f"run-{number}"
    folder.mkdir()
    done = process.run(
        [sys.executable, "-m", "rvbundle", "run", *which, image, "--", *workload.args],
        env={**launcher_environment(frozen), "RVBUNDLE_CACHE": str(scratch / "cache")},
        cwd=folder,
        timeout=limit,
        check=False,
    )
    try:
        explain_failure(done, workload, number, "the finished image", limit)
    except TraceError as error:
        raise ProveError(error.message, _LEFT_OUT) from None
    return done.stdout.decode("utf-8", "replace")


def _explain_difference(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    workload: Workload,
    number: int,
    env: Mapping[str, str],
    expected: str,
    difference: str,
) -> None:
    """Raise the error that fits: run the workload once more in the tree to see whether it repeats itself."""
    name = f"trace workload {number} ({' '.join(workload.args) or 'no arguments'})"
    again = run_again(recipe, frozen, agent, workload, number, env)
    if compare(expected, again, workload.tolerance):
        raise TraceError(
            f"{name} prints something else each time, in the same tree too:\n{difference}",
            "seed every source of chance and print no times, paths or process ids; or set `tolerance` in "
            "its [[trace]] for numbers that may differ a little, or golden = false",
        )
    raise ProveError(
        f"{name} prints something else in the finished image than in the tree it was made of:\n{difference}",
        _LEFT_OUT,
    )
