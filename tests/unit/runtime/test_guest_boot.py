"""The import finder, run as in a payload: a tree with its own prefix, and a pager at the other end."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rvbundle_runtime
from rvbundle.freeze import Frozen, FrozenFile
from rvbundle.split import Placed, cold_list
from rvbundle_runtime.image import Reader
from rvbundle_runtime.pager import Pager

from ..images import ARCH, build, item

PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
BOOT = Path(rvbundle_runtime.__file__).parent / "guest/_rvbundle_boot.py"
WAYS_OUT = (
    "keep it in the image with [keep] in the recipe or with a [[trace]] that uses it, "
    "or put the cold pack (.cold.rvb) beside the image"
)
NOT_HERE = "no trace used it, and the cold pack is not here"

_LAYOUT = """
import json, sys, sysconfig
print(json.dumps(["python%d.%d" % sys.version_info[:2], sysconfig.get_path("stdlib")]))
"""
NAME, STDLIB = json.loads(subprocess.run([PYTHON, "-c", _LAYOUT], capture_output=True, check=True).stdout)
LIB = f"usr/lib/{NAME}"
SITE = f"{LIB}/site-packages"

# Compiled with the names that sources have in the sandbox, wherever the tree lies.
HOT = {
    f"{SITE}/hotmod.py": (
        "VALUE = 1\ndef fail():\n    raise KeyError('inside')\n"
        "if __name__ == '__main__':\n    print('main')\n"
    ),
    f"{SITE}/hotpkg/__init__.py": "from . import sub\n",
    f"{SITE}/hotpkg/sub.py": "VALUE = 2\n",
    f"{SITE}/hotpkg/__main__.py": "print('package main')\n",
    f"{SITE}/mixed/__init__.py": "",
    f"{LIB}/colorsys.py": "VALUE = 'sourceless'\n",
    f"{SITE}/torch/__init__.py": "from . import backends\n",
    f"{SITE}/torch/backends.py": "class mkldnn:\n    enabled = True\n    precision = 'none'\n",
}
COLD = {
    f"{SITE}/coldmod.py": "'''Doc.'''\nVALUE = 3\ndef function():\n    return 'text'\n",
    f"{SITE}/coldpkg/__init__.py": "from .inner import VALUE\n",
    f"{SITE}/coldpkg/inner.py": "VALUE = 4\n",
    f"{SITE}/mixed/late.py": "VALUE = 5\n",
    f"{SITE}/nspkg/deep/mod.py": "VALUE = 6\n",
}
COLD_TXT = f"""\
D {SITE}
p coldpkg
s coldmod
y badmod
x extmod extmod.so usr/lib/libanswer.so
s ghost
D {SITE}/coldpkg
s inner
d data.txt
D {SITE}/mixed
s late
d more.txt
D {SITE}/demo-1.0.dist-info
d RECORD
D {SITE}/demo-1.0.dist-info/licenses
d LICENSE
"""
RECORD = "hotmod.py,,\ndemo-1.0.dist-info/RECORD,,\n"
EARLY = ("__init__", "aliases", "utf_8", "utf_8_sig", "latin_1", "ascii")  # of encodings
_COMPILE = """
import importlib.util, json, marshal, sys
for path, text, place in json.load(sys.stdin):
    with open(place, "wb") as file:
        code = compile(text, "/" + path, "exec", dont_inherit=True)
        file.write(importlib.util.MAGIC_NUMBER + b"\\x01\\0\\0\\0" + bytes(8) + marshal.dumps(code))
