"""What a self-running file does once its bootstrap runs: the file's options, commands and errors.

    ./agent.run [--rvbundle-OPTION[=VALUE] | --rvbundle-COMMAND | ARGUMENT]... [-- ARGUMENT...]

Words that begin with --rvbundle- are for us, wherever they stand; all others are the agent's, in their
order. Behind the first `--` everything is the agent's; that `--` itself is ours only if it is the agent's
first word, as in `rvbundle run IMAGE -- ARGUMENTS`.
"""

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rvbundle_runtime import __version__, bootstraps
from rvbundle_runtime.errors import HostError, UsageError
from rvbundle_runtime.host import EMULATORS_VARIABLE, Host, cache_place, read_host
from rvbundle_runtime.options import OPTIONS, RunOptions, parse_run
from rvbundle_runtime.report import reported

PREFIX = "--rvbundle-"
# The options of `run`, for --rvbundle-help: what each does (`OPTIONS` has their forms).
HELP = {
    "--volume": "show a folder or file to the agent",
    "--env": "set a variable, or pass yours on",
    "--device": "show a device, such as dri",
    "--memory": "limit each process's data, such as 2g",
    "--cold": "the cold pack, if it is neither inside nor beside this file",
    "--record": "write what had to be restored, for the next build",
    "--payload": "take this payload, whatever the machine is",
    "--emulator": "what runs a payload for another machine",
    "--backend": "take these numeric kernels (see explain), whatever was measured",
    "--threads": "so many threads of numeric libraries",
    "--precision": "of matrix products: bf16 where the processor can, auto if it has been measured",
    "--network": "give the agent the network",
    "--no-network": "take it away, whatever the recipe says",
    "--no-cwd": "start in an empty folder instead of the current one",
    "--no-sandbox": "run with all your rights, where namespaces are denied",
    "--verbose": "print the plan on stderr first",
}


@dataclass(frozen=True)
class Started:
    """How sh started us: the file (as it was named), and the folder of the bootstrap that runs."""

    file: str
    folder: Path


@dataclass(frozen=True)
class Request:
    """What the command line asks for: a command ("" for a run), options of `run`, the agent's words."""

    command: str
    options: tuple[str, ...]
    arguments: tuple[str, ...]


def main(argv: list[str]) -> int:
    """Do what the script for sh asks: `install BASE WORK MANIFEST`, or `run FOLDER FILE ARGUMENTS...`."""
    verb, *words = argv
    if verb == "install":
        base, work, manifest = words
        return reported(lambda: _install(Path(base), Path(work), manifest))
    started = Started(file=words[1], folder=Path(words[0]))
    return reported(lambda: _start(started, words[2:]), lambda text: reword(text, started.file))


def _install(base: Path, work: Path, manifest: str) -> int:
    bootstraps.install(base, work, manifest)
    return 0


def _start(started: Started, words: Sequence[str]) -> int:
    bootstraps.hold(started.folder)  # until this process ends
    request = split(words)
    image = Path(started.file)
    if bootstraps.find_table(image) is None:
        raise HostError(f"{image} is not the file that this was started from", "start it by its name")
    if request.command:
        return COMMANDS[request.command].carry_out(started, _options(request, image))
    from rvbundle_runtime import launch

    host = _host(started)
    return launch.run(host, _options(request, image), cache_place(host.environ, host.uid))


def _options(request: Request, image: Path) -> RunOptions:
    word = os.path.join(".", image) if str(image).startswith("-") else str(image)
    return parse_run([*request.options, word, "--", *request.arguments])


def split(words: Sequence[str]) -> Request:
    """Tell our words from the agent's; raises UsageError naming the offending one."""
    command = ""
    options: list[str] = []
    arguments: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            arguments += left if not arguments else [word, *left]
            break
        if not word.startswith(PREFIX):
            arguments.append(word)
            continue
        name, equals, value = word.removeprefix(PREFIX).partition("=")
        if name in COMMANDS:
            if equals or command not in ("", name):
                more = "takes no value" if equals else f"and {PREFIX}{command} can't be had at once"
                raise UsageError(f"{PREFIX}{name} {more}")
            command = name
            continue
        options.append(_option(name, f"{equals}{value}", left))
    return Request(command, tuple(options), tuple(arguments))


def _option(name: str, value: str, left: list[str]) -> str:
    """Return an option of `run` as one word; takes its value from `left` if need be."""
    known = OPTIONS.get(f"--{name}")
    if known is None:
        names = [*COMMANDS, *(option.removeprefix("--") for option in OPTIONS)]
        close = difflib.get_close_matches(name, names, 1)
        raise UsageError(
            f"no such option: {PREFIX}{name}",
            f"did you mean {PREFIX}{close[0]}?" if close else f"see {PREFIX}help",
        )
    if known[0] and not value:
        if not left:
            raise UsageError(f"{PREFIX}{name} needs a value: {PREFIX}{name} {known[0]}")
        value = f"={left.pop(0)}"
    return f"--{name}{value}"


def reword(text: str, file: str) -> str:
    """Return a message of rvbundle's as one of the self-running file `file`: with the words to type there."""
    parts = re.split(r"(rvbundle build[^`]*)", text)
    return "".join(part if part.startswith("rvbundle build") else _reword(part, file) for part in parts)


