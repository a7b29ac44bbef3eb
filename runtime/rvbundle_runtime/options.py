"""The options of `rvbundle run`: one table, and a parser small enough to cost a warm start nothing.

`rvbundle.cli` declares the same options to Typer for help and completion; a test compares the two.
"""

from dataclasses import dataclass, field

from rvbundle_runtime.errors import UsageError

# option -> (name of its value in help, or "" for a flag; may it be repeated)
OPTIONS: dict[str, tuple[str, bool]] = {
    "--volume": ("SRC:DST[:ro]", True),
    "--env": ("NAME[=VALUE]", True),
    "--device": ("DEVICE", True),
    "--memory": ("SIZE", False),
    "--cold": ("FILE", False),
    "--record": ("FILE", False),
    "--payload": ("ARCH", False),
    "--emulator": ("auto|qemu|box64|none", False),
    "--backend": ("NAME", False),
    "--threads": ("N", False),
    "--precision": ("float32|bf16|auto", False),
    "--network": ("", False),
    "--no-network": ("", False),
    "--no-cwd": ("", False),
    "--no-sandbox": ("", False),
    "--verbose": ("", False),
}
_RESERVED = frozenset("usr app bin lib lib64 sbin proc dev sys run etc oldroot".split())
_MEMORY_MIN = 8 << 20  # bytes; with less Python crashes at its start
AUTO, NO_EMULATOR = "auto", "none"
EMULATORS = (AUTO, "qemu", "box64", NO_EMULATOR)
FLOAT32, BF16 = "float32", "bf16"
PRECISIONS = (FLOAT32, BF16, AUTO)
SHORT = {"-v": "--volume", "-e": "--env", "-m": "--memory"}