"""
_EXTENSION = """
struct {
    long refcnt; void *type, *init; long index; void *copy; const char *name, *doc; long size; void *rest[5];
} definition = {1, 0, 0, 0, 0, "extmod", 0, -1, {0}};
extern void *PyModule_Create2(void *, int);
extern int PyModule_AddIntConstant(void *, const char *, long);
extern int answer(void);
void *PyInit_extmod(void) {
    void *module = PyModule_Create2(&definition, 1013);
    PyModule_AddIntConstant(module, "VALUE", answer());
    return module;
}
"""


@dataclass(frozen=True)
class Material:
    """What trees are made of: bytecode by path of its source, two shared libraries, a cold pack."""

    bytecode: dict[str, bytes]
    pack: Path


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("material")
    early = {f"{LIB}/encodings/{n}.py" for n in EARLY}
    sources = {**HOT, **COLD}
    early |= {f"{LIB}/importlib/metadata/{p.name}" for p in Path(STDLIB, "importlib/metadata").glob("*.py")}
    sources |= {p: Path(STDLIB, p.removeprefix(f"{LIB}/")).read_text() for p in early}
    jobs = [[path, text, f"{folder}/{n}.pyc"] for n, (path, text) in enumerate(sources.items())]
    subprocess.run([PYTHON, "-c", _COMPILE], input=json.dumps(jobs).encode(), check=True)
    bytecode = {path: Path(place).read_bytes() for path, _, place in jobs}
    (folder / "answer.c").write_text("int answer(void) { return 42; }\n")
    (folder / "ext.c").write_text(_EXTENSION)
    gcc = ["gcc", "-shared", "-fPIC", "-O1", "-o"]
    subprocess.run([*gcc, folder / "libanswer.so", folder / "answer.c"], check=True)
    rpath = "-Wl,--enable-new-dtags,-rpath,$ORIGIN/../.."
    linked = ["extmod.so", "ext.c", "-L.", "-lanswer", rpath]
    subprocess.run([*gcc, *linked], cwd=folder, check=True)
    items = [item(f"{path}c", bytecode[path]) for path in COLD]
    items += [item(path, text.encode()) for path, text in {**COLD, **HOT}.items()]
    items += [
        item(f"{SITE}/badmod.py", b"VALUE = 7\n"),
        item(f"{SITE}/coldpkg/data.txt", b"cold data\n"),
        item(f"{SITE}/mixed/more.txt", b"more data\n"),
        item(f"{SITE}/demo-1.0.dist-info/RECORD", RECORD.encode()),
        item(f"{SITE}/demo-1.0.dist-info/licenses/LICENSE", b"do as you like\n"),
        item(f"{SITE}/extmod.so", (folder / "extmod.so").read_bytes()),
        item("usr/lib/libanswer.so", (folder / "libanswer.so").read_bytes()),
    ]
    build(folder / "x.cold.rvb", items, bound_to="ab" * 32)
    return Material(bytecode, folder / "x.cold.rvb")


@dataclass(frozen=True)
class Tree:
    """A payload's tree and what runs in it."""

    root: Path
    address: str

    def run(
        self, code: str, *words: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        variables = {
            "PYTHONHOME": f"{self.root}/usr",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            "LANG": "C.UTF-8",
            "RVBUNDLE_PAGER": self.address,
        }
        command = [PYTHON, *(words or ("-c", textwrap.dedent(code)))]
        return subprocess.run(
            command, env={**variables, **(env or {})}, capture_output=True, text=True, check=False
        )

    def value(self, code: str) -> object:
        """Return what `code` prints with `show(value)`."""
        done = self.run(
            "import json\ndef show(value):\n    print(json.dumps(value))\n" + textwrap.dedent(code)
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)


def make_tree(root: Path, material: Material) -> Tree:
    lib, site = root / LIB, root / SITE
    site.mkdir(parents=True)
    for name in os.listdir(STDLIB):
        if name not in ("site-packages", "encodings", "colorsys.py", "importlib"):
            (lib / name).symlink_to(Path(STDLIB, name))
    (lib / "importlib").mkdir()
    for name in os.listdir(f"{STDLIB}/importlib"):
        if name not in ("metadata", "__pycache__"):
            (lib / "importlib" / name).symlink_to(Path(STDLIB, "importlib", name))
    for path, data in material.bytecode.items():
        if path not in COLD:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / f"{path}c").write_bytes(data)
    shutil.copy(BOOT, site)
    (site / "00_rvbundle_boot.pth").write_text("import _rvbundle_boot\n")
    (site / "demo-1.0.dist-info").mkdir()
    (site / "demo-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    (root / "usr/lib/rvbundle").mkdir()
    (root / "usr/lib/rvbundle/cold.txt").write_text(COLD_TXT)
    return Tree(root, f"{root}/nothing")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, material: Material) -> Tree:
    """A tree without a cold pack, which no test changes."""
    return make_tree(tmp_path_factory.mktemp("payload") / "root", material)


@pytest.fixture
def own(tmp_path: Path, material: Material) -> Tree:
    """A tree without a cold pack that a test may change."""
    return make_tree(tmp_path / "root", material)


