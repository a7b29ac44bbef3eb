"""The preload that has children emulated: everything is as when the kernel runs them, but who runs them.

x86-64 programs run under qemu-x86_64 on x86-64; a call that the preload misses would run its child natively,
which the child notices. RVBUNDLE_TEST_QEMU: a folder with another qemu-x86_64 that the tests use as well.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.native.emulated import SHOW, World
from tests.native.toys import EMULATOR, TARGET, Toys, zig_build

QEMUS = [
    Path(folder, "qemu-x86_64")
    for folder in (os.environ.get("RVBUNDLE_TEST_QEMU", ""), "/usr/bin")
    if folder and Path(folder, "qemu-x86_64").exists()
]
pytestmark = [
    pytest.mark.skipif(bool(EMULATOR) or platform.machine() != "x86_64", reason="x86-64 under qemu-x86_64"),
    pytest.mark.skipif(not QEMUS, reason="no qemu-x86_64"),
]

CALL = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
extern char **environ;
int execveat(int, const char *, char *const *, char *const *, int);
#define IS(name) (!strcmp(how, name))
static int ended(pid_t pid) {
    int status;
    return waitpid(pid, &status, 0) == pid ? status : -1;
}
static int run(char **a) {
    char *how = a[0], *path = a[1], **argv = a + 2;
    char *none[] = {0}, *few[] = {"ONE=1", "TWO=", 0};
    int folder = -1, fd = -1, result;
    pid_t pid = 0;
    if (strncmp(how, "folder-", 7) == 0) {
        how += 7;
        folder = open(getenv("FOLDER"), O_PATH | O_DIRECTORY | (getenv("CLOEXEC") ? O_CLOEXEC : 0));
        if (folder < 0) return 90;
    }
    if (strstr(how, "fexecve")) {
        fd = open(path, (strstr(how, "path") ? O_PATH : O_RDONLY) | (strstr(how, "open") ? 0 : O_CLOEXEC));
        if (fd < 0) return 91;
        if (strstr(how, "deleted")) unlink(path);
    }
    if (IS("execve")) result = execve(path, argv, environ);
    else if (IS("execve-empty")) result = execve(path, argv, none);
    else if (IS("execve-few")) result = execve(path, argv, few);
    else if (IS("execve-null")) result = execve(path, 0, environ);
    else if (IS("execve-no-path")) result = execve(0, argv, environ);
    else if (IS("execv")) result = execv(path, argv);
    else if (IS("execvp")) result = execvp(path, argv);
    else if (IS("execvpe")) result = execvpe(path, argv, few);
    else if (IS("execl")) result = execl(path, argv[0], argv[1], argv[2], (char *)0);
    else if (IS("execle")) result = execle(path, argv[0], argv[1], argv[2], (char *)0, few);
    else if (IS("execlp")) result = execlp(path, argv[0], argv[1], argv[2], (char *)0);
    else if (strstr(how, "fexecve")) result = fexecve(fd, argv, environ);
    else if (IS("execveat")) result = execveat(folder, path, argv, environ, 0);
    else if (IS("execveat-here")) result = execveat(AT_FDCWD, path, argv, environ, 0);
    else if (IS("execveat-nofollow"))
        result = execveat(AT_FDCWD, path, argv, environ, AT_SYMLINK_NOFOLLOW);
    else if (IS("execveat-flags")) result = execveat(AT_FDCWD, path, argv, environ, 1);
    else if (IS("posix_spawn") || IS("posix_spawnp")) {
        int (*spawn)(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
                     char *const *, char *const *) = IS("posix_spawn") ? posix_spawn : posix_spawnp;
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        if (getenv("OUTPUT"))
            posix_spawn_file_actions_addopen(&actions, 1, getenv("OUTPUT"), O_WRONLY | O_CREAT | O_TRUNC,
                                             0644);
        if (getenv("CHDIR")) posix_spawn_file_actions_addchdir_np(&actions, getenv("CHDIR"));
        if (getenv("FCHDIR")) posix_spawn_file_actions_addfchdir_np(&actions, folder);
        result = spawn(&pid, path, &actions, 0, argv, environ);
        fflush(stdout);
        printf("status %d\n", result ? -1 : ended(pid));
        errno = result;
    } else if (IS("vfork")) {
        pid = vfork();
        if (pid == 0) { execve(path, argv, environ); _exit(errno); }
        printf("status %d\n", ended(pid));
        return 0;
    } else if (IS("long")) {
        long size = atol(argv[1]);
        char *text = malloc(size + 1);
        memset(text, 'x', size);
        text[size] = 0;
        argv[1] = text;
        result = execve(path, argv, environ);
    } else if (IS("many") || IS("execvp-many")) {
        long count = atol(argv[1]);
        char **list = malloc((count + 2) * sizeof *list);
        list[0] = argv[0];
        for (long i = 1; i <= count; i++) list[i] = "y";
        list[count + 1] = 0;
        result = IS("many") ? execve(path, list, environ) : execvp(path, list);
    } else return 99;
    printf("errno %s\n", errno ? strerrorname_np(errno) : "0");
    return 0;
}
/* Each case is in a process of its own: HOW PATH ARGUMENTS -- HOW PATH ARGUMENTS -- ... */
int main(int n, char **a) {
    for (int i = 1, next; i < n; i = next + 1) {
        for (next = i; next < n && strcmp(a[next], "--"); next++);
        a[next] = 0;
        printf("\n%s %.80s\n", a[i], a[i + 1]);
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            int code = run(a + i);
            fflush(stdout);
            _exit(code);
        }
        printf("ended %d\n", ended(pid));
    }
    return 0;
}
"""


