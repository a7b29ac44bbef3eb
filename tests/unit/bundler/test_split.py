from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rvbundle import freeze
from rvbundle.analysis import Reach
from rvbundle.freeze import Frozen, FrozenFile, module_name
from rvbundle.recipe import Recipe, Workload
from rvbundle.split import HOT_MODULES, Placed, Split, cold_list, split
from rvbundle.trace import Trace, WorkloadTrace

LIB = "usr/lib/python3.11"
SITE = f"{LIB}/site-packages"
RECIPE = Recipe(
    Path("/r/recipe.toml"),
    "demo",
    "1.0",
    "play.py",
    ("play.py",),
    "3.11",
    (),
    None,
    (Workload((), True, None, 1.0),),
    "traced",
    False,
    (),
    (),
    False,
    {},
)
NOTHING = Reach({}, {})


def file(path: str, role: str, package: str = "torch", executable: bool = False) -> FrozenFile:
    return FrozenFile(path, role, f"tree/{path}", executable, 10, "00" * 32, package)


def frozen(*files: FrozenFile, needed: Mapping[str, tuple[str, ...]] | None = None) -> Frozen:
    libdir = "usr/lib/x86_64-linux-gnu"
    return Frozen(Path("/f"), "3.11", "3.11.7", "x86_64", libdir, (), files, dict(needed or {}), ())


def opened(*workloads: tuple[str, ...]) -> Trace:
    return Trace(tuple(WorkloadTrace((), (), paths, "") for paths in workloads))


def place(
    item: FrozenFile, recipe: Recipe = RECIPE, trace: Trace | None = None, reach: Reach = NOTHING
) -> tuple[bool, str]:
    (placed,) = split(recipe, frozen(item), trace or opened(), reach).placed
    assert placed.file == item
    return placed.hot, placed.reason


BYTECODE = file(f"{SITE}/torch/nn/functional.pyc", freeze.BYTECODE)
PART = "part of every image"
TOLD = "a data file, which programs may look for at run time"
METADATA = "metadata of an installed distribution"
FOR_PEOPLE = "metadata that only installers and people read"
DUNNO = "no trace imported it, and nothing is known to import it"


