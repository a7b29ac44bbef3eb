"""`rvbundle run`: find the payload, plan, carry the plan out. Imports as little as it can."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rvbundle_runtime import decisions, selection, store
from rvbundle_runtime import plan as planning
from rvbundle_runtime.decision import Decision, Situation
from rvbundle_runtime.errors import HostError, ImageError, StoreError
from rvbundle_runtime.host import CachePlace, Host, cache_place, read_host
from rvbundle_runtime.image import Reader
from rvbundle_runtime.options import RunOptions, parse_run

if TYPE_CHECKING:
    from rvbundle_runtime.pager import Pager

RECORD_FORMAT = 2


@dataclass(frozen=True)
class Prepared:
    """A plan whose payload lies unpacked in the store, the cold pack (if any), and where the store is.

    `decision` is the backend, chosen for `situation`.
    """

    plan: planning.Plan
    cold: Reader | None
    place: CachePlace
    unpacked: store.Unpacked
    situation: Situation
    decision: Decision


def main(argv: list[str]) -> int:
    """Carry out `rvbundle run ARGV`; return the agent's exit code, or end by the agent's signal."""
    options = parse_run(argv)
    host = read_host()
    return run(host, options, cache_place(host.environ, host.uid))


def run(host: Host, options: RunOptions, place: CachePlace, entry: tuple[str, ...] = ()) -> int:
    """Run an image on `host` out of the store at `place`; see `main` for what is returned.

    `entry` replaces the words that start the agent.
    """
    from rvbundle_runtime import supervisor

    prepared, held = prepare_and_hold(host, options, place, entry)
    for choice in prepared.plan.choices:
        if options.verbose or choice.warn:
            print(f"rvbundle: {choice.what}: {choice.value} ({choice.reason})", file=sys.stderr)
    pager, present = restoring(prepared.plan, prepared.cold, prepared.unpacked)
    outcome = supervisor.run(prepared.plan, pager, present)
    if options.record:
        _write_record(Path(options.record), prepared.unpacked)
    if held is not None:
        os.close(held)
    return supervisor.die_like(outcome)


def restoring(
    plan: planning.Plan, cold: Reader | None, unpacked: store.Unpacked
) -> tuple["Pager | None", bytes]:
    """Return the pager for a run, if it has a cold pack, and what is restored already (see `absent.py`)."""
    pager = None
    if cold:
        from rvbundle_runtime.pager import Pager

        pager = Pager(cold, plan.info.arch, plan.root)
    if not plan.info.trimmed:
        return pager, b""
    from rvbundle_runtime.filler import initial_present

    return pager, initial_present(unpacked)


def _write_record(path: Path, unpacked: store.Unpacked) -> None:
    """Write what this and earlier runs had to restore; raises StoreError."""
    import json

    info = unpacked.info
    value = {
        "format": RECORD_FORMAT,
        "name": info.name,
        "version": info.version,
        "image": info.identity,
        "restored": store.restored(unpacked),
        "pages": {path: sorted(runs) for path, runs in sorted(store.restored_runs(unpacked).items())},
    }
    try:
        path.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise StoreError(f"can't write the record {path}: {error.strerror}") from None


def prepare_and_hold(
    host: Host, options: RunOptions, place: CachePlace, entry: tuple[str, ...]
) -> tuple[Prepared, int | None]:
    """Prepare, and keep `cache prune` away; one that came in between is made up for."""
    while True:
        prepared = prepare(host, options, place, entry)
        held = store.hold(prepared.unpacked)
        info = prepared.unpacked.info
        if held is None or store.find(place.base, info.identity, info.arch):
            return prepared, held
        os.close(held)


def prepare(host: Host, options: RunOptions, place: CachePlace, entry: tuple[str, ...] = ()) -> Prepared:
    """Unpack if need be, and plan; raises any RvbundleError of those parts."""
    image = Path(options.image)
    with Reader(image) as reader:
        refuse_cold_pack(reader)
        launch, unpacked = selection.native_launch(host), None
        if selection.may_run_natively(host, options):  # a warm start: nothing is read but the footer
            unpacked = store.find(place.base, reader.identity, host.arch)
        if unpacked is None:
            available = store.known_payloads(place.base, reader.identity)
            available = available or tuple(payload.arch for payload in reader.index().payloads)
            host, launch = choose(host, options, place, available, str(image))
            unpacked = store.find(place.base, reader.identity, launch.arch)
            unpacked = unpacked or _unpack(place, reader, launch.arch)
        cold, pack = find_cold(image, options.cold, reader.identity)
    _check_executable(unpacked.root)
    info = replace(unpacked.info, argv=entry or unpacked.info.argv)
    situation = Situation(host, launch, info, bool(pack.path))
    decision = decisions.decide(situation, planning.wanted(options), place.base)
    plan = planning.make_plan(host, str(unpacked.root), info, options, pack, launch, decision)
    return Prepared(plan, cold, place, unpacked, situation, decision)


def choose(
    host: Host, options: RunOptions, place: CachePlace, available: tuple[str, ...], image: str
) -> tuple[Host, selection.Launch]:
    """Choose among the payloads `available`, having looked for emulators if one may be needed.

    Returns the host with what was found, and the choice; raises HostError.
    """
    guests = selection.to_emulate(host, available, options)
    if guests:
        from rvbundle_runtime import emulators

        host = emulators.look(host, guests, place.base)
    return host, selection.choose_launch(host, available, options, image)


def _unpack(place: CachePlace, reader: Reader, arch: str) -> store.Unpacked:
    show = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        print(f"\rrvbundle: unpacking {done * 100 // max(total, 1):3d} %", end="", file=sys.stderr)

    try:
        return store.ensure(place.base, reader, arch, progress if show else None)
    finally:
        if show:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def cold_beside(image: Path) -> Path:
    """Return where the cold pack lies if nobody moved it: NAME.cold.rvb beside NAME.rvb or NAME.run."""
    return image.with_name(f"{image.name.removesuffix('.rvb').removesuffix('.run')}.cold.rvb")


def refuse_cold_pack(reader: Reader) -> None:
    """Raise ImageError if an image is expected and `reader` is of a cold pack."""
    if reader.bound_to:
        raise ImageError(
            f"{reader.path} is a cold pack, not an image",
            "run the .rvb file that lies beside it (the one without .cold)",
        )


def find_cold(image: Path, given: str | None, identity: str) -> tuple[Reader | None, planning.ColdPack]:
    """Open the cold pack that was named, or lies beside the image or inside its file.

    Raises ImageError only for one that was named; one of another image is never taken.
    """
    path = Path(given) if given else cold_beside(image)
    why, unusable = f"there is no {path.name} beside the image", False
    if given or path.exists():
        try:
            reader = Reader(path)
        except ImageError as error:
            if given:
                raise
            why, unusable = f"{path.name} is not usable: {error.message}", True
        else:
            if reader.bound_to == identity:
                return reader, planning.ColdPack(str(path), "named" if given else "found beside the image")
            reader.close()
            why, unusable = f"{path.name} belongs to another image", True
            if given:
                raise ImageError(why, "a cold pack fits only the image that it was built with")
    inside = cold_inside(image, identity)
    if inside:
        return inside, planning.ColdPack(str(image), "it is inside the image's file")
    return None, planning.ColdPack("", why, unusable)


def cold_inside(image: Path, identity: str) -> Reader | None:
    """Return the cold pack that stands before the image in its file (`build --cold embed`), if one does."""
    try:
        with Reader(image) as reader:
            start = reader.start
        cold = Reader(image, start) if start else None
    except ImageError:
        return None  # what stands before an image need not be a cold pack
    if cold and cold.bound_to != identity:
        cold.close()
        return None
    return cold


def _check_executable(root: Path) -> None:
    store.check_executable(root)  # a cache may be mounted noexec after it was filled
    if not (root / "usr").is_dir():
        raise HostError(f"{root} holds no programs", "the image was not made by rvbundle build")
