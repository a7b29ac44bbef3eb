"""What the parts of a plan share: a decision with its reason, and the kinds of sandbox."""

from dataclasses import dataclass

NAMESPACES, ROOT, NONE = "namespaces", "root", "none"


@dataclass(frozen=True)
class Choice:
    """One decision: what was chosen and why. `warn`: the user should know even if nobody asked."""

    what: str
    value: str
    reason: str
    warn: bool = False