@pytest.mark.parametrize(
    ("path", "role", "package", "hot", "reason"),
    [
        ("usr/bin/python3.11", freeze.PROGRAM, "", True, PART),
        ("bin", freeze.LINK, "", True, PART),
        ("app", freeze.DIRECTORY, "", True, PART),
        (f"{SITE}/_rvbundle_boot.pyc", freeze.BYTECODE, "rvbundle", True, PART),
        (f"{SITE}/00_rvbundle_boot.pth", freeze.METADATA, "rvbundle", True, PART),
        (f"{LIB}/os.pyc", freeze.BYTECODE, "", True, "the file by which Python finds its library"),
        (
            f"{SITE}/torch-2.dist-info/METADATA",
            freeze.METADATA,
            "torch",
            True,
            METADATA,
        ),
        (f"{SITE}/torch-2.dist-info/RECORD", freeze.METADATA, "torch", False, FOR_PEOPLE),
        (f"{SITE}/torch-2.dist-info/licenses/LICENSE", freeze.METADATA, "torch", False, FOR_PEOPLE),
        (f"{SITE}/torch-2.dist-info/licenses/a/b/NOTICE", freeze.METADATA, "torch", False, FOR_PEOPLE),
        (f"{SITE}/torch-2.dist-info/sboms/torch.cdx.json", freeze.METADATA, "torch", False, FOR_PEOPLE),
        (f"{SITE}/torch-2.dist-info/entry_points.txt", freeze.METADATA, "torch", True, METADATA),
        (f"{SITE}/torch-2.dist-info/RECORD.jws", freeze.METADATA, "torch", True, METADATA),
        (f"{SITE}/torch-2.dist-info/LICENSE", freeze.METADATA, "torch", True, METADATA),
        (f"{SITE}/torch-2.dist-info/x/RECORD", freeze.METADATA, "torch", True, METADATA),
        (f"{SITE}/old.egg-info/PKG-INFO", freeze.METADATA, "old", True, METADATA),
        ("usr/lib/x/libc.so.6", freeze.LIBRARY, "", True, "part of the C library"),
        ("usr/lib64/ld-linux-x86-64.so.2", freeze.LIBRARY, "", True, "part of the C library"),
        ("usr/lib/x/libgcc_s.so.1", freeze.LIBRARY, "", True, "part of the C library"),
        ("usr/lib/x/libnss_dns.so.2", freeze.LIBRARY, "", True, "part of the C library"),
        ("usr/lib/x/libcurl.so.4", freeze.LIBRARY, "", False, "no trace loaded it"),
        (f"{SITE}/torch/lib/libtorch.so", freeze.LIBRARY, "torch", False, "no trace loaded it"),
        (f"{SITE}/torch/nn/x.py", freeze.SOURCE, "torch", False, "a source: its bytecode is what runs"),
        (
            f"{SITE}/_rvbundle_boot.py",
            freeze.SOURCE,
            "rvbundle",
            False,
            "a source: its bytecode is what runs",
        ),
        (f"{SITE}/torch/nn/x.pyc", freeze.BYTECODE, "torch", False, DUNNO),
        (f"{SITE}/torch/_C.cpython-311-x86_64-linux-gnu.so", freeze.EXTENSION, "torch", False, DUNNO),
        (
            f"{SITE}/torch/lib/libtorch.so",
            freeze.TAIL,
            "torch",
            False,
            "symbol tables and debug sections: only debuggers read them",
        ),
        (f"{SITE}/gymnasium/envs/classic_control/assets/clockwise.png", freeze.DATA, "gymnasium", True, TOLD),
        (f"{SITE}/ale_py/roms/pong.bin", freeze.DATA, "ale-py", True, TOLD),
        (
            f"{SITE}/torch/bin/torch_shm_manager",
            freeze.PROGRAM,
            "torch",
            True,
            "its package checks that it is there",
        ),
        (
            f"{SITE}/torch/bin/protoc",
            freeze.PROGRAM,
            "torch",
            False,
            "a program for building and testing torch, and no trace opened it",
        ),
        (f"{SITE}/torch/include/ATen/x.inl", freeze.DATA, "torch", False, "a header, and no trace opened it"),
        (f"{SITE}/numpy/core/x.h", freeze.DATA, "numpy", False, "a header, and no trace opened it"),
        (f"{SITE}/numpy/x.pyi", freeze.DATA, "numpy", False, "a type stub, and no trace opened it"),
        (
            f"{SITE}/numpy/lib/libnpymath.a",
            freeze.DATA,
            "numpy",
            False,
            "a static library, and no trace opened it",
        ),
        (f"{SITE}/numpy/tests/data.txt", freeze.DATA, "numpy", False, "a test, and no trace opened it"),
        (f"{LIB}/test/x.txt", freeze.DATA, "", False, "a test, and no trace opened it"),
        (
            f"{LIB}/idlelib/help.html",
            freeze.DATA,
            "",
            False,
            "a program for the desktop, and no trace opened it",
        ),
        (f"{SITE}/numpy/H.H", freeze.DATA, "numpy", True, TOLD),
    ],
    ids=lambda value: (
        value.rpartition("/")[2] if isinstance(value, str) and value.startswith("usr") else None
    ),
)
def test_rules(path: str, role: str, package: str, hot: bool, reason: str) -> None:
    assert place(file(path, role, package)) == (hot, reason)


@pytest.mark.parametrize(
    ("path", "role", "more"),
    [
        (f"{SITE}/torch/nn/x.pyc", freeze.BYTECODE, "; the analysis did not find it"),
        (f"{SITE}/torch/y.pyc", freeze.BYTECODE, "; reachable: play.py → torch"),
        (f"{SITE}/torch/_C.cpython-311-x.so", freeze.EXTENSION, "; the analysis did not find it"),
        (f"{SITE}/torch/nn/x.py", freeze.SOURCE, ""),
        (f"{SITE}/torch/x.h", freeze.DATA, ""),
        ("usr/lib/x/libcurl.so.4", freeze.LIBRARY, ""),
    ],
)
def test_what_a_trace_opened_is_hot(path: str, role: str, more: str) -> None:
    reach = Reach({"torch.y": "play.py → torch"}, {})
    opened_third = opened((), ("other",), (path,), (path,))
    assert place(file(path, role), trace=opened_third, reach=reach) == (True, f"opened by trace 3{more}")


