"""Bootstraps: how they are packed, and which modules they need."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from rvbundle import bootstrap
from rvbundle.inside import imports
from rvbundle_runtime.bootstraps import BLOCK

BUSYBOX = ("busybox", "gzip", "-dc")


@pytest.mark.parametrize("size", [0, 1, 100, 4000, 4070, 4080, 100_000])
@pytest.mark.parametrize("command", [("gzip", "-dc"), BUSYBOX], ids=["gzip", "busybox"])
def test_gzip_of_whole_blocks(size: int, command: tuple[str, ...]) -> None:
    data = bytes((n * n >> 3) & 0xFF for n in range(size))
    packed = bootstrap.padded_gzip(data)
    assert len(packed) % BLOCK == 0
    assert gzip.decompress(packed) == data
    done = subprocess.run(command, input=packed, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, data, b"")
    assert bootstrap.padded_gzip(data) == packed


def test_tar() -> None:
    files = {
        "bin/x": bootstrap._File(b"program", executable=True),
        "lib/a/b.pyc": bootstrap._File(b"code"),
        "manifest": bootstrap._File(b""),
    }
    packed = bootstrap._tar_gz(files)
    assert packed == bootstrap._tar_gz(dict(reversed(files.items())))
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(packed))) as tar:
        members = tar.getmembers()
        assert [m.name for m in members] == ["bin", "bin/x", "lib", "lib/a", "lib/a/b.pyc", "manifest"]
        assert [m.mode for m in members] == [0o755, 0o755, 0o755, 0o755, 0o644, 0o644]
        assert {(m.uid, m.gid, m.mtime, m.uname) for m in members} == {(0, 0, 0, "")}
        assert tar.extractfile("lib/a/b.pyc").read() == b"code"  # type: ignore[union-attr]


def test_our_own_modules() -> None:
    found = bootstrap._sources()
    assert {"rvbundle_runtime", "rvbundle_runtime.plan", "rvbundle_runtime.launchers.qemu"} <= set(found)
    assert not any("guest" in name for name in found)
    assert all(path.suffix == ".py" for path in found.values())


def tree(folder: Path, sources: dict[str, str]) -> list[str]:
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [str(folder / "ours"), str(folder / "lib"), str(folder / "dynload")]


SOURCES = {
    "ours/us/__init__.py": "",
    "ours/us/one.py": "import a\ndef f():\n    from b import c, d\n    class K:\n        import inclass\n",
    "ours/us/two.py": "from . import one\nfrom .one import f\n",
    "lib/a.py": """
import sys, os.path
from typing import TYPE_CHECKING
try:
    import quick
except ImportError:
    import slow
if TYPE_CHECKING:
    import types_only
else:
    import otherwise
def late():
    import never
class K:
    import inclass
    def late(self):
        import never
if __name__ == '__main__':
    import never
""",
    "lib/b/__init__.py": "from .inner import x\nfrom ..nothing import y\n",
    "lib/b/inner.py": "from . import sibling\n",
    "lib/b/sibling.py": "",
    "lib/b/c.py": "",
    "lib/b/unused.py": "",
    "dynload/quick.cpython-313-riscv64-linux-gnu.so": "",
    "dynload/plain.so": "",
    **{f"lib/{name}.py": "" for name in ("slow", "types_only", "otherwise", "never", "inclass")},
}


def test_which_modules_are_needed(tmp_path: Path) -> None:
    folders = tree(tmp_path, SOURCES)
    found = imports.needed(["us.two", "plain"], folders, "us", ["slow"])
    names = {name: str(Path(path).relative_to(tmp_path)) for name, path in found.items()}
    assert names == {
        "us": "ours/us/__init__.py",
        "us.one": "ours/us/one.py",
        "us.two": "ours/us/two.py",
        "a": "lib/a.py",
        "b": "lib/b/__init__.py",
        "b.c": "lib/b/c.py",
        "b.inner": "lib/b/inner.py",
        "b.sibling": "lib/b/sibling.py",
        "quick": "dynload/quick.cpython-313-riscv64-linux-gnu.so",
        "plain": "dynload/plain.so",
        "otherwise": "lib/otherwise.py",
        "inclass": "lib/inclass.py",
    }


def test_as_a_program(tmp_path: Path) -> None:
    question = {
        "roots": ["a"],
        "folders": tree(tmp_path, {"lib/a.py": "import b", "lib/b.py": ""}),
        "ours": ["us"],
        "left_out": [],
    }
    done = subprocess.run(
        [sys.executable, "-I", imports.__file__], input=json.dumps(question).encode(), stdout=subprocess.PIPE
    )
    assert json.loads(done.stdout) == {"a": str(tmp_path / "lib/a.py"), "b": str(tmp_path / "lib/b.py")}
