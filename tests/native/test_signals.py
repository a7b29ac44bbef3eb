"""Signals under both libraries: the application sees its own handlers and masks, as if neither was there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.payload import Payload
from tests.native.toys import EMULATOR, MACHINE, ONLY_NATIVE, Toys
from tests.native.traced import TracerToys


@pytest.fixture(params=["traced", "payload"])
def toys(request) -> Toys:
    return request.getfixturevalue(request.param)


def prepare(toys: Toys) -> None:
    """Hide the pages of the library: from the tracer they are hidden anyway."""
    if isinstance(toys, Payload):
        toys.trimmed()
        toys.serve()


def check_used(toys: Toys, least: set[str], most: set[str] = frozenset()) -> None:
    if isinstance(toys, TracerToys):
        assert least <= toys.touched() <= (most or least)
    else:
        assert toys.pager.requests


LINKING = pytest.mark.parametrize("linking", ["-Wl,-z,lazy", "-Wl,-z,now"])


def signal_program(toys: Toys, body: str, linking: str) -> Path:
    toys.library()
    program = toys.program("static int *volatile nothing;" + body, "-ltoy", linking)
    prepare(toys)
    return program


def names(*numbers: int) -> set[str]:
    return {f"f{i}" for i in numbers}


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
    check_used(toys, names(10, 20), names(5, 10, 20))


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
    check_used(toys, names(20, 30))


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
            return !sigismember(&old, SIGUSR2) || sigismember(&old, SIGSEGV) != SEEN;
        }""".replace("SEEN", str(int(isinstance(toys, Payload)))),
        linking,
    )
    toys.run(program)
    check_used(toys, names(10, 20, 30))


@ONLY_NATIVE
def test_signal_blocked_by_the_parent(toys):
    toys.library()
    program = toys.program("int main(void) { f30(1); }")
    prepare(toys)
    parent = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [11]); "
    environment = f"dict(os.environ, **{toys.environment()!r})"
    code = f"{parent} os.execve(sys.argv[1], sys.argv[1:], {environment})"
    subprocess.run([sys.executable, "-c", code, program], check=True)
    check_used(toys, names(30))


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
    check_used(toys, names(20))


@pytest.mark.skipif(bool(EMULATOR) and MACHINE == "x86_64", reason="QEMU does not align a handler's stack")
def test_exception_out_of_a_signal_handler(toys):
    """An unwinder gets through the signal frame: no frame of ours is in its way."""
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
    prepare(toys)
    toys.run(program)
    check_used(toys, names(9))


@ONLY_NATIVE
def test_python_faulthandler(toys):
    path = toys.library()
    prepare(toys)
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
    check_used(toys, names(10, 11))


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
    check_used(toys, names(20))
