import contextlib
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rvbundle_runtime import format as fmt
from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.image import Reader
from rvbundle_runtime.pager import BYTES, FAILED, NOT_IN_PACK, RESTORED, Pager

from ..images import ARCH, build, folder, forge, item, link, tree
from .trimmed import PATH, SIZE, WHOLE, Place, cold_items, make_place, trimmed_bytes

COLD = (
    item("usr/lib/a/mod.pyc", b"bytecode"),
    item("usr/lib/a/tool", b"#!", kind=fmt.EXECUTABLE),
    item("usr/lib/big.so", bytes(range(256)) * 40000),  # 10 MB: three frames
    item("usr/lib/hot.so", b"tail", kind=fmt.TAIL),
    item("usr/lib/empty", b""),
    link("usr/lib/l.so", "big.so"),
    folder("usr/lib/d/e"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    (path / "usr/lib").mkdir(parents=True)
    (path / "usr/lib/hot.so").write_bytes(b"hot")
    return path


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "x.cold.rvb"
    build(path, COLD, bound_to="ab" * 32)
    return path


@pytest.fixture
def pager(pack: Path, root: Path) -> Iterator[Pager]:
    with Reader(pack) as reader:
        yield Pager(reader, ARCH, str(root))


def test_restore_everything(pager: Pager, root: Path) -> None:
    for packed in COLD:
        if packed.kind != fmt.TAIL:
            assert pager.restore(packed.path) == (RESTORED, "")
    assert tree(root) == {
        "usr": ("folder", "", b""),
        "usr/lib": ("folder", "", b""),
        "usr/lib/a": ("folder", "", b""),
        "usr/lib/a/mod.pyc": ("file", "", b"bytecode"),
        "usr/lib/a/tool": ("program", "", b"#!"),
        "usr/lib/big.so": ("file", "", bytes(range(256)) * 40000),
        "usr/lib/d": ("folder", "", b""),
        "usr/lib/d/e": ("folder", "", b""),
        "usr/lib/empty": ("file", "", b""),
        "usr/lib/hot.so": ("file", "", b"hot"),
        "usr/lib/l.so": ("link", "big.so", b""),
    }


def test_what_is_there_stays(pager: Pager, root: Path) -> None:
    (root / "usr/lib/a").mkdir()
    (root / "usr/lib/a/mod.pyc").write_bytes(b"restored before")
    (root / "usr/lib/l.so").symlink_to("elsewhere")
    assert pager.restore("usr/lib/a/mod.pyc") == (RESTORED, "")
    assert pager.restore("usr/lib/l.so") == (RESTORED, "")
    assert (root / "usr/lib/a/mod.pyc").read_bytes() == b"restored before"
    assert os.readlink(root / "usr/lib/l.so") == "elsewhere"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "usr/lib/nothing",
        "/usr/lib/empty",
        "usr/lib/../lib/empty",
        "../../etc/passwd",
        "usr/lib/hot.so",
        "usr",
    ],
)
def test_only_what_the_pack_holds(pager: Pager, root: Path, path: str) -> None:
    before = tree(root)
    assert pager.restore(path) == (NOT_IN_PACK, f"{path} is not in the cold pack")
    assert tree(root) == before


def test_a_link_in_the_way_is_not_followed(pager: Pager, root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / "usr/lib/a").symlink_to(tmp_path / "outside")
    status, text = pager.restore("usr/lib/a/mod.pyc")
    assert (status, text) == (FAILED, "usr/lib/a/mod.pyc could not be restored: Not a directory")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_file_in_the_way(pager: Pager, root: Path) -> None:
    (root / "usr/lib/a").write_text("")
    assert pager.restore("usr/lib/a/mod.pyc") == (
        FAILED,
        "usr/lib/a/mod.pyc could not be restored: Not a directory",
    )