EXTRA = "opened while errors were provoked and the modules of [keep] were imported"


def test_what_was_opened_while_errors_were_provoked_is_hot() -> None:
    trace = replace(opened(("other",)), extra=(BYTECODE.path,))
    assert place(BYTECODE, trace=trace) == (True, EXTRA)
    both = replace(opened((BYTECODE.path,)), extra=(BYTECODE.path,))
    assert place(BYTECODE, trace=both)[1].startswith("opened by trace 1")


def test_what_runs_had_to_restore_is_hot() -> None:
    def place_recorded(recipe: Recipe, trace: Trace) -> tuple[bool, str]:
        recorded = frozenset({BYTECODE.path})
        (placed,) = split(recipe, frozen(BYTECODE), trace, NOTHING, recorded).placed
        return placed.hot, placed.reason

    assert place_recorded(RECIPE, opened()) == (True, "restored in a recorded run")
    assert place_recorded(RECIPE, replace(opened(), extra=(BYTECODE.path,))) == (True, EXTRA)
    assert place_recorded(replace(RECIPE, trim="none"), opened()) == (True, '[trim] level = "none"')


@pytest.mark.parametrize("name", ["RECORD", "licenses/LICENSE", "sboms/x.json"])
def test_metadata_for_people_that_is_wanted_is_hot(name: str) -> None:
    item = file(f"{SITE}/torch-2.dist-info/{name}", freeze.METADATA)
    assert place(item, trace=opened((item.path,))) == (True, "opened by trace 1")
    recipe = replace(RECIPE, keep_files=("*.dist-info/*",))
    assert place(item, recipe) == (True, "[keep] files has *.dist-info/*")


@pytest.mark.parametrize(
    "name", ["traceback", "linecache", "re._parser", "encodings.idna", "collections.abc"]
)
def test_what_python_imports_when_something_goes_wrong_is_hot(name: str) -> None:
    assert name in HOT_MODULES
    path = f"{LIB}/{name.replace('.', '/')}.pyc"
    reason = "Python imports it when something goes wrong"
    assert place(file(path, freeze.BYTECODE, "")) == (True, reason)
    assert place(file(path, freeze.SOURCE, ""))[0] is False
    other = file(f"{SITE}/{name.replace('.', '/')}.pyc", freeze.BYTECODE, "other")
    assert place(other) == (False, DUNNO)  # a distribution's module of the same name


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, False),
        ({"trim": "none"}, True),
        ({"trim": "reachable"}, False),
        ({"keep_files": ("torch/lib/*",)}, True),
        ({"keep_files": ("torch/fft/*",)}, False),
    ],
    ids=["traced", "none", "reachable", "kept", "another kept"],
)
def test_what_the_recipe_wants_whole(changes: dict[str, object], kept: bool) -> None:
    """Opened in a trace it is hot in any case, but then only its pages are."""
    item = file(f"{SITE}/torch/lib/libtorch.so", freeze.LIBRARY)
    recipe = replace(RECIPE, **changes)  # type: ignore[arg-type]
    (placed,) = split(recipe, frozen(item), opened((item.path,)), NOTHING).placed
    assert (placed.hot, placed.kept) == (True, kept)


def test_a_kept_module_is_whole() -> None:
    item = file(f"{SITE}/torch/_C.cpython-311-x86_64-linux-gnu.so", freeze.EXTENSION)
    (placed,) = split(replace(RECIPE, keep_modules=("torch._C",)), frozen(item), opened(), NOTHING).placed
    assert placed == Placed(item, True, "[keep] modules has torch._C", kept=True)


