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
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import rvbundle_runtime
from rvbundle import __version__, analysis, environment, freeze, lock, stage_agent, trace
from rvbundle.analysis import Reach
from rvbundle.contents import contents
from rvbundle.environment import Environment, Interpreter
from rvbundle.freeze import Frozen
from rvbundle.pack import (
    COLD_EFFORT,
    HOT_EFFORT,
    WHOLE_EFFORT,
    Effort,
    ImageMeta,
    PayloadMeta,
    compress,
    pack,
)
from rvbundle.progress import Phase, Progress
from rvbundle.prove import prove
from rvbundle.recipe import Recipe
from rvbundle.record import Recorded
from rvbundle.stage_agent import StagedAgent
from rvbundle.stages import Cached, Key, StageCache, digest_of_files, write_atomically
from rvbundle.trace import Trace
from rvbundle.trimming import Trims, trim_libraries
from rvbundle_runtime import store
from rvbundle_runtime.errors import StoreError
from rvbundle_runtime.host import read_processor

SEPARATE, EMBED, DROP = "separate", "embed", "drop"
COLD = (SEPARATE, EMBED, DROP)


@dataclass(frozen=True)
class Wanted:
    """What a build is asked for beside the recipe.

    `output` is the folder for its files, `cold` where the cold pack goes (beside the image, into its file, or
    nowhere: see COLD), `recorded` what runs had to restore and shall be hot.
    """

    output: Path
    cold: str = SEPARATE
    recorded: Recorded = field(default_factory=Recorded)


@dataclass(frozen=True)
class Built:
    """What a build made: paths, sizes in bytes, its time in seconds."""

    image: Path
    cold: Path | None
    identity: str
    image_size: int
    cold_size: int
    seconds: float


def build(recipe: Recipe, wanted: Wanted, cache_base: Path, progress: Progress) -> Built:
    """Build `recipe` as `wanted`; raises any RvbundleError of the stages, and StoreError."""
    _check_output(wanted.output)
    store.check_executable(cache_base)
    with store.translated(cache_base, "write into"):
        return _build(recipe, wanted, cache_base, progress)


def _build(recipe: Recipe, wanted: Wanted, cache_base: Path, progress: Progress) -> Built:
    started = time.monotonic()
    cache = StageCache(cache_base, recipe.name)
    interpreter = environment.find_interpreter(recipe.python, os.environ)
    locked = get_lock(recipe, interpreter, cache, progress)
    env = _environment(recipe, locked, interpreter, cache, progress)
    with _beside() as (pool, stop):  # the analysis takes a minute on one core
        graph = pool.submit(_module_graph, locked, env, cache, stop)
        frozen = _freeze(recipe, locked, env, cache, progress)
        agent = _stage_agent(recipe, interpreter, cache)
        record = _trace(recipe, frozen, agent, cache, progress)
        if not graph.done():
            _compress_early(recipe, frozen, agent, record, wanted.recorded, cache, progress)
        reached = _analysis(graph, env, frozen, agent, progress)
    folder = _image(recipe, frozen, agent, record, reached, wanted.recorded, cache, progress)
    cache.remember()
    image, beside, size, cold_size = _deliver_both(recipe, folder, wanted)
    identity = (folder / "identity").read_text()
    return Built(image, beside, identity, size, cold_size, time.monotonic() - started)


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
        }

        def make(folder: Path) -> None:
            found = environment.resolve(recipe, interpreter)
            (folder / "recipe.lock").write_text(lock.dumps(found))

        cached = cache.get("lock", key, make)
        path = cached.folder / "recipe.lock"
        found = lock.loads(path.read_text(), path)
        _note(phase, cached, f"{len(found.packages)} packages")
        return found


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


def _freeze(
    recipe: Recipe, locked: lock.Lock, env: Environment, cache: StageCache, progress: Progress
) -> Frozen:
    with progress.phase("freeze") as phase:
        key = {
            **_environment_key(locked, env.interpreter),
            "inside": freeze.code_digest(),
            "docstrings": recipe.docstrings,
        }
        cached = cache.get("freeze", key, lambda folder: freeze.freeze(env, recipe.docstrings, folder))
        frozen = freeze.load(cached.folder)
        _note(phase, cached, f"{len(frozen.files)} files, {sum(f.size for f in frozen.files) >> 20} MiB")
        for text in frozen.notes:
            phase.note(text)
        return frozen