SHELL = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
static volatile int seen[65];
static void note(int signal) { seen[signal]++; }
static void *run(void *line) {
    for (int i = 0; i < 3; i++) if (system(line) != 5 << 8) abort();
    return 0;
}
static void status(const char *line) {
    errno = 0;
    int result = system(line);
    printf("system %d %s\n", result, result < 0 ? strerrorname_np(errno) : "");
    fflush(stdout);
}
static void copy(FILE *from) {
    char line[4096];
    while (fgets(line, sizeof line, from)) fputs(line, stdout);
}
static void systems(void) {
    printf("shell %d\n", system(0));
    fflush(stdout);
    for (int i = 1; i < 32; i++) if (i != SIGCHLD) signal(i, note);
    status("exit 3");
    status("./show from system; exit 4");
    status("nothing-like-this 2>&-");
    status("kill -INT $$");
    status("kill -QUIT $$");
    status("kill -TERM $$");
    status("kill -INT $PPID; kill -QUIT $PPID; kill -USR1 $PPID");
    printf("seen %d %d %d\n", seen[SIGINT], seen[SIGQUIT], seen[SIGUSR1]);
    raise(SIGINT);
    raise(SIGQUIT);
    printf("after %d %d\n", seen[SIGINT], seen[SIGQUIT]);
    signal(SIGINT, SIG_IGN);
    status("kill -INT $$; exit 6"); /* stays ignored in the child */
    signal(SIGINT, note);
    sigset_t mask, after;
    sigemptyset(&mask);
    sigaddset(&mask, SIGTERM);
    sigprocmask(SIG_SETMASK, &mask, 0);
    status("kill -TERM $$; exit 7"); /* stays blocked there */
    sigprocmask(SIG_BLOCK, 0, &after);
    printf("mask %d %d\n", sigismember(&after, SIGTERM), sigismember(&after, SIGCHLD));
    signal(SIGCHLD, note);
    status("exit 8");
    printf("children %d\n", seen[SIGCHLD]);
    signal(SIGCHLD, SIG_IGN);
    status("exit 9");
    signal(SIGCHLD, SIG_DFL);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], 0, run, "exit 5");
    for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
    raise(SIGINT);
    printf("in the end %d\n", seen[SIGINT]);
    unsetenv("PATH");
    status("./show");
    clearenv();
    status("./show; exec ./show");
}
static void streams(void) {
    FILE *first = popen("./show first; exit 3", "r"), *second = popen("exec cat", "w"), *third;
    copy(first);
    third = popen("./show third", "re");
    printf("flags %d %d %d\n", fcntl(fileno(first), F_GETFD), fcntl(fileno(second), F_GETFD),
           fcntl(fileno(third), F_GETFD));
    fflush(stdout);
    fputs("to cat\n", second);
    printf("first %d\n", pclose(first));
    fflush(stdout);
    printf("second %d\n", pclose(second)); /* would wait for ever if the third had its pipe */
    copy(third);
    printf("third %d\n", pclose(third));
    printf("killed %d\n", pclose(popen("kill -TERM $$", "r")));
    printf("nothing %d\n", pclose(popen("nothing-like-this 2>&-", "r")));
    for (const char *modes[] = {"", "x", "rw", "rwe", "e", "er", 0}, **mode = modes; *mode; mode++) {
        errno = 0;
        FILE *file = popen("./show in a mode", *mode);
        printf("mode '%s' %s\n", *mode, file ? "yes" : strerrorname_np(errno));
        if (file) { copy(file); pclose(file); }
    }
    FILE *closed = popen("exit 1", "r");
    int fd = fileno(closed);
    fclose(closed);
    FILE *reused = fopen("script", "r");
    printf("same %d\n", fileno(reused) == fd);
    fcntl(fd, F_SETFD, 0);
    copy(closed = popen("./show with the reused descriptor", "r"));
    printf("closed %d\n", pclose(closed));
    fflush(stdout);
    int output = fcntl(1, F_DUPFD_CLOEXEC, 50);
    close(0);
    close(1);
    FILE *low = popen("./show low", "r"), *lower = popen("cat >&2", "w");
    char line[4096], text[4096] = "";
    while (fgets(line, sizeof line, low)) strcat(text, line);
    int results[] = {fileno(low), pclose(low)};
    fputs("lower\n", lower);
    results[1] += pclose(lower);
    dprintf(output, "%slow %d %d\n", text, results[0], results[1]);
}
int main(int n, char **a) {
    if (!strcmp(a[1], "system")) systems();
    else streams();
    return 0;
}
"""

PYTHON = r"""
import concurrent.futures, multiprocessing, os, signal, subprocess, sys