def test_disk_full_leaves_no_half_file(pager: Pager, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = os.write, []

    def write(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return original(fd, bytes(data)[:1000])

    monkeypatch.setattr(os, "write", write)
    status, text = pager.restore("usr/lib/big.so")
    monkeypatch.undo()
    assert (status, text) == (FAILED, "usr/lib/big.so could not be restored: No space left on device")
    assert [p.name for p in (root / "usr/lib").iterdir()] == ["hot.so"]
    assert pager.restore("usr/lib/big.so") == (RESTORED, "")
    assert (root / "usr/lib/big.so").stat().st_size == 10240000


def test_damaged_pack(pack: Path, root: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[fmt.HEADER.size + 5] ^= 1
    pack.write_bytes(data)
    with Reader(pack) as reader:
        pager = Pager(reader, ARCH, str(root))
        frame = reader.index().blobs[0].frame
        assert pager.restore("usr/lib/a/mod.pyc") == (
            FAILED,
            f"{pack}: frame {frame} is damaged (its digest is not what the image says)",
        )
    assert not (root / "usr/lib/a/mod.pyc").exists()


def test_pack_for_another_machine(pack: Path, root: Path) -> None:
    with Reader(pack) as reader:
        assert Pager(reader, "other", str(root)).restore("usr/lib/empty") == (
            FAILED,
            "the cold pack has nothing for other",
        )


def test_forged_pack(pack: Path, root: Path, tmp_path: Path) -> None:
    path = forge(
        pack,
        tmp_path / "forged",
        lambda value: value["payloads"][0]["entries"].append(["../evil", "f", 0, -1, 0]),
    )
    with Reader(path) as reader:
        status, text = Pager(reader, ARCH, str(root)).restore("../evil")
    assert status == FAILED
    assert "the index holds a path that leaves the tree: '../evil'" in text
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "日" * 85], ids=["ascii", "latin", "cjk"])
def test_longest_names(tmp_path: Path, root: Path, name: str) -> None:
    build(tmp_path / "n.cold.rvb", [item(f"usr/{name}", b"x")], bound_to="ab" * 32)
    with Reader(tmp_path / "n.cold.rvb") as reader:
        assert Pager(reader, ARCH, str(root)).restore(f"usr/{name}") == (RESTORED, "")
    assert (root / "usr" / name).read_bytes() == b"x"


def test_many_threads_restore_the_same_file_once(pager: Pager, root: Path) -> None:
    barrier = threading.Barrier(6)
    answers = []

    def run() -> None:
        barrier.wait()
        answers.append(pager.restore("usr/lib/big.so"))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(RESTORED, "")] * 6
    assert sorted(p.name for p in (root / "usr/lib").iterdir()) == ["big.so", "hot.so"]


@pytest.fixture
def address(pager: Pager) -> Iterator[str]:
    place = tempfile.mkdtemp(prefix="rv", dir="/tmp")  # tmp_path may be too long for a socket
    pager.listen(f"{place}/new/pager")
    yield f"{place}/new/pager"
    shutil.rmtree(place)


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return data
        data += chunk
    return data


def ask(connection: socket.socket, path: bytes) -> tuple[int, str]:
    connection.sendall(struct.pack("<I", len(path)) + path)
    status, size = struct.unpack("<BI", receive(connection, 5))
    return status, receive(connection, size).decode()


def connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    connection.settimeout(20)  # not before: connecting would fail, not wait, while many others do
    return connection


def test_protocol(address: str, root: Path) -> None:
    with connect(address) as connection:
        assert ask(connection, b"usr/lib/a/mod.pyc") == (0, "")
        assert ask(connection, b"nothing") == (1, "nothing is not in the cold pack")
        assert ask(connection, b"\xff\xfe")[0] == 1
        assert ask(connection, b"") == (1, " is not in the cold pack")
    assert (root / "usr/lib/a/mod.pyc").read_bytes() == b"bytecode"


def test_a_request_in_pieces(address: str, root: Path) -> None:
    request = struct.pack("<I", 13) + b"usr/lib/empty"
    with connect(address) as connection:
        for byte in request:
            connection.send(bytes([byte]))
        assert receive(connection, 5) == b"\0\0\0\0\0"
    assert (root / "usr/lib/empty").exists()


@pytest.mark.parametrize(
    "request_", [struct.pack("<I", 4096), b"\xff\xff\xff\xff", b"GET / HTTP/1.0\r\n\r\n"], ids=repr
)
def test_nonsense_is_not_answered(address: str, request_: bytes) -> None:
    with connect(address) as connection:
        connection.sendall(request_)
        with contextlib.suppress(ConnectionResetError):  # closed with bytes unread: as good an end
            assert receive(connection, 1) == b""
    with connect(address) as connection:
        assert ask(connection, b"usr/lib/empty") == (0, "")


def test_clients_that_leave_do_no_harm(address: str) -> None:
    for _ in range(300):  # more than may be connected at once
        with connect(address) as connection:
            connection.sendall(b"\x05\0")
    with connect(address) as connection:
        assert ask(connection, b"usr/lib/empty") == (0, "")