def _reword(text: str, file: str) -> str:
    text = re.sub(r"rvbundle cache prune( --images)?", f"{_escaped(file)} {PREFIX}cache-prune", text)
    text = re.sub(r"rvbundle run IMAGE\b|rvbundle run(?= --)", _escaped(file), text)
    text = re.sub(r"rvbundle (verify|explain|doctor|tune|profile)\b", rf"{_escaped(file)} {PREFIX}\1", text)
    text = re.sub(r"\brun: (?=--|no such)", "", text)
    names = "|".join(sorted(option.removeprefix("--") for option in OPTIONS))
    return re.sub(rf"(?<![\w-])--({names})\b(?!-)", rf"{PREFIX}\1", text)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\")


def _host(started: Started) -> Host:
    """Return this machine, with the emulators that the bootstrap brings."""
    host = read_host()
    folder = started.folder / "emulators"
    if EMULATORS_VARIABLE in host.environ or not folder.is_dir():
        return host
    return replace(host, environ={**host.environ, EMULATORS_VARIABLE: str(folder)})


@dataclass(frozen=True)
class Command:
    """What is done instead of running the agent."""

    help: str
    carry_out: Callable[[Started, RunOptions], int]


def _help(started: Started, _: RunOptions) -> int:
    file = started.file
    print(f"usage: {file} [{PREFIX}OPTION...] [ARGUMENTS OF THE AGENT]\n")
    print(
        "Words that begin with --rvbundle- are for rvbundle, all others are the agent's; behind -- all are."
    )
    print("\nInstead of running the agent:")
    for name, command in COMMANDS.items():
        print(f"  {PREFIX}{name:<14} {command.help}")
    print("\nOptions of a run:")
    for option, (metavar, _repeated) in OPTIONS.items():
        name = f"{PREFIX}{option.removeprefix('--')}"
        print(f"  {f'{name} {metavar}'.rstrip():<36} {HELP.get(option, '')}".rstrip())
    return 0


def _version(started: Started, _: RunOptions) -> int:
    table = bootstraps.find_table(Path(started.file))
    assert table  # `_start` has looked
    print(f"{table.name} {table.version}, packed by rvbundle {__version__}")
    print(f"image       {table.image}")
    for section in table.sections:
        emulators = f", with {', '.join(section.emulators)}" if section.emulators else ""
        print(f"runs on     {section.arch}{emulators}")
    print(f"bootstrap   {started.folder}")
    return 0


def _explain(started: Started, options: RunOptions) -> int:
    from rvbundle_runtime import explaining

    host = _host(started)
    report = explaining.explain(Path(started.file), host, cache_place(host.environ, host.uid), options)
    for line in explaining.plan_lines(report):
        print(reword(line, started.file))
    return 0


def _tune(started: Started, options: RunOptions) -> int:
    from rvbundle_runtime import tune

    host = _host(started)
    return tune.run(host, options, cache_place(host.environ, host.uid))


def _profile(started: Started, options: RunOptions) -> int:
    from rvbundle_runtime import profile

    host = _host(started)
    return profile.run(host, options, cache_place(host.environ, host.uid))


def _doctor(started: Started, _: RunOptions) -> int:
    from contextlib import redirect_stdout
    from io import StringIO

    from rvbundle_runtime import doctor

    if (started.folder / "emulators").is_dir():
        os.environ.setdefault(EMULATORS_VARIABLE, str(started.folder / "emulators"))
    out = StringIO()
    with redirect_stdout(out):
        code = doctor.main([])
    print(reword(out.getvalue(), started.file), end="")
    return code


def _verify(started: Started, _: RunOptions) -> int:
    from rvbundle_runtime import verifying

    report = verifying.verify(Path(started.file))
    table = bootstraps.find_table(Path(started.file))
    assert table  # `_start` has looked
    for section in table.sections:
        if bootstraps.folder_name(section.manifest) == started.folder.name:
            bootstraps.check_tree(started.folder, section.manifest)
    verifying.print_verified(report)
    return 0


def _prune(_started: Started, _: RunOptions) -> int:
    from rvbundle_runtime import decisions, store

    place = cache_place(os.environ, os.getuid())
    removed, busy = store.prune(place.base)
    decisions.forget(place.base, {stored.key.rpartition("-")[0] for stored in busy})
    gone, running = bootstraps.prune(place.base)
    size, freed = sum(stored.size for stored in removed), sum(stored.size for stored in gone)
    print(f"removed {len(removed)} unpacked images ({size >> 20} MiB)")
    print(f"removed {len(gone)} bootstraps ({freed >> 20} MiB), kept {len(running)} that run, this one too")
    for stored in busy:
        print(f"kept {stored.name} {stored.version}: it is running")
    return 0


COMMANDS = {
    "help": Command("print this", _help),
    "version": Command("say what this file is, and what machines it runs on", _version),
    "explain": Command("say what a run would do here, and why", _explain),
    "tune": Command("measure numeric kernels on the agent's own work, and keep the best for runs", _tune),
    "profile": Command("say where the time of the agent's work goes", _profile),
    "doctor": Command("say what this machine lacks, and what to do about it", _doctor),
    "verify": Command("check every digest of this file", _verify),
    "cache-prune": Command("remove what runs have unpacked (what is running stays)", _prune),
}
