"""Backends: which BLAS library and kernels, CPU capability, precision and threads a run takes. Pure.

The candidates are data (backends.toml). `choose` takes the first row that fits, or what was measured before
(`tuning.py`), or what the command line says; each part of a decision has its reason.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rvbundle_runtime import families, kernels, machine, nativefiles
from rvbundle_runtime import table as table_file
from rvbundle_runtime.choice import Choice
from rvbundle_runtime.decision import Decision, Situation, Wanted
from rvbundle_runtime.errors import HostError, UsageError
from rvbundle_runtime.families import Family
from rvbundle_runtime.host import Host
from rvbundle_runtime.knownbad import known_bad
from rvbundle_runtime.machine import Model
from rvbundle_runtime.options import AUTO, BF16, FLOAT32
from rvbundle_runtime.processor import Processor

PASSIVE = "passive"
TORCH_VARIABLE = "RVBUNDLE_TORCH"  # settings of torch, for the guest's import finder: NAME=VALUE;...


@dataclass(frozen=True)
class Backend:
    """A row of the table: conditions, and what is set where it is chosen.

    `needs` are features that the processor must have, `needs_any` of which it must have one; `family` the
    kernels that it uses, with conditions of their own ("": any, traced or not); `library` the BLAS of a
    payload that has several. `env` are variables of the guest, `emulator_env` of the emulator, `torch`
    settings {name below `torch`: value}; `processor` is the one that an emulator shows. With `native_blas`
    the machine itself multiplies an emulated program's matrices (docs/emulation.md).
    """

    name: str
    arch: str
    launchers: tuple[str, ...]
    reason: str
    source: str
    processor: str = ""
    family: str = ""
    library: str = ""
    needs: tuple[str, ...] = ()
    needs_any: tuple[str, ...] = ()
    precision: str = FLOAT32
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    emulator_env: Mapping[str, str] = field(default_factory=dict, hash=False)
    torch: Mapping[str, str] = field(default_factory=dict, hash=False)
    native_blas: bool = False


@dataclass(frozen=True)
class Threads:
    """A row of the table: how many threads ("2", "half" or "all" of the processors), how they wait."""

    count: str
    wait: str = ""

    def number(self, usable: int) -> int:
        """Return how many threads these are where `usable` processors may be used."""
        shares = {"half": usable // 2, "all": usable}
        return shares[self.count] if self.count in shares else int(self.count)


@dataclass(frozen=True)
class Table:
    """What backends.toml says, in its order; `processors` {(emulator, name): model}."""

    backends: tuple[Backend, ...]
    processors: Mapping[tuple[str, str], Model]
    threads: tuple[Threads, ...]


def load_table() -> Table:
    """Read backends.toml; raises ValueError naming the row that is wrong."""
    return make_table(table_file.read(), machine.processors())


def make_table(value: Mapping[str, Any], processors: Mapping[tuple[str, str], Model]) -> Table:
    """Make sense of what backends.toml says; raises ValueError naming the row that is wrong."""
    backends = tuple(_backend(row) for row in value["backend"])
    threads = tuple(_made(Threads, "threads", row) for row in value["threads"])
    for backend in backends:
        for launcher in backend.launchers:
            if launcher != "native" and (launcher, backend.processor) not in processors:
                raise ValueError(f"backend {backend.name}: no processor {backend.processor!r} of {launcher}")
    return Table(backends, processors, threads)


def _backend(row: dict[str, Any]) -> Backend:
    lists: dict[str, Any] = {n: tuple(row[n]) for n in ("launchers", "needs", "needs_any") if n in row}
    made: Backend = _made(Backend, f"backend {row.get('name')}", {**row, **lists})
    if made.precision not in (FLOAT32, BF16):
        raise ValueError(f"backend {made.name}: precision {made.precision!r}")
    if made.native_blas and "native" in made.launchers:
        raise ValueError(f"backend {made.name}: native_blas is for emulators")
    return made


def _made(kind: Callable[..., Any], what: str, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{what}: {error}") from None


def rows(table: Table, situation: Situation) -> tuple[Backend, ...]:
    """Return the rows for this payload and launcher, in their order.

    What the image has traced and no row names (it was built with another table) comes behind them.
    """
    launch = situation.launch
    found = [b for b in table.backends if b.arch == launch.arch and launch.launcher in b.launchers]
    known = {row.family for row in found}
    for family in situation.info.families:
        if found and family.name not in known:
            found.append(replace(_TRACED, name=family.name, arch=launch.arch, family=family.name))
            found[-1] = replace(found[-1], launchers=(launch.launcher,), processor=found[0].processor)
    return tuple(found)


_TRACED = Backend("", "", (), "the image has its kernels", "the image's index")


def fitting(table: Table, situation: Situation) -> tuple[Backend, ...]:
    """Return the rows that can be taken, in their order."""
    return tuple(row for row in rows(table, situation) if not why_not(table, row, situation))


def why_not(table: Table, row: Backend, situation: Situation) -> str:
    """Return why a row can't be taken in this situation; "" if it can."""
    processor = _processor(table, row, situation)
    has = "the emulated processor has" if _model(table, row, situation) else "this processor has"
    missing = sorted(set(row.needs) - processor.flags)
    if missing:
        return f"{has} no {', '.join(missing)}"
    if row.needs_any and not processor.flags.intersection(row.needs_any):
        return f"{has} none of {', '.join(row.needs_any)}"
    return (
        _why_not_native_blas(row, situation)
        or _why_not_traced(row, situation, processor)
        or _why_not_library(row, situation, processor)
    )