def test_what_is_part_of_every_image_is_not_kept_by_the_recipe() -> None:
    recipe = replace(RECIPE, trim="none")
    link_ = FrozenFile("bin", freeze.LINK, "", False, 0, "", "", "usr/bin")
    tail = file(f"{SITE}/x.so", freeze.TAIL)
    found = split(recipe, frozen(link_, tail), opened(), NOTHING)
    assert isinstance(found, Split)
    assert [placed.kept for placed in found.placed] == [False, False]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("torch", {"torch", "torch.nn", "torch.nn.x", "torch.fft"}),
        ("torch.nn", {"torch", "torch.nn", "torch.nn.x"}),
        ("torch.nn.x", {"torch", "torch.nn", "torch.nn.x"}),
        ("torch.*.x", {"torch", "torch.nn", "torch.nn.x"}),
        ("t*h", {"torch", "torch.nn", "torch.nn.x", "torch.fft"}),
        ("nothing", set()),
        ("nothing.at.all", {"nothing", "nothing.at"}),
    ],
)
def test_modules_matching(pattern: str, found: set[str]) -> None:
    modules = ["torch", "torch.nn", "torch.nn.x", "torch.fft", "torchvision"]
    names = freeze.modules_matching(pattern, modules)
    assert {name for name in names if "*" not in name} == found


def test_a_tail_is_cold_though_its_library_was_opened() -> None:
    path = f"{SITE}/torch/lib/libtorch.so"
    library, tail = file(path, freeze.LIBRARY), file(path, freeze.TAIL)
    placed = split(RECIPE, frozen(library, tail), opened((path,)), NOTHING).placed
    assert [p.hot for p in placed] == [True, False]


def test_a_reachable_module_that_no_trace_used() -> None:
    reach = Reach({"torch.nn.functional": "play.py → torch"}, {})
    assert place(BYTECODE, reach=reach) == (
        False,
        "no trace imported it, though it is reachable: play.py → torch",
    )


@pytest.mark.parametrize("role", [freeze.SOURCE, freeze.BYTECODE, freeze.LIBRARY, freeze.DATA])
def test_level_none_keeps_everything(role: str) -> None:
    recipe = replace(RECIPE, trim="none")
    assert place(file(f"{SITE}/torch/x.h", role), recipe) == (True, '[trim] level = "none"')


def test_level_none_leaves_symbol_tables_out() -> None:
    """No program reads them."""
    recipe = replace(RECIPE, trim="none")
    assert place(file(f"{SITE}/torch/x.so", freeze.TAIL), recipe)[0] is False


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (BYTECODE, (True, "reachable: play.py → torch")),
        (file(f"{SITE}/torch/other.pyc", freeze.BYTECODE), (False, DUNNO)),
        (file(f"{SITE}/torch/needed.h", freeze.DATA), (True, "reachable: data of torch (play.py → torch)")),
        (file(f"{SITE}/torch/other.h", freeze.DATA), (False, "a header, and no trace opened it")),
        (
            file(f"{SITE}/torch/lib/libx.so", freeze.LIBRARY),
            (True, "a library that a reachable package may load"),
        ),
        (
            file(f"{SITE}/torch.libs/libx-1.so", freeze.LIBRARY),
            (True, "a library that a reachable package may load"),
        ),
        (file(f"{SITE}/scipy.libs/libx-1.so", freeze.LIBRARY), (False, "no trace loaded it")),
        (
            file("usr/lib/x/libcurl.so.4", freeze.LIBRARY),
            (True, "a library that a reachable package may load"),
        ),
        (
            file(f"{SITE}/torch/nn/functional.py", freeze.SOURCE),
            (False, "a source: its bytecode is what runs"),
        ),
    ],
    ids=[
        "module",
        "other module",
        "data",
        "other data",
        "library",
        "vendored",
        "of another package",
        "system",
        "source",
    ],
)
def test_level_reachable(item: FrozenFile, expected: tuple[bool, str]) -> None:
    reach = Reach(
        {"torch": "play.py", "torch.nn.functional": "play.py → torch"},
        {f"{SITE}/torch/needed.h": "data of torch (play.py → torch)"},
    )
    assert place(item, replace(RECIPE, trim="reachable"), reach=reach) == expected


@pytest.mark.parametrize(
    ("pattern", "path", "kept"),
    [
        ("torch.nn", "torch/nn/functional.pyc", True),
        ("torch.nn", "torch/nn/__init__.pyc", True),
        ("torch.nn", "torch/__init__.pyc", True),  # or it could not be imported
        ("torch.nn", "torch/nnx.pyc", False),
        ("torch.nn", "torch/fft.pyc", False),
        ("torch", "torchvision/x.pyc", False),
        ("torch.*.functional", "torch/nn/functional.pyc", True),
        ("torch.f*", "torch/fft.pyc", True),
        ("torch._C", "torch/_C.cpython-311-x86_64-linux-gnu.so", True),
    ],
)
def test_keep_modules(pattern: str, path: str, kept: bool) -> None:
    role = freeze.EXTENSION if path.endswith(".so") else freeze.BYTECODE
    hot, reason = place(file(f"{SITE}/{path}", role), replace(RECIPE, keep_modules=("zzz", pattern)))
    assert hot is kept
    assert not kept or reason == f"[keep] modules has {pattern}"


