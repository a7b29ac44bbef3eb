"""The command line. Data goes to stdout, everything else to stderr."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rvbundle import __version__
from rvbundle.progress import Progress, mib
from rvbundle_runtime import launch
from rvbundle_runtime.errors import RvbundleError, StoreError, UsageError
from rvbundle_runtime.host import CachePlace, cache_place, read_host
from rvbundle_runtime.options import EMULATORS, PRECISIONS, make_options

app = typer.Typer(
    name="rvbundle",
    help="One recipe in, one file out: PyTorch + Gymnasium agents packed with all that they need.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(help="The store of unpacked images and of build stages.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

_RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe.toml, or the folder that holds it.")
]
_ImagePath = Annotated[Path, typer.Argument(metavar="IMAGE", help="An image (.rvb).")]
_Payload = Annotated[
    str | None,
    typer.Option("--payload", metavar="ARCH", help="Take this payload, whatever the machine is."),
]
_Emulator = Annotated[
    str | None,
    typer.Option(
        "--emulator",
        metavar="|".join(EMULATORS),
        help="What runs a payload for another machine; auto: none if need not be, else qemu, else box64.",
    ),
]
_Backend = Annotated[
    str | None,
    typer.Option(
        "--backend", metavar="NAME", help="Take these numeric kernels, whatever was measured; auto: the best."
    ),
]
_Threads = Annotated[
    str | None,
    typer.Option("--threads", metavar="N", help="So many threads of numeric libraries; auto: the best."),
]
_Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="|".join(PRECISIONS),
        help="Of matrix products; auto: bf16 once `tune` has found it right and faster.",
    ),
]
_ColdPack = Annotated[
    str | None,
    typer.Option("--cold", metavar="FILE", help="The cold pack, if it is not beside the image."),
]
_NoSandbox = Annotated[
    bool, typer.Option("--no-sandbox", help="Run with all your rights, where namespaces are denied.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def invoke(argv: Sequence[str]) -> int:
    """Run the command line; RvbundleError passes through to the caller, which prints it."""
    try:
        result = app(args=list(argv), standalone_mode=False)
    except RvbundleError:
        raise
    except SystemExit as ended:
        # Click answers a reader of stdout that went away by exiting with 1, having wrapped stdout.
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":
            raise BrokenPipeError from None
        return ended.code if isinstance(ended.code, int) else 1
    except Exception as error:
        if not hasattr(error, "exit_code") or not hasattr(error, "show"):
            raise
        error.show(file=sys.stderr)
        return int(error.exit_code)
    return result if isinstance(result, int) else 0


def _place() -> CachePlace:
    return cache_place(os.environ, os.getuid())


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rvbundle {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: rvbundle build recipes/cartpole-policy-gradient/recipe.toml")
def build(
    recipe: _RecipePath,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for the image and its cold pack.")
    ] = Path("dist"),
    cold: Annotated[
        str | None,
        typer.Option(
            metavar="separate|embed|drop",
            help="Where the cold pack goes: beside the image, into its file, or nowhere. If not said: "
            "separate, but into a self-running file.",
        ),
    ] = None,
    with_record: Annotated[
        list[Path] | None,
        typer.Option(
            "--with-record", metavar="FILE", help="Keep what a run had to restore (run --record FILE)."
        ),
    ] = None,
    payload: Annotated[
        list[str] | None,
        typer.Option(
            "--payload", metavar="ARCH", help="Only this payload of those that the recipe names; repeatable."
        ),
    ] = None,
    self_running: Annotated[
        str | None,
        typer.Option(
            "--self-running",
            metavar="ARCH[,ARCH]",
            help="Also write NAME-VERSION.run, which needs nothing there: riscv64, aarch64, x86_64.",
        ),
    ] = None,
    emulators: Annotated[
        str,
        typer.Option(
            metavar="needed|always|none|qemu,box64",
            help="What that file brings to run payloads for other machines.",
        ),
    ] = "needed",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say which stage was reused, or why it was not.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Build a recipe into an image (NAME-VERSION.rvb) and its cold pack (NAME-VERSION.cold.rvb)."""
    from rvbundle import recipe as recipes

    loaded = recipes.load(recipe)
    from rvbundle import selfrun
    from rvbundle.build import COLD, SEPARATE, Wanted
    from rvbundle.build import build as run_build  # late: a wrong recipe is said at once
    from rvbundle.record import read_records

    if cold not in (None, *COLD):
        raise UsageError(f"build: --cold {cold}: expected {', '.join(COLD[:-1])} or {COLD[-1]}")
    running = selfrun.parse_wanted(self_running, emulators) if self_running is not None else None
    progress = Progress(verbose)
    wanted = Wanted(output, cold or SEPARATE, read_records(with_record or []), tuple(payload or []))
    built = run_build(loaded, wanted, _place().base, progress)
    made = None
    if running:
        inside = built.cold if cold is None else None  # "embed" has put it before the image already
        made = selfrun.write_self_running(built.image, inside, running, _place().base, progress)
    if as_json:
        value = {key: str(v) if isinstance(v, Path) else v for key, v in vars(built).items()}
        print(json.dumps({**value, "self_running": str(made.path) if made else None}))
    else:
        print(f"{built.image}  {mib(built.image_size)}  in {built.seconds:.1f} s")
        if built.cold:
            print(f"{built.cold}  {mib(built.cold_size)}")
        elif built.cold_size:
            print(f"with its cold pack inside  {mib(built.cold_size)}")
        if made:
            print(f"{made.path}  {mib(made.size)}  runs by itself on {', '.join(made.arches)}")


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example: rvbundle run dist/cartpole-policy-gradient-1.0.0.rvb -- --episodes 50",
)
def run(
    image: _ImagePath,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the agent.")] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option("--volume", "-v", metavar="SRC:DST[:ro]", help="Show a folder or file to the agent."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="NAME[=VALUE]", help="Set a variable, or pass yours on."),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", metavar="DEVICE", help="Show a device, such as dri.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", "-m", metavar="SIZE", help="Limit each process's data, such as 2g."),
    ] = None,
    cold: _ColdPack = None,
    record: Annotated[
        str | None,
        typer.Option("--record", metavar="FILE", help="Write what had to be restored, for the next build."),
    ] = None,
    payload: _Payload = None,
    emulator: _Emulator = None,
    backend: _Backend = None,
    threads: _Threads = None,
    precision: _Precision = None,
    network: Annotated[bool, typer.Option("--network", help="Give the agent the network.")] = False,
    no_network: Annotated[
        bool, typer.Option("--no-network", help="Take it away, whatever the recipe says.")
    ] = False,
    no_cwd: Annotated[
        bool, typer.Option("--no-cwd", help="Start in an empty folder instead of the current one.")
    ] = False,
    no_sandbox: _NoSandbox = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the plan on stderr first.")] = False,
) -> int:
    """Run an image. The current folder is the agent's working folder, /agent.

    Everything after IMAGE belongs to the agent; its exit code is passed on.
    """
    single = {
        "--memory": memory,
        "--cold": cold,
        "--record": record,
        "--payload": payload,
        "--emulator": emulator,
        "--backend": backend,
        "--threads": threads,
        "--precision": precision,
    }
    flags = {
        "--network": network,
        "--no-network": no_network,
        "--no-cwd": no_cwd,
        "--no-sandbox": no_sandbox,
        "--verbose": verbose,
    }
    given = {name: value for name, value in single.items() if value is not None}
    given |= {name: "yes" for name, value in flags.items() if value}
    many = {"--volume": volume or [], "--env": env or [], "--device": device or []}
    words = list(arguments or [])
    options = make_options(str(image), words[1:] if words[:1] == ["--"] else words, given, many)
    return launch.run(read_host(), options, _place())


