"""What was decided about a backend, for which situation: all that a run needs that finds a decision. Pure.

`backends.py` makes decisions; a run that finds one does not load it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rvbundle_runtime.choice import Choice
from rvbundle_runtime.host import Host
from rvbundle_runtime.machine import Model
from rvbundle_runtime.options import FLOAT32
from rvbundle_runtime.selection import Launch
from rvbundle_runtime.store import PayloadInfo

_FORMAT = 1


@dataclass(frozen=True)
class Situation:
    """What a choice depends on. `cold`: a cold pack is at hand."""

    host: Host
    launch: Launch
    info: PayloadInfo
    cold: bool


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for; None: what is best."""

    backend: str | None = None
    threads: int | None = None
    precision: str | None = None

    @property
    def nothing(self) -> bool:
        """Tell whether it asks for nothing."""
        return self == Wanted()


@dataclass(frozen=True)
class Decision:
    """A backend that was chosen, and all that follows: what `plan.py` needs to know of it.

    `threads` is 0 where the libraries choose; `library` the BLAS of a payload that has several ("": the one
    that is found first); `model` the processor that the emulator shows, None natively.
    """

    backend: str = "any"
    precision: str = FLOAT32
    threads: int = 0
    wait: str = ""
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    emulator_env: Mapping[str, str] = field(default_factory=dict, hash=False)
    library: str = ""
    model: Model | None = None
    native_blas: bool = False
    measured: bool = False
    choices: tuple[Choice, ...] = ()


def dumps(decision: Decision, key: Mapping[str, Any]) -> str:
    """Return a decision as JSON, with the key that it was made for."""
    return json.dumps({"format": _FORMAT, "key": key, "decision": asdict(decision)}, indent=1) + "\n"


def loads(text: str, key: Mapping[str, Any]) -> Decision | None:
    """Read a decision; None if it was made for something else than `key`. Raises ValueError."""
    try:
        value = json.loads(text)
        if value["format"] != _FORMAT or value["key"] != key:
            return None
        found = dict(value["decision"])
        model = found["model"]
        found["model"] = Model(**{**model, "flags": tuple(model["flags"])}) if model else None
        found["choices"] = tuple(Choice(**choice) for choice in found["choices"])
        decision = Decision(**found)
        texts = [decision.backend, decision.precision, decision.wait, decision.library]
        for env in (decision.env, decision.emulator_env):
            texts += [*env, *env.values()]
        if not all(isinstance(text, str) and "\0" not in text for text in texts):
            raise ValueError("expected texts")
        if not isinstance(decision.threads, int) or not decision.choices:
            raise ValueError("expected a number of threads, and reasons")
        if not isinstance(decision.native_blas, bool):
            raise ValueError("expected whether matrices are multiplied natively")
        return decision
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no decision: {error}") from None