def _why_not_native_blas(row: Backend, situation: Situation) -> str:
    for arch, name in (
        (situation.host.arch, nativefiles.BLAS_WORKER),
        (situation.launch.arch, nativefiles.BLAS),
    ):
        if row.native_blas and not nativefiles.path(arch, name):
            return f"this installation of rvbundle has no {name} for {arch}"
    return ""


def _why_not_library(row: Backend, situation: Situation, processor: Processor) -> str:
    blas = situation.info.blas
    if not row.family and not row.library:
        return kernels.chooses_wrongly(row.arch, processor, blas)
    if row.library and row.library not in blas and (blas or not row.family):
        return f"the payload has no {row.library} BLAS"
    return known_bad(row.library, blas.get(row.library, ""), row.family, processor.vlen)


_NOT_TRACED = "its kernels were not traced, and the cold pack is not here"


def _why_not_traced(row: Backend, situation: Situation, processor: Processor) -> str:
    """Without a cold pack, kernels that no trace touched are not there."""
    traced = situation.info.families
    if not traced or situation.cold:
        family = _family(row, situation)
        return families.lacks(family, processor) if family else ""
    family = next((family for family in traced if family.name == row.family), None)
    if family is None:
        return _NOT_TRACED
    return families.why_not(family, processor)


def _family(row: Backend, situation: Situation) -> Family | None:
    """Return the family of a row: as it was traced, or for a payload that is whole as families.py has it."""
    known = (*situation.info.families, *families.of(row.arch))
    return next((family for family in known if family.name == row.family), None)


def _model(table: Table, row: Backend, situation: Situation) -> Model | None:
    launch = situation.launch
    return None if launch.native else launch.told or table.processors[launch.launcher, row.processor]


def _processor(table: Table, row: Backend, situation: Situation) -> Processor:
    """Return the processor that the payload's libraries will see."""
    model = _model(table, row, situation)
    return model.processor if model else situation.host.processor


@dataclass(frozen=True)
class Setting:
    """How many threads (0: as the libraries choose), and how they wait ("" or PASSIVE)."""

    threads: int = 0
    wait: str = ""


def choose(table: Table, situation: Situation, wanted: Wanted, found: Decision | None = None) -> Decision:
    """Choose a backend: what `wanted` says, else what was `found` before, else the first row that fits.

    Raises UsageError for a backend or precision that there is none of, HostError for what can't be here.
    """
    _check_names(table, situation, wanted)
    row, why = _choose_row(table, situation, wanted, found)
    setting, why_threads = _choose_threads(situation.host, wanted, found)
    why_precision = _why_precision(table, situation, wanted, row)
    made = settle(table, situation, row, setting)
    choices = (
        Choice("backend", row.name if row else "any", why, warn=row is None),
        Choice("threads", _thread_words(setting, situation.host), why_threads),
        Choice("precision", made.precision, why_precision),
    )
    return replace(made, choices=choices, measured=bool(found and found.measured and wanted.nothing))


def _check_names(table: Table, situation: Situation, wanted: Wanted) -> None:
    names = [row.name for row in rows(table, situation)]
    if wanted.backend not in (None, AUTO, *names):
        launch = situation.launch
        how = "" if launch.native else f" on {launch.launcher}"
        raise UsageError(
            f"run: --backend {wanted.backend}: expected {AUTO} or one of {', '.join(names)} "
            f"(those for a payload of {launch.arch}{how})"
        )


def _choose_row(
    table: Table, situation: Situation, wanted: Wanted, found: Decision | None
) -> tuple[Backend | None, str]:
    """Return the row, or None where no row fits (then nothing is set), and why."""
    if wanted.backend not in (None, AUTO):
        row = next(row for row in rows(table, situation) if row.name == wanted.backend)
        refusal = why_not(table, row, situation)
        if not refusal and wanted.precision in (FLOAT32, BF16) and row.precision != wanted.precision:
            refusal = f"its precision is {row.precision}, and --precision says {wanted.precision}"
        if refusal:
            raise HostError(
                f"--backend {row.name} can't be had: {refusal}", "leave that option out, or see `explain`"
            )
        return row, "--backend says so"
    precision = wanted_precision(situation, wanted)
    if found and (found.precision == precision or precision == AUTO):
        known = next((row for row in rows(table, situation) if row.name == found.backend), None)
        if known and not why_not(table, known, situation):
            return known, found.choices[0].reason
    refused: list[str] = []
    for row in _in_order(rows(table, situation), precision):
        why = why_not(table, row, situation)
        if not why:
            first = "without a cold pack only kernels that were traced" if _held(situation) else row.reason
            return row, "; ".join([first, *refused])
        if row.precision == FLOAT32 and why != _NOT_TRACED:
            refused.append(f"not {row.name}: {why}")
    return None, f"none that were traced fit: {'; '.join(refused)}"