@dataclass(frozen=True)
class Volume:
    """A folder or file of the host that the agent sees at `target`."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class RunOptions:
    """What the command line of `run` asked for.

    None means, for `network`: as the image says; for `payload`, `backend`, `threads`, `precision`: what fits
    the machine.
    """

    image: str
    arguments: tuple[str, ...] = ()
    volumes: tuple[Volume, ...] = ()
    env: tuple[tuple[str, str | None], ...] = ()
    devices: tuple[str, ...] = ()
    memory: int | None = None
    cold: str | None = None
    record: str | None = None
    payload: str | None = None
    emulator: str = AUTO
    backend: str | None = None
    threads: int | None = None
    precision: str | None = None
    network: bool | None = None
    cwd: bool = True
    sandbox: bool = True
    verbose: bool = False


@dataclass
class _Collected:
    single: dict[str, str] = field(default_factory=dict)
    many: dict[str, list[str]] = field(default_factory=dict)


def parse_run(argv: list[str]) -> RunOptions:
    """Read `[OPTIONS] IMAGE [--] [ARGUMENTS...]`; everything after IMAGE belongs to the agent.

    Raises UsageError naming the offending word.
    """
    found = _Collected()
    words = list(argv)
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        _take_option(words, found)
    if words and words[0] == "--":
        words.pop(0)
    if not words:
        raise UsageError("run: which image?", "rvbundle run IMAGE [-- ARGUMENTS]; see rvbundle run --help")
    image, rest = words[0], words[1:]
    if rest and rest[0] == "--":
        rest.pop(0)
    return make_options(image, rest, found.single, found.many)


def _take_option(words: list[str], found: _Collected) -> None:
    word = words.pop(0)
    name, equals, value = word.partition("=")
    if word[:2] in SHORT and len(word) > 2:  # -m2g
        name, equals, value = word[:2], "=", word[2:]
    name = SHORT.get(name, name)
    if name not in OPTIONS:
        import difflib  # late: a correct command line needs none of it

        close = difflib.get_close_matches(name, OPTIONS, 1)
        raise UsageError(
            f"run: no such option: {word}",
            f"did you mean {close[0]}?" if close else "see rvbundle run --help",
        )
    metavar, repeated = OPTIONS[name]
    if not metavar:
        if equals:
            raise UsageError(f"run: {name} takes no value")
        found.single[name] = "yes"
        return
    if not equals:
        if not words:
            raise UsageError(f"run: {name} needs a value: {name} {metavar}")
        value = words.pop(0)
    if repeated:
        found.many.setdefault(name, []).append(value)
    else:
        found.single[name] = value


def make_options(
    image: str, arguments: list[str], single: dict[str, str], many: dict[str, list[str]]
) -> RunOptions:
    """Turn option texts, keyed by long option name, into checked values; raises UsageError."""
    if "--network" in single and "--no-network" in single:
        raise UsageError("run: --network and --no-network contradict each other")
    network = True if "--network" in single else False if "--no-network" in single else None
    return RunOptions(
        image=image,
        arguments=tuple(arguments),
        volumes=tuple(parse_volume(text) for text in many.get("--volume", [])),
        env=tuple(parse_env(text) for text in many.get("--env", [])),
        devices=tuple(parse_device(text) for text in many.get("--device", [])),
        memory=_parse_memory(single["--memory"]) if "--memory" in single else None,
        cold=single.get("--cold"),
        record=single.get("--record"),
        payload=single.get("--payload"),
        emulator=_parse_emulator(single.get("--emulator", AUTO)),
        backend=_not_auto(single.get("--backend")),
        threads=_parse_threads(single.get("--threads")),
        precision=_parse_precision(single.get("--precision")),
        network=network,
        cwd="--no-cwd" not in single,
        sandbox="--no-sandbox" not in single,
        verbose="--verbose" in single,
    )


def parse_volume(text: str) -> Volume:
    """Read SRC:DST[:ro|:rw]; raises UsageError."""
    parts = text.split(":")
    mode = parts.pop() if len(parts) == 3 and parts[2] in ("ro", "rw") else "rw"
    if len(parts) != 2 or not parts[0] or not parts[1].startswith("/"):
        raise UsageError(f"run: --volume {text}: expected SRC:DST or SRC:DST:ro, with DST an absolute path")
    steps = [step for step in parts[1].split("/") if step not in ("", ".")]
    if not steps or ".." in steps or steps[0] in _RESERVED:
        raise UsageError(
            f"run: --volume {text}: {parts[1]} belongs to the image",
            "choose another place, such as /data",
        )
    return Volume(parts[0], "/" + "/".join(steps), mode == "ro")


def parse_device(text: str) -> str:
    """Return the path of a device given as /dev/NAME or NAME; raises UsageError."""
    path = text if text.startswith("/dev/") else f"/dev/{text}"
    name = path[len("/dev/") :]
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise UsageError(f"run: --device {text}: expected a device such as dri or /dev/dri")
    return path


def parse_env(text: str) -> tuple[str, str | None]:
    """Read NAME=VALUE, or NAME alone (value None: the host's, if it has one); raises UsageError."""
    name, equals, value = text.partition("=")
    if not name or not name.replace("_", "a").isalnum() or name[0].isdigit():
        raise UsageError(f"run: --env {text}: expected NAME=VALUE or NAME")
    return name, value if equals else None


def _parse_emulator(text: str) -> str:
    if text not in EMULATORS:
        raise UsageError(
            f"run: --emulator {text}: expected {', '.join(EMULATORS[:-1])} or {EMULATORS[-1]}",
            "auto: natively if the image has a payload for this machine, else emulated",
        )
    return text


def _not_auto(text: str | None) -> str | None:
    return None if text == AUTO else text


def _parse_threads(text: str | None) -> int | None:
    if text in (None, AUTO):
        return None
    assert text is not None
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text)):
        raise UsageError(f"run: --threads {text}: expected {AUTO} or a number of threads, 1 or more")
    return int(text)


def _parse_precision(text: str | None) -> str | None:
    if text is not None and text not in PRECISIONS:
        raise UsageError(
            f"run: --precision {text}: expected {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}",
            "bf16: products of float32 matrices may take bfloat16 inputs, where the processor can",
        )
    return text


def _parse_memory(text: str) -> int:
    size = parse_size(text)
    if size < _MEMORY_MIN:
        raise UsageError(
            f"run: --memory {text}: too little for Python to start",
            f"at least {_MEMORY_MIN >> 20}m; a number without a unit counts bytes",
        )
    return size


def parse_size(text: str) -> int:
    """Read a size such as 512m or 2g (powers of 1024) into bytes; raises UsageError."""
    digits, unit = text.rstrip("bB"), 1
    if digits and digits[-1].lower() in "kmgt":
        unit = 1024 ** ("kmgt".index(digits[-1].lower()) + 1)
        digits = digits[:-1]
    if digits.isascii() and digits.isdigit() and len(digits) < 20:
        size = int(digits) * unit
        if 0 < size < 1 << 63:
            return size
    raise UsageError(f"run: --memory {text}: expected a size such as 512m or 2g")