def test_keep_modules_with_a_glob_keeps_what_they_need_to_be_imported() -> None:
    """torch.nn.functional can't be imported without torch and torch.nn."""
    recipe = replace(RECIPE, keep_modules=("torch.*.functional",))
    files = [
        file(f"{SITE}/torch/{name}.pyc", freeze.BYTECODE)
        for name in ("__init__", "nn/__init__", "nn/functional")
    ]
    assert [p.hot for p in split(recipe, frozen(*files), opened(), NOTHING).placed] == [True, True, True]


def test_keep_modules_leaves_sources_alone() -> None:
    assert not place(file(f"{SITE}/torch/nn/x.py", freeze.SOURCE), replace(RECIPE, keep_modules=("torch",)))[
        0
    ]


@pytest.mark.parametrize(
    ("pattern", "path", "kept"),
    [
        ("torch/nn/*.py", f"{SITE}/torch/nn/x.py", True),
        ("*.py", f"{SITE}/torch/nn/x.py", True),
        ("torch/nn/*.py", f"{SITE}/torch/fft/x.py", False),
        (f"{SITE}/torch/*", f"{SITE}/torch/fft/x.py", True),
        ("json/*.py", f"{LIB}/json/decoder.py", True),
        ("usr/lib/*/libcurl*", "usr/lib/x/libcurl.so.4", True),
    ],
)
def test_keep_files(pattern: str, path: str, kept: bool) -> None:
    role = freeze.SOURCE if path.endswith(".py") else freeze.LIBRARY
    hot, reason = place(file(path, role), replace(RECIPE, keep_files=(pattern,)))
    assert hot is kept
    assert not kept or reason == f"[keep] files has {pattern}"


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        ("torch/nn/functional.pyc", "torch.nn.functional"),
        ("torch/__init__.pyc", "torch"),
        ("torch/_C.cpython-311-x86_64-linux-gnu.so", "torch._C"),
        ("six.py", "six"),
    ],
)
def test_module_name(inner: str, name: str) -> None:
    assert module_name(inner) == name


def listed(*rows: tuple[str, str, bool], needed: Mapping[str, tuple[str, ...]] | None = None) -> str:
    """Return cold.txt for files given as (path below site-packages, role, hot)."""
    files = [
        (file(path if path.startswith("usr/") else f"{SITE}/{path}", role), hot) for path, role, hot in rows
    ]
    return cold_list(
        frozen(*(f for f, _ in files), needed=needed), tuple(Placed(f, hot, "") for f, hot in files)
    )


B, S, X, D = freeze.BYTECODE, freeze.SOURCE, freeze.EXTENSION, freeze.DATA


def test_nothing_is_cold() -> None:
    assert listed(("a.pyc", B, True), ("a.txt", D, True)) == ""


def test_cold_modules_and_packages() -> None:
    text = listed(
        ("pkg/__init__.pyc", B, False),
        ("pkg/__init__.py", S, False),
        ("pkg/inner.pyc", B, False),
        ("pkg/inner.py", S, False),
        ("pkg/warm.pyc", B, True),
        ("mod.pyc", B, False),
        ("hot/__init__.pyc", B, True),
        ("hot/late.pyc", B, False),
        ("hot/data.bin", D, False),
        ("hot/kept.bin", D, True),
        ("broken.py", S, False),
    )
    assert text == (
        f"D {SITE}\ny broken\ns mod\np pkg\n"
        + f"D {SITE}/hot\ns late\nd data.bin\n"
        + f"D {SITE}/pkg\ns inner\n"
    )


def test_cold_sources_of_hot_bytecode_are_not_listed() -> None:
    assert listed(("a.pyc", B, True), ("a.py", S, False)) == ""


