"""Every error that a user can meet: one root, one exit code per class (docs/exit-codes.md)."""


class RvbundleError(Exception):
    """Root of all errors that are printed as a message and a hint, never as a traceback.

    `message` says what happened and to what; `hint` says what to do about it (it may be empty).
    The exit codes start at 100 so that they do not collide with the small codes that agents use.
    """

    exit_code = 100

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RecipeError(RvbundleError):
    """The recipe can't be read, or says something that can't be."""

    exit_code = 101


class EnvironmentSetupError(RvbundleError):
    """The Python environment could not be made: no interpreter, no pip, a failed install."""

    exit_code = 102


class LockError(RvbundleError):
    """The lock file is damaged, or was made for other requirements."""

    exit_code = 103


class FreezeError(RvbundleError):
    """The environment can't be frozen into a tree."""

    exit_code = 104


class TraceError(RvbundleError):
    """A trace workload failed, hung, or is not repeatable."""

    exit_code = 105


class ProveError(RvbundleError):
    """The finished image does not do what the traced tree did."""

    exit_code = 106


class ImageError(RvbundleError):
    """An image or cold pack is damaged, foreign, or too new."""

    exit_code = 107


class StoreError(RvbundleError):
    """The store of unpacked images can't be used: disk full, read-only, no execution allowed."""

    exit_code = 108


class SandboxError(RvbundleError):
    """The sandbox can't be made: namespaces denied, a volume that does not exist."""

    exit_code = 109


class HostError(RvbundleError):
    """This host can't run the image: no payload for its architecture."""

    exit_code = 110


class ToolError(RvbundleError):
    """A program that rvbundle calls failed in a way that no stage explains better."""

    exit_code = 111


class AbsentError(RvbundleError):
    """The agent ran into code that its image lacks, and no cold pack was at hand.

    The guard in C says so and ends the process; nothing raises it.
    """

    exit_code = 112


class UsageError(RvbundleError):
    """A command line that can't be understood; the code is the one that Click uses."""

    exit_code = 2