def host():
    return os.readlink("/proc/self/../self/exe")

def square(x):
    return x * x, host(), os.path.realpath(sys.executable)

def show(*results):
    for x in results:
        print(x[0], x[2])
        print("host", x[1], flush=True)

CODE = '''import os, sys
print(sys.argv[1:], sys.flags.isolated)
print("host", os.readlink("/proc/self/../self/exe"))'''

def main():
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            show(*pool.map(square, [1, 2, 3]))
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        show(pool.submit(square, 4).result())
    python = [sys.executable, "-I", "-c", CODE]
    subprocess.run([*python, "x"], check=True)
    for more in (
        {"env": {}},
        {"executable": "./show"},
        {"umask": 7},
        {"close_fds": False},
        {"start_new_session": True},
        {"preexec_fn": lambda: None},
        {"cwd": "folder", "executable": "./inner"},
    ):
        subprocess.run(["./show", "zero"], check=True, **more)
    print(subprocess.run("./show 1; exit 7", shell=True).returncode, flush=True)
    print(subprocess.run(["./script-shell", "a b"]).returncode, flush=True)
    print(subprocess.check_output(["./show"], text=True), end="", flush=True)
    for words in ["./nothing"], ["./plain"], ["./text"], ["./script-missing"], ["show"]:
        for more in {}, {"close_fds": False}:
            try:
                subprocess.run(words, **more)
            except OSError as error:
                print(words, error, flush=True)
    process = subprocess.Popen(["sleep", "100"])
    process.send_signal(signal.SIGTERM)
    print(process.wait(), flush=True)
    print(os.system("./show 2; exit 3"), flush=True)
    with os.popen("./show 3; exit 4") as stream:
        print(stream.read(), end="", flush=True)
    actions = [(os.POSIX_SPAWN_DUP2, 1, 9)]
    pid = os.posix_spawn("./show", ["zero", "spawned"], {"A": "B"}, file_actions=actions)
    print(os.waitpid(pid, 0)[1], flush=True)
    for name in "nothing", "show", "sh":
        try:
            pid = os.posix_spawnp(name, [name, "-c", "./show spawnp"], os.environ)
            print(os.waitpid(pid, 0)[1], flush=True)
        except OSError as error:
            print(error, flush=True)
    if os.fork() == 0:
        os.execvpe("sh", ["sh", "-c", "./show execvpe"], {"C": "D"})
    print(os.wait()[1], flush=True)
    if os.fork() == 0:
        os.execve(os.open("show", os.O_RDONLY), ["fd"], {})
    print(os.wait()[1], flush=True)
    os.execv("/proc/self/exe", [sys.executable, "-I", "-c", CODE, "the", "end"])

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="session", params=QEMUS, ids=lambda path: path.parent.parts[-1])
def qemu(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with emulate.so and the compiled programs."""
    folder = tmp_path_factory.mktemp("emulate")
    zig_build(folder, ["x86_64-linux-gnu.2.17"])
    toys = Toys(folder)
    toys.compile("show", SHOW)
    toys.compile("call", CALL)
    toys.compile("shell", SHELL)
    return folder


def write(path: Path, text: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def world(tmp_path: Path, programs: Path, qemu: Path) -> World:
    """A working directory with programs and scripts of all kinds."""
    for name in ("show", "call", "shell"):
        shutil.copy(programs / name, tmp_path / name)
    show = tmp_path / "show"
    shutil.copy(show, tmp_path / "-show")
    write(tmp_path / "script", f"#!{show}\nbody\n")
    write(tmp_path / "script-argument", f"#! \t{show} \t one  two \t \nbody\n")
    write(tmp_path / "script-shell", '#!/bin/sh\nexec ./show "$0" "$@"\n')
    write(tmp_path / "script-relative", "#!./show\n")
    write(tmp_path / "script-dash", "#!-show -x\n")
    write(tmp_path / "script-env", "#!/usr/bin/env -S ./show a b\n")
    write(tmp_path / "script-no-newline", f"#!{show}")
    write(tmp_path / "script-no-newline-blank", f"#!{show} ")
    write(tmp_path / "script-no-newline-argument", f"#!{show} one\ttwo ")
    write(tmp_path / "script-nothing", "#!\n")
    write(tmp_path / "script-blank", "#!  \t \nbody")
    write(tmp_path / "script-blank-end", "#!   ")
    write(tmp_path / "script-only", "#!")
    write(tmp_path / "script-nul", f"#!{show} one\0two\nx\n")
    write(tmp_path / "script-nul-name", f"#!{show}\0 one\nx\n")
    write(tmp_path / "script-carriage-return", f"#!{show}\r\n")
    write(tmp_path / "script-missing", "#!/nowhere/interpreter\n")
    write(tmp_path / "script-folder", "#!/tmp\n")
    write(tmp_path / "script-denied", f"#!{tmp_path}/plain\n")
    write(tmp_path / "script-of-text", f"#!{tmp_path}/text\n")
    write(tmp_path / "script-closed", f"#!{show}\n", 0o644)
    for length in (200, 240, 252, 253, 254, 255, 256, 300):
        start = f"#!{show}" + " x" * 10
        write(tmp_path / f"script-long-{length}", start + "y" * (length - len(start)) + "\n")
        start = "#!" + "/" * (length - 2 - len(str(show)))
        write(tmp_path / f"script-long-name-{length}", f"{start}{show}\n")
        write(tmp_path / f"script-long-name-end-{length}", f"{start}{show}")
        write(tmp_path / f"script-long-name-argument-{length}", f"{start}{show} one\n")
        write(tmp_path / f"script-long-blank-{length}", "#!" + " " * length + f"{show}\n")
    write(tmp_path / "nested-0", f"#!{show} zero\n")
    write(tmp_path / "missing-0", "#!/nowhere/interpreter\n")
    for i in range(1, 8):
        write(tmp_path / f"nested-{i}", f"#!{tmp_path}/nested-{i - 1} level {i}\n")
        write(tmp_path / f"missing-{i}", f"#!{tmp_path}/missing-{i - 1}\n")
    write(tmp_path / "recursive", f"#!{tmp_path}/recursive\n")
    write(tmp_path / "text", "./show from text\n")
    write(tmp_path / "empty", "")
    write(tmp_path / "plain", "./show\n", 0o644)
    program = show.read_bytes()
    for name, data in {
        "elf-short": program[:40],
        "elf-header-only": program[:64],
        "elf-relocatable": program[:16] + b"\1\0" + program[18:],
        "elf-machine": program[:18] + b"\xf3\0" + program[20:],
        "elf-no-headers": program[:56] + b"\0\0" + program[58:],
        "elf-interpreter": program.replace(b"/lib64/ld-linux-x86-64.so.2", b"/lib64/ld-linux-x86-64.so.9"),
    }.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o755)
    os.symlink("show", tmp_path / "link")
    os.symlink("nothing", tmp_path / "link-broken")
    os.symlink("link-loop", tmp_path / "link-loop")
    os.mkfifo(tmp_path / "fifo", 0o755)
    (tmp_path / "folder").mkdir()
    shutil.copy(show, tmp_path / "folder" / "inner")
    write(tmp_path / "folder" / "inner-script", f"#!{show} in\n")
    write(tmp_path / "folder" / "inner-relative", "#!./inner in\n")
    return World(tmp_path, qemu, programs / "x86_64" / "emulate.so")


FILES = """
    show ./show link -show /usr/bin/env script script-argument script-shell script-relative script-dash
    script-env script-no-newline script-no-newline-blank script-no-newline-argument script-nothing
    script-blank script-blank-end script-only script-nul script-nul-name script-carriage-return
    script-missing script-folder script-denied script-of-text script-closed recursive text empty plain
    folder fifo link-broken link-loop nothing nothing/at/all show/below elf-short elf-header-only
    elf-relocatable elf-machine elf-no-headers elf-interpreter /dev/null /proc/self/exe
    /proc/thread-self/exe folder/inner folder/../show
""".split()


def calls(ways: str, paths: list[str], *arguments: str) -> list[str]:
    """Return the command that calls every function with every path."""
    cases = [[how, path, *arguments] for how in ways.split() for path in paths]
    return ["./call", *[word for case in cases for word in [*case, "--"]][:-1]]


@pytest.mark.parametrize("how", "execve vfork posix_spawn posix_spawnp".split())
def test_every_kind_of_file(world, how):
    done = world.same(
        *calls(how, [*FILES, "", "x" * 300, "x/" * 2500], "zero", "one", "two"),
        CODE="3",
        PATH=str(world.folder),
    )
    assert done.out.count("host") == 17
    world.same(*calls(how, [f"{world.folder}/{path}" for path in FILES], "zero"))


def test_scripts_whose_first_line_is_as_long_as_the_kernel_reads(world):
    names = sorted(path.name for path in world.folder.glob("script-long-*"))
    assert len(names) == 40
    world.same(*calls("execve", names, "zero", "one"))


def test_scripts_of_scripts(world):
    names = [f"{kind}-{i}" for kind in ("nested", "missing") for i in range(8)]
    done = world.same(*calls("execve posix_spawn", names, "zero", "one"))
    assert done.out.count("ELOOP") == 2 * (
        3 + 2
    )  # the interpreter is looked for before the levels are counted


def test_other_ways(world):
    ways = "execve-empty execve-few execve-null execv execl execle"
    done = world.same(
        *calls(ways, ["show", "script", "script-argument", "text", "nothing"], "0", "1", "2", "3")
    )
    assert done.out.count("host") == 3 * 6


def test_no_path_and_no_arguments(world):
    done = world.same("./call", "execve-no-path", "", "zero", "--", "execve", "show")
    assert "errno EFAULT" in done.out
    assert "[] 1\n" in done.out


SEARCHES = [
    ("/usr/bin:{0}:/bin", "show inner"),
    ("/usr/bin::/bin", "show"),  # an empty folder is the working directory
    (":/bin", "show"),
    ("/bin:", "show"),
    ("/bin", "show ./show true"),
    ("", "show true"),
    (None, "show true"),
    ("folder", "inner inner-script inner-relative"),
    ("nowhere:show:{0}/folder", "inner"),  # ENOTDIR is passed over
    ("{0}:/bin", "plain elf-interpreter script-missing"),  # EACCES is told in the end
    ("{0}:{0}/more", "plain"),  # and passed over
    (
        "{0}",  # ENOEXEC: the shell
        "script text ./text empty folder link-loop script-nothing script-of-text nested-6 show/ ./plain "
        + "x" * 255
        + " "
        + "x" * 256,
    ),
    ("/" + "x" * 5000 + ":{0}", "show"),
]


@pytest.mark.parametrize(("search", "names"), SEARCHES, ids=range(len(SEARCHES)))
def test_search(world, search, names):
    write(world.folder / "more" / "plain", f"#!{world.folder}/show more\n")
    words = calls("execvp execvpe execlp posix_spawnp", [*names.split(), ""], "zero", "one", "two")
    if search is None:
        world.same("/usr/bin/env", "-u", "PATH", *words)
    else:
        world.same(*words, PATH=search.format(world.folder))


def test_programs_given_by_descriptor(world):
    paths = "show script script-shell text plain folder elf-interpreter".split()
    done = world.same(*calls("fexecve fexecve-open fexecve-path fexecve-path-open", paths, "zero", "one"))
    assert done.out.count("[zero]") == 4


def test_a_program_that_has_no_name_any_more(world):
    outputs = []
    for run in (world.native, world.emulated):
        shutil.copy(world.folder / "show", world.folder / "doomed")
        done = run("./call", "fexecve-deleted", "doomed", "zero", "one")
        assert done.code == 0
        assert done.hosts()
        outputs.append([line for line in done.lines() if not line.startswith(("open", "exe"))])
    assert outputs[0] == outputs[1]
    assert done.hosts() == {str(world.emulator)}


@pytest.mark.parametrize("close", [False, True])
def test_programs_in_a_folder_given_by_descriptor(world, close):
    paths = [
        "inner",
        "../show",
        "inner-script",
        "inner-relative",
        "nothing",
        "/usr/bin/true",
        "",
        f"{world.folder}/show",
    ]
    more = {"FOLDER": "folder", **({"CLOEXEC": "1"} if close else {})}
    done = world.same(*calls("folder-execveat", paths, "zero", "one"), **more)
    assert done.hosts()


def test_execveat(world):
    paths = ["show", "link", "script", "link-broken", "folder"]
    world.same(*calls("execveat-here execveat-nofollow execveat-flags", paths, "zero", "one"))
    world.same(*calls("execveat-here execveat-nofollow", [""], "zero", "one"))


def test_paths_that_name_a_descriptor(world):
    for start in ("/proc/self/fd/", "/dev/fd/"):
        command = f'exec 7<"$1"; exec ./call execve {start}7 zero one -- posix_spawn {start}7 zero'
        for path in ("show", "script", "text"):
            world.same("/bin/sh", "-c", command, "sh", path)


@pytest.mark.parametrize("more", [{"CHDIR": "folder"}, {"CHDIR": "nowhere"}, {"FCHDIR": "1"}])
def test_file_actions(world, more):
    paths = ["./inner", "../show", "inner-script", "./inner-relative", "./nothing", "show"]
    more = {**more, "OUTPUT": "output", "PATH": f"/bin:{world.folder}", "FOLDER": "folder"}
    for how in ("posix_spawn", "posix_spawnp"):
        for path in paths:
            outputs = []
            for run in (world.native, world.emulated):
                done = run(*calls(f"folder-{how}", [path], "zero", "one"), **more)
                output = world.folder / "output"
                outputs.append(
                    replace(done, out=done.out + output.read_text() if output.exists() else done.out)
                )
                output.unlink(missing_ok=True)
            native, emulated = outputs
            assert emulated.lines() == native.lines()
            assert emulated.hosts() == ({str(world.emulator)} if native.hosts() else set())


def test_system(world):
    done = world.same("./shell", "system")
    assert done.out.count("host") == 4


def test_popen(world):
    done = world.same("./shell", "popen")
    assert done.out.count("host") == 5


def test_python(world):
    write(world.folder / "script.py", PYTHON)
    done = world.same(Path(sys.executable).resolve(), "-I", "script.py")
    assert done.code == 0
    assert done.out.count("host") == 28


def test_long_arguments_and_many(world):
    paths = ["./show", "./script-argument"]
    command = calls("long", paths, "zero", str((1 << 17) - 1))
    command += ["--", *calls("long", paths, "0", str(1 << 17))[1:]]
    for count in (490, 499, 500, 501, 520, 100_000, 2_000_000):
        command += ["--", *calls("many execvp-many", paths, "zero", str(count))[1:]]
    done = world.same(*command)
    assert done.out.count("E2BIG") == 2 + 2 * 2
    assert " 100001\n" in done.out


def test_options_of_the_emulator(world):
    """The child shows them: qemu's -E sets a variable of the guest."""
    world = replace(world, words=("-E", "WITH SPACE=a  b", "-U", "GONE"))
    done = world.emulated("./call", "execve", "show", "zero", GONE="1")
    assert "{WITH SPACE=a  b}" in done.out
    assert "GONE" not in done.out


def test_without_the_option_for_argv0(world):
    config = f"emulator {world.emulator}\n"
    done = replace(world, config=config).emulated("./call", "execve", "./show", "zero", "one")
    assert "[./show][one] 2\n" in done.out


def test_argv0_by_a_variable(world):
    config = f"emulator {world.emulator}\nargv0-variable ARGV0\n"
    world = replace(world, config=config)
    done = world.emulated(*calls("execve execve-empty posix_spawn", ["show", "script"], "zero", "one"))
    assert done.out.count("{ARGV0=zero}") == 3
    assert done.out.count("{ARGV0=zero} 1") == 1
    assert "ARGV0=show" not in done.out
    done = world.emulated("./call", "execve", "show", "show", "one", "--", "execve", "show", "x" * 5000)
    assert "ARGV0" not in done.out
    assert "errno E2BIG" in done.out


def test_variables_that_every_child_needs(world):
    config = f"emulator {world.emulator}\nargv0 -0\nvariable NEEDED=a b\nvariable ONE=2\nvariable X=\n"
    done = replace(world, config=config).emulated(
        *calls("execve-empty execve-few execve", ["show", "script"], "zero"), NEEDED="mine"
    )
    assert done.out.count("{NEEDED=a b}{ONE=2}{X=} 3\n") == 2
    assert done.out.count("{NEEDED=a b}{ONE=1}{TWO=}{X=} 4\n") == 2
    assert done.out.count("{NEEDED=mine}{OLDPWD=") == 2


def test_the_emulator_itself_goes_to_the_kernel(world):
    done = world.emulated("./call", "execve", world.emulator, "zero", "-0", "x", "./show", "one")
    assert "[x][one] 2\n" in done.out
    assert done.hosts() == {str(world.emulator)}
    write(world.folder / "script-emulator", f"#!{world.emulator}\n")
    done = world.emulated("./call", "execve", "script-emulator", "zero")
    assert "ended 256" in done.out  # it is told to run this text


def test_no_file_that_names_an_emulator(world):
    done = replace(world, config="\n").native("./call", "execve", "show", "zero")
    assert done.hosts() == {str(world.folder / "show")}
    ways = (
        "execve execv execvp execvpe execl execle execlp fexecve execveat-here posix_spawn posix_spawnp vfork"
    )
    preload = {"LD_PRELOAD": str(world.preload)}
    command = calls(ways, ["./show", "script", "text", "nothing"], "zero", "one", "two")
    assert world.native(*command, **preload).out == world.native(*command).out.replace(
        "{OLDPWD", f"{{LD_PRELOAD={world.preload}}}{{OLDPWD"
    ).replace("} 3\n", "} 4\n")
    for what in ("system", "popen"):
        outputs = [world.native("./shell", what, **more).out for more in ({}, preload)]
        assert outputs[0].count("host") == outputs[1].count("host")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("emulator /x", 1),  # cut short
        ("emulator x\n", 1),
        ("emulator \n", 1),
        ("emulator\n", 1),
        ("word x\nemulator /x\n", 1),
        ("emulator /x\nemulator /y\n", 2),
        ("emulator /x\n\n", 2),
        ("emulator /x\nwords x\n", 2),
        ("emulator /x\nword\n", 2),
        ("emulator /x\nargv0 -0\nargv0 -0\n", 3),
        ("emulator /x\nargv0-variable A\nargv0-variable A\n", 3),
        ("emulator /x\nvariable A\n", 2),
        ("emulator /x\nvariable =A\n", 2),
        ("emulator /x\n" + "word x\n" * 65, 66),
        ("emulator /x\n" + "variable A=B\n" * 17, 18),
        ("emulator /x\nword " + "x" * 4096 + "\n", 1),
        ("emulator /x\nword \0\n", 2),
    ],
)
def test_a_file_that_makes_no_sense(world, text, line):
    path = world.folder / "broken"
    path.write_text(text)
    variables = {"LD_PRELOAD": str(world.preload), "RVBUNDLE_EMULATOR_FILE": str(path)}
    done = world.native("./show", **variables)
    message = f"rvbundle: {path}, line {line}: it does not name an emulator as docs/emulation.md has it\n"
    assert (done.code, done.out, done.err) == (107, "", message)


