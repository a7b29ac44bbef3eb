"""Self-running files on a riscv64 board as people have them: a kernel, busybox, a plain user, nothing else.

`make emulation` runs it; not part of `make test`. The logs stay in build/machine (RVBUNDLE_MACHINE_LOG).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rvbundle_runtime.errors import SandboxError
from tests.conftest import RECIPES, run_cli

from . import machine
from .machine import Board, Job, Outcome, Session

pytestmark = pytest.mark.torch
LOGS = Path(os.environ.get("RVBUNDLE_MACHINE_LOG", machine.WORK))
BUILT = os.environ.get("RVBUNDLE_MACHINE_FILES")  # a folder: native/NAME.run and foreign/NAME.run
BUILD_LIMIT = 5400  # seconds; a tenth is needed where nothing else runs
Q, POLE = "tabular-q-1.0.0.run", "cartpole-policy-gradient-1.0.0.run"
Q_ARGUMENTS = ["--episodes", "300", "--seed", "1", "--evaluate"]
Q_WORDS = " ".join(Q_ARGUMENTS)


def build(recipe: str, folder: Path) -> Path:
    """Build a recipe's self-running file for riscv64, unless RVBUNDLE_MACHINE_FILES has it built already."""
    name = f"{recipe.split('/')[0]}-1.0.0.run"
    if BUILT and (Path(BUILT) / folder.name / name).exists():
        return Path(BUILT) / folder.name / name
    self_running = ("--self-running", "riscv64", "--output", folder)
    done = run_cli("build", RECIPES / recipe, *self_running, timeout=BUILD_LIMIT)
    assert done.code == 0, done.err
    return folder / name


@pytest.fixture(scope="session")
def parts() -> machine.Parts:
    """What the board is made of."""
    return machine.gather()


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The self-running files of both agents, with payloads for riscv64 and x86-64."""
    folder = tmp_path_factory.mktemp("native", numbered=False)
    return [build(f"{agent}/riscv64.toml", folder) for agent in ("tabular-q", "cartpole-policy-gradient")]


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-running file for riscv64 that holds just a payload for x86-64, and so an emulator."""
    folder = tmp_path_factory.mktemp("foreign", numbered=False)
    copy = folder / "foreign.run"
    shutil.copy(build("tabular-q/recipe.toml", folder), copy)
    return copy


