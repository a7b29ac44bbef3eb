"""Tests of tracer.c with toy libraries whose functions each have a page of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.native.toys import EMULATOR, FUNCTIONS, LAYOUTS, MACHINE, ONLY_NATIVE, TARGET, zig_build
from tests.native.traced import TracerToys, read_record


@pytest.fixture
def toys(traced: TracerToys) -> TracerToys:
    return traced


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


# ---- constants that the build lists ----

TABLE = 40  # pages
# By a function: were the program to name the constants, ld.so would copy all of them (R_X86_64_COPY).
NUMBERS = f"""
    __attribute__((aligned(4096))) const unsigned char numbers[{TABLE} * 4096] = {{
        [0 ... {TABLE} * 4096 - 1] = 7}};
    const char text[] = "{"x" * 9000}";
    __attribute__((aligned(4096))) const void *find(int what) {{ return what ? text : (void *)numbers; }}
"""
READ = """
    extern const char *find(int);
    int main(int n, char **a) {
        int sum = 0;
        for (int i = 1; i < n; i++) sum += find(0)[atoi(a[i]) * 4096 + 5];
        if (write(1, find(1), 9) != 9) return 1;
        printf("%d", sum + f3(1));
        return 0;
    }"""


def list_constants(toys: TracerToys, content: str, name: str = "libtoy.so") -> Path:
    path = toys.pages / "constants" / toys.record_path(name).name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode())
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exactly_the_listed_constants_are_watched(toys, layout):
    """In a segment of their own, and in one with code as on Debian's riscv64."""
    toys.library("libtoy.so", FUNCTIONS, NUMBERS, *layout)
    program = toys.program(READ)
    first, text = (toys.symbols()[name] for name in ("numbers", "text"))
    toys.run(program)
    before = read_record(toys.record_path())
    toys.record_path().unlink()

    list_constants(toys, f"{first + 2}-{first + 9} {first + 20} {first + 30}-{first + 31}\n")
    listed = {*range(2, 10), 20, 30, 31}
    assert toys.run(program, "0", "4", "9", "9", "20", "25") == "x" * 9 + "46"
    assert toys.run(program, "31", "5") == "x" * 9 + "18"
    record = read_record(toys.record_path())
    assert not toys.skipped()
    assert {i for i in range(TABLE) if record.watched[first + i - record.first]} == listed
    assert {i for i in listed if record.touched[first + i - record.first]} == {4, 5, 9, 20, 31}
    assert not record.watched[text - record.first + 1]
    others = [i for i in range(len(record.watched)) if i + record.first - first not in listed]
    assert [record.watched[i] for i in others] == [before.watched[i] for i in others]
    assert toys.touched() == names(3)


def test_system_calls_fail_on_watched_constants(toys):
    """Which is why no page with text may be listed."""
    toys.library("libtoy.so", FUNCTIONS, NUMBERS)
    program = toys.program("""
        extern const char *find(int);
        int main(void) {
            const char *page = find(0) + 5 * 4096;
            if (write(1, page, 9) != -1 || errno != EFAULT) return 1;
            return *page != 7 || write(1, page, 9) != 9;
        }""")
    first = toys.symbols()["numbers"]
    list_constants(toys, f"{first + 5}\n")
    toys.run(program)


def test_list_of_a_library_that_is_closed_and_opened(toys):
    path = toys.library("libtoy.so", FUNCTIONS, NUMBERS)
    program = toys.program(
        """
        int main(int n, char **a) {
            for (int i = 0; i < 4; i++) {
                void *h = dlopen(a[1], RTLD_NOW);
                if (((volatile unsigned char *)dlsym(h, "numbers"))[(10 + i) * 4096] != 7) return 1;
                dlclose(h);
            }
            return 0;
        }""",
        "-ldl",
    )
    first = toys.symbols()["numbers"]
    list_constants(toys, f"{first + 1}-{first + TABLE - 2}\n")
    toys.run(program, path)
    record = read_record(toys.record_path())
    listed = range(1, TABLE - 1)
    assert {i for i in listed if record.touched[first + i - record.first]} == {10, 11, 12, 13}


