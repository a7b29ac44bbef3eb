"""The pipeline on one page: recipe in, image and cold pack out.

    recipe.toml ─► environment ─► freeze ─► trace ─► split ─► trim ─► pack ─► prove
                                    └──────► analysis ──┘

Every stage takes frozen values and returns one; its result lies in the build cache under an explicit key.
"""

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import rvbundle_runtime
from rvbundle import (
    __version__,
    analysis,
    debian,
    environment,
    foreign,
    freeze,
    hostpython,
    licences,
    lock,
    stage_agent,
    trace,
)
from rvbundle.analysis import Reach
from rvbundle.contents import Contents, contents
from rvbundle.debian import ARCHITECTURES
from rvbundle.environment import Environment, Interpreter
from rvbundle.freeze import Frozen
from rvbundle.hostpython import machine
from rvbundle.lock import LockedDebian
from rvbundle.pack import (
    COLD_EFFORT,
    HOT_EFFORT,
    WHOLE_EFFORT,
    Effort,
    ImageMeta,
    Item,
    PayloadMeta,
    compress,
    pack,
)
from rvbundle.progress import Phase, Progress
from rvbundle.prove import prove
from rvbundle.recipe import WHEELS, Recipe
from rvbundle.record import Recorded
from rvbundle.stage_agent import StagedAgent
from rvbundle.stages import Cached, Key, StageCache, digest_of_files, write_atomically
from rvbundle.trace import Trace, processor_of
from rvbundle.trimming import Trims, trim_libraries
from rvbundle_runtime import golden, store
from rvbundle_runtime.errors import StoreError, UsageError

SEPARATE, EMBED, DROP = "separate", "embed", "drop"
COLD = (SEPARATE, EMBED, DROP)


@dataclass(frozen=True)
class Wanted:
    """What a build is asked for beside the recipe.

    `output` is the folder for its files, `cold` where the cold pack goes (beside the image, into its file, or
    nowhere: see COLD), `recorded` what runs had to restore and shall be hot, `payloads` the architectures
    that the image shall have (none: all that the recipe names).
    """

    output: Path
    cold: str = SEPARATE
    recorded: Recorded = field(default_factory=Recorded)
    payloads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """What a build made: paths, sizes in bytes, its time in seconds, the image's architectures."""

    image: Path
    cold: Path | None
    identity: str
    image_size: int
    cold_size: int
    seconds: float
    payloads: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Traced:
    """A payload once it was traced: what is needed to pack it."""

    source: str
    frozen: Frozen
    agent: StagedAgent
    record: Trace
    reached: Reach


def build(recipe: Recipe, wanted: Wanted, cache_base: Path, progress: Progress) -> Built:
    """Build `recipe` as `wanted`; raises any RvbundleError of the stages, and StoreError."""
    _check_payloads(recipe, wanted.payloads)
    _check_output(wanted.output)
    store.check_executable(cache_base)
    with store.translated(cache_base, "write into"):
        return _build(recipe, wanted, cache_base, progress)


def _check_payloads(recipe: Recipe, payloads: tuple[str, ...]) -> None:
    have = (machine(), *recipe.debian)
    for arch in payloads:
        if arch not in have:
            raise UsageError(
                f"{recipe.path} has no payload for {arch}; it has: {', '.join(have)}",
                f'add it: [payloads] {arch} = "debian:trixie"' if arch in ARCHITECTURES else "",
            )


def _build(recipe: Recipe, wanted: Wanted, cache_base: Path, progress: Progress) -> Built:
    started = time.monotonic()
    cache = StageCache(cache_base, recipe.name)
    interpreter = environment.find_interpreter(recipe.python, os.environ)
    locked = get_lock(recipe, interpreter, cache, progress)
    env = _environment(recipe, locked, interpreter, cache, progress)
    with _beside() as (pool, stop):  # the analysis takes a minute on one core
        graph = pool.submit(_module_graph, locked, env, cache, stop)
        frozen = _freeze_own(recipe, locked, env, cache, progress)
        agent = _stage_agent(recipe, interpreter, frozen.arch, cache)
        record = _trace(recipe, frozen, agent, None, cache, progress)
        if not graph.done() and not recipe.debian:
            _compress_early(recipe, frozen, agent, record, wanted.recorded, cache, progress)
        others = [
            _trace_foreign(recipe, locked.debian_for(arch), locked, env, record, cache, progress)
            for arch in sorted(recipe.debian)
            if not wanted.payloads or arch in wanted.payloads
        ]
        reached = _analysis(graph, env, frozen, agent, progress)
    own = _Traced(WHEELS, frozen, agent, record, reached)
    traced = [own] if not wanted.payloads or frozen.arch in wanted.payloads else []
    # Reachability is a matter of names: the graph of this machine's packages serves the others, too.
    traced += [replace(payload, reached=reached) for payload in others]
    folder = _image(recipe, tuple(traced), wanted.recorded, cache, progress)
    cache.remember()
    image, beside, size, cold_size = _deliver_both(recipe, folder, wanted)
    identity = (folder / "identity").read_text()
    seconds = time.monotonic() - started
    return Built(image, beside, identity, size, cold_size, seconds, tuple(t.frozen.arch for t in traced))