@pytest.fixture(scope="session")
def expected() -> list[str]:
    """What tabular-q prints, on any machine."""
    script = RECIPES / "tabular-q" / "train.py"
    done = subprocess.run([sys.executable, script, *Q_ARGUMENTS], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def boot(
    parts: machine.Parts, name: str, files: list[Path], jobs: list[Job], board: Board | None = None
) -> Session:
    """Run the jobs on a board; the log is NAME.log."""
    print(f"\n{name}: {', '.join(job.name for job in jobs)}")
    session = machine.run(parts, jobs, files, LOGS / f"{name}.log", board=board, echo=True)
    print(f"boot: {session.boot_seconds} s")
    for job, done in session.outcomes.items():
        print(f"{job}: code {done.code}, {done.seconds} s, {done.peak >> 20} MiB")
    return session


@pytest.fixture(scope="session")
def actions(native: list[Path]) -> str:
    """What the shipped checkpoint of cartpole-policy-gradient does on 200 observations, on this machine."""
    done = run_cli("run", native[1], "--", "--actions", "200")
    assert re.fullmatch("[01]{200}\n", done.out), done.err
    return done.out.strip()


@pytest.fixture(scope="session")
def board(parts: machine.Parts, native: list[Path], foreign: Path) -> Session:
    """A board with Sv39 addresses and no vectors (like a VisionFive 2), its root on a disk."""
    jobs = [
        Job("facts", "id -u; nproc; grep -m 1 ^mmu /proc/cpuinfo; head -1 /proc/meminfo; touch /media/x"),
        Job("doctor", f"/media/{Q} --rvbundle-doctor"),
        Job("q-first", f"cd; /media/{Q} {Q_WORDS}"),
        Job("q-again", f"cd; /media/{Q} {Q_WORDS}"),
        Job("q-moved", f'mkdir "$HOME/a b"; cd "$HOME/a b"; cp /media/{Q} "q 2.run"; "./q 2.run" {Q_WORDS}'),
        Job("q-root", f"cd; /media/{Q} {Q_WORDS}", user="root"),
        Job("q-foreign", f"cd; /media/foreign.run {Q_WORDS}"),
        Job("explain", f"/media/{POLE} --rvbundle-explain"),
        Job("evaluate", f"cd; cp /media/{POLE} . && ./{POLE} --evaluate --evaluation-episodes 2"),
        Job("actions", f"cd; ./{POLE} --actions 200"),
        Job("train", f"cd; ./{POLE} --episodes 6 --out runs && ls runs && cat runs/rewards.csv"),
        Job("resume", f"cd; ./{POLE} --resume runs/policy.pt --episodes 2 --out runs --evaluate-after 1"),
    ]
    return boot(parts, "board", [*native, foreign], jobs)


@pytest.fixture(scope="session")
def vectors(parts: machine.Parts, native: list[Path]) -> Session:
    """A board with vectors of 256 bits (like a Banana Pi F3): other kernels of OpenBLAS are chosen."""
    jobs = [
        Job("facts", "grep -m 1 ^isa /proc/cpuinfo"),
        Job("evaluate", f"cd; /media/{POLE} --evaluate --evaluation-episodes 2"),
        Job("actions", f"cd; /media/{POLE} --actions 200"),
    ]
    return boot(parts, "vectors", native, jobs, Board(cpu="rv64,sv48=off,sv57=off,v=true,vlen=256"))


@pytest.fixture(scope="session")
def firmware(parts: machine.Parts, native: list[Path], foreign: Path) -> Session:
    """A board that runs from its initramfs, as small systems do, and whose kernel lacks more and more.

    With an initramfs as root pivot_root(2) is refused.
    """
    jobs = [
        Job("facts", "grep -m 1 ' / ' /proc/mounts"),
        Job("q", f"cd; /media/{Q} {Q_WORDS}"),
        Job("q-root", f"cd; /media/{Q} {Q_WORDS}", user="root"),
        Job("no-binfmt", "rmmod binfmt_misc", user="root"),
        Job("q-foreign", f"cd; /media/foreign.run {Q_WORDS}"),
        Job("no-namespaces", "echo 0 >/proc/sys/user/max_user_namespaces", user="root"),
        Job("q-denied", f"cd; /media/{Q} {Q_WORDS}"),
        Job("doctor", f"/media/{Q} --rvbundle-doctor"),
        Job("q-open", f"cd; /media/{Q} --rvbundle-no-sandbox {Q_WORDS}"),
        Job("q-root-denied", f"cd; /media/{Q} {Q_WORDS}", user="root"),
    ]
    memory = Board(kernel_arguments=("machine.root=memory",))
    return boot(parts, "firmware", [native[0], foreign], jobs, memory)


def succeeded(session: Session, job: str) -> Outcome:
    """Return what a job did; it must have ended well."""
    done = session.outcomes[job]
    assert done.code == 0, f"{job}: exit code {done.code}\n{done.output[-3000:]}\nlog: {session.log}"
    return done


def test_the_board_is_what_it_is_taken_for(board: Session, vectors: Session, firmware: Session) -> None:
    done = board.outcomes["facts"]
    uid, cores, mmu, memory, refused = done.output.splitlines()
    assert (uid, cores, mmu.split()) == ("1000", "4", ["mmu", ":", "sv39"])
    assert 1_900_000 < int(memory.split()[1]) < 2_097_152
    assert "Read-only file system" in refused
    assert done.code == 1
    assert re.search(r": rv64[a-z]*v", succeeded(vectors, "facts").output)
    assert succeeded(firmware, "facts").output.startswith("rootfs / ")


def test_doctor_finds_nothing_wrong(board: Session) -> None:
    done = succeeded(board, "doctor")
    assert re.search(r"^\W*ok\b", done.output, re.MULTILINE)
    assert not re.search(r"^\W*fail\b", done.output, re.MULTILINE)
    assert "6.12" in done.output
    assert "Sv39" in done.output


def test_explain(board: Session) -> None:
    output = succeeded(board, "explain").output
    assert "native to this machine (riscv64)" in output
    assert "user namespaces work here" in output


@pytest.mark.parametrize("job", ["q-first", "q-again", "q-moved", "q-root", "q-foreign"])
def test_tabular_q(board: Session, expected: list[str], job: str) -> None:
    lines = succeeded(board, job).output.splitlines()
    assert [line for line in lines if line in expected] == expected


@pytest.mark.parametrize("job", ["q", "q-root", "q-foreign", "q-root-denied"])
def test_tabular_q_on_a_kernel_that_lacks_things(firmware: Session, expected: list[str], job: str) -> None:
    for before in ("no-binfmt", "no-namespaces"):
        succeeded(firmware, before)
    lines = succeeded(firmware, job).output.splitlines()
    assert [line for line in lines if line in expected] == expected


def test_a_plain_user_without_namespaces_is_told_what_to_do(firmware: Session) -> None:
    done = firmware.outcomes["q-denied"]
    assert done.code == SandboxError.exit_code
    assert "the sandbox needs user namespaces, and they can't be had" in done.output
    assert "sysctl -w user.max_user_namespaces=" in done.output
    assert "sysctl -w user.max_user_namespaces=" in firmware.outcomes["doctor"].output
    # There is no C library on this board but what the sandbox shows.
    assert firmware.outcomes["q-open"].code == SandboxError.exit_code
    assert "this machine has no loader for it" in firmware.outcomes["q-open"].output


def test_evaluation_of_the_shipped_checkpoint(board: Session) -> None:
    assert "mean return 500.00 in 2 evaluation episodes" in succeeded(board, "evaluate").output


def test_evaluation_with_vectors(vectors: Session) -> None:
    assert "mean return 500.00 in 2 evaluation episodes" in succeeded(vectors, "evaluate").output


def test_actions_are_those_of_x86_64(board: Session, vectors: Session, actions: str) -> None:
    for session in (board, vectors):
        assert actions in succeeded(session, "actions").output.splitlines()


def test_training(board: Session) -> None:
    output = succeeded(board, "train").output
    assert "policy.pt" in output
    assert any(re.fullmatch(r"6,[0-9.]+", line) for line in output.splitlines())  # of rewards.csv
    assert re.search(r"mean return [0-9.]+ in 1 evaluation episodes", succeeded(board, "resume").output)
