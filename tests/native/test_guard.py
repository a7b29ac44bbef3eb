"""Tests of guard.c with trimmed toy libraries whose functions each have a page of their own."""

from __future__ import annotations

import os
import platform
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rvbundle_runtime import absent
from tests.native.payload import (
    BYTES,
    FAILED,
    NOT_IN_PACK,
    PAGE,
    RESTORED,
    RUN,
    Payload,
    answer,
    send,
    store,
)
from tests.native.toys import BUILD_PYTHON, EMULATOR, LAYOUTS, MACHINE, NATIVE, ONLY_NATIVE, TARGET, zig_build

SUM = "long sum = 0; for (int i = 0; i < 100; i++) sum += toy_table[i](1);"
ALL = f"int main(void) {{ {SUM} return sum != 5050; }}"
F40 = 'int main(void) { printf("%d", f40(2)); }'
ABSENT = "no trace used it, and the cold pack is not here"
SILENT = "the pager does not answer"
ODD = "the pager's answer makes no sense"
HINT = (
    "hint: put the cold pack (.cold.rvb) beside the image; or add a [[trace]] that does this to the recipe "
    'and build again; or keep the library whole with [keep] files = ["*/libtoy.so"]\n'
)
AS_ROOT = pytest.mark.skipif(bool(EMULATOR) or os.getuid() != 0, reason="needs root")


@pytest.fixture(scope="session")
def special(tmp_path_factory):
    """Build guards with these flags for the compiler."""
    made: dict[tuple[str, ...], Path] = {}

    def build(*flags: str) -> Path:
        if flags not in made:
            out = tmp_path_factory.mktemp("special")
            zig_build(out, [TARGET[MACHINE]], list(flags))
            made[flags] = out / MACHINE / "guard.so"
        return made[flags]

    return build


@pytest.fixture(params=["query", "text"])
def lookup(request, payload, special) -> str:
    """Both ways to ask the kernel what is mapped; the second traps undefined behaviour."""
    if request.param == "text":
        traps = ["-U_FORTIFY_SOURCE", "-fsanitize=undefined", "-fsanitize-trap=undefined"]
        payload.guard = special("-DUSE_MAP_QUERY=0", *traps)
    return request.param


def needs(name: str, *words: str) -> str:
    """What the first line of the message says before the reason."""
    return "".join([f"rvbundle: the agent needs code that was left out of its image: {name}", *words])


# ---- pages come back ----


