"""Tests of tracer.c with toy libraries whose functions each have a page of their own."""

from __future__ import annotations

import os
import platform
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "runtime" / "native"
# Another machine by qemu-user: RVBUNDLE_TEST_MACHINE=riscv64, RVBUNDLE_TEST_EMULATOR="qemu-riscv64
# -L SYSROOT" (with glibc in SYSROOT/lib); toys are then compiled by zig. Tests that start programs
# from programs need binfmt_misc.
MACHINE = os.environ.get("RVBUNDLE_TEST_MACHINE", platform.machine())
EMULATOR = os.environ.get("RVBUNDLE_TEST_EMULATOR", "").split()
ONLY_NATIVE = pytest.mark.skipif(bool(EMULATOR), reason="starts programs from programs")
TARGET = {
    "x86_64": "x86_64-linux-gnu.2.17",
    "aarch64": "aarch64-linux-gnu.2.17",
    "riscv64": "riscv64-linux-gnu.2.27",
}
# The interpreter that has ziglang; it need not be the one that runs pytest.
BUILD_PYTHON = os.environ.get("RVBUNDLE_BUILD_PYTHON", sys.executable)
FUNCTIONS = 100


def zig_build(out: Path, targets: list[str], extra: list[str] = ()) -> None:
    code = (
        f"import sys, pathlib, build; build.build(pathlib.Path({str(out)!r}), {targets!r}, {list(extra)!r})"
    )
    subprocess.run([BUILD_PYTHON, "-c", code], cwd=NATIVE, check=True)