def test_socket_is_open_to_all(address: str) -> None:
    assert os.stat(address).st_mode & 0o777 == 0o666


def test_a_root_that_is_gone(pack: Path, tmp_path: Path) -> None:
    with Reader(pack) as reader, pytest.raises((OSError, ImageError)):
        Pager(reader, ARCH, str(tmp_path / "nothing"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place(tmp_path, monkeypatch)


@pytest.fixture
def paged(place: Place) -> Iterator[str]:
    """The address of a pager for an image with a trimmed library."""
    folder_ = tempfile.mkdtemp(prefix="rv", dir="/tmp")
    with Reader(place.pack) as reader:
        pager = Pager(reader, ARCH, str(place.unpacked.root))
        pager.listen(f"{folder_}/pager")
        yield f"{folder_}/pager"
        pager.filler.close()
    shutil.rmtree(folder_)


def page_request(path: str | bytes, offset: int, flags: int = 0) -> bytes:
    name = path.encode() if isinstance(path, str) else path
    body = b"\0" + struct.pack("<QB", offset, flags) + name
    return struct.pack("<I", len(body)) + body


def answer(connection: socket.socket, request: bytes) -> tuple[int, bytes]:
    connection.sendall(request)
    status, size = struct.unpack("<BI", receive(connection, 5))
    return status, receive(connection, size)


def test_a_page_request_byte_by_byte(paged: str, place: Place) -> None:
    request = b"\x1d\0\0\0" + b"\0" + b"\x00\x20\0\0\0\0\0\0" + b"\0" + b"usr/lib/x/libtoy.so"
    assert page_request(PATH, 0x2000) == request
    with connect(paged) as connection:
        connection.sendall(request)
        assert receive(connection, 5) == b"\0\0\0\0\0"
    assert place.library.read_bytes()[0x2000:0x5000] == WHOLE[0x2000:0x5000]
    assert [line.split()[0] for line in place.lines()] == ["B", "P", "P"]


def test_bytes_on_request(paged: str, place: Place) -> None:
    with connect(paged) as connection:
        connection.sendall(page_request(PATH, 0x20010, 1))
        assert receive(connection, 5) == b"\3" + struct.pack("<I", 65536)
        assert receive(connection, 65536) == WHOLE[0x20000:0x30000]
        assert answer(connection, page_request(PATH, 5 * 65536, 1)) == (BYTES, WHOLE[5 * 65536 :])
    assert place.library.read_bytes() == trimmed_bytes()
    assert place.lines() == []


def test_unknown_flags_are_left_alone(paged: str, place: Place) -> None:
    with connect(paged) as connection:
        assert answer(connection, page_request(PATH, 0x2000, 0xFE)) == (RESTORED, b"")
    assert place.library.read_bytes() != trimmed_bytes()


def test_files_and_pages_over_one_connection(paged: str, place: Place) -> None:
    with connect(paged) as connection:
        for _ in range(2):
            assert answer(connection, page_request(PATH, 0x48000)) == (RESTORED, b"")
            assert ask(connection, b"usr/lib/other.pyc") == (RESTORED, "")
    assert (place.unpacked.root / "usr/lib/other.pyc").read_bytes() == b"cold"


@pytest.mark.parametrize(
    ("path", "offset", "status", "text"),
    [
        (PATH, 3 * 65536 + 7, FAILED, f"the cold pack has nothing at 0x30000 of {PATH}"),
        (PATH, SIZE + 65536, FAILED, f"the cold pack has nothing at 0x60000 of {PATH}"),
        (PATH, (1 << 64) - 1, FAILED, f"the cold pack has nothing at 0xffffffffffff0000 of {PATH}"),
        ("usr/lib/liba.so", 0, NOT_IN_PACK, "the cold pack has no pages of usr/lib/liba.so"),
        ("usr/lib/other.pyc", 0, NOT_IN_PACK, "the cold pack has no pages of usr/lib/other.pyc"),
        ("usr/lib/nothing.so", 0, NOT_IN_PACK, "the cold pack has no pages of usr/lib/nothing.so"),
        (f"/{PATH}", 0, NOT_IN_PACK, f"the cold pack has no pages of /{PATH}"),
        (f"usr/../{PATH}", 0, NOT_IN_PACK, f"the cold pack has no pages of usr/../{PATH}"),
        (b"\xff", 0, NOT_IN_PACK, "the cold pack has no pages of \ufffd"),
    ],
    ids=[
        "nothing cold",
        "outside",
        "far outside",
        "hot library",
        "cold file",
        "unknown",
        "absolute",
        "climbing",
        "no text",
    ],
)
def test_pages_that_can_not_be_had(
    paged: str, place: Place, path: str | bytes, offset: int, status: int, text: str
) -> None:
    with connect(paged) as connection:
        assert answer(connection, page_request(path, offset)) == (status, text.encode())
        assert answer(connection, page_request(PATH, 0x2000)) == (RESTORED, b"")  # and it goes on


@pytest.mark.parametrize("size", range(1, 11))
def test_page_requests_that_are_cut(paged: str, size: int) -> None:
    with connect(paged) as connection:
        body = page_request(PATH, 0x2000)[4 : 4 + size]
        request = struct.pack("<I", size) + body
        assert answer(connection, request) == (NOT_IN_PACK, b"a request for pages without a path")
        assert answer(connection, page_request(PATH, 0x2000)) == (RESTORED, b"")


def test_the_ranges_of_a_library_are_no_file(paged: str, place: Place) -> None:
    """Asked for as a file, it is not in the pack: the file that is there must not be replaced."""
    with connect(paged) as connection:
        assert ask(connection, PATH.encode()) == (NOT_IN_PACK, f"{PATH} is not in the cold pack")
    assert place.library.read_bytes() == trimmed_bytes()


def test_the_bits_are_shared(place: Place) -> None:
    with Reader(place.pack) as reader:
        pager = Pager(reader, ARCH, str(place.unpacked.root))
        fd = os.memfd_create("present")
        os.write(fd, b"\0\0")
        pager.filler.share(fd, 2)
        assert pager.restore_pages(PATH, 0x48000, send=False) == (RESTORED, b"")
        assert os.pread(fd, 2, 0) == bytes([1 << 7, 1])


def test_many_threads_fill_the_same_window(place: Place) -> None:
    with Reader(place.pack) as reader:
        pager = Pager(reader, ARCH, str(place.unpacked.root))
        barrier, answers = threading.Barrier(6), []

        def run(number: int) -> None:
            barrier.wait()
            answers.append(pager.restore_pages(PATH, (0, 0x20000, 0x48000)[number % 3], send=False))

        threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [(RESTORED, b"")] * 6
    assert place.library.read_bytes()[64:] == WHOLE[64:]


def test_pages_of_a_damaged_pack(place: Place) -> None:
    data = bytearray(place.pack.read_bytes())
    data[fmt.HEADER.size : fmt.HEADER.size + 200] = bytes(200)
    place.pack.write_bytes(data)
    with Reader(place.pack) as reader:
        pager = Pager(reader, ARCH, str(place.unpacked.root))
        found = {pager.restore_pages(PATH, offset, send=False) for offset in (0, 0x20000, 0x48000)}
    damaged = [text.decode() for status, text in found if status == FAILED]
    assert damaged
    assert all("is damaged (its digest is not what the image says)" in text for text in damaged)


def test_pages_for_another_machine(place: Place) -> None:
    with Reader(place.pack) as reader:
        pager = Pager(reader, "other", str(place.unpacked.root))
        assert pager.restore_pages(PATH, 0, send=False) == (FAILED, b"the cold pack has nothing for other")


def test_a_library_that_is_gone(place: Place) -> None:
    place.library.unlink()
    with Reader(place.pack) as reader:
        pager = Pager(reader, ARCH, str(place.unpacked.root))
        assert pager.restore_pages(PATH, 0, send=False) == (
            FAILED,
            f"{PATH} could not be restored: No such file or directory".encode(),
        )


def test_a_forged_pack_does_not_end_the_pager(place: Place, tmp_path: Path) -> None:
    """Its library is longer than the image's."""

    def change(value: dict[str, Any]) -> None:
        (row,) = [row for row in value["payloads"][0]["entries"] if row[1] == "r"]
        row[2][0] = 20 * 65536
        row[2][1][-1][1] = [10 * 65536, 0x1000 + 100]

    build(tmp_path / "honest.rvb", cold_items(), bound_to="ab" * 32)
    path = forge(tmp_path / "honest.rvb", tmp_path / "forged.rvb", change)
    with Reader(path) as reader:
        pager = Pager(reader, ARCH, str(place.unpacked.root))
        assert pager.restore_pages(PATH, 10 * 65536, send=True)[0] == FAILED
        assert pager.restore_pages(PATH, 0, send=False)[0] == FAILED
