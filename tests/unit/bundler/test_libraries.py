import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rvbundle import libraries, process
from rvbundle.debian import TRIPLETS
from rvbundle.libraries import SystemLibraries, close_over_libraries
from rvbundle_runtime.errors import FreezeError

ARCH = os.uname().machine


def library(folder: Path, name: str, *needs: str, options: tuple[str, ...] = ()) -> Path:
    """Make an empty library NAME in `folder` that needs others by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    code = folder / "x.c"
    code.write_text("")
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for need in needs:
        soname = f"-Wl,-soname,{need}"
        subprocess.run(["gcc", "-shared", "-nostdlib", soname, "-o", stubs / need, code], check=True)
    path = folder / name
    words = [str(stubs / need) for need in needs]
    command = ["gcc", "-shared", "-nostdlib", f"-Wl,--no-as-needed,-soname,{name}", "-o", path, code, *words]
    subprocess.run([*command, *options], check=True)
    return path


def system(**paths: Path) -> SystemLibraries:
    return SystemLibraries(ARCH, "usr/lib/x", {name.replace("_", "."): path for name, path in paths.items()})


def test_chain_through_the_system(tmp_path: Path) -> None:
    c = library(tmp_path / "sys", "liba.so", "libb.so")
    b = library(tmp_path / "sys", "libb.so", "liba.so")  # a cycle
    ext = library(tmp_path / "env", "ext.so", "liba.so")
    closure = close_over_libraries([("site/ext.so", ext)], system(liba_so=c, libb_so=b))
    assert closure.added == (("usr/lib/x/liba.so", c), ("usr/lib/x/libb.so", b))
    assert closure.needed == {
        "site/ext.so": ("usr/lib/x/liba.so",),
        "usr/lib/x/liba.so": ("usr/lib/x/libb.so",),
        "usr/lib/x/libb.so": ("usr/lib/x/liba.so",),
    }
    assert closure.notes == []


def test_runpath_inside_the_inventory_comes_first(tmp_path: Path) -> None:
    own = library(tmp_path / "env/lib", "liba.so")
    other = library(tmp_path / "sys", "liba.so")
    ext = library(
        tmp_path / "env", "ext.so", "liba.so", options=("-Wl,--enable-new-dtags,-rpath,$ORIGIN/lib",)
    )
    closure = close_over_libraries([("site/ext.so", ext), ("site/lib/liba.so", own)], system(liba_so=other))
    assert closure.needed["site/ext.so"] == ("site/lib/liba.so",)
    assert closure.added == ()


def test_runpath_out_of_the_inventory_is_added(tmp_path: Path) -> None:
    outside = library(tmp_path / "opt", "liba.so")
    ext = library(tmp_path / "env", "ext.so", "liba.so", options=(f"-Wl,-rpath,{tmp_path}/opt",))
    closure = close_over_libraries([("site/ext.so", ext)], system())
    assert closure.added == (("usr/lib/x/liba.so", outside),)


def test_a_library_of_the_inventory_that_its_package_loads_first(tmp_path: Path) -> None:
    own = library(tmp_path / "env/torch/lib", "liba.so")
    ext = library(tmp_path / "env", "ext.so", "liba.so")
    closure = close_over_libraries([("site/ext.so", ext), ("site/torch/lib/liba.so", own)], system())
    assert closure.needed["site/ext.so"] == ("site/torch/lib/liba.so",)


def test_missing_library(tmp_path: Path) -> None:
    ext = library(tmp_path / "env", "ext.so", "libgone.so.7")
    closure = close_over_libraries([("site/ext.so", ext)], system())
    assert closure.notes == ["libgone.so.7 is nowhere on this machine (site/ext.so names it)"]
    assert closure.needed == {"site/ext.so": ()}


def test_foreign_library(tmp_path: Path) -> None:
    ext = library(tmp_path / "env", "ext.so")
    data = bytearray(ext.read_bytes())
    data[18:20] = (243 if ARCH != "riscv64" else 62).to_bytes(2, "little")  # e_machine
    ext.write_bytes(data)
    closure = close_over_libraries([("site/ext.so", ext)], system())
    other = "riscv64" if ARCH != "riscv64" else "x86_64"
    assert closure.notes == [f"not for this machine: site/ext.so ({other})"]


def test_files_that_are_no_elf_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("INPUT(libc.so.6)")
    closure = close_over_libraries([("site/x.so", tmp_path / "x.so")], system())
    assert (closure.added, closure.needed, closure.notes) == ((), {}, [])


def test_what_glibc_loads_by_name_is_added(tmp_path: Path) -> None:
    gcc_s = library(tmp_path, "libgcc_s.so.1")
    paths = SystemLibraries(ARCH, "usr/lib/x", {"libgcc_s.so.1": gcc_s})
    assert close_over_libraries([], paths).added == (("usr/lib/x/libgcc_s.so.1", gcc_s),)


def test_the_loader_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "p.c").write_text("int main(void) { return 0; }")
    subprocess.run(["gcc", "-o", tmp_path / "p", tmp_path / "p.c"], check=True)
    here = SystemLibraries.of_this_machine()
    closure = close_over_libraries([("usr/bin/p", tmp_path / "p")], here)
    loader = closure.interpreter_path
    assert loader.startswith("/lib")
    paths = [path for path, _ in closure.added]
    assert f"usr{loader}" in paths
    assert len([p for p in paths if p.endswith(loader.rpartition("/")[2])]) == 1
    assert f"{here.libdir}/libc.so.6" in paths


LISTING = """\
3 libs found in cache `/etc/ld.so.cache'
\tlibm.so.6 (libc6,x86-64) => /lib/x86_64-linux-gnu/libm.so.6
\tlibc.so.6 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/x86_64-linux-gnu/libc.so.6
\tlibc.so.6 (libc6, hwcap: 0x2) => /lib/i386-linux-gnu/libc.so.6
\tlibm.so.6 (libc6,x86-64) => /usr/local/lib/libm.so.6
\tlibz.so.1 (libc6) => /lib/i386-linux-gnu/libz.so.1
"""


def answer(monkeypatch: pytest.MonkeyPatch, text: str, machine: str) -> None:
    uname = os.uname_result(("Linux", "host", "6", "v", machine))
    monkeypatch.setattr(os, "uname", lambda: uname)
    monkeypatch.setattr(process, "run", lambda _: process.Finished("", 0, text.encode(), ""))


def test_ldconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, LISTING, "x86_64")
    assert SystemLibraries.of_this_machine() == SystemLibraries(
        "x86_64",
        "usr/lib/x86_64-linux-gnu",
        {
            "libm.so.6": Path("/lib/x86_64-linux-gnu/libm.so.6"),
            "libc.so.6": Path("/lib/x86_64-linux-gnu/libc.so.6"),
        },
    )


def test_ldconfig_of_riscv(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\tlibc.so.6 (libc6,double-float) => /usr/lib/riscv64-linux-gnu/libc.so.6\n"
    answer(monkeypatch, text, "riscv64")
    assert SystemLibraries.of_this_machine().libdir == "usr/lib/riscv64-linux-gnu"


def test_no_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, LISTING, "aarch64")
    with pytest.raises(FreezeError) as caught:
        SystemLibraries.of_this_machine()
    assert caught.value.message == "this machine has no glibc that ldconfig knows of"


def rooted(root: Path, *paths: str, arch: str = "riscv64") -> SystemLibraries:
    """List the libraries of a folder of packages with files at `paths`, and a glibc."""
    libdir = f"usr/lib/{TRIPLETS[arch]}"
    for path in (f"{libdir}/libc.so.6", *paths):
        place = root / path.format(libdir=libdir)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(path)
    return SystemLibraries.of_root(arch, root)


def test_libraries_of_packages(tmp_path: Path) -> None:
    places = ("{libdir}/libz.so.1", "usr/lib/liba.so.2", "{libdir}/python3/b.so", "usr/lib/c.a")
    found = rooted(tmp_path, *places)
    libdir = "usr/lib/riscv64-linux-gnu"
    assert (found.arch, found.libdir, found.root) == ("riscv64", libdir, tmp_path)
    assert found.paths == {
        "libc.so.6": tmp_path / libdir / "libc.so.6",
        "libz.so.1": tmp_path / libdir / "libz.so.1",
        "liba.so.2": tmp_path / "usr/lib/liba.so.2",
    }


@pytest.mark.parametrize(
    ("folders", "chosen"),
    [
        (("blas",), "blas"),
        (("blas", "openblas-pthread"), "openblas-pthread"),
        (("blas", "openblas-openmp"), "openblas-openmp"),
        (("openblas-openmp", "openblas-pthread"), "openblas-pthread"),
        (("", "openblas-pthread"), "openblas-pthread"),
        (("", "blas"), "blas"),
    ],
)
def test_the_best_alternative_is_found_first(tmp_path: Path, folders: tuple[str, ...], chosen: str) -> None:
    """As update-alternatives would link it, had the maintainers' scripts run."""
    places = [f"{{libdir}}/{name}/libblas.so.3".replace("//", "/") for name in folders]
    found = rooted(tmp_path, *places, "{libdir}/lapack/liblapack.so.3")
    libdir = tmp_path / found.libdir
    assert found.paths["libblas.so.3"] == libdir / chosen / "libblas.so.3"
    assert found.paths["liblapack.so.3"] == libdir / "lapack/liblapack.so.3"


def test_the_reference_comes_with_the_better_one(tmp_path: Path) -> None:
    """OpenBLAS is what programs find; the reference stays in Debian's folders."""
    root, libdir = tmp_path / "root", "usr/lib/x"
    chosen = library(root / libdir / "openblas-pthread", "libblas.so.3", "libopenblas.so.0")
    core = library(root / libdir / "openblas-pthread", "libopenblas.so.0")
    blas = library(root / libdir / "blas", "libblas.so.3")
    lapack = library(root / libdir / "lapack", "liblapack.so.3", "libblas.so.3")
    ours = library(root / libdir / "openblas-pthread", "liblapack.so.3", "libopenblas.so.0")
    paths = {"libblas.so.3": chosen, "liblapack.so.3": ours, "libopenblas.so.0": core}
    found = SystemLibraries(
        ARCH, libdir, paths, root, libraries._not_chosen(libdir, {**paths, "libblas.so.3": chosen}, root)
    )
    ext = library(tmp_path / "env", "ext.so", "libblas.so.3")
    closure = close_over_libraries([("site/ext.so", ext)], found)
    assert closure.added == (
        (f"{libdir}/blas/libblas.so.3", blas),
        (f"{libdir}/libblas.so.3", chosen),
        (f"{libdir}/libopenblas.so.0", core),
    )
    assert closure.needed["site/ext.so"] == (f"{libdir}/libblas.so.3",)
    both = library(tmp_path / "env", "both.so", "libblas.so.3", "liblapack.so.3")
    closure = close_over_libraries([("site/both.so", both)], found)
    added = dict(closure.added)
    assert added[f"{libdir}/lapack/liblapack.so.3"] == lapack
    assert added[f"{libdir}/liblapack.so.3"] == ours
    assert len(added) == 5
    alone = library(tmp_path / "env", "alone.so")
    assert close_over_libraries([("site/alone.so", alone)], found).added == ()


@pytest.mark.parametrize(
    ("folders", "others"),
    [
        (("blas", "openblas-pthread"), {"libblas.so.3": "blas/libblas.so.3"}),
        (("blas",), {}),
        (("openblas-pthread",), {}),
        ((), {}),
    ],
)
def test_what_a_variable_finds(tmp_path: Path, folders: tuple[str, ...], others: dict[str, str]) -> None:
    found = rooted(tmp_path, *(f"{{libdir}}/{name}/libblas.so.3" for name in folders))
    assert found.others == {
        name: (f"{found.libdir}/{path}", tmp_path / found.libdir / path) for name, path in others.items()
    }


def test_links_among_packages(tmp_path: Path) -> None:
    """Dangling ones (to what another package would hold) are no libraries."""
    libdir = tmp_path / "usr/lib/riscv64-linux-gnu"
    libdir.mkdir(parents=True)
    (libdir / "libgone.so.1").symlink_to("libgone.so.1.2")
    (libdir / "libz.so.1").symlink_to("libz.so.1.3")
    (libdir / "libdir.so").mkdir()
    found = rooted(tmp_path, "{libdir}/libz.so.1.3")
    assert set(found.paths) == {"libc.so.6", "libz.so.1", "libz.so.1.3"}


@pytest.mark.parametrize("arch", ["x86_64", "aarch64", "riscv64"])
def test_packages_without_glibc(tmp_path: Path, arch: str) -> None:
    with pytest.raises(FreezeError) as caught:
        SystemLibraries.of_root(arch, tmp_path)
    assert caught.value.message == f"there is no glibc among the packages for {arch}"


def test_a_root_elsewhere(tmp_path: Path) -> None:
    """Absolute run paths and the loader's path begin at the root, not at this machine's own /."""
    root = tmp_path / "root"
    mine = library(root / "opt/lib", "liba.so")
    library(tmp_path / "opt/lib", "liba.so")
    (root / "opt/lib/link.so").symlink_to("liba.so")
    ext = library(root / "env", "ext.so", "liba.so", options=("-Wl,-rpath,/opt/lib",))
    closure = close_over_libraries([("site/ext.so", ext)], replace(system(), root=root))
    assert closure.added == (("usr/lib/x/liba.so", mine),)
    elsewhere = library(tmp_path / "env", "ext.so", "liba.so", options=(f"-Wl,-rpath,{tmp_path}/opt/lib",))
    closure = close_over_libraries([("site/ext.so", elsewhere)], replace(system(), root=root))
    assert closure.notes == ["liba.so is nowhere among the packages (site/ext.so names it)"]
    odd = replace(system(), root=root, arch="s390x")
    assert close_over_libraries([("site/ext.so", ext)], odd).notes == [f"not for s390x: site/ext.so ({ARCH})"]


def test_the_loader_of_a_root(tmp_path: Path) -> None:
    (tmp_path / "p.c").write_text("int main(void) { return 0; }")
    subprocess.run(["gcc", "-o", tmp_path / "p", tmp_path / "p.c"], check=True)
    here = SystemLibraries.of_this_machine()
    loader = close_over_libraries([("usr/bin/p", tmp_path / "p")], here).interpreter_path
    root = tmp_path / "root"
    (root / "usr/real").mkdir(parents=True)
    (root / "usr/real/ld.so").write_text("the loader of the packages")
    (root / loader[1:]).parent.mkdir(parents=True)
    (root / loader[1:]).symlink_to(os.path.relpath(root / "usr/real/ld.so", (root / loader[1:]).parent))
    closure = close_over_libraries([("usr/bin/p", tmp_path / "p")], replace(here, root=root))
    assert dict(closure.added)[f"usr{loader}"] == root / "usr/real/ld.so"