@pytest.fixture
def paged(own: Tree, material: Material) -> Iterator[Tree]:
    """A tree with a cold pack at hand."""
    place = tempfile.mkdtemp(prefix="rv", dir="/tmp")  # tmp_path may be too long for a socket
    with Reader(material.pack) as reader:
        Pager(reader, ARCH, str(own.root)).listen(f"{place}/pager")
        yield Tree(own.root, f"{place}/pager")
    shutil.rmtree(place)


def denied(name: str, reason: str = NOT_HERE) -> str:
    return f"{name} was left out of this image ({reason}): {WAYS_OUT}"


def test_the_tree_is_the_prefix(tree: Tree) -> None:
    assert tree.value("import sys, _rvbundle_boot as b; show([sys.base_prefix, b._BASE])") == [
        f"{tree.root}/usr",
        f"{tree.root}/",
    ]


def test_hot_modules_look_as_they_would_with_sources(tree: Tree) -> None:
    site = f"{tree.root}/{SITE}"
    code = """
        import hotmod, hotpkg, hotpkg.sub
        show([hotmod.__file__, hotmod.__spec__.origin, hotmod.VALUE, hotmod.fail.__code__.co_filename,
              hotpkg.__file__, hotpkg.__path__, hotpkg.sub.__file__, hotpkg.sub.VALUE, hotmod.__package__])
    """
    assert tree.value(code) == [
        f"{site}/hotmod.py",
        f"{site}/hotmod.py",
        1,
        f"{site}/hotmod.py",
        f"{site}/hotpkg/__init__.py",
        [f"{site}/hotpkg"],
        f"{site}/hotpkg/sub.py",
        2,
        "",
    ]


def test_cached_names_the_usual_place(tree: Tree) -> None:
    code = """
        import hotmod, importlib.util as u
        show(hotmod.__spec__.cached == u.cache_from_source(hotmod.__file__))
    """
    assert tree.value(code) is True


def test_standard_library_without_sources(tree: Tree) -> None:
    code = "import colorsys; show([colorsys.VALUE, colorsys.__file__])"
    assert tree.value(code) == ["sourceless", f"{tree.root}/{LIB}/colorsys.py"]


def test_what_was_imported_before_the_finder(tree: Tree) -> None:
    code = """
        import encodings, encodings.utf_8, os
        show([encodings.__file__, encodings.__spec__.origin, encodings.utf_8.__file__, os.__file__,
              type(encodings.__loader__).__name__, encodings.__spec__.loader is encodings.__loader__])
    """
    lib = f"{tree.root}/{LIB}"
    assert tree.value(code) == [
        f"{lib}/encodings/__init__.py",
        f"{lib}/encodings/__init__.py",
        f"{lib}/encodings/utf_8.py",
        f"{lib}/os.py",
        "PayloadLoader",
        True,
    ]


def test_what_does_not_exist(tree: Tree) -> None:
    code = """
        try:
            import nothing_of_this_name
        except ModuleNotFoundError as error:
            show([str(error), error.name])
    """
    assert tree.value(code) == ["No module named 'nothing_of_this_name'", "nothing_of_this_name"]


def test_settings_of_torch(tree: Tree) -> None:
    """The backend's settings are there once torch is imported; one that this version lacks is told of."""
    settings = "backends.mkldnn.enabled=False;backends.mkldnn.precision=bf16;backends.mkldnn.typo=1"
    code = "import torch; m = torch.backends.mkldnn; print(m.enabled, m.precision, hasattr(m, 'typo'))"
    done = tree.run(code, env={"RVBUNDLE_TORCH": settings})
    assert done.stdout == "False bf16 False\n"
    assert done.stderr.startswith("rvbundle: torch.backends.mkldnn.typo can't be 1, it stays as it is: ")
    assert tree.run(code).stdout == "True none False\n"


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("coldmod", "coldmod.py"),
        ("coldpkg", "coldpkg/__init__.py"),
        ("mixed.late", "mixed/late.py"),
        ("badmod", "badmod.py"),
        ("extmod", "extmod.so"),
    ],
)
def test_cold_module_without_a_pack(tree: Tree, module: str, file: str) -> None:
    code = f"""
        for _ in range(2):
            try:
                import {module}
            except ModuleNotFoundError:
                print("must not look like a missing package")
            except ImportError as error:
                print(error, error.name, error.path, sep="|")
    """
    done = tree.run(code)
    path = f"{tree.root}/{SITE}/{file}"
    assert done.stdout == f"{denied(module)}|{module}|{path}\n" * 2
    assert done.stderr == f"rvbundle: {denied(module)}\n"  # once
    assert done.returncode == 0


