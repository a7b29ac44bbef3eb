"""A payload of trimmed toy libraries for tests of guard.c, and a pager that does what a test wants."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from rvbundle import trim
from rvbundle_runtime import absent
from tests.native.toys import EMULATOR, Toys

PAGE, RUN = 4096, absent.RUN
RESTORED, NOT_IN_PACK, FAILED, BYTES = range(4)
Answer = Callable[["Payload", str, int, int], bytes | None]


def answer(status: int, data: bytes = b"") -> bytes:
    return struct.pack("<BI", status, len(data)) + data


def store(payload: Payload, path: str, offset: int, flags: int) -> bytes:
    """What the real pager does: put what is absent of the run into the store's file, and say so."""
    if flags:
        return send(payload, path, offset, flags)
    payload.put(path, offset)
    return answer(RESTORED)


def send(payload: Payload, path: str, offset: int, flags: int) -> bytes:
    """What the real pager does for a store that can't be written."""
    return answer(BYTES, payload.originals[path][offset : offset + RUN])


class Pager:
    """Serves requests in threads; `requests` has them all: path, offset, flags."""

    def __init__(self, payload: Payload, how: Answer, address: str) -> None:
        self.payload, self.how = payload, how
        self.requests: list[tuple[str, int, int]] = []
        self.broken: list[Exception] = []
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.listen(100)
        self.thread = threading.Thread(target=self.accept)
        self.thread.start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=[connection]).start()

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                (size,) = struct.unpack("<I", file.read(4))
                payload = file.read(size)
                kind, offset, flags = struct.unpack_from("<BQB", payload)
                path = payload[10:].decode()
                assert (kind, flags & ~1, offset % RUN, len(payload)) == (0, 0, 0, size)
                self.requests.append((path, offset, flags))
                reply = self.how(self.payload, path, offset, flags)
                if reply is not None:
                    connection.sendall(reply)
            except ConnectionError:
                pass
            except Exception as error:  # noqa: BLE001 - close() raises it in the test's thread
                self.broken.append(error)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()
        for error in self.broken:
            raise error


class Payload(Toys):
    """A payload's root with trimmed libraries in usr/lib; runs programs under the guard."""

    def __init__(self, folder: Path, guard: Path) -> None:
        self.root = folder / "root"
        super().__init__(self.root / "usr" / "lib")
        self.folder.mkdir(parents=True)
        self.guard = guard
        self.scratch = Path(tempfile.mkdtemp(prefix="rvg"))  # a socket's path must be short
        self.address = str(self.scratch / "pager")
        self.present = self.scratch / "present"
        self.originals: dict[str, bytes] = {}
        self.absent: dict[str, absent.AbsentLibrary] = {}
        self.pager: Pager | None = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.scratch)

    def stop(self) -> None:
        pager, self.pager = self.pager, None
        if pager:
            pager.close()
            Path(self.address).unlink(missing_ok=True)

    def serve(self, how: Answer = store) -> Pager:
        self.stop()
        self.pager = Pager(self, how, self.address)
        return self.pager

    def trim(self, path: Path, watched: set[int] | range, touched: set[int] = frozenset(), **more) -> Path:
        """Trim a library in place: pages that are watched, but not touched, are absent."""
        data = path.read_bytes()
        plan = trim.plan(data, touched, watched, gap=0, **more)
        assert (plan.reason, plan.notes) == ("", ())
        assert any(s.absent for s in plan.segments)
        name = str(path.relative_to(self.root))
        path.unlink()
        trim.apply(data, plan, path)
        self.originals[name] = data
        segments = tuple(
            absent.AbsentSegment(
                s.vaddr, s.offset, s.filesz, s.prot, tuple((r.start, r.stop) for r in s.absent)
            )
            for s in plan.segments
            if s.absent or s.offset == 0
        )
        self.absent[name] = absent.AbsentLibrary(name, plan.size, segments)
        self.write_table()
        return path

    def write_table(self) -> None:
        data = absent.dump(list(self.absent.values()))
        table = self.root / absent.TABLE
        table.parent.mkdir(exist_ok=True)
        table.write_bytes(data)
        self.absent = {x.path: x for x in absent.load(data)}
        self.present.write_bytes(bytes(absent.run_count(list(self.absent.values())) // 8 + 1))

    def trimmed(
        self, name: str = "libtoy.so", hot: set[int] = frozenset(), prefix: str = "f", **more
    ) -> Path:
        """Compile a library whose functions f0, f1, ... are absent but for the `hot` ones, and trim it."""
        if not (self.folder / name).exists():
            self.library(name, **more)
        pages = self.functions(name, prefix)
        return self.trim(self.folder / name, set(pages.values()), {pages[i] for i in hot})

    def functions(self, name: str = "libtoy.so", prefix: str = "f") -> dict[int, int]:
        """Return the pages of the functions PREFIX<number>."""
        return {
            int(symbol[len(prefix) :]): page
            for symbol, page in self.symbols(name).items()
            if re.fullmatch(prefix + r"\d+", symbol)
        }

    def offset(self, page: int, name: str = "usr/lib/libtoy.so") -> int:
        """Where a page (by address) is in its library's file."""
        for segment in self.absent[name].segments:
            if segment.vaddr <= page * PAGE < segment.vaddr + segment.size:
                return page * PAGE - segment.vaddr + segment.offset
        raise AssertionError(page)

    def ranges(self, path: str, offset: int) -> list[tuple[int, int]]:
        """What is absent of a run, as file offsets."""
        found = []
        for segment in self.absent[path].segments:
            delta = segment.offset - segment.vaddr
            for start, stop in segment.ranges:
                low, high = max(start + delta, offset), min(stop + delta, offset + RUN)
                found += [(low, min(high, self.absent[path].size))] if low < high else []
        return found

    def put(self, path: str, offset: int) -> None:
        """Put what is absent of a run into the library's file."""
        with (self.root / path).open("r+b") as file:
            for low, high in self.ranges(path, offset):
                file.seek(low)
                file.write(self.originals[path][low:high])
        self.mark(path, offset)

    def mark(self, path: str, offset: int) -> None:
        number = self.absent[path].first_run + offset // RUN
        with LOCK, self.present.open("r+b") as file:
            file.seek(number // 8)
            byte = file.read(1)[0] | 1 << number % 8
            file.seek(number // 8)
            file.write(bytes([byte]))

    def settings(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self.guard),
            "RVBUNDLE_ROOT": str(self.root),
            "RVBUNDLE_PAGER": self.address,
            "RVBUNDLE_PRESENT": str(self.present),
        }

    def command(self, *words: str | Path) -> list[str | Path]:
        if not EMULATOR:
            return list(words)
        preload = ["-E", f"LD_PRELOAD={self.guard}"]  # not for the emulator itself
        return [EMULATOR[0], *preload, *EMULATOR[1:], *words]

    def environment(self, **more: str) -> dict[str, str]:
        settings = self.settings()
        if EMULATOR:
            del settings["LD_PRELOAD"]
        return {**os.environ, **settings, **more}

    def result(self, *words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def message(self, *words: str | Path, **more: str) -> str:
        """Run what can't go on; return what the guard says."""
        done = self.result(*words, **more)
        assert done.returncode == 112, (done.returncode, done.stdout, done.stderr)
        return done.stderr


LOCK = threading.Lock()