@pytest.mark.parametrize("how", [store, send])
def test_restored_by_the_pager(payload, lookup, how):
    path = payload.trimmed(hot={1, 50})
    trimmed = path.read_bytes()
    pager = payload.serve(how)
    payload.run(payload.program(ALL))
    runs = {page * PAGE // RUN for i, page in payload.functions().items() if i not in (1, 50)}
    assert {offset // RUN for _, offset, _ in pager.requests} >= runs - {0}
    assert len(pager.requests) <= len(runs) + 2  # hot pages split two of the runs
    assert {(name, flags) for name, _, flags in pager.requests} == {("usr/lib/libtoy.so", 0)}
    if how is send:
        assert path.read_bytes() == trimmed


def test_what_is_in_the_store_needs_no_pager(payload):
    payload.trimmed()
    program = payload.program(ALL)
    pager = payload.serve()
    payload.run(program)
    assert pager.requests
    pager.requests.clear()
    payload.run(program)
    assert not pager.requests
    payload.stop()
    payload.run(program)


def test_all_that_is_in_the_store_at_once(payload, special):
    """Where a look at what is mapped costs much."""
    payload.guard = special("-DUSE_MAP_QUERY=0")
    payload.trimmed(hot={20, 60})
    payload.serve()
    payload.run(payload.program("int main(void) { return f30(1) + f50(1) + f95(1) != 178; }"))
    pages = payload.functions()
    there = {offset for _, offset, _ in payload.pager.requests}
    program = payload.program("""
        int main(void) { f50(1); fflush(stdout); char line[999]; FILE *f = fopen("/proc/self/maps", "r");
                         while (fgets(line, 999, f)) if (strstr(line, "libtoy.so")) printf("%s", line); }""")
    payload.stop()
    readable: set[int] = set()
    base = None
    for line in payload.run(program).splitlines():
        start, end, protection = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
        base = base or int(start, 16)
        if protection == "r-xp":
            readable |= set(range((int(start, 16) - base) // PAGE, (int(end, 16) - base) // PAGE))
    for i, page in pages.items():
        assert (page in readable) == (i in (20, 60) or payload.offset(page) // RUN * RUN in there), i


@pytest.mark.parametrize("content", [None, b"", b"\0"])
def test_without_the_file_of_what_is_present(payload, content):
    payload.trimmed()
    payload.present.unlink()
    if content is not None:
        payload.present.write_bytes(content)
    payload.serve(
        lambda p, path, offset, flags: (
            store(p, path, offset, flags) if content else send(p, path, offset, flags)
        )
    )
    payload.mark = lambda *_: None
    payload.run(payload.program(ALL))


def test_pager_in_the_abstract_namespace(payload):
    payload.trimmed()
    payload.address = f"@rvbundle-test-{os.getpid()}"
    payload.serve()
    assert payload.run(payload.program(F40)) == "42"
    payload.stop()
    assert payload.message(payload.folder / "program", RVBUNDLE_PRESENT="/nowhere").splitlines()[0] == needs(
        "libtoy.so", f", near f40+0x0 (address {payload.functions()[40] * PAGE:#x}): {SILENT}"
    )


def test_offsets_are_not_addresses(payload, lookup):
    """As in libraries that lld or patchelf made."""
    source = "".join(
        f"__attribute__((aligned(4096))) int f{i}(int x) {{ return x + {i}; }}\n" for i in range(100)
    )
    source += f"int (*const toy_table[])(int) = {{{','.join(f'f{i}' for i in range(100))}}};\n"
    source += "__attribute__((aligned(4096))) void last_one(void) {}\n"
    path = zig_library(payload, source)
    payload.trimmed(hot={1, 50})
    segments = payload.absent["usr/lib/libtoy.so"].segments
    assert any(s.vaddr != s.offset and s.ranges for s in segments)
    program = payload.program(ALL)
    for how in (send, store):
        payload.serve(how)
        payload.run(program)
        compare_all(payload, path)
    payload.stop()
    payload.run(program)


COMPARE = """
    #include <fcntl.h>
    #include <link.h>
    int main(int n, char **a) {
        struct link_map *map = dlopen(a[1], RTLD_NOW);
        int fd = open(a[2], O_RDONLY);
        if (!map || fd < 0) return puts(dlerror()), 1;
        for (int i = 3; i < n; i++) {
            unsigned long vaddr, offset, size;
            static char page[4096];
            sscanf(a[i], "%lx,%lx,%lx", &vaddr, &offset, &size);
            for (unsigned long at = 0; at < size; at += 4096) {
                long want = pread(fd, page, size - at < 4096 ? size - at : 4096, offset + at);
                if (memcmp((char *)map->l_addr + vaddr + at, page, want)) return printf("%lx", vaddr + at), 2;
            }
        }
        return 0;
    }"""


def compare_all(payload: Payload, path: Path) -> None:
    """Check that a process sees every byte of what a library had originally."""
    original = payload.scratch / "original"
    data = payload.originals[str(path.relative_to(payload.root))]
    original.write_bytes(data)
    offset, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    pieces = []
    for kind, flags, at, vaddr, _, size, _, _ in struct.iter_unpack(
        "<IIQQQQQQ", data[offset : offset + 56 * count]
    ):
        if kind == 1 and not flags & 2:
            skip = 64 if at == 0 else 0  # the ELF header is another one
            pieces.append(f"{vaddr + skip:x},{at + skip:x},{size - skip:x}")
    payload.run(payload.program(COMPARE, "-ldl", name="compare"), path, original, *pieces)


def test_segments_that_share_a_page_of_the_file(payload, lookup):
    """lld maps such a page twice, at two addresses: each gets its own protection."""
    # The last page of code has to stay: it shares a page with .dynamic. So unwind data for it must not be
    # on the page that unwind data and code share.
    functions = (f".globl f{i}\nf{i}: .cfi_startproc\n.skip 60\nret\n.cfi_endproc" for i in range(4000))
    last = "{0}.skip 8192\n{0}".format(".cfi_startproc\nret\n.cfi_endproc\n")
    last = f".text 1\n{last}.text 0\n"
    source = last + "\n".join(functions).replace(".skip 60\n", "", 1)
    path = zig_library(payload, source + '\n.section .note.GNU-stack,"",%progbits\n', "s")
    payload.trim(path, range(1 << 20))
    first, second = payload.absent["usr/lib/libtoy.so"].segments[:2]
    shared = second.offset // PAGE * PAGE
    assert first.offset + first.size > shared
    for segment in (first, second):
        place = shared - segment.offset + segment.vaddr
        assert any(start <= place < stop for start, stop in segment.ranges)
    program = payload.program("int main(void) { f0(1); return 0; }", name="second")
    for how in (send, store):
        payload.serve(how)
        compare_all(payload, path)
        payload.run(program)
    payload.stop()
    compare_all(payload, path)
    payload.run(program)


def zig_library(payload: Payload, source: str, suffix: str = "c") -> Path:
    """A library by lld, whose offsets and addresses differ."""
    path = payload.folder / "libtoy.so"
    file = path.with_suffix(f".{suffix}")
    file.write_text(source)
    command = [BUILD_PYTHON, "-m", "ziglang", "cc", "-target", f"{MACHINE}-linux-gnu.2.36", "-O1", "-shared"]
    subprocess.run([*command, "-fPIC", "-o", path, file], check=True)
    return path


@ONLY_NATIVE
@pytest.mark.parametrize("how", [store, send])
def test_every_byte_of_a_large_library(payload, how):
    name = subprocess.check_output(["g++", "-print-file-name=libstdc++.so.6"], text=True).strip()
    path = payload.folder / "libstdc++.so.6"
    shutil.copy(name, path)
    payload.trim(path, range(1 << 20))
    pager = payload.serve(how)
    compare_all(payload, path)
    assert len(pager.requests) > 10


NUMBERS = """
    __attribute__((aligned(4096))) const unsigned numbers[400 * 1024] = {[0 ... 400 * 1024 - 2] = 7, 1};
    __attribute__((aligned(4096))) const unsigned *find(void) { return numbers; }
"""
READ = """
    extern const unsigned *find(void);
    pthread_barrier_t barrier;
    static void *work(void *start) {
        long sum = 0;
        const unsigned *numbers = find();
        for (long i = 0; i < 398; i++) { /* all threads the same pages, or each others */
            if (i % 16 == 0) pthread_barrier_wait(&barrier);
            sum += numbers[(1 + (i + (long)start) % 398) * 1024 + i];
        }
        return (void *)sum;
    }
    int main(int n, char **a) {
        pthread_t t[16]; void *sum;
        pthread_barrier_init(&barrier, 0, 16);
        for (long i = 0; i < 16; i++) pthread_create(&t[i], 0, work, (void *)(i * atoi(a[1])));
        for (int i = 0; i < 16; i++) { pthread_join(t[i], &sum); if ((long)sum != 398 * 7) return 2; }
        return find()[0] != 7 || find()[400 * 1024 - 1] != 1;
    }"""


@pytest.fixture(params=LAYOUTS)
def numbers(request, payload) -> int:
    """A library whose table of numbers is absent but for its ends; the table's first page."""
    path = payload.library("libtoy.so", 100, NUMBERS, *request.param)
    first = payload.symbols()["numbers"]
    payload.trim(path, set(range(first + 1, first + 399)))
    absent = [s for s in payload.absent["usr/lib/libtoy.so"].segments if s.ranges]
    assert [s.protection for s in absent] == [5 if "-Wl,-z,noseparate-code" in request.param else 1]
    assert absent[0].ranges == (((first + 1) * PAGE, (first + 399) * PAGE),)
    return first


@pytest.mark.parametrize("how", [store, send])
@pytest.mark.parametrize("stride", [0, 25])
def test_constants_are_restored_for_many_threads(payload, lookup, numbers, how, stride):
    program = payload.program(READ)
    pager = payload.serve(how)
    payload.run(program, str(stride))
    runs = {payload.offset(page) // RUN for page in range(numbers + 1, numbers + 399)}
    assert {offset // RUN for _, offset, _ in pager.requests} == runs
    payload.stop()
    if how is store:
        payload.run(program, str(stride))
        compare_all(payload, payload.folder / "libtoy.so")


def test_message_for_constants(payload, numbers):
    program = payload.program("""
        extern const unsigned *find(void);
        int main(void) { return find()[1024 * 200 + 3] != 7; }""")
    address = (numbers + 200) * PAGE + 12
    place = f", near numbers+{200 * PAGE + 12:#x} (address {address:#x}): {ABSENT}"
    assert payload.message(program) == f"{needs('libtoy.so', place)}\n{HINT}"


def test_system_calls_can_not_restore_constants(payload, numbers):
    """They fail, and only a read by the program itself mends it: see docs/trimming.md."""
    payload.serve()
    payload.run(
        payload.program("""
            extern const unsigned *find(void);
            int main(void) {
                const unsigned *page = find() + 1024 * 200;
                int pipes[2];
                if (pipe(pipes) || write(pipes[1], page, 9) != -1 || errno != EFAULT) return 1;
                return *(volatile const unsigned *)page != 7 || write(pipes[1], page, 9) != 9;
            }""")
    )


def test_errno_is_kept(payload):
    payload.trimmed()
    payload.serve()
    payload.run(payload.program("int main(void) { errno = 1234; f7(1); return errno != 1234; }"))


def test_constructors_of_other_libraries(payload):
    """The guard is there before any of them runs."""
    extra = """
        extern void *volatile keep[]; int calls;
        __attribute__((constructor, aligned(4096))) static void f200(void) { calls++; keep[0] = 0; }
        __attribute__((aligned(4096))) void f201(void) {}
        void *volatile keep[] = {0, f201};
    """
    payload.trimmed(count=100, extra=extra)
    payload.serve()
    payload.run(payload.program("extern int calls; int main(void) { return calls != 1; }"))
    payload.stop()
    payload.present.write_bytes(bytes(100))
    assert "near" in payload.message(payload.folder / "program")


def test_libraries_come_and_go(payload, lookup):
    """Never the bytes of a library that was at this address before."""
    for name, more in (("liba.so", 0), ("libb.so", 1000)):
        source = "".join(
            f"__attribute__((aligned(4096))) int f{i}(int x) {{ return x + {i + more}; }}\n"
            for i in range(100)
        )
        source += "__attribute__((aligned(4096))) void last_one(void) {}\n"
        payload.compile(name, source, "-shared", "-fPIC")
        payload.trimmed(name)
    program = payload.program(
        """
        int main(int n, char **a) {
            int same = 0;
            void *before = 0;
            for (int i = 0; i < 300; i++) {
                void *h = dlopen(a[1 + i % 2], RTLD_NOW);
                char name[9]; sprintf(name, "f%d", i * 7 % 100);
                int (*f)(int) = dlsym(h, name);
                if (f(1) != 1 + i * 7 % 100 + 1000 * (i % 2)) return 1;
                void *at = dlsym(h, "f0");
                same += at == before;
                before = at;
                dlclose(h);
            }
            return same < LEAST ? 2 : 0;
        }""".replace("LEAST", "0" if EMULATOR else "200"),
        "-ldl",
    )
    for how in (send, store):
        payload.serve(how)
        payload.run(program, payload.folder / "liba.so", payload.folder / "libb.so")
    payload.stop()
    payload.run(program, payload.folder / "liba.so", payload.folder / "libb.so")


THREADS = """
    pthread_barrier_t barrier;
    void *work(void *x) {
        long sum = 0;
        for (int i = 0; i < 1000; i++) {
            if (i % 16 == 0) pthread_barrier_wait(&barrier);
            sum += toy_table[i](1);
        }
        return (void *)sum;
    }
    int main(void) {
        pthread_t t[8]; void *sum;
        pthread_barrier_init(&barrier, 0, 8);
        for (int i = 0; i < 8; i++) pthread_create(&t[i], 0, work, 0);
        for (int i = 0; i < 8; i++) {
            pthread_join(t[i], &sum);
            if ((long)sum != 500500) return 1;
        }
        return 0;
    }"""


def test_threads_race_for_the_same_pages(payload, lookup):
    """A page is often back before the second thread's fault is looked at."""
    payload.trimmed(count=1000, hot={n for n in range(1000) if n % 5 == 0})
    program = payload.program(THREADS)
    for how in (send, store):
        payload.serve(how)
        payload.run(program)
    payload.stop()
    for _ in range(3):
        payload.run(program)


def test_handlers_that_jump_out_leave_nothing_behind(payload):
    payload.trimmed()
    program = payload.program("""
        #include <dirent.h>
        #include <sys/time.h>
        static sigjmp_buf back; static volatile int jumps, armed;
        static void handler(int s) { if (armed && ++jumps % 3) { armed = 0; siglongjmp(back, 1); } }
        static int count(const char *path) {
            DIR *d = opendir(path); int n = 0; while (readdir(d)) n++; closedir(d); return n;
        }
        int main(void) {
            struct itimerval every = {{0, 300}, {0, 300}}, off = {0};
            int before = count("/proc/self/fd");
            signal(SIGALRM, handler);
            setitimer(ITIMER_REAL, &every, 0);
            for (volatile int i = 0; i < 100; i++) {
                while (sigsetjmp(back, 1)) {}
                armed = 1;
                if (toy_table[i](1) != i + 1) return 1;
                armed = 0;
            }
            setitimer(ITIMER_REAL, &off, 0);
            return count("/proc/self/fd") - before;
        }""")

    def slow(payload, path, offset, flags):
        time.sleep(0.003)
        return send(payload, path, offset, flags)

    payload.serve(slow)
    payload.run(program)


@ONLY_NATIVE
def test_fork_vfork_and_spawn(payload):
    payload.trimmed()
    program = payload.program("""
        int main(int n, char **a) {
            if (n > 1) return f40(1) != 41;
            for (int fd = 3; fd < 100; fd++) close(fd);
            if (f10(1) != 11) return 1;
            if (fork() == 0) {
                if (f20(1) != 21) _exit(1);
                if (fork() == 0) _exit(f30(1) != 31);
                int s; wait(&s); _exit(s != 0);
            }
            int status; wait(&status);
            if (status) return 2;
            if (vfork() == 0) _exit(f50(1) != 51);
            wait(&status);
            if (status || f51(1) != 52) return 3;
            char *argv[] = {a[0], "x", 0};
            pid_t pid;
            if (vfork() == 0) { execv(a[0], argv); _exit(1); }
            wait(&status);
            if (status) return 4;
            if (posix_spawn(&pid, a[0], 0, 0, argv, environ)) return 5;
            waitpid(pid, &status, 0);
            if (status) return 6;
            return f60(1) != 61;
        }""")
    payload.serve(send)
    payload.run(program)


@AS_ROOT
def test_in_a_root_of_its_own_with_an_empty_environment(payload):
    """As in the sandbox: /etc/ld.so.preload, default places, children without any variable."""
    payload.trimmed()
    program = payload.program("""
        int main(int n, char **a) {
            int first = n * 10;
            if (toy_table[first](1) != first + 1) return 1;
            char *none[] = {0}, *argv[] = {a[0], "x", "x", 0};
            pid_t pid; int status;
            if (n > 2) return 0;
            if (posix_spawn(&pid, a[0], 0, 0, argv, none)) return 2;
            waitpid(pid, &status, 0);
            return status ? 3 : 0;
        }""")
    root = payload.root
    for line in subprocess.check_output(["ldd", program], text=True).splitlines():
        for found in re.findall(r"(?:^\s*|=> )(/(?!tmp)\S+)", line):
            to = root / found.lstrip("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, to)
    shutil.copy(payload.guard, root / absent.GUARD)
    for folder in ("etc", "proc", "run/rvbundle"):
        (root / folder).mkdir(parents=True)
    (root / "etc/ld.so.preload").write_text(f"/{absent.GUARD}\n")
    (root / "etc/ld.so.conf").write_text("/usr/lib\n")
    payload.present.rename(root / "run/rvbundle/present")
    payload.present = root / "run/rvbundle/present"
    (payload.scratch / "root").symlink_to(root)  # a socket's path must be short
    payload.address = str(payload.scratch / "root/run/rvbundle/pager")
    pager = payload.serve()
    script = f"mount -t proc proc {root}/proc && exec env -i /usr/sbin/chroot {root} /usr/lib/program"
    command = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    runs = {payload.functions()[i] * PAGE // RUN * RUN for i in (10, 30)}
    assert {offset for _, offset, _ in pager.requests} == runs


@ONLY_NATIVE
def test_python_and_its_subprocesses(payload):
    path = payload.trimmed()
    payload.serve()
    code = f"""
import ctypes, subprocess, sys
lib = ctypes.CDLL({str(path)!r})
assert lib.f10(1) == 11
call = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).f20(1) != 21)"
ways = {{}}, {{"close_fds": False}}, {{"start_new_session": True}}, {{"preexec_fn": lambda: lib.f40(1)}}
for more in ways:
    assert subprocess.run([sys.executable, "-c", call, {str(path)!r}], **more).returncode == 0
assert lib.f70(1) == 71
"""
    payload.run(sys.executable, "-c", code)


# ---- pages do not come back ----


def where(payload: Payload, number: int = 40, name: str = "libtoy.so", into: int = 0) -> str:
    return needs(
        name, f", near f{number}+{into:#x} (address {payload.functions(name)[number] * PAGE + into:#x}): "
    )


def test_message_without_a_pager(payload, lookup):
    payload.trimmed()
    payload.stop()
    done = payload.result(payload.program(F40))
    assert done.returncode == 112
    assert done.stdout == ""
    assert done.stderr == f"{where(payload)}{ABSENT}\n" + HINT


def test_message_names_the_place(payload):
    """The address is that of the access, not of its page."""
    payload.trimmed()
    text = payload.message(payload.program("int main(void) { return *((volatile char *)f40 + 0x123); }"))
    assert text.startswith(where(payload, into=0x123))


def test_message_without_symbols(payload):
    path = payload.library()
    program = payload.program(F40)
    data = bytearray(path.read_bytes())
    payload.trimmed()
    data = bytearray(path.read_bytes())
    data[0x3C:0x3E] = bytes(2)  # e_shnum
    path.write_bytes(data)
    page = int(re.search(r"address (0x\w+)", payload.message(program))[1], 16)
    assert payload.message(program).startswith(needs("libtoy.so", f" (address {page:#x}): {ABSENT}\n"))


def test_message_from_a_library_that_lld_linked(payload):
    source = "".join(
        f"__attribute__((aligned(4096))) int f{i}(int x) {{ return x + {i}; }}\n" for i in range(100)
    )
    zig_library(payload, source + "__attribute__((aligned(4096))) void last_one(void) {}\n")
    program = payload.program(F40)
    payload.trimmed()
    assert payload.message(program).startswith(where(payload))


@ONLY_NATIVE
def test_message_with_the_python_stack(payload):
    python = "/usr/bin/python3"
    exported = subprocess.run(
        ["nm", "-D", os.path.realpath(python)], capture_output=True, text=True, check=False
    )
    if "_Py_DumpTraceback" not in exported.stdout:
        pytest.skip("no Python that exports _Py_DumpTraceback")
    path = payload.trimmed()
    script = payload.scratch / "agent.py"
    script.write_text(
        f"import ctypes\nlib = ctypes.CDLL({str(path)!r})\n\n\ndef culprit():\n    lib.f40(1)\n\nculprit()\n"
    )
    lines = payload.message(python, script).splitlines()
    assert lines[0] == where(payload) + ABSENT
    assert f'  File "{script}", line 6 in culprit' in lines
    assert lines[-1].startswith("hint: ")


@ONLY_NATIVE
def test_message_when_the_python_stack_needs_absent_pages(payload):
    """What prints the stack may be absent itself: then the rest comes all the same, once."""
    payload.trimmed()
    program = payload.program(
        """
        void *PyGILState_GetThisThreadState(void) { return environ; }
        void _Py_DumpTraceback(int fd, void *x) { write(fd, "stack\\n", 6); f60(1); }
        int main(void) { f40(1); }""",
        "-ltoy",
        "-rdynamic",
    )
    lines = payload.message(program).splitlines()
    assert [lines[0], lines[1], lines[2][:5], len(lines)] == [where(payload) + ABSENT, "stack", "hint:", 3]


def test_many_threads_that_cannot_go_on(payload):
    payload.trimmed()
    program = payload.program("""
        static void *work(void *x) { toy_table[(long)x](1); return 0; }
        int main(void) {
            pthread_t t[16];
            for (long i = 0; i < 16; i++) pthread_create(&t[i], 0, work, (void *)(i * 3));
            for (int i = 0; i < 16; i++) pthread_join(t[i], 0);
            return 0;
        }""")
    for _ in range(10):
        assert payload.message(program).count("rvbundle:") == 1


@ONLY_NATIVE
def test_vfork_child_that_cannot_go_on(payload):
    """It ends alone; its parent's own message is still to come."""
    payload.trimmed()
    program = payload.program("""
        int main(void) {
            int status;
            if (vfork() == 0) { f20(1); _exit(0); }
            wait(&status);
            if (WEXITSTATUS(status) != 112) return 1;
            f40(1);
            return 2;
        }""")
    text = payload.message(program)
    assert text.count("rvbundle:") == 2
    assert "near f20" in text
    assert "near f40" in text


def endless(payload, path, offset, flags):
    time.sleep(3)
    return answer(RESTORED)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer(NOT_IN_PACK, b"the pack has no such path"), "the pack has no such path"),
        (answer(FAILED, b"disk full\n\x1b[1mx"), "disk full  [1mx"),
        (answer(FAILED), "the pager could not restore it"),
        (answer(FAILED, b"y" * 500), "y" * 199),
        (answer(RESTORED, b"x"), ODD),
        (answer(4), ODD),
        (answer(255, b"zzz"), ODD),
        (answer(BYTES), ODD),
        (answer(BYTES, bytes(100)), ODD),
        (answer(BYTES, bytes(RUN + 1)), ODD),
        (struct.pack("<BI", BYTES, RUN) + bytes(RUN - 1), SILENT),
        (struct.pack("<BI", BYTES, 0xFFFFFFFF), ODD),
        (struct.pack("<BI", FAILED, 100) + b"short", SILENT),
        (b"", SILENT),
        (b"\0", SILENT),
        (b"\0\0\0\0", SILENT),
        (None, SILENT),
    ],
)
def test_odd_answers(payload, reply, reason):
    payload.trimmed()
    payload.serve(lambda *_: reply)
    assert payload.message(payload.program(F40)).startswith(f"{where(payload)}{reason}\nhint:")


def test_pager_that_takes_too_long(payload, special):
    payload.trimmed()
    payload.guard = special("-DPAGER_SECONDS=1")
    program = payload.program(F40)
    payload.serve(endless)
    start = time.monotonic()
    assert payload.message(program).startswith(f"{where(payload)}{SILENT}\n")
    assert time.monotonic() - start < 2.8
    payload.stop()
    # one that never accepts: the queue for new connections is full
    Path(payload.address).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(payload.address)
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(payload.address)
        assert payload.message(program).startswith(f"{where(payload)}{SILENT}\n")
        for one in waiting:
            one.close()


def test_pager_that_is_gone(payload):
    payload.trimmed()
    program = payload.program(F40)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(payload.address)
    assert payload.message(program).startswith(f"{where(payload)}{SILENT}\n")


def test_pager_that_dies_midway(payload):
    payload.trimmed()
    calls = []

    def once(payload, *request):
        calls.append(request)
        return store(payload, *request) if len(calls) == 1 else None

    payload.serve(once)
    program = payload.program("int main(void) { f2(1); f40(1); }")
    assert payload.message(program).startswith(f"{where(payload)}{SILENT}\n")


# ---- the store's file ----


def test_file_that_was_replaced_is_not_mapped(payload, lookup):
    path = payload.trimmed()
    program = payload.program('int main(int n, char **a) { rename(a[1], a[2]); printf("%d", f40(2)); }')
    other = payload.folder / "other"
    for how in (store, send):
        shutil.copy(path, other)
        pager = payload.serve(how)
        text = payload.message(program, other, path)
        assert text.startswith(needs("libtoy.so"))
        assert text.splitlines()[0].endswith("): its file was deleted or replaced while it is in use")
        assert not pager.requests


@AS_ROOT
@pytest.mark.parametrize("answers", [True, False])
def test_another_file_at_its_place(payload, lookup, answers):
    """Hidden by a mount: its path still is the old one. The bytes can come from the pager only."""
    path = payload.trimmed()
    other = payload.folder / "other"
    other.write_bytes(bytes(len(path.read_bytes())))
    program = payload.program(
        """
        #include <sys/mount.h>
        #include <sched.h>
        int main(int n, char **a) {
            if (unshare(CLONE_NEWNS) || mount(0, "/", 0, MS_REC | MS_PRIVATE, 0)) return 1;
            if (mount(a[1], a[2], 0, MS_BIND, 0)) return 2;
            printf("%d", f40(2));
            return 0; }"""
    )
    pager = payload.serve(lambda p, path, offset, flags: send(p, path, offset, 0) if flags and answers else
                          answer(RESTORED) if not flags else answer(FAILED, b"no"))  # fmt: skip
    if answers:
        assert payload.run(program, other, path) == "42"
    else:
        assert "): its file in the store is another one now; no\n" in payload.message(program, other, path)
    assert [flags for _, _, flags in pager.requests] == [0, 1]
    payload.stop()
    payload.present.write_bytes(b"\xff" * 100)
    assert f"): its file in the store is another one now; {ABSENT}\n" in payload.message(program, other, path)


@AS_ROOT
def test_on_overlayfs(payload, lookup):
    """There stat(2) and /proc/self/maps may tell different inodes of one file."""
    payload.trimmed()
    program = payload.program(ALL)
    payload.serve()
    payload.run(program)
    payload.stop()
    upper, work, merged = (payload.scratch / n for n in ("upper", "work", "merged"))
    for folder in (upper, work, merged):
        folder.mkdir()
    options = f"lowerdir={payload.root},upperdir={upper},workdir={work}"
    script = f"mount -t overlay overlay -o {options} {merged} || exit 77; exec {merged}/usr/lib/program"
    more = {"RVBUNDLE_ROOT": str(merged), "LD_LIBRARY_PATH": f"{merged}/usr/lib"}
    done = payload.result("unshare", "--mount", "sh", "-c", script, **more)
    if done.returncode == 77:
        pytest.skip("no overlayfs here")
    assert (done.returncode, done.stderr) == (0, "")


TRUNCATE = """
    int main(int n, char **a) {
        f40(1);
        madvise((void *)f40, 4096 * 20, MADV_DONTNEED);
        if (truncate(a[1], atol(a[2]))) return 1;
        long sum = 0;
        for (int i = 40; i < 60; i++) sum += ORDER[i](1);
        printf("%ld", sum); fflush(stdout); _exit(0); /* no destructors: these are cut off, too */
    }"""


@ONLY_NATIVE
@pytest.mark.parametrize("answers", [True, False])
def test_file_that_is_cut_short(payload, lookup, answers):
    """SIGBUS where it was mapped already; the rest must not be mapped."""
    path = payload.trimmed(extra="int (*toy_order[100])(int);")
    program = payload.program(
        "extern int (*toy_order[100])(int);"
        + TRUNCATE.replace("ORDER", "toy_order").replace(
            "f40(1);", "for (int i = 0; i < 100; i++) toy_order[i] = toy_table[i]; f40(1);"
        ),
        "-ltoy",
        "-Wl,-z,now",  # the library's .dynamic is cut off, too
    )
    address = payload.functions()[40] * PAGE
    pager = payload.serve(lambda p, path, offset, flags: store(p, path, offset, 0) if not flags else
                          send(p, path, offset, 0) if answers else answer(FAILED, b"no"))  # fmt: skip
    original = path.read_bytes()
    if answers:
        assert payload.run(program, path, str(address)) == str(sum(range(40, 60)) + 20)
        assert {flags for _, _, flags in pager.requests} == {0, 1}
    else:
        assert payload.message(program, path, str(address)).startswith(
            needs("libtoy.so", f" (address {address:#x}): its file in the store cannot be read; no\n")
        )
    path.write_bytes(original)


def test_file_that_cannot_be_opened(payload):
    path = payload.trimmed()
    program = payload.program(
        """
        #include <sys/resource.h>
        #include <fcntl.h>
        int main(int n, char **a) {
            struct rlimit now, after;
            getrlimit(RLIMIT_NOFILE, &now);
            now.rlim_cur = 50;
            setrlimit(RLIMIT_NOFILE, &now);
            while (open("/dev/null", O_RDONLY) >= 0) {}
            for (int i = 0; i < 100; i += 3) if (toy_table[i](1) != i + 1) return 1;
            getrlimit(RLIMIT_NOFILE, &after);
            if (after.rlim_cur != 50) return 2;
            return open("/dev/null", O_RDONLY) >= 0;
        }"""
    )
    for how in (send, store):
        payload.serve(how)
        payload.run(program, path)


@ONLY_NATIVE
def test_no_descriptor_to_be_had(payload):
    """Then nothing can be told about a fault, but that."""
    payload.trimmed()
    payload.serve()
    program = payload.program("""
        #include <sys/resource.h>
        int main(void) {
            struct rlimit none = {3, 3}; setrlimit(RLIMIT_NOFILE, &none);
            return f40(1); }""")
    done = payload.result(program)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("rvbundle: a fault cannot be looked into: ")


def test_files_of_the_program_that_are_cut_short(payload):
    """SIGBUS that has nothing to do with absent pages goes to the program's handler, or kills."""
    payload.trimmed()
    payload.serve()
    program = payload.program("""
        static char *p;
        static void handler(int s, siginfo_t *i, void *c) { f10(1); _exit(i->si_addr == p + 5 ? 42 : 1); }
        int main(int n, char **a) {
            FILE *f = tmpfile(); ftruncate(fileno(f), 4096);
            p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(f), 0);
            ftruncate(fileno(f), 0);
            struct sigaction act = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
            if (n > 1) sigaction(SIGBUS, &act, 0);
            return p[5];
        }""")
    payload.run(program, code=-signal.SIGBUS)
    payload.run(program, "handler", code=42)


@ONLY_NATIVE
def test_no_mappings_left(payload):
    payload.trimmed()
    program = payload.program("""
        int main(void) {
            char *p = mmap(0, 70000 * 8192L, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            for (long i = 0; i < 70000; i++) if (mprotect(p + i * 8192, 4096, PROT_READ)) {
                f40(1);
                return 1;
            }
            return 9; }""")
    for how in (store, send):
        payload.serve(how)
        done = payload.result(program)
        if done.returncode == 9:
            pytest.skip("vm.max_map_count is larger than usual here")
        assert done.returncode == 112
        assert "vm.max_map_count" in done.stderr.splitlines()[0]


# ---- signals: more in test_signals.py ----


def test_masks_and_handlers_are_read_back(payload):
    payload.trimmed()
    payload.serve()
    program = payload.program("""
        #include <sys/ucontext.h>
        static void handler(int s) { f10(1); }
        static int blocked(int s) {
            sigset_t m; pthread_sigmask(SIG_BLOCK, 0, &m); return sigismember(&m, s); }
        static int really(int s) {
            char line[100]; unsigned long mask = 0; FILE *f = fopen("/proc/thread-self/status", "r");
            while (fgets(line, 100, f)) sscanf(line, "SigBlk: %lx", &mask);
            fclose(f); return mask >> (s - 1) & 1;
        }
        static int set(int how, int s, sigset_t *old) {
            sigset_t m; sigemptyset(&m); sigaddset(&m, s); return pthread_sigmask(how, &m, old); }
        int main(void) {
            sigset_t old, both; sigemptyset(&both); sigaddset(&both, SIGSEGV); sigaddset(&both, SIGBUS);
            if (set(SIG_BLOCK, SIGSEGV, &old) || sigismember(&old, SIGSEGV)) return 1;
            if (!blocked(SIGSEGV) || blocked(SIGBUS) || really(SIGSEGV)) return 2;
            if (sigprocmask(SIG_BLOCK, &both, &both)) return 3; /* one variable for both */
            if (!sigismember(&both, SIGSEGV) || sigismember(&both, SIGBUS)) return 4;
            if (!blocked(SIGSEGV) || !blocked(SIGBUS) || really(SIGBUS)) return 5;
            f20(1);
            if (set(SIG_UNBLOCK, SIGBUS, &old) || blocked(SIGBUS) || !blocked(SIGSEGV)) return 6;
            if (set(SIG_SETMASK, SIGUSR1, &old) || blocked(SIGSEGV) || !really(SIGUSR1)) return 7;
            if (set(77, SIGSEGV, &old) != EINVAL || blocked(SIGSEGV)) return 8;
            sighold(SIGSEGV); if (!blocked(SIGSEGV)) return 9;
            sigrelse(SIGSEGV); if (blocked(SIGSEGV)) return 10;
            if (sigset(SIGSEGV, handler) != SIG_DFL || sigset(SIGSEGV, SIG_HOLD) != handler) return 11;
            if (sigset(SIGSEGV, SIG_IGN) != SIG_HOLD || blocked(SIGSEGV)) return 12;
            sigignore(SIGBUS); raise(SIGBUS); raise(SIGSEGV);
            struct sigaction a = {.sa_handler = handler}, got;
            sigfillset(&a.sa_mask);
            for (int i = 0; i < 3; i++) {
                int s = (int[]){SIGUSR1, SIGSEGV, SIGBUS}[i];
                if (sigaction(s, &a, &got) || sigaction(s, 0, &got) || got.sa_handler != handler) return 13;
                if (!sigismember(&got.sa_mask, SIGSEGV) || !sigismember(&got.sa_mask, SIGBUS)) return 14;
                sigemptyset(&got.sa_mask);
                if (sigaction(s, &got, &got) || !sigismember(&got.sa_mask, SIGBUS)) return 15;
                if (sigaction(s, 0, &got) || sigismember(&got.sa_mask, SIGBUS)) return 16;
            }
            errno = 0;
            if (sigaction(99, &a, 0) != -1 || errno != EINVAL) return 17;
            if (sigaction(SIGKILL, &a, 0) != -1 || sighold(-1) != -1) return 18;
            raise(SIGUSR1);
            return 0;
        }""")
    payload.run(program)


def test_signal_that_was_sent_while_blocked(payload):
    payload.trimmed()
    payload.serve()
    program = payload.program("""
        static volatile int count, code, value;
        static void handler(int s, siginfo_t *i, void *c) {
            count++; code = i->si_code; value = i->si_value.sival_int; f10(1); }
        int main(void) {
            struct sigaction a = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
            sigaction(SIGSEGV, &a, 0);
            sigset_t m, old; sigemptyset(&m); sigaddset(&m, SIGSEGV);
            sigprocmask(SIG_BLOCK, &m, 0);
            sigqueue(getpid(), SIGSEGV, (union sigval){.sival_int = 77});
            f20(1);
            if (count) return 1;
            sigprocmask(SIG_UNBLOCK, &m, &old);
            if (count != 1 || code != SI_QUEUE || value != 77) return 2;
            kill(getpid(), SIGSEGV);
            if (count != 2 || code != SI_USER) return 3;
            signal(SIGSEGV, SIG_DFL);
            sigprocmask(SIG_BLOCK, &m, 0);
            kill(getpid(), SIGSEGV);
            sigprocmask(SIG_SETMASK, &old, 0);
            sigprocmask(SIG_UNBLOCK, &m, 0);
            return 4;
        }""")
    payload.run(program, code=-signal.SIGSEGV)


def test_calls_that_wait_with_another_mask(payload):
    """A handler that runs meanwhile may need absent pages; they still are cancellation points."""
    payload.trimmed()
    payload.serve()
    program = payload.program(
        """
        #include <poll.h>
        #include <sys/epoll.h>
        #include <sys/select.h>
        #include <sys/time.h>
        static volatile int next;
        static void handler(int s) { toy_table[next++](1); }
        static int fd;
        static void wait_with(int how, const sigset_t *m) {
            struct timespec t = {5, 0}; struct epoll_event e;
            if (how == 0) sigsuspend(m);
            if (how == 1) ppoll(0, 0, &t, m);
            if (how == 2) pselect(0, 0, 0, 0, &t, m);
            if (how == 3) epoll_pwait(fd, &e, 1, 5000, m);
        }
        static void *sleeper(void *how) { sigset_t m; sigemptyset(&m); wait_with((long)how, &m); return 0; }
        int main(void) {
            sigset_t alarm, most;
            struct itimerval soon = {{0, 0}, {0, 20000}};
            fd = epoll_create(1);
            sigemptyset(&alarm); sigaddset(&alarm, SIGALRM);
            sigfillset(&most); sigdelset(&most, SIGALRM);
            signal(SIGALRM, handler);
            sigprocmask(SIG_BLOCK, &alarm, 0);
            for (int how = 0; how < 4; how++) {
                setitimer(ITIMER_REAL, &soon, 0);
                wait_with(how, &most);
                if (next != how + 1) return 1 + how;
            }
            for (long how = 0; how < KINDS; how++) {
                pthread_t t; void *r;
                pthread_create(&t, 0, sleeper, (void *)how);
                usleep(20000); pthread_cancel(t); pthread_join(t, &r);
                if (r != PTHREAD_CANCELED) return 11 + how;
            }
            return 0;
        }""".replace("KINDS", "0" if EMULATOR else "4")
    )
    start = time.monotonic()
    payload.run(program)
    assert time.monotonic() - start < 4


def test_inherited_mask(payload):
    payload.trimmed()
    payload.serve()
    program = payload.program("""
        int main(void) {
            sigset_t m; sigprocmask(SIG_BLOCK, 0, &m);
            if (!sigismember(&m, SIGSEGV) || sigismember(&m, SIGBUS)) return 1;
            return f10(1) != 11;
        }""")
    parent = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [11]); "
    code = f"{parent} os.execvpe(sys.argv[1], sys.argv[1:], {payload.environment()!r})"
    subprocess.run([sys.executable, "-c", code, *payload.command(program)], check=True)


def test_small_alternate_stack(payload, lookup):
    """A fault on it takes the kernel's frame and less than 4 KiB."""
    payload.trimmed()
    program = payload.program("""
        #include <sys/auxv.h>
        static void handler(int s) { f20(1); }
        int main(void) {
            size_t frame = getauxval(51 /* AT_MINSIGSTKSZ */);
            if (!frame) frame = 5000;
            size_t size = 2 * frame + 4096 + 512;
            char *low = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            memset(low, 0x55, 1 << 20);
            stack_t s = {.ss_sp = low + 65536, .ss_size = size};
            struct sigaction a = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
            if (sigaltstack(&s, 0)) return 1;
            sigaction(SIGUSR1, &a, 0);
            raise(SIGUSR1);
            for (int i = 0; i < 65536; i++) if (low[i] != 0x55) return 2;
            return 0;
        }""")
    for how in (send, store):
        payload.serve(how)
        payload.run(program)


def test_handler_on_the_stack_that_it_asked_for(payload):
    payload.trimmed()
    payload.serve()
    program = payload.program("""
        static char stack[65536]; static volatile int on;
        static sigjmp_buf back;
        static int *volatile nothing;
        static void handler(int s) { char here; on = &here > stack && &here < stack + sizeof stack;
                                     f20(1); siglongjmp(back, 1); }
        int main(void) {
            stack_t s = {.ss_sp = stack, .ss_size = sizeof stack};
            sigaltstack(&s, 0);
            for (int i = 0; i < 2; i++) {
                struct sigaction a = {.sa_handler = handler, .sa_flags = i ? SA_ONSTACK : 0};
                sigaction(SIGSEGV, &a, 0);
                on = 2;
                if (!sigsetjmp(back, 1)) *nothing = 1;
                if (on != i) return i + 1;
            }
            return 0;
        }""")
    payload.run(program)


@ONLY_NATIVE
def test_main_thread_that_has_ended(payload, lookup):
    """/proc/self/maps is empty then."""
    payload.trimmed()
    payload.serve()
    program = payload.program("""
        static void *work(void *x) { usleep(50000); _exit(f40(1) != 41); }
        int main(void) { pthread_t t; pthread_create(&t, 0, work, 0); pthread_exit(0); }""")
    payload.run(program)


def test_exceptions_need_no_absent_pages(payload):
    """Unwind data of what is there is there, too; the rest of it, and all other code, is absent."""
    source = "#include <string>\n#include <stdexcept>\n"
    source += "".join(
        f'extern "C" __attribute__((aligned(4096), noinline)) int f{i}(int x)'
        f"{{ std::string s(40, x); try {{ if (x > {i}) throw std::runtime_error(s); return {i}; }}"
        f" catch (const std::exception &e) {{ return {i} + (int)std::string(e.what()).size(); }} }}\n"
        for i in range(200)
    )
    source += 'extern "C" __attribute__((aligned(4096))) void last_one(void) {}\n'
    path = payload.compile("libcpp.so", source, "-shared", "-fPIC", compiler="g++")
    program = payload.compile(
        "program",
        'extern "C" int f100(int); int main() { return f100(1) != 100 || f100(200) != 140; }',
        "-lcpp",
        compiler="g++",
    )
    pages = payload.functions("libcpp.so")
    absent_code = {n for i, n in pages.items() if i != 100}
    frames = section_pages(path, ".eh_frame", ".gcc_except_table", ".eh_frame_hdr")
    payload.trim(path, absent_code | frames)
    segments = payload.absent["usr/lib/libcpp.so"].segments
    gone = {n for s in segments for a, b in s.ranges for n in range(a // PAGE, b // PAGE)}
    assert len(gone & absent_code) > 190
    assert gone & frames
    payload.run(program)


def section_pages(path: Path, *names: str) -> set[int]:
    pages: set[int] = set()
    for line in subprocess.check_output(["readelf", "-SW", path], text=True).splitlines():
        found = re.match(r" *\[ *\d+\] (\S+) +\S+ +(\w+) +\w+ +(\w+)", line)
        if found and found[1] in names:
            start, size = int(found[2], 16), int(found[3], 16)
            pages |= set(range(start // PAGE, (start + size - 1) // PAGE + 1))
    return pages


# ---- the table ----


@pytest.mark.parametrize("folder", ["", "/nowhere", "/dev/null", "x" * 5000, "/" + "x" * 5000, "relative"])
def test_without_a_table_it_does_nothing(payload, folder):
    payload.library()
    program = payload.program("""
        static void handler(int s) { _exit(42); }
        int main(void) {
            sigset_t all, got; sigfillset(&all);
            sigprocmask(SIG_SETMASK, &all, 0); sigprocmask(SIG_BLOCK, 0, &got);
            if (!sigismember(&got, SIGSEGV) || signal(SIGSEGV, handler) != SIG_DFL) return 1;
            sigprocmask(SIG_UNBLOCK, &all, 0);
            struct sigaction a;
            if (sigaction(SIGSEGV, 0, &a) || a.sa_handler != handler) return 2;
            raise(SIGSEGV);
            return 3;
        }""")
    payload.run(program, RVBUNDLE_ROOT=folder, code=42)


def test_root_by_another_name(payload):
    payload.trimmed()
    payload.serve()
    link = payload.scratch / "link"
    link.symlink_to(payload.root)
    assert payload.run(payload.program(F40), RVBUNDLE_ROOT=f"{link}/usr/../") == "42"


def test_damaged_table(payload):
    payload.trimmed()
    table = payload.root / absent.TABLE
    data = table.read_bytes()
    program = payload.program("int main(void) { return 0; }")
    for content in (b"x", data[:-1], data + b"x" * 8, b"RVABSNT2" + data[8:], bytes(len(data))):
        table.write_bytes(content)
        done = payload.result(program)
        if content == data + b"x" * 8:  # bytes that nothing points at
            assert done.returncode == 0
        else:
            assert done.returncode == 107
            assert done.stderr.startswith("rvbundle: the image is damaged: its table of absent pages (")
            assert done.stderr.endswith("\n")


HARNESS = r"""
    #include "absent.h"
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    static const char *text; static size_t left, piece;
    static long fill(struct reader *r) {
        size_t n = left < piece ? left : piece;
        memcpy(r->data, text, n); text += n; left -= n;
        return n;
    }
    static char *read_file(const char *path, size_t *size) {
        FILE *f = fopen(path, "rb"); fseek(f, 0, SEEK_END); *size = ftell(f); rewind(f);
        char *data = malloc(*size + !*size);
        if (fread(data, 1, *size, f) != *size) exit(9);
        fclose(f); return data;
    }
    static void walk(const struct table *t) {
        for (unsigned i = 0; i < header_of(t)->libraries; i++)
            for (unsigned k = 0; k < library_of(t, i)->segments; k++) {
                const struct absent_segment *s = &segments_of(t, library_of(t, i))[k];
                for (uint64_t at = 0; at <= s->size && at < 1 << 20; at += 2048)
                    find_range(t, s, s->vaddr + at);
            }
    }
    int main(int n, char **a) {
        size_t size; char *data = read_file(a[2], &size);
        if (!strcmp(a[1], "table")) { /* many of them, each with its size before it */
            for (char *at = data; at < data + size;) {
                uint64_t own; memcpy(&own, at, 8);
                uint8_t *copy = malloc(own + !own); /* exactly: a byte too far is seen */
                memcpy(copy, at + 8, own);
                struct table t = {copy, own};
                bool valid = is_valid(&t);
                if (valid) walk(&t);
                putchar(valid ? '1' : '0');
                free(copy);
                at += 8 + own;
            }
            free(data); return 0;
        }
        static const char *const paths[] = {"/r/a", "/r/a b", "/r/ab", "/r/lib.so", "/r/lib.so.1"};
        for (piece = 1; piece <= 1024; piece = piece * 3 + 1) {
            struct reader r = {.fill = fill}; struct area area = {0};
            uint64_t address = strtoul(a[3], 0, 16);
            text = data; left = size;
            bool found = next_area(&r, address, match_start(paths, 5), &area) && area.start <= address;
            if (found) printf("%lx-%lx %d %d %lx %x:%x %lu %d %d\n", area.start, area.end, area.protection,
                              area.shared, area.offset, area.major, area.minor, area.inode, area.library,
                              area.deleted);
            else puts(r.any ? "none" : "empty");
        }
        free(data); return 0;
    }"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """The parts without system calls, under sanitizers."""
    if EMULATOR:
        pytest.skip("sanitizers run natively")
    folder = tmp_path_factory.mktemp("harness")
    (folder / "harness.c").write_text(HARNESS)
    flags = ["-g", "-O1", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{NATIVE}"]
    subprocess.run(
        ["gcc", *flags, "-DBARE_WITH_LIBC", "-o", folder / "harness", folder / "harness.c"], check=True
    )
    return folder / "harness"


def judge(harness: Path, tables: list[bytes]) -> list[bool]:
    file = harness.with_name("tables")
    file.write_bytes(b"".join(struct.pack("<Q", len(t)) + t for t in tables))
    done = subprocess.run([harness, "table", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) == len(tables)
    return [c == "1" for c in done.stdout]


def toy_tables() -> list[absent.AbsentLibrary]:
    read = absent.AbsentSegment(0, 0, 0x2FF0, 1, ((0x1000, 0x2000),))
    code = absent.AbsentSegment(0x4000, 0x3000, 0x41234, 5, ((0x4000, 0x9000), (0xB000, 0x46000)))
    return [absent.AbsentLibrary(f"usr/lib/lib{name}.so", 0x50000, (read, code)) for name in ("a", "ab", "b")]


def test_tables_under_sanitizers(harness):
    data = absent.dump(toy_tables())
    assert judge(harness, [data, absent.dump([])]) == [True, True]
    empty = absent.AbsentLibrary("usr/lib/e.so", 1, ())
    assert judge(harness, [absent.dump([*toy_tables(), empty])]) == [True]
    assert not any(judge(harness, [data[:n] for n in range(len(data))]))
    chance = random.Random(7)
    damaged = []
    for _ in range(4000):
        one = bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 8])):
            place = chance.randrange(len(one))
            one[place] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        damaged.append(bytes(one))
    judge(harness, damaged)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ((0, "Q"), [0]),  # magic
        ((8, "I"), [0, 2, 4, 0xFFFFFFFF]),  # libraries
        ((12, "I"), [4096]),  # run size
        ((16, "Q"), [0, 1, 1 << 63]),  # runs
        ((24, "Q"), [1 << 63, 0xFFFFFFFFFFFFFFFF, 1 << 20, 0]),  # path
        ((32, "I"), [0, 0xFFFFFFFF, 5000]),  # its length
        ((36, "I"), [0xFFFFFFFF, 1000]),  # segments
        ((40, "Q"), [1, 4, 1 << 63, 0xFFFFFFFFFFFFFFF8]),  # where they are
        ((48, "Q"), [1]),  # first run
        ((56, "Q"), [0, 1, 1 << 63, 0x10000]),  # size
        ((144, "Q"), [0x800, 1 << 50]),  # vaddr
        ((152, "Q"), [0x800, 1 << 63, 0x4F000]),  # offset
        ((160, "Q"), [0, 1 << 63, 0xFFFFFFFFFFFFFFFF]),  # size
        ((168, "I"), [0, 2, 3, 7, 8]),  # protection
        ((172, "I"), [0xFFFFFFFF, 100]),  # ranges
        ((176, "Q"), [4, 1 << 63]),  # where they are
    ],
)
def test_fields_of_the_table(harness, field, values):
    data = absent.dump(toy_tables())
    tables = []
    for value in values:
        one = bytearray(data)
        struct.pack_into("<" + field[1], one, field[0], value)
        tables.append(bytes(one))
    assert judge(harness, tables) == [False] * len(tables)


def test_ranges_and_paths_of_the_table(harness):
    def changed(ranges=((0x4000, 0x9000),), path="usr/lib/libx.so", **more) -> bytes:
        fields = {"vaddr": 0x4000, "offset": 0x3000, "size": 0x41234, "protection": 5, **more}
        return absent.dump(
            [absent.AbsentLibrary(path, 0x50000, (absent.AbsentSegment(**fields, ranges=ranges),))]
        )

    assert judge(harness, [changed()]) == [True]
    wrong = [
        changed(((0x9000, 0x4000),)),
        changed(((0x4000, 0x4000),)),
        changed(((0x4000, 0x9000), (0x8000, 0xA000))),
        changed(((0x4800, 0x9000),)),
        changed(((0x4000, 0x9001),)),
        changed(((0x4000, 0x51000),)),
        changed(((0x0, 0x9000),)),
        changed(path="/usr/lib/libx.so"),
        changed(path="usr/lib\0/libx.so"),
        changed(path=""),
    ]
    assert judge(harness, wrong) == [False] * len(wrong)
    twice = bytearray(absent.dump(toy_tables()))
    struct.pack_into("<QI", twice, 24 + 40, *struct.unpack_from("<QI", twice, 24))  # the first path again
    assert judge(harness, [bytes(twice)]) == [False]


MAPS = """\
00400000-00452000 r-xp 00000000 08:02 173521                             /r/lib.so
00652000-00653000 ---p 00052000 fd:01 9                                  /r/lib.so.1
00653000-00655000 ---s 00000000 00:00 0
00655000-00656000 rw-p 00001000 fffff:fffff 18446744073709551615         /r/lib.so (deleted)
00656000-00657000 r--p 00000000 00:00 0                                  [heap]
00657000-00658000 ---p 00000000 08:02 1                                  /r/a b
00658000-00659000 ---p 00000000 08:02 1                                  /r/a (deleted)
00659000-0065a000 ---p 00000000 08:02 1                                  /r/a (deleted) x
0065a000-0065b000 ---p 00000000 08:02 1                                  /r/lib.so.11
0065b000-0065c000 ---p 00000000 08:02 1                                  /r/lib.s
0065c000-0065d000 ---p 00000000 08:02 1                                  /r/
0065d000-0065e000 ---p 00000000 08:02 1                                  /r/ab (deletee)
7fffffffe000-7ffffffff000 rw-p 00000000 00:00 0                          [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
"""


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (0x3FFFFF, "none"),
        (0x400000, "400000-452000 5 0 0 8:2 173521 3 0"),
        (0x451FFF, "400000-452000 5 0 0 8:2 173521 3 0"),
        (0x452000, "none"),
        (0x652FFF, "652000-653000 0 0 52000 fd:1 9 4 0"),
        (0x653000, "653000-655000 0 1 0 0:0 0 -1 0"),
        (0x655000, "655000-656000 3 0 1000 fffff:fffff 18446744073709551615 3 1"),
        (0x656000, "656000-657000 1 0 0 0:0 0 -1 0"),
        (0x657000, "657000-658000 0 0 0 8:2 1 1 0"),
        (0x658000, "658000-659000 0 0 0 8:2 1 0 1"),
        (0x659000, "659000-65a000 0 0 0 8:2 1 -1 0"),
        (0x65A000, "65a000-65b000 0 0 0 8:2 1 -1 0"),
        (0x65B000, "65b000-65c000 0 0 0 8:2 1 -1 0"),
        (0x65C000, "65c000-65d000 0 0 0 8:2 1 -1 0"),
        (0x65D000, "65d000-65e000 0 0 0 8:2 1 -1 0"),
        (0x7FFFFFFFE001, "7fffffffe000-7ffffffff000 3 0 0 0:0 0 -1 0"),
        (0xFFFFFFFFFF600000, "ffffffffff600000-ffffffffff601000 4 0 0 0:0 0 -1 0"),
        (0xFFFFFFFFFFFFFFFF, "none"),
    ],
)
def test_maps_under_sanitizers(harness, address, expected):
    assert set(read_maps(harness, MAPS.encode(), address)) == {expected}


def test_odd_maps_under_sanitizers(harness):
    assert set(read_maps(harness, b"", 5)) == {"empty"}
    for cut in range(1, 90, 3):
        assert set(read_maps(harness, MAPS.encode()[:cut], 0x400000)) <= {
            "none",
            "400000-452000 5 0 0 8:2 173521 3 0",
        }
    chance = random.Random(3)
    for _ in range(40):
        text = bytearray(MAPS.encode())
        for _ in range(5):
            text[chance.randrange(len(text))] = chance.randrange(256)
        assert len(set(read_maps(harness, bytes(text), 0x657000))) == 1


def read_maps(harness: Path, text: bytes, address: int) -> list[str]:
    file = harness.with_name("maps")
    file.write_bytes(text)
    done = subprocess.run(
        [harness, "maps", file, f"{address:x}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


# ---- under other tools ----


@ONLY_NATIVE
def test_a_program_under_sanitizers(payload):
    payload.trimmed()
    payload.serve(send)
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-ltoy")
    # Their own handler for SIGSEGV is set without libc, where the guard can't see it.
    handlers = "handle_segv=0:handle_sigbus=0"
    options = {"ASAN_OPTIONS": f"verify_asan_link_order=0:{handlers}", "UBSAN_OPTIONS": handlers}
    program = payload.program(
        f"int main(void) {{ char *p = malloc(10); {SUM} free(p); return sum != 5050; }}", *flags
    )
    payload.run(program, **options)
    program = payload.program(
        f"int main(int n, char **a) {{ char *p = malloc(10); {SUM} return p[n * 11]; }}", *flags, name="wrong"
    )
    done = payload.result(program, **options)
    assert done.returncode == 1
    assert "wrong.c" in done.stderr


@ONLY_NATIVE
def test_a_program_under_valgrind(payload, special):
    if not shutil.which("valgrind"):
        pytest.skip("no valgrind")
    payload.guard = special("-DUSE_MAP_QUERY=0")  # valgrind does not know what that ioctl(2) fills in
    payload.trimmed()
    program = payload.program(ALL)
    # Memcheck calls each access to an absent page an error; what it says of the guard itself counts.
    # (With what the store has it trips over its own list of mappings: debuginfo.c, '!overlap'.)
    payload.serve(send)
    done = payload.result("valgrind", "--quiet", program)
    assert done.returncode == 0, done.stderr
    complaints = re.findall(r"^==\d+== ([A-Z]\w+ .*)", done.stderr, re.M)
    assert set(complaints) <= {"Jump to the invalid address stated on the next line"} | {
        c for c in complaints if c.startswith("Address 0x")
    }, done.stderr
    payload.stop()
    assert where(payload, 0) in payload.message("valgrind", "--quiet", program)


@ONLY_NATIVE
def test_gdb_sees_through(payload):
    if not shutil.which("gdb"):
        pytest.skip("no gdb")
    payload.trimmed()
    payload.serve()
    program = payload.program("""
        static int *volatile nothing;
        void handler(int s) { f40(1); raise(SIGTRAP); _exit(0); }
        void culprit(void) { *nothing = 1; }
        int main(void) { signal(SIGSEGV, handler); culprit(); return 0; }""")
    gdb = [
        "gdb",
        "-batch",
        "-nx",
        "-ex",
        "handle SIGSEGV nostop noprint pass",
        "-ex",
        "run",
        "-ex",
        "bt",
        program,
    ]
    found = re.findall(r"^#\d+ .*?(\w+|<signal handler called>)(?: \(|$)", payload.run(*gdb), re.M)
    frames = [f for f in found if f in ("handler", "<signal handler called>", "culprit", "main")]
    assert frames == ["handler", "<signal handler called>", "culprit", "main"], found


# ---- other machines ----

# A program without libc, so that no sysroot is needed: it maps a library as ld.so would.
BARE_PROGRAM = """
    #include "guard.c"
    #if defined(__x86_64__)
    __asm__(".globl _start\\n_start: mov %rsp, %rdi\\n and $-16, %rsp\\n call begin\\n");
    static void set_tls(char *at) { sys4(SYS_arch_prctl, 0x1002, (long)at, 0, 0); *(char **)at = at; }
    #elif defined(__aarch64__)
    __asm__(".globl _start\\n_start: mov x0, sp\\n b begin\\n");
    static void set_tls(char *at) { __asm__ volatile("msr tpidr_el0, %0" : : "r"(at)); }
    #else
    __asm__(".globl _start\\n_start: mv a0, sp\\n tail begin\\n");
    static void set_tls(char *at) { __asm__ volatile("mv tp, %0" : : "r"(at)); }
    #endif
    static char tls[8192];
    static int *volatile nothing;
    static volatile int faults;
    static unsigned long hex(const char **s) {
        unsigned long n = 0;
        for (; **s && **s != ','; ++*s) n = n * 16 + (**s <= '9' ? **s - '0' : **s - 'a' + 10);
        *s += **s == ',';
        return n;
    }
    static void handler(int signal, siginfo_t *info, void *context) {
        sigset_t now = {0};
        sys4(SYS_rt_sigprocmask, 0, 0, (long)&now, 8);
        if (signal != SIGSEGV || !context || !(*bits_of(&now) & 1 << (SIGUSR1 - 1))) leave(50);
        leave(info->si_addr == (void *)16 ? 42 : 51);
    }
    __attribute__((used)) void begin(long *stack) {
        int count = (int)stack[0];
        char **a = (char **)(stack + 1), *base = 0;
        Elf64_Ehdr header; Elf64_Phdr load;
        set_tls(tls + 4096);
        start(count, a, a + count + 1);
        int fd = open_file(a[1], O_RDONLY);
        if (!enabled || !read_at(fd, &header, sizeof header, 0)) leave(60);
        base = (char *)sys6(SYS_mmap, 0, 16 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (int i = 0; i < header.e_phnum; i++) {
            if (!read_at(fd, &load, sizeof load, header.e_phoff + i * sizeof load)) leave(61);
            if (load.p_type != PT_LOAD || load.p_flags & PF_W || !load.p_filesz) continue;
            unsigned long extra = load.p_vaddr & 4095;
            int protection = (load.p_flags & PF_R ? PROT_READ : 0) | (load.p_flags & PF_X ? PROT_EXEC : 0);
            sys6(SYS_mmap, (long)(base + load.p_vaddr - extra), load.p_filesz + extra, protection,
                 MAP_PRIVATE | MAP_FIXED, fd, load.p_offset - extra);
        }
        close_file(fd);
        for (int i = 3; i < count; i++) {
            const char *s = a[i];
            unsigned long vaddr = hex(&s);
            int value = ((int (*)(int))(base + vaddr))(1);
            if ((unsigned long)value != hex(&s)) leave(62);
        }
        struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
        *bits_of(&action.sa_mask) = 1 << (SIGUSR1 - 1);
        if (a[2][0] == 'h') sigaction(SIGSEGV, &action, 0);
        if (a[2][0] == 'h' || a[2][0] == 'f') *(volatile int *)((char *)nothing + 16) = 1;
        if (a[2][0] == 's') send_to_self(SIGSEGV, &(siginfo_t){.si_signo = SIGSEGV, .si_code = SI_USER});
        leave(0);
    }"""


@pytest.mark.parametrize("machine", list(TARGET))
def test_other_machines_without_libc(payload, machine):
    emulator = [] if machine == platform.machine() else [f"qemu-{machine}"]
    if emulator and not shutil.which(emulator[0]):
        pytest.skip(f"no {emulator[0]}")
    zig = [BUILD_PYTHON, "-m", "ziglang", "cc", "-target", TARGET[machine], "-O2", "-fno-sanitize=undefined"]
    zig += ["-fno-builtin", "-fno-stack-protector", "-fPIC", "-ftls-model=initial-exec", f"-I{NATIVE}", "-w"]
    zig += ["-mno-outline-atomics"] if machine == "aarch64" else []
    functions = (
        f"__attribute__((aligned(4096))) int f{i}(int x) {{ return x + {i}; }}\n" for i in range(100)
    )
    library, program = payload.folder / "libtoy.so", payload.folder / "bare"
    library.with_suffix(".c").write_text(
        "".join(functions) + "__attribute__((aligned(4096))) void last(void) {}"
    )
    subprocess.run([*zig, "-shared", "-nostdlib", "-o", library, library.with_suffix(".c")], check=True)
    program.with_suffix(".c").write_text(BARE_PROGRAM)
    object_file = program.with_suffix(".o")  # zig links what it compiles with helpers of its own
    subprocess.run([*zig, "-c", "-o", object_file, program.with_suffix(".c")], check=True)
    subprocess.run([*zig, "-static", "-nostdlib", "-no-pie", "-o", program, object_file], check=True)
    payload.trimmed()
    calls = [f"{page * PAGE:x},{i + 1:x}" for i, page in sorted(payload.functions().items())]
    environment = {**os.environ, **payload.settings()}
    del environment["LD_PRELOAD"]

    def run(how: str, *calls: str) -> tuple[int, str]:
        command = [*emulator, program, library, how, *calls]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, "".join(x for x in done.stderr.splitlines(True) if "uncaught target" not in x)

    assert run("-", calls[40]) == (112, f"{where(payload)}{ABSENT}\n" + HINT)
    for reply in (send, store):
        payload.serve(reply)
        assert run("-", *calls) == (0, "")
        assert run("handler", *calls[:5]) == (42, "")
        assert run("fault", *calls[:5]) == (-signal.SIGSEGV, "")
        assert run("sent", *calls[:5]) == (-signal.SIGSEGV, "")
    payload.stop()
    assert run("-", *calls) == (0, "")


# ---- the builds ----


def test_kernel_with_64k_pages(payload, special):
    """Only whole pages of the kernel are mapped; a library trimmed by smaller ones can't be served."""
    payload.guard = special("-DTEST_GRAIN=65536")
    separate = [] if EMULATOR else ["-Wl,-z,separate-code"]  # zig's linker does so anyway
    path = payload.library("libtoy.so", 100, "", "-Wl,-z,max-page-size=65536", *separate)
    original = path.read_bytes()
    program = payload.program(ALL)
    pages = payload.functions()
    payload.trim(path, set(pages.values()), {pages[50]}, grain=65536)
    assert all(n % RUN == 0 for x in payload.absent.values() for s in x.segments for r in s.ranges for n in r)
    for how in (send, store):
        payload.serve(how)
        payload.run(program)
    path.write_bytes(original)
    payload.trim(path, set(pages.values()), {pages[50]})
    payload.serve()
    first = 50 - pages[50] % 16  # at the start of a large page that has absent and other pages
    program = payload.program(f"int main(void) {{ return f{first}(1); }}", name="second")
    text = payload.message(program)
    assert "): the kernel's pages are larger than those of the build\n" in text


def test_all_targets(tmp_path):
    zig_build(tmp_path, list(TARGET.values()))
    for machine in TARGET:
        path = tmp_path / machine / "guard.so"
        dump = subprocess.check_output(["readelf", "-W", "--dyn-syms", "-d", "-l", path], text=True)
        assert re.findall(r"NEEDED.*\[(.*)\]", dump) == [
            "libc.so.6"
        ]  # any version: box64 binds no symbol else
        assert "VERNEED" not in dump
        assert "TEXTREL" not in dump
        assert re.search(r"FLAGS_1.*NODELETE.*INITFIRST", dump)
        assert not any(" R W E" in s or " RWE" in s for s in dump.splitlines())
        symbols = [s.split() for s in dump.splitlines() if re.match(r" +\d+: ", s)]
        assert {s[7] for s in symbols if len(s) == 8 and s[6] == "UND"} == {
            "dlsym", "dlerror", "getauxval", "__errno_location", "_Py_DumpTraceback",
            "PyGILState_GetThisThreadState",
        }  # fmt: skip
        assert all(s[4] == "WEAK" for s in symbols if len(s) == 8 and s[6] == "UND")
        assert {s[7] for s in symbols if len(s) == 8 and s[6] != "UND"} == {
            "sigaction", "__sigaction", "signal", "bsd_signal", "ssignal", "sysv_signal", "__sysv_signal",
            "sigset", "sigignore", "sighold", "sigrelse", "sigprocmask", "pthread_sigmask", "sigblock",
            "sigsetmask", "sigsuspend", "__sigsuspend", "ppoll", "__ppoll_chk", "pselect", "epoll_pwait",
            "epoll_pwait2",
            "pthread_attr_setsigmask_np", "vfork",
        }  # fmt: skip
        if machine == "aarch64":  # kernels with 64 KiB pages
            loads = [s for s in dump.splitlines() if s.strip().startswith("LOAD")]
            assert all(s.split()[-1] == "0x10000" for s in loads), loads