def _trace_foreign(
    recipe: Recipe,
    part: LockedDebian,
    locked: lock.Lock,
    env: Environment,
    native: Trace,
    cache: StageCache,
    progress: Progress,
) -> _Traced:
    """Freeze and trace a payload for another architecture, through an emulator."""
    python = hostpython.host_python(part.suite, part.python, cache)
    frozen = _freeze_foreign(recipe, part, locked, env, python, cache, progress)
    emulators = hostpython.emulators(part.suite, part.emulators, cache)
    frozen = replace(frozen, emulators=emulators)
    agent = _stage_agent(recipe, python, part.arch, cache)
    record = _trace(recipe, frozen, agent, native, cache, progress)
    return _Traced(f"debian:{part.suite}", frozen, agent, record, Reach({}, {}))


def get_lock(recipe: Recipe, interpreter: Interpreter, cache: StageCache, progress: Progress) -> lock.Lock:
    """Return the lock beside the recipe, or what pip made of these requirements before, or makes now."""
    with progress.phase("lock") as phase:
        beside = lock.read_beside(recipe)
        if beside:
            phase.result, phase.reused = f"{recipe.lock_path.name}, {len(beside.packages)} packages", True
            return beside
        key: Key = {
            "python": interpreter.version,
            "requires": list(recipe.requires),
            "requirements": str(recipe.requirements or ""),
            "pip": {n: v for n, v in sorted(os.environ.items()) if n.startswith("PIP_")},
            "debian": dict(sorted(recipe.debian.items())),
            "format": "2",
        }

        def make(folder: Path) -> None:
            found = resolve(recipe, interpreter, cache.base.parent)
            (folder / "recipe.lock").write_text(lock.dumps(found))

        cached = cache.get("lock", key, make)
        path = cached.folder / "recipe.lock"
        found = lock.loads(path.read_text(), path)
        _note(phase, cached, f"{len(found.packages)} packages")
        return found


def resolve(recipe: Recipe, interpreter: Interpreter, cache_base: Path) -> lock.Lock:
    """Ask pip and apt what the requirements mean today; raises EnvironmentSetupError."""
    return foreign.lock_payloads(recipe, environment.resolve(recipe, interpreter), cache_base)


def _note(phase: Phase, cached: Cached, result: str) -> None:
    phase.result, phase.reused, phase.why = result, cached.reused, cached.why


def _environment(
    recipe: Recipe, locked: lock.Lock, interpreter: Interpreter, cache: StageCache, progress: Progress
) -> Environment:
    with progress.phase("environment") as phase:
        key = _environment_key(locked, interpreter)
        cached = cache.get(
            "environment", key, lambda folder: environment.install(recipe, locked, interpreter, folder)
        )
        _note(phase, cached, f"Python {interpreter.version}")
        return Environment(cached.folder, interpreter)


def _environment_key(locked: lock.Lock, interpreter: Interpreter) -> Key:
    return {
        "lock": locked.digest(),
        "interpreter": f"{interpreter.version} {interpreter.executable}",
        "rvbundle": __version__,
    }