def _stage_agent(recipe: Recipe, interpreter: Interpreter, cache: StageCache) -> StagedAgent:
    key: Key = {
        "sources": stage_agent.source_digests(recipe),
        "entry": recipe.entry,
        "python": interpreter.version,
    }
    cached = cache.get("agent", key, lambda folder: stage_agent.stage(recipe, interpreter, folder))
    return stage_agent.load(recipe, cached.folder)


def _trace(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    cache: StageCache,
    progress: Progress,
) -> Trace:
    with progress.phase("trace") as phase:
        key: Key = {
            "tree": frozen.digest(),
            "agent": agent.digest(),
            "workloads": [[list(w.args), w.golden, w.tolerance] for w in recipe.workloads],
            "run": [recipe.network, recipe.env],
            "trim": [recipe.trim, list(recipe.keep_modules)],
            "rvbundle": _code_digest(),
        }
        beside = recipe.trace_path if recipe.lock_path.exists() else None
        kept = _kept_trace(beside, key)
        if kept:
            phase.result, phase.reused = f"{beside.name if beside else ''}", True
            phase.why = "the record beside the lock is of these very files and workloads"
            return kept

        def make(folder: Path) -> None:
            record = trace.trace(recipe, frozen, agent, read_processor())
            (folder / "trace.json").write_text(trace.dumps(record, key))

        cached = cache.get("trace", key, make)
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
    from rvbundle.split import split

    if recipe.trim == "reachable":
        return
    with progress.phase("compress"):
        placed = split(recipe, frozen, record, Reach({}, {}), recorded.paths)
        trims = trim_libraries(frozen, placed, record, recorded.runs, recipe.trim)
        both = contents(frozen, agent, placed, trims)
        compress(both.hot, _hot_effort(trims), _frames(cache))
        compress(both.cold, COLD_EFFORT, _frames(cache))


def _hot_effort(trims: Trims) -> Effort:
    return HOT_EFFORT if trims.trimmed else WHOLE_EFFORT


def _frames(cache: StageCache) -> Path:
    return cache.base / "frames"


def _image(
    recipe: Recipe,
    frozen: Frozen,
    agent: StagedAgent,
    record: Trace,
    reached: Reach,
    recorded: Recorded,
    cache: StageCache,
    progress: Progress,
) -> Path:
    from rvbundle.split import split

    key: Key = {
        "tree": frozen.folder.name,
        "agent": agent.folder.parent.name,
        "trace": trace.digest(record),
        "recipe": [recipe.name, recipe.version, recipe.network, recipe.env],
        "trim": [recipe.trim, list(recipe.keep_modules), list(recipe.keep_files)],
        "workloads": [[list(w.args), w.golden, w.tolerance] for w in recipe.workloads],
        "recorded": [sorted(recorded.paths), sorted((p, sorted(r)) for p, r in recorded.runs.items())],
        "rvbundle": _code_digest(),
    }
    names = _file_names(recipe)

    def make(folder: Path) -> None:
        with progress.phase("trim") as phase:
            placed = split(recipe, frozen, record, reached, recorded.paths)
            trims = trim_libraries(frozen, placed, record, recorded.runs, recipe.trim)
            both = contents(frozen, agent, placed, trims)
            phase.result = _trim_result(trims)
        payload = PayloadMeta(
            frozen.arch,
            "wheels",
            frozen.python_version,
            agent.argv,
            frozen.libdir,
            frozen.packages,
            record.families if trims.trimmed else (),
        )
        meta = ImageMeta(
            name=recipe.name,
            version=recipe.version,
            created_by=f"rvbundle {__version__}",
            network=recipe.network,
            env=recipe.env,
            details={
                "trim": recipe.trim,
                "traces": [list(w.args) for w in recipe.workloads],
                "trimmed": {path: trims.trimmed[path].report() for path in sorted(trims.trimmed)},
                "whole": dict(sorted(trims.whole.items())),
            },
        )
        frames = _frames(cache)
        with progress.phase("pack") as phase:
            identity = pack(folder / names[0], meta, payload, both.hot, _hot_effort(trims), frames)
            bound = ImageMeta(**{**vars(meta), "bound_to": identity})
            pack(folder / names[1], bound, payload, both.cold, COLD_EFFORT, frames)
            phase.result = f"{(folder / names[0]).stat().st_size >> 20} MiB"
        with progress.phase("prove"):
            prove(recipe, frozen, agent, record, folder / names[0])
        (folder / "identity").write_text(identity)

    cached = cache.get("image", key, make)
    if cached.reused:
        with progress.phase("pack and prove") as phase:
            _note(phase, cached, "")
    return cached.folder


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
