"""Run an agent in a frozen tree: `python -m rvbundle.run_tree < request.json`, a child of the trace stage.

A process of its own, because making a sandbox changes the process that makes it.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rvbundle_runtime import plan as planning
from rvbundle_runtime import supervisor
from rvbundle_runtime.errors import RvbundleError
from rvbundle_runtime.host import read_host
from rvbundle_runtime.options import RunOptions
from rvbundle_runtime.store import PayloadInfo

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
    options = RunOptions(image="", arguments=())
    plan = planning.make_plan(
        read_host(), str(Path(request["tree"])), info, options, planning.ColdPack("", "the tree is whole")
    )
    ours = (planning.Mount(source, target, read_only) for source, target, read_only in request["mounts"])
    plan = replace(plan, mounts=(*ours, *plan.mounts))
    return supervisor.die_like(supervisor.run(plan, None))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RvbundleError as error:
        print(MARKER + json.dumps({"message": error.message, "hint": error.hint}), file=sys.stderr)
        sys.exit(error.exit_code)