@contextmanager
def _beside() -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """Give a thread for work beside the block, and an event that is set when the block fails."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool, stop
        except BaseException:
            stop.set()
            raise


def _module_graph(locked: lock.Lock, env: Environment, cache: StageCache, stop: threading.Event) -> Cached:
    base: Key = {"python": env.interpreter.version, "pyinstaller": list(analysis.PYINSTALLER)}
    tools = cache.get("tools", base, lambda folder: analysis.install_tools(env, folder))
    key: Key = {**base, **_environment_key(locked, env.interpreter), "inside": analysis.code_digest()}
    return cache.get("analysis", key, lambda folder: analysis.analyse(env, tools.folder, folder, stop))


def _freeze_own(
    recipe: Recipe, locked: lock.Lock, env: Environment, cache: StageCache, progress: Progress
) -> Frozen:
    key = _environment_key(locked, env.interpreter)
    return _freeze(recipe, "freeze", key, lambda: freeze.of_environment(env), cache, progress)


def _freeze_foreign(
    recipe: Recipe,
    part: LockedDebian,
    locked: lock.Lock,
    env: Environment,
    python: Interpreter,
    cache: StageCache,
    progress: Progress,
) -> Frozen:
    digests: Key = {"packages": [package.sha256 for package in part.packages]}
    with progress.phase(f"packages for {part.arch}") as phase:
        unpacked: Key = {**digests, "inside": debian.code_digest()}
        cached = cache.get(
            f"debian-{part.arch}",
            {**unpacked, "lists": "owners, packages"},
            lambda folder: foreign.unpack(part, cache.base.parent, folder),
        )
        _note(phase, cached, f"{len(part.packages)} of Debian's {part.suite}")

    def inventory() -> freeze.Inventory:
        return freeze.of_foreign(foreign.assemble(part, locked, cached.folder, env, python))

    key = {**_environment_key(locked, env.interpreter), **digests, "compiler": python.version}
    return _freeze(recipe, f"freeze-{part.arch}", key, inventory, cache, progress)


def _freeze(
    recipe: Recipe,
    stage: str,
    made_of: Key,
    inventory: Callable[[], freeze.Inventory],
    cache: StageCache,
    progress: Progress,
) -> Frozen:
    with progress.phase(stage.replace("-", " ")) as phase:
        key = {**made_of, "inside": freeze.code_digest(), "docstrings": recipe.docstrings}
        cached = cache.get(stage, key, lambda folder: freeze.freeze(inventory(), recipe.docstrings, folder))
        frozen = freeze.load(cached.folder)
        _note(phase, cached, f"{len(frozen.files)} files, {sum(f.size for f in frozen.files) >> 20} MiB")
        for text in frozen.notes:
            phase.note(text)
        return frozen


def _stage_agent(recipe: Recipe, interpreter: Interpreter, arch: str, cache: StageCache) -> StagedAgent:
    key: Key = {
        "sources": stage_agent.source_digests(recipe),
        "entry": recipe.entry,
        "python": interpreter.version,
    }
    stage = _named("agent", arch)
    cached = cache.get(stage, key, lambda folder: stage_agent.stage(recipe, interpreter, folder))
    return stage_agent.load(recipe, cached.folder)


def _named(stage: str, arch: str) -> str:
    """Return the name of a stage in the cache: that of another architecture has its own history."""
    return stage if arch == machine() else f"{stage}-{arch}"


def _trace(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    native: Trace | None,
    cache: StageCache,
    progress: Progress,
) -> Trace:
    """Trace a payload; one for another architecture must print what `native` has printed."""
    stage = _named("trace", frozen.arch)
    with progress.phase(stage.replace("-", " ")) as phase:
        key: Key = {
            "arch": frozen.arch,
            "tree": frozen.digest(),
            "agent": agent.digest(),
            "workloads": [[list(w.args), w.golden, w.tolerance] for w in recipe.workloads],
            "run": [recipe.network, recipe.env],
            "trim": [recipe.trim, list(recipe.keep_modules)],
            "rvbundle": _code_digest(),
        }
        beside = recipe.trace_path(frozen.arch) if recipe.lock_path.exists() else None
        kept = _kept_trace(beside, key)
        if kept:
            phase.result, phase.reused = f"{beside.name if beside else ''}", True
            phase.why = "the record beside the lock is of these very files and workloads"
            return kept

        def make(folder: Path) -> None:
            record = trace.trace(recipe, frozen, agent, processor_of(frozen))
            if native:
                trace.check_same(recipe, frozen, native, record)
            (folder / "trace.json").write_text(trace.dumps(record, key))

        cached = cache.get(stage, key, make)
        text = (cached.folder / "trace.json").read_text()
        if beside:
            write_atomically(beside, text.encode())
        record, _ = trace.loads(text)
        _note(phase, cached, f"{len(record.workloads)} workloads opened {len(record.opened_by())} files")
        if record.note:
            phase.note(record.note)
        return record


def _kept_trace(beside: Path | None, key: Key) -> Trace | None:
    try:
        record, made_for = trace.loads(beside.read_text()) if beside else (None, {})
    except (OSError, ValueError):
        return None
    return record if made_for == key else None


def _analysis(
    graph: "Future[Cached]", env: Environment, frozen: Frozen, agent: StagedAgent, progress: Progress
) -> Reach:
    with progress.phase("analysis") as phase:
        cached = graph.result()
        sources = [(path, (agent.folder / path).read_bytes()) for path in agent.files if path.endswith(".py")]
        packages = (env.site_packages, f"{frozen.stdlib}/site-packages")
        reached = analysis.reach(
            analysis.load_graph(cached.folder), sources, freeze.plugins(frozen), frozen.modules(), packages
        )
        _note(phase, cached, f"{len(reached.modules)} modules are reachable")
        return reached


def _compress_early(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    record: Trace,
    recorded: Recorded,
    cache: StageCache,
    progress: Progress,
) -> None:
    """Compress, while the analysis is still under way, what will be packed in any case.

    At level "traced" the analysis only gives reasons: which file goes where is known without it.
    """
    if recipe.trim == "reachable":
        return
    with progress.phase("compress"):
        _, both, trims = _trim(recipe, _Traced(WHEELS, frozen, agent, record, Reach({}, {})), recorded)
        compress(both.hot, _hot_effort(bool(trims.trimmed)), _frames(cache))
        compress(both.cold, COLD_EFFORT, _frames(cache))


def _hot_effort(trimmed: bool) -> Effort:
    return HOT_EFFORT if trimmed else WHOLE_EFFORT


def _frames(cache: StageCache) -> Path:
    return cache.base / "frames"


def _image(
    recipe: Recipe,
    traced: tuple[_Traced, ...],
    recorded: Recorded,
    cache: StageCache,
    progress: Progress,
) -> Path:
    key: Key = {
        "payloads": [
            [t.frozen.folder.name, t.agent.folder.parent.name, trace.digest(t.record), t.source]
            for t in traced
        ],
        "recipe": [recipe.name, recipe.version, recipe.network, recipe.env, recipe.precision],
        "trim": [recipe.trim, list(recipe.keep_modules), list(recipe.keep_files)],
        "workloads": [[list(w.args), w.golden, w.tolerance] for w in recipe.workloads],
        "recorded": [sorted(recorded.paths), sorted((p, sorted(r)) for p, r in recorded.runs.items())],
        "rvbundle": _code_digest(),
    }
    names = _file_names(recipe)

    def make(folder: Path) -> None:
        with progress.phase("trim") as phase:
            ready = [_trim(recipe, payload, recorded) for payload in traced]
            phase.result = "; ".join(_trim_result(trims) for _, _, trims in ready)
        effort = _hot_effort(any(trims.trimmed for _, _, trims in ready))
        meta = _meta(recipe, traced, [trims for _, _, trims in ready])
        frames = _frames(cache)
        with progress.phase("pack") as phase:
            hot = [(payload, both.hot) for payload, both, _ in ready]
            cold = [(payload, both.cold) for payload, both, _ in ready]
            identity = pack(folder / names[0], _with_licences(meta, traced, hot), hot, effort, frames)
            bound = replace(_with_licences(meta, traced, cold), bound_to=identity)
            pack(folder / names[1], bound, cold, COLD_EFFORT, frames)
            phase.result = f"{(folder / names[0]).stat().st_size >> 20} MiB"
        for payload in traced:
            with progress.phase(_named("prove", payload.frozen.arch).replace("-", " ")):
                prove(recipe, payload.frozen, payload.agent, payload.record, folder / names[0])
        (folder / "identity").write_text(identity)

    cached = cache.get("image", key, make)
    if cached.reused:
        with progress.phase("pack and prove") as phase:
            _note(phase, cached, "")
    return cached.folder


def _trim(recipe: Recipe, payload: _Traced, recorded: Recorded) -> tuple[PayloadMeta, Contents, Trims]:
    """Decide what of a payload is hot and what is cold."""
    from rvbundle.split import split

    frozen, record = payload.frozen, payload.record
    placed = split(recipe, frozen, record, payload.reached, recorded.paths)
    trims = trim_libraries(frozen, placed, record, recorded.runs, recipe.trim)
    meta = PayloadMeta(
        frozen.arch,
        payload.source,
        frozen.python_version,
        payload.agent.argv,
        frozen.libdir,
        frozen.packages,
        record.families if trims.trimmed else (),
        frozen.blas,
    )
    return meta, contents(frozen, payload.agent, placed, trims), trims


def _meta(recipe: Recipe, traced: tuple[_Traced, ...], trims: list[Trims]) -> ImageMeta:
    """Return what the image says of itself: of every payload, what was trimmed and what was not."""
    archs = [payload.frozen.arch for payload in traced]
    reports = [
        ({path: t.trimmed[path].report() for path in sorted(t.trimmed)}, dict(sorted(t.whole.items())))
        for t in trims
    ]
    return ImageMeta(
        name=recipe.name,
        version=recipe.version,
        created_by=f"rvbundle {__version__}",
        network=recipe.network,
        env=recipe.env,
        details={
            "trim": recipe.trim,
            "traces": [list(w.args) for w in recipe.workloads],
            "trimmed": {arch: trimmed for arch, (trimmed, _) in zip(archs, reports, strict=True)},
            "whole": {arch: whole for arch, (_, whole) in zip(archs, reports, strict=True)},
            "precision": recipe.precision,
            "workloads": {t.frozen.arch: golden.to_details(_goldens(recipe, t.record)) for t in traced},
        },
    )


def _goldens(recipe: Recipe, record: Trace) -> tuple[golden.Workload, ...]:
    """Return the workloads with what they printed: what a run may compare itself with."""
    return tuple(
        golden.Workload(w.args, w.golden, w.tolerance, seen.stdout)
        for w, seen in zip(recipe.workloads, record.workloads, strict=True)
    )


def _with_licences(
    meta: ImageMeta, traced: tuple[_Traced, ...], packed: list[tuple[PayloadMeta, tuple[Item, ...]]]
) -> ImageMeta:
    """Add what the payloads are made of, as far as it is `packed`."""
    parts = {
        f"payload {payload.frozen.arch}": licences.held(
            licences.load(payload.frozen.folder), {item.path for item in items}
        )
        for payload, (_, items) in zip(traced, packed, strict=True)
    }
    return replace(meta, details={**meta.details, **licences.to_details(parts)})


def _trim_result(trims: Trims) -> str:
    whole = sum(t.plan.size for t in trims.trimmed.values())
    hot = sum(t.hot_size for t in trims.trimmed.values())
    return f"{len(trims.trimmed)} libraries, {whole >> 20} -> {hot >> 20} MiB"


def _file_names(recipe: Recipe) -> tuple[str, str]:
    return f"{recipe.file_stem}.rvb", f"{recipe.file_stem}.cold.rvb"


def _deliver_both(recipe: Recipe, folder: Path, wanted: Wanted) -> tuple[Path, Path | None, int, int]:
    """Put image and cold pack where they are wanted; return both paths and their sizes in bytes."""
    hot_name, cold_name = _file_names(recipe)
    size, cold_size = ((folder / name).stat().st_size for name in (hot_name, cold_name))
    output = wanted.output
    if wanted.cold == EMBED:
        # A reader finds an image from the end of its file, and before it the cold pack by its own end.
        whole = folder / f"{hot_name}.whole"
        if not whole.exists():
            _concatenate([folder / cold_name, folder / hot_name], whole)
        return _deliver(whole, output / hot_name), None, size, cold_size
    image = _deliver(folder / hot_name, output / hot_name)
    if wanted.cold == DROP:
        return image, None, size, 0
    return image, _deliver(folder / cold_name, output / cold_name), size, cold_size


def _concatenate(parts: list[Path], target: Path) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    with temporary.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
    temporary.rename(target)


def _code_digest() -> str:
    """Return a digest of all of rvbundle: what runs an agent decides what a trace sees and a proof proves."""
    ours = (Path(__file__).parent, Path(rvbundle_runtime.__file__).parent)
    return digest_of_files(path for f in ours for kind in ("*.py", "*.so") for path in f.rglob(kind))


def _check_output(output: Path) -> None:
    """Say before a long build, not after it, that nothing can be written there."""
    if not store.nearest_existing(output.absolute()).is_dir():
        raise StoreError(f"can't write into {output}: {os.strerror(errno.ENOTDIR)}", _OTHER_OUTPUT)


_OTHER_OUTPUT = "name another folder with --output"


def _deliver(source: Path, target: Path) -> Path:
    """Put a finished file where the user wants it: a hard link where possible, else a copy."""
    try:
        _place(source, target)
    except OSError as error:
        full = "free some space, or " if error.errno == errno.ENOSPC else ""
        raise StoreError(f"can't write {target}: {error.strerror}", full + _OTHER_OUTPUT) from None
    return target


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.samefile(source):
        return
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        temporary.rename(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