def test_a_file_of_the_largest_size(world):
    start = f"emulator {world.emulator}\nargv0 -0\nword -E\nword A="
    config = start + "x" * (4095 - len(start) - 1) + "\n"
    done = replace(world, config=config).emulated("./call", "execve", "show", "zero")
    assert "{A=xxx" in done.out


def test_beside_the_guard(world, programs):
    """Both are in /etc/ld.so.preload, in either order."""
    for libraries in ("guard.so", "emulate.so"), ("emulate.so", "guard.so"):
        preload = "\n".join(str(programs / "x86_64" / name) for name in libraries)
        both = replace(world, preload=preload)
        both.same(*calls("execve posix_spawn vfork fexecve", ["show", "script-shell"], "zero"))
        both.same("./shell", "popen")  # not system: QEMU 7.2 enters dash's handlers with an odd stack


def test_all_targets(tmp_path):
    """Small, without a version of libc, without a constructor before all others."""
    zig_build(tmp_path, list(TARGET.values()))
    for machine in TARGET:
        path = tmp_path / machine / "emulate.so"
        dump = subprocess.check_output(["readelf", "-W", "-d", "-l", path], text=True)
        assert re.findall(r"NEEDED.*\[(.*)\]", dump) == ["libc.so.6"]
        assert "VERNEED" not in dump
        assert "TEXTREL" not in dump
        assert "INITFIRST" not in dump
        assert path.stat().st_size < 30_000
