"""The processes of a run: the launcher waits outside, the supervisor is pid 1 of the sandbox.

    launcher ── fork ──► supervisor (pid 1: makes the sandbox, reaps, forwards signals, is the pager)
                              └── fork ──► the agent

Each tells the other of its end: the supervisor dies with the launcher (PR_SET_PDEATHSIG), and its death
ends everything in its process-id namespace; the agent's end is reported through a pipe.
"""

import errno
import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass, replace

from rvbundle_runtime import runinfo, sandbox
from rvbundle_runtime import syscalls as sys_
from rvbundle_runtime.choice import NAMESPACES, NONE
from rvbundle_runtime.emulation import BINFMT
from rvbundle_runtime.errors import RvbundleError, SandboxError
from rvbundle_runtime.pager import Pager
from rvbundle_runtime.plan import PAGER_SOCKET, PRESENT_FILE, Plan

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_WAITED = frozenset({signal.SIGCHLD, *_FORWARDED})
# siginfo's si_code of a signal that the kernel sent by itself (Ctrl-C at a terminal reaches the whole
# foreground group, so it must not be forwarded a second time): asm-generic/siginfo.h
_SI_KERNEL = 0x80
_EXEC_FAILED = 127
# execve(2) says of a program without its loader (PT_INTERP) that the program itself does not exist.
_NO_LOADER = "this machine has no loader for it (the ld.so that it names)"
_THREAD_EXIT_POLLS = 5000  # of a millisecond each
_BLAS_POLLS = 2000  # of a millisecond each


@dataclass(frozen=True)
class Outcome:
    """How the agent ended: an exit code, or the number of the signal that ended it (else 0)."""

    code: int
    signal: int = 0


def run(plan: Plan, pager: Pager | None, present: bytes = b"") -> Outcome:
    """Start the agent as `plan` says, wait for it, pass signals on; raises SandboxError.

    `present` is what the guard will find restored already, if libraries are trimmed (see `absent.py`).
    """
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    try:
        if plan.sandbox == NONE:
            return _run_unconfined(plan, pager, present, old_mask)
        return _run_confined(plan, pager, present, old_mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def die_like(outcome: Outcome) -> int:
    """Return the exit code of `outcome`, or end this process by the signal that ended the agent."""
    if outcome.signal:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core, if any, is the agent's
        if outcome.signal != signal.SIGKILL:
            signal.signal(outcome.signal, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {outcome.signal})
        os.kill(os.getpid(), outcome.signal)
        return 128 + outcome.signal  # a signal that does not end a process
    return outcome.code


def _run_confined(
    plan: Plan, pager: Pager | None, present: bytes, old_mask: set[int | signal.Signals]
) -> Outcome:
    uid, gid = os.getuid(), os.getgid()
    instance = _unshare_outer(plan, uid, gid)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(reading)
        _supervise(plan, pager, present, writing, uid, gid, old_mask)
    os.close(writing)
    _wait(supervisor)
    if instance is not None:
        os.close(instance)
    with os.fdopen(reading, "rb") as pipe:
        report = pipe.read()
    if not report:
        raise SandboxError("the run's supervisor was killed, and the agent with it", "out of memory?")
    value = json.loads(report)
    if "error" in value:
        raise SandboxError(value["error"], value["hint"])
    return Outcome(value["code"], value["signal"])


def _unshare_outer(plan: Plan, uid: int, gid: int) -> int | None:
    """Move into the namespaces that the supervisor is born into; return what must stay open until its end."""
    if plan.sandbox != NAMESPACES:
        sys_.unshare(sys_.CLONE_NEWPID)
        return None
    _wait_until_single_threaded()
    if plan.emulation is None or plan.emulation.children != BINFMT:
        sys_.unshare(sys_.CLONE_NEWUSER | sys_.CLONE_NEWPID)
        sys_.map_ids((uid, uid), (gid, gid))
        return None
    from rvbundle_runtime import binfmt

    # Two user namespaces, one inside the other: in the outer one, whose user 0 we are, binfmt_misc can be
    # used at all; in the inner one the agent has the user id that it has everywhere.
    instance = binfmt.enter(uid, gid)
    emulation = plan.emulation
    binfmt.register(instance, plan.info.arch, emulation.starter, emulation.start, emulation.native)
    sys_.unshare(sys_.CLONE_NEWUSER | sys_.CLONE_NEWPID)
    sys_.map_ids((uid, 0), (gid, 0))
    return instance


def _wait_until_single_threaded() -> None:
    """Wait for the threads that have unpacked the image: Python's join returns before the kernel's exit.

    unshare(CLONE_NEWUSER) says EINVAL to a process with more than one thread.
    """
    for _ in range(_THREAD_EXIT_POLLS):
        if len(os.listdir("/proc/self/task")) == 1:
            return
        time.sleep(0.001)


def _supervise(
    plan: Plan,
    pager: Pager | None,
    present: bytes,
    report: int,
    uid: int,
    gid: int,
    old_mask: set[int | signal.Signals],
) -> None:
    """Be pid 1; never returns."""
    try:
        sys_.prctl(sys_.PR_SET_PDEATHSIG, signal.SIGKILL)
        if _reader_gone(report):
            os._exit(0)  # the launcher died before the line above could take effect
        sys_.prctl(sys_.PR_SET_DUMPABLE, 0)  # the agent has the same user id and must not trace pid 1
        flags = sys_.CLONE_NEWNS | sys_.CLONE_NEWIPC | sys_.CLONE_NEWUTS
        sys_.unshare(flags if plan.network else flags | sys_.CLONE_NEWNET)
        sys_.sethostname("agent")
        sandbox.carry_out(sandbox.operations(plan, uid, gid))
        if present:
            os.makedirs(os.path.dirname(PRESENT_FILE), exist_ok=True)
            _share_present(
                os.open(PRESENT_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o444), present, pager
            )
        if pager:
            pager.listen(PAGER_SOCKET)
        sys_.drop_privileges()
        if plan.emulation and plan.emulation.blas:
            _start_blas(plan.emulation.blas.command())
        value: dict[str, int | str] = {**_outcome(_wait(_start(plan, old_mask)))}
        if pager:
            pager.filler.close()
    except RvbundleError as error:
        value = {"error": error.message, "hint": error.hint}
    except OSError as error:
        value = {"error": f"sandbox: {error.filename or 'start'}: {error.strerror}", "hint": ""}
    os.write(report, json.dumps(value).encode())
    os._exit(0)


def _start_blas(command: tuple[str, ...]) -> None:
    """Start the native BLAS, which ends with this process; wait until it listens. Raises SandboxError.

    Programs that find nobody listening compute by themselves: a machine too busy to start it in time runs on.
    """
    words: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0, 1),
        (os.POSIX_SPAWN_DUP2, 0, 2),
    ]
    try:
        os.posix_spawn(command[0], command, {}, file_actions=words)
    except OSError as error:
        raise SandboxError(f"the native BLAS could not be started: {error.strerror}", "") from None
    for _ in range(_BLAS_POLLS):
        if os.path.exists(command[1]):
            return
        time.sleep(0.001)