def _held(situation: Situation) -> bool:
    return bool(situation.info.families) and not situation.cold and situation.launch.native


def _in_order(found: Iterable[Backend], precision: str) -> list[Backend]:
    """Return rows in the order in which they are tried: bf16 first where it is asked for, else never."""
    float32 = [row for row in found if row.precision == FLOAT32]
    return [*(row for row in found if row.precision == BF16), *float32] if precision == BF16 else float32


def wanted_precision(situation: Situation, wanted: Wanted) -> str:
    """Return the precision asked for: by the command line, else by the recipe."""
    return wanted.precision or situation.info.precision


def _why_precision(table: Table, situation: Situation, wanted: Wanted, row: Backend | None) -> str:
    who = "--precision" if wanted.precision else "the recipe"
    precision = wanted_precision(situation, wanted)
    if row and row.precision == BF16:
        if wanted.backend == row.name:
            return "that backend's"
        return f"{who} says so" if precision == BF16 else "measured: right, and at least 10 % faster"
    if precision == FLOAT32:
        return f"{who} says so" if wanted.precision else "the recipe asks for nothing else"
    rest = [row for row in rows(table, situation) if row.precision == BF16]
    why = next((why_not(table, row, situation) for row in rest), "no library has it for this architecture")
    if why:
        return f"{who} says {precision}, but {why}"
    return f"{who} says {precision}: bf16 is taken once `rvbundle tune` has found it right and 10 % faster"


def _choose_threads(host: Host, wanted: Wanted, found: Decision | None) -> tuple[Setting, str]:
    if wanted.threads is not None:
        return Setting(wanted.threads), "--threads says so"
    if found and found.measured and wanted.backend in (None, AUTO):
        return Setting(found.threads, found.wait), found.choices[1].reason
    return default_threads(host)


def default_threads(host: Host) -> tuple[Setting, str]:
    """Return how many threads are sound without a measurement, and why.

    More of them than there is time for wait for each other; and a product that is split evenly among cores
    of different speed is done when the slowest is.
    """
    usable = len(host.usable)
    if host.quota is not None and host.quota < usable:
        return Setting(max(1, int(host.quota))), f"the control group gives the time of {host.quota:g}"
    fast = len(_fast_cores(host) & set(host.usable))
    if 0 < fast < usable:
        return Setting(fast), f"the fast ones of {usable}: threads wait for the slowest"
    return Setting(), "each library starts one for each processor that may be used"


def _fast_cores(host: Host) -> set[int]:
    """Return the cores that are at least half as fast as the fastest, as far as the kernel tells."""
    if not host.clusters:
        return set()
    if host.arch == "x86_64":  # it tells the kinds apart, the fast one first, and no capacities
        return set(host.clusters[0].cpus)
    most = max(cluster.capacity for cluster in host.clusters)
    return {cpu for cluster in host.clusters if cluster.capacity * 2 >= most for cpu in cluster.cpus}


def _thread_words(setting: Setting, host: Host) -> str:
    count = str(setting.threads or len(host.usable))
    return f"{count}, passive" if setting.wait else count


def settle(table: Table, situation: Situation, row: Backend | None, setting: Setting) -> Decision:
    """Return all that follows from a row and threads; the variables that the guest and the emulator get."""
    env: dict[str, str] = {}
    if setting.threads:
        env |= dict.fromkeys(_THREAD_VARIABLES, str(setting.threads))
    if setting.wait:
        env["OMP_WAIT_POLICY"] = setting.wait.upper()
    if row is None:
        model = _first_model(table, situation)
        return Decision(threads=setting.threads, wait=setting.wait, env=env, model=model)
    family = _family(row, situation) if row.family else None
    if family:
        env |= families.environment(family, _processor(table, row, situation))
    env |= row.env
    if row.torch:
        env[TORCH_VARIABLE] = ";".join(f"{name}={value}" for name, value in sorted(row.torch.items()))
    return Decision(
        backend=row.name,
        precision=row.precision,
        threads=setting.threads,
        wait=setting.wait,
        env=env,
        emulator_env=dict(row.emulator_env),
        library=row.library,
        model=_model(table, row, situation),
        native_blas=row.native_blas,
    )


# OpenMP (torch), MKL (torch's wheels), OpenBLAS with threads of its own (numpy's wheels, Debian's pthread).
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _first_model(table: Table, situation: Situation) -> Model | None:
    found = rows(table, situation)
    return _model(table, found[0], situation) if found else None


def thread_settings(table: Table, host: Host) -> tuple[Setting, ...]:
    """Return the different settings of threads to measure on `host`, in the table's order."""
    usable = len(host.usable)
    quota = usable if host.quota is None else min(usable, max(1, int(host.quota)))
    found: dict[Setting, None] = {}
    for row in table.threads:
        number = row.number(quota)
        if 1 <= number <= quota and not (number == 1 and row.wait):
            found.setdefault(Setting(number, row.wait))
    return tuple(found)
