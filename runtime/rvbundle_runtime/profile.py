"""`rvbundle profile`: where the time of the agent's workload goes, and which kernels ran."""

import dataclasses
import json

from rvbundle_runtime import launch, tune
from rvbundle_runtime.errors import HostError
from rvbundle_runtime.host import CachePlace, Host
from rvbundle_runtime.measuring import laboratory
from rvbundle_runtime.options import RunOptions
from rvbundle_runtime.profiling import Profile, from_result, profile_lines

# What makes the libraries say what they execute: oneDNN's "Verbose Mode", Intel MKL's developer guide,
# OpenBLAS's README.
VERBOSE = {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1", "OPENBLAS_VERBOSE": "2"}


def profile(host: Host, options: RunOptions, place: CachePlace) -> Profile:
    """Run the first recorded workload under the backend that a run would take, and return its profile.

    Raises HostError if it fails.
    """
    prepared, _held = launch.prepare_and_hold(host, options, place, ())
    with laboratory(prepared, options) as lab:
        request = tune.request(lab, tune.find_workload(options.image, prepared.situation), profile=True)
        answer = lab.run(prepared.decision, request, tune.first_limit(prepared.situation), VERBOSE)
    if answer.failed or answer.value is None:
        raise HostError(
            f"the workload can't be profiled: {answer.failed}",
            "" if prepared.cold else "the profiler may need the cold pack: put it beside the image",
        )
    return from_result(answer.value)


def run(host: Host, options: RunOptions, place: CachePlace, as_json: bool = False) -> int:
    """Print the profile; return the exit code."""
    found = profile(host, options, place)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        print("\n".join(profile_lines(found)))
    return 0