def test_cold_modules_with_a_pack(paged: Tree) -> None:
    code = """
        import coldmod, coldpkg, mixed.late, badmod
        show([coldmod.VALUE, coldmod.__file__, coldpkg.VALUE, coldpkg.__path__, mixed.late.VALUE,
              badmod.VALUE])
    """
    site = f"{paged.root}/{SITE}"
    assert paged.value(code) == [3, f"{site}/coldmod.py", 4, [f"{site}/coldpkg"], 5, 7]
    restored = {p.name for p in Path(site).rglob("*") if p.is_file()}
    assert {"coldmod.pyc", "inner.pyc", "late.pyc", "badmod.py"} <= restored
    assert "coldmod.py" not in restored  # nobody asked for the source


def test_what_was_restored_needs_no_pack(paged: Tree, own: Tree) -> None:
    assert paged.value("import coldpkg; show(coldpkg.VALUE)") == 4
    assert own.value("import coldpkg; show(coldpkg.VALUE)") == 4


def test_cold_extension_and_its_library(paged: Tree) -> None:
    code = "import extmod; show([extmod.VALUE, extmod.__file__])"
    assert paged.value(code) == [42, f"{paged.root}/{SITE}/extmod.so"]
    assert (paged.root / "usr/lib/libanswer.so").exists()


def test_cold_modules_can_be_found_without_a_pack(tree: Tree) -> None:
    code = """
        import importlib.util as u
        show([u.find_spec(n) is not None for n in ("coldmod", "coldpkg", "badmod", "extmod", "nothing")])
    """
    assert tree.value(code) == [True, True, True, True, False]


def test_iter_modules_lists_both(tree: Tree) -> None:
    code = f"""
        import pkgutil, mixed
        names = {{m.name: m.ispkg for m in pkgutil.iter_modules(["{tree.root}/{SITE}"])}}
        show([names, [m.name for m in pkgutil.iter_modules(mixed.__path__, "mixed.")]])
    """
    names, below = tree.value(code)  # type: ignore[misc]
    expected = {
        "hotmod": False,
        "hotpkg": True,
        "coldmod": False,
        "coldpkg": True,
        "badmod": False,
        "mixed": True,
    }
    assert {name: names[name] for name in expected} == expected
    assert below == ["mixed.late"]


def test_sources_come_back_when_asked_for(paged: Tree) -> None:
    code = """
        import inspect, coldmod, hotpkg.sub
        show([inspect.getsource(coldmod.function), inspect.getsource(hotpkg.sub)])
    """
    assert paged.value(code) == ["def function():\n    return 'text'\n", "VALUE = 2\n"]


def test_no_source_without_a_pack(tree: Tree) -> None:
    code = """
        import inspect, hotmod
        try:
            inspect.getsource(hotmod)
        except OSError as error:
            show(str(error))
    """
    assert tree.value(code) == "could not get source code"


def test_tracebacks_work_without_sources(tree: Tree) -> None:
    done = tree.run("import hotmod; hotmod.fail()")
    assert done.returncode == 1
    assert f'File "{tree.root}/{SITE}/hotmod.py", line 3, in fail\n' in done.stderr
    assert done.stderr.endswith("KeyError: 'inside'\n")


def test_data_files(paged: Tree) -> None:
    code = """
        import importlib.resources as r, pkgutil, mixed, coldpkg
        files = r.files("mixed")
        show([pkgutil.get_data("mixed", "more.txt").decode(), files.joinpath("more.txt").read_text(),
              sorted(p.name for p in r.files("coldpkg").iterdir() if p.name.endswith(".txt")),
              (r.files("coldpkg") / "data.txt").read_text()])
    """
    assert paged.value(code) == ["more data\n", "more data\n", ["data.txt"], "cold data\n"]


def test_data_files_without_a_pack(tree: Tree) -> None:
    code = """
        import importlib.resources as r, pkgutil, mixed
        result = []
        for read in (lambda: pkgutil.get_data("mixed", "more.txt"),
                     lambda: (r.files("mixed") / "more.txt").read_text()):
            try:
                read()
            except FileNotFoundError as error:
                result.append(error.strerror)
        show(result)
    """
    assert tree.value(code) == [
        f"No such file in this image ({NOT_HERE})",
        "No such file or directory",
    ]