def _share_present(fd: int, present: bytes, pager: Pager | None) -> None:
    """Write the bits of what is restored, and let the pager keep them."""
    os.write(fd, present)
    if pager:
        pager.filler.share(fd, len(present))


def _reader_gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


def _run_unconfined(
    plan: Plan, pager: Pager | None, present: bytes, old_mask: set[int | signal.Signals]
) -> Outcome:
    if present:
        fd = os.memfd_create("rvbundle-present")  # leaves nothing behind, however this process ends
        _share_present(fd, present, pager)
        plan = replace(plan, env={**plan.env, "RVBUNDLE_PRESENT": f"/proc/{os.getpid()}/fd/{fd}"})
    if plan.emulation:
        path = _in_memory("rvbundle-emulator", plan.emulation.start.settings())
        plan = replace(plan, env={**plan.env, "RVBUNDLE_EMULATOR_FILE": path})
    if plan.report:
        path = _in_memory("rvbundle-runtime", plan.report)
        plan = replace(plan, env={**plan.env, runinfo.VARIABLE: path})
    if pager:
        address = f"@rvbundle-{os.getpid()}-{os.urandom(6).hex()}"
        pager.listen(address)
        plan = replace(plan, env={**plan.env, "RVBUNDLE_PAGER": address})
    value = _outcome(_wait(_start(plan, old_mask)))
    if pager:
        pager.filler.close()
    return Outcome(value["code"], value["signal"])


def _in_memory(name: str, text: str) -> str:
    """Return the path of a file with `text` that leaves nothing behind, however this process ends."""
    fd = os.memfd_create(name)
    os.write(fd, text.encode())
    return f"/proc/{os.getpid()}/fd/{fd}"


def _outcome(status: int) -> dict[str, int]:
    if os.WIFSIGNALED(status):
        return {"code": 0, "signal": os.WTERMSIG(status)}
    return {"code": os.WEXITSTATUS(status), "signal": 0}


def _start(plan: Plan, old_mask: set[int | signal.Signals]) -> int:
    """Fork and execute the agent; return its process id. Raises SandboxError if it can't be executed."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    agent = os.fork()
    if agent == 0:
        doing = plan.workdir
        try:
            sys_.prctl(sys_.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.chdir(plan.workdir)
            doing = " ".join(plan.command[:1])
            if plan.memory is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (plan.memory, plan.memory))
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them: programs do not expect it
                signal.signal(number, signal.SIG_DFL)
            if callable(signal.getsignal(signal.SIGINT)):  # else it is ignored, and stays so (nohup)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            os.execve(plan.command[0], plan.command, plan.env)
        except OSError as error:
            there = error.errno == errno.ENOENT and os.path.exists(doing)
            os.write(writing, f"{doing}: {_NO_LOADER if there else error.strerror}".encode())
        except (ValueError, IndexError, OverflowError, TypeError) as error:
            os.write(writing, f"{doing}: {error}".encode("utf-8", "replace"))
        finally:
            os._exit(_EXEC_FAILED)  # whatever happens, this process must not run on as the launcher
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        failure = pipe.read().decode()
    if failure.endswith(_NO_LOADER):
        raise SandboxError(
            f"the agent could not be started: {failure}",
            "in the sandbox it has a C library of its own; see `rvbundle doctor` for what the sandbox lacks "
            "here, or install the C library (glibc)",
        )
    if failure:
        raise SandboxError(
            f"the agent could not be started: {failure}",
            "was a part of the unpacked image removed? `rvbundle cache prune --images` lets it be "
            "unpacked anew",
        )
    return agent


def _wait(watched: int) -> int:
    """Reap children and forward signals until the child `watched` ends; return its wait status."""
    while True:
        info = signal.sigwaitinfo(_WAITED)
        if info.si_signo == signal.SIGCHLD:
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == watched:
                    return status
                if pid == 0:
                    break
        elif info.si_code != _SI_KERNEL:
            _send(watched, info.si_signo)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended meanwhile; its SIGCHLD is pending