@app.command(epilog="Example: rvbundle explain dist/cartpole-policy-gradient-1.0.0.rvb --files 'torch/*'")
def explain(
    image: _ImagePath,
    files: Annotated[
        str | None,
        typer.Option("--files", metavar="GLOB", help="Say of each such file why it is hot or cold."),
    ] = None,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Say where the bytes are, by package and library.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write that as a page with a treemap.")
    ] = None,
    payload: _Payload = None,
    emulator: _Emulator = None,
    backend: _Backend = None,
    threads: _Threads = None,
    precision: _Precision = None,
    cold: _ColdPack = None,
    as_json: _Json = False,
) -> None:
    """Say what `run` would do on this machine and why; of a build, why each file is hot or cold."""
    from rvbundle import explain as explaining

    if sizes or html:
        from rvbundle import sizes as sizing

        report = sizing.measure(image, _place())
        if html:
            try:
                html.write_text(sizing.to_html(report))
            except OSError as error:
                raise StoreError(f"can't write {html}: {error.strerror}") from None
            print(html)
        if sizes:
            _emit(report, sizing.print_sizes, as_json)
        return
    if files is not None:
        _emit(explaining.explain_files(image, files), explaining.print_files, as_json)
    else:
        given = _given(payload, emulator, backend, threads, precision, cold)
        options = make_options(str(image), [], given, {})
        _emit(explaining.explain(image, read_host(), _place(), options), explaining.print_plan, as_json)


def _given(
    payload: str | None,
    emulator: str | None,
    backend: str | None,
    threads: str | None,
    precision: str | None,
    cold: str | None,
    no_sandbox: bool = False,
) -> dict[str, str]:
    """Return the options that were given, by name."""
    values = {
        "--payload": payload,
        "--emulator": emulator,
        "--backend": backend,
        "--threads": threads,
        "--precision": precision,
        "--cold": cold,
        "--no-sandbox": "yes" if no_sandbox else None,
    }
    return {name: value for name, value in values.items() if value is not None}


