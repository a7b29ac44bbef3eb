"""Run an agent in a frozen tree: `python -m rvbundle.run_tree < request.json`, a child of the trace stage.

A process of its own, because making a sandbox changes the process that makes it.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rvbundle_runtime import launch as launch_
from rvbundle_runtime import plan as planning
from rvbundle_runtime import supervisor
from rvbundle_runtime.errors import RvbundleError
from rvbundle_runtime.host import Host, cache_place, read_host
from rvbundle_runtime.machine import Model
from rvbundle_runtime.options import AUTO, RunOptions
from rvbundle_runtime.store import PayloadInfo

_PRELOAD_LIST = "/etc/ld.so.preload"
MARKER = "rvbundle.run_tree: "  # before what went wrong, on stderr, for the trace stage


def main() -> int:
    """Run the request from standard input; return the agent's exit code."""
    request: dict[str, Any] = json.load(sys.stdin)
    # The agent's own standard input is empty, as in any unattended run.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    info = PayloadInfo(
        "tree",
        request["name"],
        request["version"],
        request["arch"],
        "wheels",
        request["python"],
        tuple(request["argv"]),
        request["libdir"],
        request["network"],
        request["env"],
    )
    plan = make_plan(read_host(), info, request)
    return supervisor.die_like(supervisor.run(plan, None))


def make_plan(host: Host, info: PayloadInfo, request: dict[str, Any]) -> planning.Plan:
    """Plan the run of a tree as that of a payload: natively, or by an emulator; raises HostError.

    `processor` of the request is the emulated one, as machine.Model's option; "" leaves it to rvbundle.
    """
    options = RunOptions(image="", payload=info.arch, emulator=request.get("emulator", AUTO))
    host, launch = launch_.choose(
        host, options, cache_place(host.environ, host.uid), (info.arch,), "the frozen tree"
    )
    told = request.get("processor", "")
    if told:
        launch = replace(launch, told=Model(told, "the trace stage says so"))
    cold = planning.ColdPack("", "the tree is whole")
    plan = planning.make_plan(host, request["tree"], info, options, cold, launch)
    ours = [planning.Mount(*mount) for mount in request["mounts"]]
    listed = [mount.source for mount in ours if mount.target == _PRELOAD_LIST]
    if listed and plan.preload is not None:  # the tracer's list and the emulator's are one file
        lines = [line for path in listed for line in Path(path).read_text().splitlines()]
        ours = [mount for mount in ours if mount.target != _PRELOAD_LIST]
        # The last one's constructor comes first: that is the tracer's.
        plan = replace(plan, preload=(*plan.preload, *lines))
    return replace(plan, mounts=(*ours, *plan.mounts))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RvbundleError as error:
        print(MARKER + json.dumps({"message": error.message, "hint": error.hint}), file=sys.stderr)
        sys.exit(error.exit_code)