@pytest.fixture(scope="session")
def tracer(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tracer")
    zig_build(out, [TARGET[MACHINE]])
    return out / MACHINE / "tracer.so"


@dataclass
class Record:
    first: int
    touched: list[bool]
    watched: list[bool]


def read_record(path: Path) -> Record:
    data = path.read_bytes()
    magic, page_size, first, pages = struct.unpack_from("<8sQQQ", data)
    assert (magic, page_size) == (b"RVPAGES1", 4096)
    size = (pages + 7) // 8
    assert len(data) == 32 + 2 * size
    maps = [data[32 : 32 + size], data[32 + size :]]
    bits = [[bool(m[i // 8] >> (i % 8) & 1) for i in range(pages)] for m in maps]
    for m in maps:  # no bits beyond the end
        assert int.from_bytes(m, "little") >> pages == 0
    assert all(t or w for t, w in zip(*bits, strict=True)), "not watched must count as touched"
    return Record(first, *bits)


class Toys:
    """Compiles toys and runs programs under the tracer."""

    def __init__(self, folder: Path, tracer: Path) -> None:
        self.folder, self.tracer = folder, tracer
        self.pages = folder / "pages"
        self.pages.mkdir()

    def compile(self, output: str, source: str, *flags: str, compiler: str = "gcc") -> Path:
        path = self.folder / output
        source_file = path.with_suffix(".cc" if compiler == "g++" else ".c")
        source_file.write_text(source)
        command = [compiler]
        if EMULATOR:
            zig = "c++" if compiler == "g++" else "cc"
            command = [BUILD_PYTHON, "-m", "ziglang", zig, "-target", f"{MACHINE}-linux-gnu.2.36"]
            command += ["-fno-sanitize=undefined", "-fno-strict-aliasing", "-fno-builtin"]
        command += ["-g", "-O1", "-w", "-o", path, source_file, f"-L{self.folder}"]
        subprocess.run([*command, f"-Wl,-rpath,{self.folder}", "-pthread", *flags], check=True)
        return path

    def library(self, name: str = "libtoy.so", count: int = FUNCTIONS, extra: str = "", *flags):
        source = "".join(
            f"__attribute__((aligned(4096))) int f{i}(int x) {{ return x + {i}; }}\n" for i in range(count)
        )
        table = ",".join(f"f{i}" for i in range(count))
        source += f"int (*const toy_table[])(int) = {{{table}}};\n"
        # After the last function, so that its page holds nothing else.
        source += extra + "__attribute__((aligned(4096))) void last_one(void) {}\n"
        return self.compile(name, source, "-shared", "-fPIC", f"-Wl,-soname,{name}", *flags)

    def program(self, body: str, *flags: str, name: str = "program") -> Path:
        head = """
            #define _GNU_SOURCE
            #include <dlfcn.h>
            #include <errno.h>
            #include <pthread.h>
            #include <setjmp.h>
            #include <signal.h>
            #include <spawn.h>
            #include <stdio.h>
            #include <stdlib.h>
            #include <string.h>
            #include <sys/mman.h>
            #include <sys/wait.h>
            #include <unistd.h>
            extern int (*const toy_table[])(int);
            extern char **environ;
        """
        head += "".join(f"int f{i}(int);" for i in range(FUNCTIONS))
        return self.compile(name, head + body, *(flags or ("-ltoy",)))

    def environment(self, **more: str) -> dict[str, str]:
        own = {
            "LD_AUDIT": str(self.tracer),
            "RVBUNDLE_TRACE_PAGES": str(self.pages),
            "RVBUNDLE_TRACE_PREFIX": f"{self.folder}/",
        }
        return {**os.environ, **own, **more}

    def run(self, *command, code: int = 0, **more: str) -> str:
        result = subprocess.run(
            [*EMULATOR, *command],
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
        assert "tracer" not in result.stderr
        return result.stdout + result.stderr

    def record_path(self, name: str = "libtoy.so") -> Path:
        return self.pages / str(self.folder / name).replace("/", "%")

    def symbols(self, name: str = "libtoy.so") -> dict[str, int]:
        output = subprocess.check_output(["readelf", "-sW", self.folder / name], text=True)
        fields = (line.split() for line in output.splitlines())
        return {f[7]: int(f[1], 16) // 4096 for f in fields if len(f) == 8 and f[3] != "SECTION"
                and f[1] != "Value"}  # fmt: skip

    def touched(self, name: str = "libtoy.so", prefix: str = "f") -> set[str]:
        """The functions PREFIX<number> whose page was touched; all must have been watched."""
        record = read_record(self.record_path(name))
        result = set()
        for symbol, page in self.symbols(name).items():
            if symbol.startswith(prefix) and symbol[len(prefix) :].isdigit():
                assert record.watched[page - record.first], symbol
                if record.touched[page - record.first]:
                    result.add(symbol)
        return result

    def skipped(self) -> dict[str, str]:
        path = self.pages / "skipped"
        lines = path.read_text().splitlines() if path.exists() else []
        return dict(line.split("\t") for line in lines)


@pytest.fixture
def toys(tmp_path, tracer) -> Toys:
    return Toys(tmp_path, tracer)


LINKING = pytest.mark.parametrize("linking", ["-Wl,-z,lazy", "-Wl,-z,now"])


def signal_program(toys: Toys, body: str, linking: str) -> Path:
    toys.library()
    return toys.program("static int *volatile nothing;" + body, "-ltoy", linking)


def names(*numbers: int) -> set[str]:
    return {f"f{i}" for i in numbers}


# ---- what is recorded ----


def test_exactly_the_pages_of_the_called_functions(toys):
    toys.library()
    program = toys.program('int main(void) { printf("%d", f3(1) + f7(1) + f50(1)); }')
    assert toys.run(program) == "63"
    assert toys.touched() == names(3, 7, 50)
    assert not toys.skipped()
    assert [p.name for p in toys.pages.iterdir()] == [toys.record_path().name]  # no temporary file


def test_runs_add_up(toys):
    toys.library()
    program = toys.program("int main(int n, char **a) { toy_table[atoi(a[1])](1); return 0; }")
    for i in (5, 9, 5):
        toys.run(program, str(i))
    assert toys.touched() == names(5, 9)


def test_constructor_destructor_and_ifunc_resolver(toys):
    extra = """
        extern void *volatile keep[];
        __attribute__((constructor, aligned(4096))) void g1(void) { keep[0] = 0; }
        __attribute__((destructor, aligned(4096))) void g2(void) { keep[0] = 0; }
        static int g3(int x) { return x; }
        __attribute__((aligned(4096))) void *g4(void) { return g3; }
        __attribute__((aligned(4096))) void g5(void) {}
        __attribute__((ifunc("g4"))) int chosen(int);
        void *volatile keep[] = {0, g5, chosen};
    """
    toys.library("libtoy.so", FUNCTIONS, extra)
    toys.run(toys.program("int main(void) { f1(1); }"))
    # zig's linker drops the relocation that would call the resolver.
    resolver = set() if EMULATOR else {"g4"}
    assert toys.touched(prefix="g") == {"g1", "g2"} | resolver


def test_rodata_works_in_system_calls_and_is_not_watched(toys):
    text = "x" * 100_000
    toys.library("libtoy.so", FUNCTIONS, f'const char text[] = "{text}";')
    program = toys.program("extern char text[]; int main(void) { write(1, text, 100000); f1(1); }")
    assert toys.run(program) == text
    record = read_record(toys.record_path())
    page = toys.symbols()["text"] - record.first
    assert not any(record.watched[page : page + 24])


def test_unwind_data_of_a_cpp_exception(toys):
    source = "".join(
        f"extern void sink(int); int h{i}(int x)"
        f"{{ try {{ sink(x); }} catch (int e) {{ return e + {i}; }} return 0; }}\n"
        for i in range(5000)
    )
    source += "void sink(int x) { if (x) throw x; }\n"
    toys.compile("libcpp.so", source, "-shared", "-fPIC", compiler="g++")
    program = toys.compile(
        "program",
        "int h2500(int); int main() { return h2500(7) == 2507 ? 0 : 1; }",
        "-lcpp",
        compiler="g++",
    )
    toys.run(program)
    record = read_record(toys.record_path("libcpp.so"))
    sections = subprocess.check_output(["readelf", "-SW", toys.folder / "libcpp.so"], text=True)
    for name in (".eh_frame_hdr", ".eh_frame", ".gcc_except_table"):
        line = next(s for s in sections.splitlines() if f" {name} " in s)
        address, _, size = (int(x, 16) for x in line.split(f" {name} ")[1].split()[1:4])
        inner = range(-(-address // 4096) - record.first, (address + size) // 4096 - record.first)
        assert all(record.watched[i] for i in list(inner)[1:-1]), name
        count = sum(record.touched[i] and record.watched[i] for i in inner)
        # The binary search in .eh_frame_hdr reaches a large part of so small a table.
        limit = len(inner) + 1 if name == ".eh_frame_hdr" else len(inner) / 2
        assert 0 < count < limit, (name, count, len(inner))


def test_only_large_libraries_below_the_prefix(toys):
    toys.library("libsmall.so", 10)
    toys.library()
    toys.run(toys.program("int main(void) { f1(1); }", "-ltoy", "-Wl,--no-as-needed", "-lsmall"))
    assert not toys.record_path("libsmall.so").exists()
    toys.record_path().unlink()
    toys.run(toys.folder / "program", RVBUNDLE_TRACE_PREFIX="/nowhere/")
    assert not list(toys.pages.iterdir())


def test_path_is_canonical(toys):
    toys.library()
    (toys.folder / "link").symlink_to(toys.folder)
    program = toys.program("int main(int n, char **a) { return !dlopen(a[1], RTLD_NOW); }", "-ldl")
    toys.run(program, f"{toys.folder}/link/../{toys.folder.name}/libtoy.so")
    assert toys.record_path().exists()


# ---- what is skipped ----


def test_text_relocations_are_skipped(toys):
    extra = '__asm__(".text\\n.quad outside\\n"); int outside;'
    toys.library("libtoy.so", FUNCTIONS, extra, "-Wl,-z,notext")
    toys.run(toys.program("int main(void) { f1(1); }"))
    assert toys.skipped() == {str(toys.folder / "libtoy.so"): "text relocations"}
    assert not toys.record_path().exists()


def test_no_section_headers_is_skipped(toys):
    path = toys.library()
    program = toys.program("int main(void) { f1(1); }")
    data = bytearray(path.read_bytes())
    data[0x28:0x30] = bytes(8)  # e_shoff
    data[0x3C:0x40] = bytes(4)  # e_shnum, e_shstrndx
    path.write_bytes(data)
    toys.run(program)
    assert toys.skipped() == {str(path): "no section headers"}


def test_record_of_another_library_is_left_alone(toys):
    path = toys.library()
    program = toys.program("int main(void) { f1(1); }")
    for content in (b"", b"nonsense", b"RVPAGES1" + bytes(1000)):
        toys.record_path().write_bytes(content)
        toys.run(program)
        assert toys.record_path().read_bytes() == content
        assert toys.skipped()[str(path)] == "the record there is of another library"


@pytest.mark.parametrize("folder", ["", "/nowhere", "/dev/null", "pages", "/proc", "/" + "x" * 5000])
def test_unusable_folder_does_nothing(toys, folder):
    toys.library()
    program = toys.program("int main(void) { f1(1); raise(SIGSEGV); }")
    toys.run(program, RVBUNDLE_TRACE_PAGES=folder, code=-signal.SIGSEGV)
    assert not list(toys.pages.iterdir())


def test_read_only_folder_does_nothing(toys):
    toys.library()
    toys.pages.chmod(0o555)
    program = toys.program('int main(void) { printf("%d", f1(1)); }')
    assert toys.run(program) == "2"
    if os.getuid() != 0:  # root may write there all the same
        assert not list(toys.pages.iterdir())


# ---- processes ----


@ONLY_NATIVE
def test_fork_vfork_and_spawn(toys):
    toys.library()
    program = toys.program("""
        int main(int n, char **a) {
            if (n > 1) { f40(1); return 0; }
            for (int fd = 3; fd < 100; fd++) close(fd);
            f10(1);
            if (fork() == 0) { f11(1); if (fork() == 0) { f12(1); _exit(0); } wait(0); _exit(0); }
            wait(0);
            if (vfork() == 0) { f20(1); _exit(0); }
            wait(0);
            f21(1);
            char *argv[] = {a[0], "x", 0};
            pid_t pid; int status;
            if (posix_spawn(&pid, a[0], 0, 0, argv, environ)) return 2;
            waitpid(pid, &status, 0);
            f22(1);
            return status ? 3 : 0;
        }""")
    toys.run(program)
    assert toys.touched() == names(10, 11, 12, 20, 21, 22, 40)


@ONLY_NATIVE
@LINKING
def test_vfork_child_resets_its_own_handlers_only(toys, linking):
    program = signal_program(
        toys,
        """
        static void handler(int s) { _exit(42); }
        static void child(char *path) {
            char *argv[] = {path, "x", 0};
            if (vfork() == 0) {
                signal(SIGSEGV, SIG_DFL);
                f20(1);
                execve(path, argv, environ);
                _exit(1);
            }
            wait(0);
        }
        int main(int n, char **a) {
            if (n > 1) return 0;
            signal(SIGSEGV, handler);
            child(a[0]);
            struct sigaction got;
            sigaction(SIGSEGV, 0, &got);
            if (got.sa_handler != handler) return 1;
            if (fork() == 0) {
                child(a[0]);
                sigaction(SIGSEGV, 0, &got);
                if (got.sa_handler != handler) _exit(2);
                signal(SIGSEGV, SIG_IGN);
                sigaction(SIGSEGV, 0, &got);
                _exit(got.sa_handler != SIG_IGN);
            }
            int status; wait(&status);
            if (status) return 3;
            *nothing = 1;
        }""",
        linking,
    )
    toys.run(program, code=42)
    assert toys.touched() == names(20)


@ONLY_NATIVE
def test_child_without_environment_is_not_traced(toys):
    toys.library()
    program = toys.program("""
        int main(int n, char **a) {
            if (n > 1) { f40(1); return 0; }
            char *argv[] = {a[0], "x", 0}, *none[] = {0};
            int status;
            if (vfork() == 0) { execve(a[0], argv, none); _exit(1); }
            wait(&status);
            f1(1);
            return status ? 3 : 0;
        }""")
    toys.run(program)
    assert toys.touched() == names(1)


@ONLY_NATIVE
def test_processes_that_start_together_share_one_record(toys):
    toys.library()
    program = toys.program(
        """
        int main(int n, char **a) {
            for (int i = 0; i < 40; i++)
                if (fork() == 0) {
                    char number[9]; sprintf(number, "%d", i);
                    char *argv[] = {a[1], number, 0};
                    execv(a[1], argv); _exit(1);
                }
            int status, bad = 0;
            while (wait(&status) > 0) bad |= status;
            return !!bad;
        }""",
        "-ldl",
    )  # not linked with the library: the record doesn't exist yet
    worker = toys.program("int main(int n, char **a) { toy_table[atoi(a[1])](1); return 0; }", name="worker")
    for _ in range(5):
        toys.record_path().unlink(missing_ok=True)
        toys.run(program, worker)
        assert toys.touched() == names(*range(40))
        assert len(list(toys.pages.iterdir())) == 1


def test_many_threads_race_on_the_same_pages(toys):
    toys.library("libtoy.so", 1000)
    program = toys.program("""
        pthread_barrier_t barrier;
        void *work(void *x) {
            long sum = 0;
            for (int i = 0; i < 1000; i++) {
                if (i % 50 == 0) pthread_barrier_wait(&barrier);
                sum += toy_table[i](1);
            }
            return (void *)sum;
        }
        int main(void) {
            pthread_t t[16]; void *sum;
            pthread_barrier_init(&barrier, 0, 16);
            for (int i = 0; i < 16; i++) pthread_create(&t[i], 0, work, 0);
            for (int i = 0; i < 16; i++) {
                pthread_join(t[i], &sum);
                if ((long)sum != 500500) return 1;
            }
            return 0;
        }""")
    for _ in range(3):
        toys.record_path().unlink(missing_ok=True)
        toys.run(program)
        assert toys.touched() == names(*range(1000))


def test_dlclose_and_dlopen(toys):
    for name in ("liba.so", "libb.so"):
        toys.library(name)
    program = toys.program(
        """
        static int call(const char *path, const char *name) {
            void *h = dlopen(path, RTLD_NOW);
            int (*f)(int) = dlsym(h, name);
            int r = f(1);
            dlclose(h);
            return r;
        }
        int main(int n, char **a) {
            int sum = call(a[1], "f10") + call(a[2], "f20");
            for (int i = 0; i < 3000; i++) sum += call(a[1 + i % 2], "f30");
            call(a[1], "f60");
            return sum != 11 + 21 + 3000 * 31;
        }""",
        "-ldl",
    )
    toys.run(program, *(toys.folder / n for n in ("liba.so", "libb.so")))
    assert toys.touched("liba.so") == names(10, 30, 60)
    assert toys.touched("libb.so") == names(20, 30)


def test_range_of_a_closed_library_is_no_longer_served(toys):
    path = toys.library()
    program = toys.program(
        """
        int main(int n, char **a) {
            void *h = dlopen(a[1], RTLD_NOW);
            char *f = dlsym(h, "f10"), *page = (char *)((long)f & ~4095L);
            dlclose(h);
            if (mmap(page, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != page)
                return 1;
            return *(volatile char *)page;
        }""",
        "-ldl",
    )
    toys.run(program, path, code=-signal.SIGSEGV)
    assert toys.touched() == set()


def test_code_that_runs_during_exit(toys):
    toys.library()
    program = toys.program("""
        static void *work(void *x) {
            for (int i = 0; i < 100; i++) { toy_table[i](1); usleep(500); }
            raise(SIGTERM); return 0;
        }
        __attribute__((destructor)) static void slow(void) { f99(1); usleep(200000); }
        int main(void) { pthread_t t; pthread_create(&t, 0, work, 0); return 0; }""")
    toys.run(program, code=-signal.SIGTERM)
    assert toys.touched() == names(*range(100))


@ONLY_NATIVE
def test_no_mappings_left(toys):
    toys.library()
    program = toys.program("""
        int main(void) {
            char *p = mmap(0, 70000 * 8192L, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            for (long i = 0; i < 70000; i++) if (mprotect(p + i * 8192, 4096, PROT_READ)) {
                int sum = 0;
                for (int k = 0; k < 100; k += 2) sum += toy_table[k](1);
                printf("%d", sum); return 0;
            }
            return 9; }""")
    result = subprocess.run([program], env=toys.environment(), capture_output=True, text=True, check=False)
    if result.returncode == 9:
        pytest.skip("vm.max_map_count is larger than usual here")
    assert (result.returncode, result.stdout) == (0, "2500"), result
    assert toys.touched() == names(*range(100))  # all count as touched


# ---- signals ----


@LINKING
@pytest.mark.parametrize(
    "how",
    [
        "*nothing = 1",
        "raise(SIGSEGV)",
        "kill(getpid(), SIGSEGV)",
        "*(volatile char *)f5 = 1",
        "(f5(1), *(volatile char *)f5 = 1)",
    ],
)
def test_a_real_fault_kills(toys, linking, how):
    program = signal_program(toys, f"int main(void) {{ f1(1); {how}; return 0; }}", linking)
    toys.run(program, code=-signal.SIGSEGV)


@LINKING
@pytest.mark.parametrize("how", ["*nothing = 1", "raise(SIGSEGV)", "*(volatile char *)f5 = 1"])
def test_own_handler(toys, linking, how):
    program = signal_program(
        toys,
        """
        static void *want; static sigjmp_buf back; static volatile int count;
        static void handler(int s, siginfo_t *i, void *c) {
            sigset_t now; sigprocmask(SIG_BLOCK, 0, &now);
            if (s != SIGSEGV || !c || !sigismember(&now, SIGUSR1)) _exit(11);
            if (i->si_code > 0 && i->si_addr != want) _exit(12);
            f20(1); count++;
            siglongjmp(back, 1);
        }
        int main(void) {
            struct sigaction a = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO}, got;
            sigaddset(&a.sa_mask, SIGUSR1);
            if (sigaction(SIGSEGV, &a, &got) || got.sa_handler != SIG_DFL) return 1;
            if (sigaction(SIGSEGV, 0, &got) || got.sa_sigaction != handler) return 2;
            if (!(got.sa_flags & SA_SIGINFO) || !sigismember(&got.sa_mask, SIGUSR1)) return 3;
            for (volatile int i = 0; i < 3; i++)
                if (!sigsetjmp(back, 1)) { f10(1); HOW; return 4; }
            sigset_t now; sigprocmask(SIG_BLOCK, 0, &now);
            return count != 3 || sigismember(&now, SIGUSR1);
        }""".replace("HOW", ("want = (void *)f5;" if "f5" in how else "") + how),
        linking,
    )
    toys.run(program)
    assert {"f10", "f20"} <= toys.touched() <= names(5, 10, 20)


@LINKING
def test_signal_function(toys, linking):
    program = signal_program(
        toys,
        """
        static sigjmp_buf back; static volatile int count;
        static void handler(int s) { count++; f20(1); siglongjmp(back, 1); }
        typedef void (*h)(int); h bsd_signal(int, h); h __sysv_signal(int, h);
        int main(void) {
            if (signal(SIGSEGV, handler) != SIG_DFL) return 1;
            if (bsd_signal(SIGSEGV, handler) != handler) return 2;
            if (!sigsetjmp(back, 1)) { *nothing = 1; return 3; }
            if (signal(SIGUSR1, handler) != SIG_DFL) return 4;
            if (!sigsetjmp(back, 1)) { raise(SIGUSR1); return 5; }
            errno = 0;
            if (signal(SIGSEGV, SIG_ERR) != SIG_ERR || errno != EINVAL) return 6;
            if (signal(SIGSEGV, SIG_IGN) != handler) return 7;
            raise(SIGSEGV);  /* ignored */
            if (__sysv_signal(SIGSEGV, handler) != SIG_IGN) return 8;
            if (!sigsetjmp(back, 1)) { *nothing = 1; return 9; }
            struct sigaction got;  /* System V: back to the default after one signal */
            if (sigaction(SIGSEGV, 0, &got) || got.sa_handler != SIG_DFL) return 10;
            if (count != 3) return 11;
            f30(1);
            *nothing = 1;
        }""",
        linking,
    )
    toys.run(program, code=-signal.SIGSEGV)
    assert toys.touched() == names(20, 30)


@LINKING
def test_blocked_signals(toys, linking):
    program = signal_program(
        toys,
        """
        static void handler(int s) { f10(1); }
        static void *work(void *x) {
            sigset_t all; sigfillset(&all); pthread_sigmask(SIG_SETMASK, &all, 0);
            f20(1); return 0;
        }
        int main(int n, char **a) {
            struct sigaction act = {.sa_handler = handler};
            sigfillset(&act.sa_mask);
            sigaction(SIGUSR1, &act, 0);
            raise(SIGUSR1);
            pthread_t t; pthread_create(&t, 0, work, 0); pthread_join(t, 0);
            sigset_t all, old; sigfillset(&all);
            sigprocmask(SIG_BLOCK, &all, 0);
            f30(1);
            sigprocmask(SIG_BLOCK, 0, &old);
            if (!sigismember(&old, SIGUSR2) || sigismember(&old, SIGSEGV)) return 1;
            return 0;
        }""",
        linking,
    )
    toys.run(program)
    assert toys.touched() == names(10, 20, 30)


@ONLY_NATIVE
def test_signal_blocked_by_the_parent(toys):
    toys.library()
    program = toys.program("int main(void) { f30(1); }")
    parent = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [11]); "
    environment = f"dict(os.environ, **{toys.environment()!r})"
    code = f"{parent} os.execve(sys.argv[1], sys.argv[1:], {environment})"
    subprocess.run([sys.executable, "-c", code, program], check=True)
    assert toys.touched() == names(30)


def test_alternate_stack(toys):
    program = signal_program(
        toys,
        """
        static char stack[65536]; static sigjmp_buf back;
        static void handler(int s) { char here; f20(1);
            if (&here < stack || &here > stack + sizeof stack) _exit(3);
            siglongjmp(back, 1); }
        static int deep(int n) { volatile char space[4096]; space[0] = n;
                                 return deep(n + 1) + space[0]; }
        int main(void) {
            stack_t s = {.ss_sp = stack, .ss_size = sizeof stack};
            struct sigaction a = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
            sigaltstack(&s, 0); sigaction(SIGSEGV, &a, 0);
            for (volatile int i = 0; i < 3; i++) if (!sigsetjmp(back, 1)) deep(0);
            return 0;
        }""",
        "-Wl,-z,now",
    )
    toys.run(program)
    assert toys.touched() == names(20)


def test_exception_out_of_a_signal_handler(toys):
    """An unwinder gets through the signal frame: no frame of the tracer is in its way."""
    toys.library()
    program = toys.compile(
        "program",
        """
        #include <csignal>
        extern "C" int f9(int);
        static void handler(int) { f9(1); throw 42; }
        static int *volatile nothing;
        __attribute__((noinline)) int bad() { return *nothing; }
        int main() {
            signal(SIGSEGV, handler);
            try { return bad(); } catch (int x) { return x != 42; }
        }""",
        "-ltoy",
        "-fnon-call-exceptions",
        compiler="g++",
    )
    toys.run(program)
    assert toys.touched() == names(9)


@ONLY_NATIVE
def test_python_faulthandler(toys):
    path = toys.library()
    code = f"""
import ctypes, faulthandler, subprocess, sys
lib = ctypes.CDLL({str(path)!r})
assert lib.f10(1) == 11
assert faulthandler.is_enabled()
assert subprocess.run([sys.executable, "-c", "print(1)"]).returncode == 0
assert lib.f11(1) == 12
print("alive", flush=True)
def culprit(): ctypes.string_at(0)
culprit()
"""
    output = toys.run(sys.executable, "-X", "faulthandler", "-c", code, code=-signal.SIGSEGV)
    assert "alive" in output
    assert output.count("Fatal Python error: Segmentation fault") == 1
    assert "in culprit" in output
    assert toys.touched() == names(10, 11)


# ---- the builds ----


def test_kernel_with_64k_pages(toys, tmp_path_factory):
    """The record stays at 4 KiB; whole kernel pages are hidden and touched at once."""
    out = tmp_path_factory.mktemp("grain")
    zig_build(out, [TARGET[MACHINE]], ["-DTEST_GRAIN=65536"])
    toys.tracer = out / MACHINE / "tracer.so"
    separate = [] if EMULATOR else ["-Wl,-z,separate-code"]  # zig's linker does so anyway
    toys.library("libtoy.so", 100, "", "-Wl,-z,max-page-size=65536", *separate)
    toys.run(toys.program("int main(void) { f40(1); }"))
    record, symbols = read_record(toys.record_path()), toys.symbols()
    for i in range(20, 80):
        page = symbols[f"f{i}"]
        assert record.watched[page - record.first]
        assert record.touched[page - record.first] == (page // 16 == symbols["f40"] // 16)


def test_all_targets(tmp_path):
    zig_build(tmp_path, list(TARGET.values()))
    for machine in TARGET:
        path = tmp_path / machine / "tracer.so"
        dump = subprocess.check_output(["readelf", "-W", "--dyn-syms", "-d", "-l", path], text=True)
        assert "NEEDED" not in dump
        assert "TEXTREL" not in dump
        assert not any(" R W E" in s or " RWE" in s for s in dump.splitlines())
        exported = {s.split()[-1] for s in dump.splitlines() if " FUNC " in s}
        assert exported == {
            "la_version", "la_objopen", "la_objclose", "la_activity", "la_symbind64",
        }  # fmt: skip
        undefined = [s for s in dump.splitlines() if " UND " in s and s.split()[-1] != "UND"]
        assert not undefined
        if machine == "aarch64":  # kernels with 64 KiB pages
            loads = [s for s in dump.splitlines() if s.strip().startswith("LOAD")]
            assert all(s.split()[-1] == "0x10000" for s in loads), loads