@pytest.mark.parametrize(("module", "output"), [("hotmod", "main\n"), ("hotpkg", "package main\n")])
def test_run_as_a_program(tree: Tree, module: str, output: str) -> None:
    done = tree.run("", "-m", module)
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


def test_cold_module_run_as_a_program(paged: Tree) -> None:
    done = paged.run("", "-m", "coldmod")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_earlier_entry_of_the_path_wins(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/coldmod.py").write_text("VALUE = 'the agent own'\n")
    done = tree.run("import coldmod; print(coldmod.VALUE)", env={"PYTHONPATH": str(tmp_path / "app")})
    assert (done.stdout, done.stderr) == ("the agent own\n", "")


def test_without_site_the_finder_is_out(tree: Tree) -> None:
    done = tree.run("", "-S", "-c", "import sys; print('_rvbundle_boot' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_reload_and_invalidate(tree: Tree) -> None:
    code = """
        import importlib, hotmod
        hotmod.VALUE = 0
        importlib.invalidate_caches()
        show(importlib.reload(hotmod).VALUE)
    """
    assert tree.value(code) == 1


def test_a_module_that_appears_later(own: Tree) -> None:
    code = f"""
        import importlib, shutil
        shutil.copy("{own.root}/{SITE}/hotmod.pyc", "{own.root}/{SITE}/fresh.pyc")
        importlib.invalidate_caches()
        import fresh
        show(fresh.__file__)
    """
    assert own.value(code) == f"{own.root}/{SITE}/fresh.py"


def test_pickle_and_spawn(paged: Tree, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "def work(number):\n"
        "    import coldmod\n"
        "    return number + coldmod.VALUE\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [1]))\n"
    )
    done = paged.run("", str(script))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[4]\n", "")


def test_pack_that_lacks_a_module(paged: Tree) -> None:
    done = paged.run("import ghost")
    reason = f"{SITE}/ghost.pyc is not in the cold pack"
    assert done.stderr.startswith(f"rvbundle: {denied('ghost', reason)}\n")
    assert done.stderr.endswith(f"ImportError: {denied('ghost', reason)}\n")


def test_pager_that_does_not_answer(tree: Tree) -> None:
    place = tempfile.mkdtemp(prefix="rv", dir="/tmp")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{place}/pager")  # and never listens
        done = Tree(tree.root, f"{place}/pager").run("import coldmod")
    shutil.rmtree(place)
    reason = "the pager does not answer: [Errno 111] Connection refused"
    assert done.stderr.endswith(f"ImportError: {denied('coldmod', reason)}\n")


def test_bytecode_of_another_python(own: Tree) -> None:
    path = own.root / SITE / "hotmod.pyc"
    path.write_bytes(b"\0\0\0\0" + path.read_bytes()[4:])
    done = own.run("import hotmod")
    assert done.stderr.endswith(f"ImportError: {path} was compiled for another Python\n")


def test_empty_bytecode(own: Tree) -> None:
    path = own.root / SITE / "hotmod.pyc"
    path.write_bytes(b"")
    done = own.run("import hotmod")
    assert done.stderr.endswith(f"ImportError: {path} was compiled for another Python\n")


def test_no_cold_list_is_a_plain_tree(own: Tree) -> None:
    (own.root / "usr/lib/rvbundle/cold.txt").unlink()
    code = """
        import hotmod
        try:
            import coldmod
        except ModuleNotFoundError as error:
            show([hotmod.VALUE, str(error)])
    """
    assert own.value(code) == [1, "No module named 'coldmod'"]


def test_a_cold_namespace_package(paged: Tree) -> None:
    """A package without __init__, all of whose modules are cold: its folders do not exist in the image."""
    path = f"{SITE}/nspkg/deep/mod.pyc"
    file = FrozenFile(path, "bytecode", f"tree/{path}", False, 1, "00" * 32, "nspkg")
    short = NAME.removeprefix("python")
    frozen = Frozen(paged.root, short, short, ARCH, "usr/lib", (), (file,), {}, ())
    text = cold_list(frozen, (Placed(file, False, "cold"),))
    (paged.root / "usr/lib/rvbundle/cold.txt").write_text(text)
    assert paged.value("import nspkg.deep.mod as m; show(m.VALUE)") == 6


def test_paths_outside_the_payload_are_left_to_python(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/plain.py").write_text("")
    code = f"""
        import sys
        sys.path.insert(0, "{tmp_path}/out")
        import plain
        show([type(sys.path_importer_cache["{tmp_path}/out"]).__name__, plain.__file__])
    """
    assert tree.value(code) == ["FileFinder", f"{tmp_path}/out/plain.py"]


METADATA = """
    import importlib.metadata as m
    show([m.version("demo"), [str(f) for f in m.files("demo") or ()],
          m.distribution("demo").read_text("licenses/LICENSE"), m.distribution("demo").read_text("nothing")])
"""


def test_cold_metadata_comes_back(paged: Tree) -> None:
    files = ["hotmod.py", "demo-1.0.dist-info/RECORD"]
    for _ in range(2):
        assert paged.value(METADATA) == ["1.0", files, "do as you like\n", None]
    assert (paged.root / SITE / "demo-1.0.dist-info/RECORD").read_text() == RECORD


def test_metadata_is_restored_only_when_it_is_asked_for(paged: Tree) -> None:
    code = "import importlib.metadata as m; show([m.version('demo'), m.metadata('demo')['Name']])"
    assert paged.value(code) == ["1.0", "demo"]
    assert not (paged.root / SITE / "demo-1.0.dist-info/RECORD").exists()


def test_cold_metadata_without_a_pack(tree: Tree) -> None:
    """It looks as if it had never been installed, so stderr is told: once for each file."""
    code = """
        import importlib.metadata as m
        for _ in range(2):
            print(m.version("demo"), m.files("demo"), m.distribution("demo").read_text("licenses/LICENSE"))
    """
    done = tree.run(code)
    assert (done.returncode, done.stdout) == (0, "1.0 None None\n" * 2)
    folder = f"{tree.root}/{SITE}/demo-1.0.dist-info"
    assert done.stderr == "".join(
        f"rvbundle: {denied(f'{folder}/{name}')}\n" for name in ("RECORD", "licenses/LICENSE")
    )


def test_metadata_that_never_was_is_no_news(tree: Tree) -> None:
    code = """
        import importlib.metadata as m
        show([m.distribution("demo").read_text(name) for name in ("nothing", "licenses/x", "INSTALLER")])
    """
    assert tree.value(code) == [None, None, None]


def test_metadata_that_the_pack_lacks(paged: Tree) -> None:
    cold = paged.root / "usr/lib/rvbundle/cold.txt"
    cold.write_text(cold.read_text().replace("d RECORD\n", "d RECORD\nd EXTRA\n"))
    done = paged.run("import importlib.metadata as m; print(m.distribution('demo').read_text('EXTRA'))")
    inner = f"{SITE}/demo-1.0.dist-info/EXTRA"
    reason = f"{inner} is not in the cold pack"
    assert done.stdout == "None\n"
    assert done.stderr == f"rvbundle: {denied(f'{paged.root}/{inner}', reason)}\n"


def test_metadata_imported_before_the_finder(paged: Tree) -> None:
    """By a .pth file of a distribution whose name sorts first."""
    (paged.root / SITE / "000_early.pth").write_text("import importlib.metadata\n")
    files = ["hotmod.py", "demo-1.0.dist-info/RECORD"]
    assert paged.value(METADATA) == ["1.0", files, "do as you like\n", None]


def test_metadata_looks_as_it_should(tree: Tree) -> None:
    code = """
        import importlib.metadata as m, inspect
        function = m.PathDistribution.read_text
        show([function.__doc__, function.__name__, str(inspect.signature(function)), m.__file__])
    """
    doc, name, signature, file = tree.value(code)  # type: ignore[misc]
    from importlib.metadata import PathDistribution

    assert doc == PathDistribution.read_text.__doc__
    assert (name, signature) == ("read_text", "(self, filename)")
    assert file == f"{tree.root}/{LIB}/importlib/metadata/__init__.py"


def test_distributions_outside_the_payload_are_left_alone(tree: Tree, tmp_path: Path) -> None:
    folder = tmp_path / "out/other-2.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    code = f"""
        import sys
        sys.path.insert(0, "{tmp_path}/out")
        import importlib.metadata as m
        show([m.version("other"), m.files("other")])
    """
    assert tree.value(code) == ["2.0", None]
