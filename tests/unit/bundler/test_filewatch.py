import subprocess
from pathlib import Path

import pytest

from rvbundle.filewatch import FileWatch
from rvbundle_runtime.errors import TraceError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in ("top", "a/b/deep", "a/b/quiet", "ünï/x y"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    return tmp_path


def test_what_was_opened(tree: Path) -> None:
    with FileWatch(tree) as watch:
        (tree / "top").read_text()
        subprocess.run(["cat", tree / "a/b/deep", tree / "ünï/x y"], check=True)
        list((tree / "a").iterdir())  # reading a folder opens no file
        (tree / "a/b/quiet").stat()
    assert watch.opened == {"top", "a/b/deep", "ünï/x y"}


def test_nothing_before_and_nothing_after(tree: Path) -> None:
    (tree / "top").read_text()
    with FileWatch(tree) as watch:
        pass
    (tree / "a/b/deep").read_text()
    assert watch.opened == set()


def test_through_a_link(tree: Path) -> None:
    (tree / "link").symlink_to("a/b/deep")
    with FileWatch(tree) as watch:
        (tree / "link").read_text()
    assert watch.opened == {"a/b/deep"}


def test_more_events_than_fit_into_one_read(tree: Path) -> None:
    for number in range(3000):
        (tree / f"file-with-a-rather-long-name-{number}").write_text("")
    with FileWatch(tree) as watch:
        for number in range(3000):
            (tree / f"file-with-a-rather-long-name-{number}").read_text()
    assert len(watch.opened) == 3000


def test_descriptors_are_closed(tree: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with FileWatch(tree):
            pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_error_inside_comes_through(tree: Path) -> None:
    with pytest.raises(KeyError), FileWatch(tree):
        raise KeyError("x")


def test_lost_events(tree: Path) -> None:
    watch = FileWatch(tree)
    watch.__enter__()
    watch._note(b"\xff\xff\xff\xff" + (0x4000).to_bytes(4, "little") + bytes(8))  # IN_Q_OVERFLOW
    with pytest.raises(TraceError) as caught:
        watch.__exit__(None, None, None)
    assert caught.value.message == "files were opened faster than the trace could note them"
    assert caught.value.hint == "sudo sysctl -w fs.inotify.max_queued_events=1048576"