@pytest.mark.parametrize(
    "content",
    [
        "", "\n", "{0}", "{0} {3}", "{0} \n", " {0}\n", "{0}\n\n", "{0}\0\n", "{0}\n{3}\n",
        "{3} {0}\n", "{0} {0}\n", "{3}-{0}\n", "{0}-{3}-{4}\n", "{0}-\n", "-{0}\n", "{0}--{3}\n",
        "{0},{3}\n", "{0}  {3}\n", "{0}x\n", "pages\n", "99999999999999999999999\n",
        "{0}-18446744073709551617\n",
    ],
)  # fmt: skip
def test_malformed_list_of_constants(toys, content):
    path = toys.library("libtoy.so", FUNCTIONS, NUMBERS)
    program = toys.program(READ)
    first = toys.symbols()["numbers"]
    list_constants(toys, content.format(*range(first, first + TABLE)))
    assert toys.run(program, "1") == "x" * 9 + "11"
    assert toys.skipped() == {str(path): "the list of its constants is malformed"}
    assert not toys.record_path().exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_list_of_constants_of_another_library(toys, layout):
    """Pages of code, of data, of none, and such that only some bytes of constants are on."""
    extra = (
        f'const char a[] = "at one end"; {NUMBERS} const char b[] = "or the other"; int data[5000] = {{1}};'
    )
    path = toys.library("libtoy.so", FUNCTIONS, extra, *layout)
    program = toys.program(READ)
    sections = subprocess.check_output(["readelf", "-SW", path], text=True)
    line = next(s for s in sections.splitlines() if " .rodata " in s)
    address, _, size = (int(x, 16) for x in line.split(" .rodata ")[1].split()[1:4])
    end = (address + size) // 4096
    assert (address + size) % 4096
    symbols = toys.symbols()
    for pages in (
        str(symbols["f5"]),
        str(symbols["data"] + 1),
        "0",
        str(end),
        f"{end - 1}-{end}",
        f"{end - 2} {end + 1000}",
        f"{address // 4096 - 1}-{end - 1}",
        "4294967295-4294967295",
    ):
        (toys.pages / "skipped").unlink(missing_ok=True)
        list_constants(toys, f"{pages}\n")
        assert toys.run(program, "1") == "x" * 9 + "11"
        reason = "malformed" if pages.startswith("4294967295") else "of another library"
        assert toys.skipped() == {str(path): f"the list of its constants is {reason}"}, pages
        assert not toys.record_path().exists()


def test_lists_of_constants_that_can_not_be_read(toys):
    path = toys.library("libtoy.so", FUNCTIONS, NUMBERS)
    program = toys.program(READ)
    listed = list_constants(toys, "1 " * 200_000)
    toys.run(program)
    assert toys.skipped() == {str(path): "the list of its constants is too long"}
    for unreadable in (listed, listed.parent):
        (toys.pages / "skipped").unlink()
        listed.unlink()
        if unreadable is listed:
            listed.mkdir()
        else:
            listed.parent.rmdir()
            unreadable.touch()
        toys.run(program)
        assert toys.skipped() == {str(path): "cannot read the list of its constants"}
        if unreadable is listed:
            listed.rmdir()
            listed.touch()


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


def test_constants_on_a_kernel_with_64k_pages(toys, tmp_path_factory):
    """Only kernel pages of which all parts are listed."""
    out = tmp_path_factory.mktemp("grain")
    zig_build(out, [TARGET[MACHINE]], ["-DTEST_GRAIN=65536"])
    toys.tracer = out / MACHINE / "tracer.so"
    numbers = NUMBERS.replace(f"{TABLE} *", "100 *")
    toys.library("libtoy.so", FUNCTIONS, numbers, "-Wl,-z,max-page-size=65536")
    program = toys.program(READ)
    first = toys.symbols()["numbers"]
    list_constants(toys, f"{first + 1}-{first + 97}\n")
    page = -(-(first + 20) // 16) * 16
    toys.run(program, str(page - first + 3))
    record = read_record(toys.record_path())
    listed = range(first + 1, first + 98)
    for i in range(first, first + 98):
        whole = all(n in listed for n in range(i // 16 * 16, i // 16 * 16 + 16))
        assert record.watched[i - record.first] == whole, i - first
        assert record.touched[i - record.first] == (not whole or i // 16 == page // 16), i - first


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