@app.command(epilog="Example: rvbundle tune dist/cartpole-policy-gradient-1.0.0.rvb")
def tune(
    image: _ImagePath,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="How long to search; if not said: 60, and 900 where the agent is emulated."),
    ] = None,
    payload: _Payload = None,
    emulator: _Emulator = None,
    backend: _Backend = None,
    threads: _Threads = None,
    precision: _Precision = None,
    cold: _ColdPack = None,
    no_sandbox: _NoSandbox = False,
) -> int:
    """Measure backends on the agent's own workload, check that they are right, and keep the best for runs."""
    from rvbundle_runtime import tune as tuning

    given = _given(payload, emulator, backend, threads, precision, cold, no_sandbox)
    options = make_options(str(image), [], given, {})
    return tuning.run(read_host(), options, _place(), seconds)


@app.command(epilog="Example: rvbundle profile dist/cartpole-policy-gradient-1.0.0.rvb")
def profile(
    image: _ImagePath,
    payload: _Payload = None,
    emulator: _Emulator = None,
    backend: _Backend = None,
    threads: _Threads = None,
    precision: _Precision = None,
    cold: _ColdPack = None,
    no_sandbox: _NoSandbox = False,
    as_json: _Json = False,
) -> int:
    """Say where the time of the agent's workload goes, by operator and by kernel, and which kernels ran."""
    from rvbundle_runtime import profile as profiles

    given = _given(payload, emulator, backend, threads, precision, cold, no_sandbox)
    options = make_options(str(image), [], given, {})
    return profiles.run(read_host(), options, _place(), as_json)


@app.command(epilog="Example: rvbundle inspect dist/cartpole-policy-gradient-1.0.0.rvb --json")
def inspect(
    image: _ImagePath,
    files: Annotated[bool, typer.Option("--files", help="List every file.")] = False,
    licences: Annotated[
        bool, typer.Option("--licences", help="List what it is made of, by licence, and where the source is.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show what an image (or cold pack) holds: payloads, sizes by package and library, versions."""
    from rvbundle import inspection

    if licences:
        _emit(inspection.list_licences(image), inspection.print_licences, as_json)
        return
    _emit(inspection.inspect(image, files), inspection.print_report, as_json)


@app.command(epilog="Example: rvbundle verify dist/cartpole-policy-gradient-1.0.0.rvb")
def verify(image: _ImagePath, as_json: _Json = False) -> None:
    """Check every digest of an image, and of the cold pack beside it; name what is damaged."""
    from rvbundle import inspection

    _emit(inspection.verify(image), inspection.print_verified, as_json)


@app.command(epilog="Example: rvbundle lock recipes/cartpole-policy-gradient/recipe.toml")
def lock(recipe: _RecipePath) -> None:
    """Write recipe.lock: name, version and SHA-256 of every wheel; builds use it from then on."""
    from rvbundle import lock as locks
    from rvbundle import recipe as recipes
    from rvbundle.build import resolve
    from rvbundle.environment import find_interpreter

    progress = Progress()
    loaded = recipes.load(recipe)
    with progress.phase("lock") as phase:
        found = resolve(loaded, find_interpreter(loaded.python, os.environ), _place().base)
        locks.write_beside(loaded, found)
        phase.result = f"{len(found.packages)} packages"
    print(loaded.lock_path)


@app.command(epilog="Example: cd my-agent && rvbundle init && rvbundle build recipe.toml")
def init(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The agent's folder.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace a recipe that is there.")] = False,
) -> None:
    """Write a commented recipe.toml for the agent in this folder."""
    from rvbundle.init import write_recipe

    print(write_recipe(folder, force))


@app.command(epilog="Example: rvbundle extract dist/cartpole-policy-gradient-1.0.0.rvb tree")
def extract(
    image: _ImagePath,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    payload: Annotated[
        str | None, typer.Option("--payload", metavar="ARCH", help="Which, if there are several.")
    ] = None,
) -> None:
    """Write the plain tree of an image to DIR, whole if its cold pack lies beside it."""
    from rvbundle import inspection

    result = inspection.extract(image, folder, payload)
    print(f"{folder}: {result.files} files, {mib(result.size)}, {result.note}")


@app.command(epilog="Example: rvbundle shell dist/cartpole-policy-gradient-1.0.0.rvb")
def shell(image: _ImagePath) -> int:
    """Open a Python prompt inside an image."""
    options = make_options(str(image), [], {}, {})
    return launch.run(read_host(), options, _place(), entry=("/usr/bin/python3",))


@app.command(epilog="Example: rvbundle doctor")
def doctor(as_json: _Json = False) -> int:
    """Say what this machine lacks to run images well, and what to do about it."""
    from rvbundle_runtime import doctor as examination

    return examination.main(["--json"] if as_json else [])


@cache_app.command("ls")
def cache_ls(as_json: _Json = False) -> None:
    """List unpacked images and build stages, with their sizes."""
    from rvbundle import caches

    _emit(caches.list_cache(_place()), caches.print_cache, as_json)


@cache_app.command("prune")
def cache_prune(
    images: Annotated[bool, typer.Option("--images", help="Only unpacked images.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="Only build stages.")] = False,
) -> None:
    """Remove unpacked images (those in use stay) and build stages; both are made again when needed."""
    from rvbundle import caches

    both = images == stages
    for line in caches.prune_cache(_place(), images or both, stages or both):
        print(line)


def _emit(value: Any, printer: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(value, indent=2))
    else:
        printer(value)
