"""What an agent can read about its own run, so that a result can be reproduced. Pure."""

import json
from typing import Any

from rvbundle_runtime import __version__
from rvbundle_runtime.choice import Choice
from rvbundle_runtime.decision import Decision
from rvbundle_runtime.host import Host
from rvbundle_runtime.selection import Launch
from rvbundle_runtime.store import PayloadInfo

FILE = "/run/rvbundle/rvbundle_runtime.json"  # in the sandbox
VARIABLE = "RVBUNDLE_RUNTIME"  # names it, also where there is no sandbox
_FORMAT = 1


def describe(
    host: Host, info: PayloadInfo, launch: Launch, decision: Decision, choices: tuple[Choice, ...]
) -> str:
    """Return the text of rvbundle_runtime.json (docs/backends.md has its keys)."""
    processor = host.processor
    value: dict[str, Any] = {
        "format": _FORMAT,
        "rvbundle": __version__,
        "image": {"name": info.name, "version": info.version, "identity": info.identity},
        "payload": {"arch": info.arch, "source": info.source, "python": info.python, "blas": dict(info.blas)},
        "packages": dict(info.packages),
        "host": {
            "arch": host.arch,
            "kernel": host.kernel,
            "processor": processor.name,
            "vendor": processor.vendor,
            "vlen": processor.vlen,
            "processors": len(host.usable),
            "quota": host.quota,
        },
        "launcher": launch.launcher,
        "backend": {
            "name": decision.backend,
            "precision": decision.precision,
            "threads": decision.threads or len(host.usable),
            "wait": decision.wait,
            "measured": decision.measured,
            "library": decision.library,
            "environment": dict(decision.env),
            "emulator_environment": dict(decision.emulator_env),
            "emulated_processor": decision.model.option if decision.model else None,
        },
        "choices": [{"what": c.what, "value": c.value, "reason": c.reason} for c in choices],
    }
    return json.dumps(value, indent=1) + "\n"