def test_extension_with_the_cold_libraries_that_it_needs() -> None:
    text = listed(
        ("ext.cpython-311-x86_64-linux-gnu.so", X, False),
        ("usr/lib/x/liba.so", freeze.LIBRARY, False),
        ("usr/lib/x/libb.so", freeze.LIBRARY, True),
        ("usr/lib/x/libc.so", freeze.LIBRARY, False),
        needed={
            f"{SITE}/ext.cpython-311-x86_64-linux-gnu.so": ("usr/lib/x/libb.so",),
            "usr/lib/x/libb.so": ("usr/lib/x/libc.so", "usr/lib/x/libb.so"),
            "usr/lib/x/libc.so": ("usr/lib/x/libb.so", "usr/lib/x/liba.so"),
        },
    )
    assert (
        text == f"D {SITE}\nx ext ext.cpython-311-x86_64-linux-gnu.so usr/lib/x/liba.so usr/lib/x/libc.so\n"
    )


def test_the_winner_of_one_name_decides() -> None:
    """Python's order in a folder: package, extension module, source or bytecode."""
    package, extension, module = ("m/__init__.pyc", B), ("m.cpython-311-x.so", X), ("m.pyc", B)
    assert listed((*package, False), (*extension, True), (*module, True)) == f"D {SITE}\np m\n"
    assert listed((*package, True), (*extension, False), (*module, False)) == ""
    assert listed((*extension, False), (*module, True)) == f"D {SITE}\nx m m.cpython-311-x.so\n"
    assert listed((*extension, True), (*module, False)) == ""


@pytest.mark.parametrize("name", ["_sysconfigdata__linux_x86_64-linux-gnu", "1st"])
def test_what_no_import_statement_can_name_but_import_can(name: str) -> None:
    assert listed((f"{name}.pyc", B, False)) == f"D {SITE}\ns {name}\n"


def test_what_the_lists_words_can_not_name() -> None:
    assert listed(("a b.pyc", B, False)) == ""


def test_a_folder_of_data_alone_is_a_package_too() -> None:
    """numpy's own tests import numpy._core.include, which holds but headers."""
    assert listed(("pkg/__init__.pyc", B, True), ("pkg/include/a.h", D, False)) == (
        f"D {SITE}/pkg\nn include\nD {SITE}/pkg/include\nd a.h\n"
    )


def test_names_with_spaces_and_line_ends() -> None:
    assert listed(("a b.txt", D, False), ("a\nb.txt", D, False)) == f"D {SITE}\nd a b.txt\n"


def test_an_extension_may_be_a_packages_init() -> None:
    """Cython can compile __init__: the finder must not take its .so for bytecode."""
    assert listed(("pkg/__init__.cpython-311-x.so", X, False)) != f"D {SITE}\ns pkg\n"


def test_tails_and_links_are_not_listed() -> None:
    assert listed(("a.so", freeze.TAIL, False), ("l", freeze.LINK, True)) == ""


def test_cold_metadata_is_listed() -> None:
    """importlib.metadata looks for it."""
    text = listed(
        ("a-1.dist-info/RECORD", freeze.METADATA, False),
        ("a-1.dist-info/METADATA", freeze.METADATA, True),
        ("a-1.dist-info/licenses/LICENSE", freeze.METADATA, False),
        ("a-1.dist-info/licenses/NO\nTICE", freeze.METADATA, False),
    )
    assert text == f"D {SITE}/a-1.dist-info\nd RECORD\nD {SITE}/a-1.dist-info/licenses\nd LICENSE\n"


def test_the_list_does_not_depend_on_the_order_of_files() -> None:
    rows = [("b.pyc", B, False), ("a/__init__.pyc", B, False), ("a/x.pyc", B, False), ("a/d.txt", D, False)]
    assert listed(*rows) == listed(*reversed(rows))


@pytest.mark.parametrize(
    ("name", "hot"),
    [("blas/libblas.so.3", True), ("lapack/liblapack.so.3", True), ("other/libblas.so.3", False)],
)
def test_the_reference_blas_is_there_whatever_was_traced(name: str, hot: bool) -> None:
    found = place(file(f"usr/lib/x86_64-linux-gnu/{name}", freeze.LIBRARY))
    assert found == ((True, "a run may choose the reference BLAS") if hot else (False, "no trace loaded it"))
