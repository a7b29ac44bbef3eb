"""Self-running files: the first start and later ones, in every place and under every shell; faults."""

import json
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from rvbundle_runtime import bootstraps
from tests.conftest import AGENTS, TEST_CACHE, run_cli
from tests.selfrunning import PLAIN_USER, SHELLS, Board, build, changed, cut, make_board, tools

# What the first start needs, by the script's own words, and what later ones do.
FIRST = ("dd", "gzip", "tar", "ls", "chmod", "mkdir", "rm", "uname")
LATER = ("uname",)
HELLO = "hello a b\n"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The probe as a self-running file; image and cold pack lie beside it."""
    return build(AGENTS / "probe", tmp_path_factory.mktemp("selfrun"), "x86_64")


@pytest.fixture(scope="session")
def file(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The probe as a self-running file, alone in a folder that others may look into."""
    folder = tmp_path_factory.mktemp("alone")
    for parent in (folder, folder.parent):
        parent.chmod(0o755)
    return Path(shutil.copy(built, folder))


@pytest.fixture(params=[0, PLAIN_USER], ids=["root", "user"])
def board(tmp_path: Path, request: pytest.FixtureRequest) -> Board:
    """A board whose user is root or not."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    return make_board(tmp_path, uid=request.param)


@pytest.fixture
def ours(tmp_path: Path) -> Board:
    """A board whose user is the one of the tests."""
    return make_board(tmp_path)


@pytest.fixture(scope="session")
def warm(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Board:
    """A board on which the file has run."""
    board = make_board(tmp_path_factory.mktemp("warm"))
    assert board.start(file, "hello").out == "hello\n"
    return board


def table(file: Path) -> bootstraps.Table:
    found = bootstraps.find_table(file)
    assert found
    return found


def name_of(file: Path) -> str:
    return bootstraps.folder_name(table(file).sections[0].manifest)


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_first_and_later_starts(shell: tuple[str, ...], board: Board, file: Path) -> None:
    for _ in range(2):
        result = board.start(*shell, file, "hello", "a", "b")
        assert (result.code, result.out, result.err) == (0, HELLO, "")
        assert board.installed() == [name_of(file)]


def test_later_starts_need_no_tools(warm: Board, file: Path, tmp_path: Path) -> None:
    path = tools(tmp_path / "bin", LATER)
    again = Board(warm.folder, env={"PATH": str(path)})
    assert again.start("/bin/sh", file, "hello", "a", "b").out == HELLO


def test_the_first_start_needs_the_tools_that_it_names(ours: Board, file: Path, tmp_path: Path) -> None:
    comment = " ".join(line.strip("# ") for line in file.read_bytes()[:500].decode().splitlines())
    assert f"nothing there but a shell and {', '.join(FIRST)}: busybox will do" in comment
    fresh = Board(ours.folder, env={"PATH": str(tools(tmp_path / "bin", FIRST))})
    assert fresh.start("/bin/sh", file, "hello", "a", "b").out == HELLO


@pytest.mark.parametrize("missing", ["dd", "gzip", "tar"])
def test_a_machine_without_a_tool(missing: str, ours: Board, file: Path, tmp_path: Path) -> None:
    path = tools(tmp_path / "bin", [name for name in FIRST if name != missing])
    result = Board(ours.folder, env={"PATH": str(path)}).start("/bin/sh", file, "hello")
    assert result.code == 110
    assert result.err.startswith(f"error: this machine has no {missing}, which the first start needs\n")
    assert ours.installed() == []


def test_busybox_and_nothing_else(file: Path, tmp_path: Path) -> None:
    """A root folder that holds busybox and the file: no /bin/sh, no /etc, no /tmp, no HOME."""
    root = tmp_path / "root"
    for name in ("proc", "dev"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "busybox")
    shutil.copy(file, root / "probe.run")
    # A mount of its own, as the root folder of a machine is.
    script = (
        f'mount --bind "{root}" "{root}"; mount -t proc proc "{root}/proc"; mount --rbind /dev "{root}/dev"'
    )
    script += f'; exec chroot "{root}" "$@"'
    words = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "sh",
        "-euc",
        script,
        "sh",
        "/busybox",
        "sh",
        "/probe.run",
    ]
    for _ in range(2):
        env = {"HOME": "/home", "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [*words, "hello", "a", "b"], env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, HELLO, "")


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_however_it_is_named(shell: tuple[str, ...], warm: Board, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    renamed = Path(shutil.copy(file, folder / "-my agent's $file"))
    (folder / "link").symlink_to(renamed)
    there = Board(warm.folder, cwd=folder)
    for words in ([renamed], ["./-my agent's $file"], ["link"], ["../a folder/link"]):
        assert there.start(*shell, *words, "hello", "a", "b").out == HELLO
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    assert Board(warm.folder, env=path).start("-my agent's $file", "hello", "a", "b").out == HELLO
    assert Board(warm.folder, env=path).start("env", "link", "hello", "a", "b").out == HELLO


@pytest.mark.parametrize("options", ["ro", "noexec"])
def test_the_file_is_in_a_place_that_can_not(options: str, board: Board, file: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    copied = (
        f'mount -t tmpfs tmpfs "{place}"; cp "{file}" "{place}/x.run"; mount -o remount,{options} "{place}"'
    )
    there = Board(board.folder, uid=board.uid, setup=copied)
    for _ in range(2):
        result = there.start("sh", place / "x.run", "hello", "a", "b")
        assert (result.code, result.out, result.err) == (0, HELLO, "")


# What may be wrong with the usual place for caches, and what is said of it if no other will do. {home} is
# a mount point.
HOMES = {
    "read-only": ('mount -t tmpfs -o ro tmpfs "{home}"', "can't be written: Read-only file system"),
    "noexec": ('mount -t tmpfs -o noexec,mode=777 tmpfs "{home}"', "nothing can be executed from"),
    "a file": ('mount -t tmpfs -o mode=777 tmpfs "{home}"; : >"{home}/.cache"', "can't be written: "),
    "another's": (
        'mount -t tmpfs tmpfs "{home}"; mkdir -p "{home}/.cache/rvbundle"; chown -R 12345 "{home}"',
        "belongs to another user",
    ),
}
TEMPORARY = "mount -t tmpfs tmpfs /var/tmp; mount -t tmpfs {options} tmpfs /tmp; chmod 1777 /tmp /var/tmp"


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
@pytest.mark.parametrize(("setup", "said"), HOMES.values(), ids=HOMES)
def test_a_home_that_can_not(
    setup: str, said: str, shell: tuple[str, ...], board: Board, file: Path, tmp_path: Path
) -> None:
    """The next place is taken: /var/tmp. Both starts see the same mounts, so the second is a later one."""
    home = setup.format(home=board.home)
    fresh = 'mkdir -p "$OLD"; mount --bind "$OLD" /var/tmp; chmod 1777 /var/tmp'.replace(
        "$OLD", str(tmp_path / "t")
    )
    there = Board(board.folder, board.uid, f"{home}\n{fresh}")
    for _ in range(2):
        result = there.start(*shell, file, "hello", "a", "b")
        assert (result.code, result.out, result.err) == (0, HELLO, "")
    place = tmp_path / f"t/rvbundle-{board.uid}"
    assert [path.name for path in place.glob("bootstrap/*") if path.name != "lock"] == [name_of(file)]


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
@pytest.mark.parametrize("home", [None, "", "relative", "/nonexistent/home"])
def test_no_home(home: str | None, shell: tuple[str, ...], file: Path, tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    setup = f'mkdir -p "{tmp_path}/t"; mount --bind "{tmp_path}/t" /var/tmp; chmod 1777 /var/tmp'
    board = make_board(tmp_path, uid=PLAIN_USER, setup=setup)
    words = [] if home is not None else ["env", "-u", "HOME"]
    there = Board(board.folder, board.uid, setup, env={} if home is None else {"HOME": home})
    result = there.start(*words, *shell, file, "hello", "a", "b")
    assert (result.code, result.out, result.err) == (0, HELLO, "")
    assert (tmp_path / f"t/rvbundle-{PLAIN_USER}/bootstrap" / name_of(file) / "ready").exists()


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_no_place_at_all(shell: tuple[str, ...], file: Path, tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    board = make_board(tmp_path, uid=PLAIN_USER)
    kept = tmp_path / "kept.run"
    shutil.copy(file, kept)
    setup = (
        f'mkdir /run/t; cp "{kept}" /run/t/x.run; mount -t tmpfs -o noexec,mode=1777 tmpfs /var/tmp\n'
        "mount -t tmpfs -o mode=1777 tmpfs /tmp; mkdir /tmp/rvbundle-65534\nmount -o remount,ro /tmp"
    )
    setup = f"mount -t tmpfs tmpfs /run\n{setup}"
    there = Board(board.folder, board.uid, setup, {"HOME": "/proc/nothing"}, cwd=Path("/"))
    result = there.start(*shell, "/run/t/x.run", "hello")
    assert (result.code, result.out) == (108, "")
    assert result.err.splitlines() == [
        "error: there is no place for the bootstrap:",
        "    /proc/nothing/.cache/rvbundle can't be written: No such file or directory",
        "    nothing can be executed from /var/tmp/rvbundle-65534 (is it mounted noexec?)",
        "    /tmp/rvbundle-65534 belongs to another user",
        "",
        "hint: set RVBUNDLE_CACHE to a folder that will do",
    ]


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_a_cache_that_was_named(shell: tuple[str, ...], board: Board, file: Path) -> None:
    """RVBUNDLE_CACHE may be relative, and no other place is taken in its stead."""
    there = Board(board.folder, board.uid, env={"RVBUNDLE_CACHE": "my cache"})
    assert there.start(*shell, file, "hello", "a", "b").out == HELLO
    assert (board.folder / "my cache/bootstrap" / name_of(file) / "ready").exists()
    assert board.installed() == []
    mounts = f'mkdir -p "{board.folder}/c"; mount -t tmpfs -o noexec,mode=777 tmpfs "{board.folder}/c"'
    refused = Board(board.folder, board.uid, mounts, {"RVBUNDLE_CACHE": f"{board.folder}/c"})
    result = refused.start(*shell, file, "hello")
    assert result.code == 108
    assert f"nothing can be executed from {board.folder}/c (is it mounted noexec?)" in result.err


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_noexec_since_the_first_start(shell: tuple[str, ...], board: Board, file: Path) -> None:
    assert board.start(*shell, file, "hello", "a", "b").out == HELLO
    mounts = f'mount --bind "{board.home}" "{board.home}"; mount -o remount,bind,noexec "{board.home}"'
    there = Board(board.folder, board.uid, mounts, {"RVBUNDLE_CACHE": str(board.home / ".cache/rvbundle")})
    result = there.start(*shell, file, "hello")
    assert result.code == 108
    assert "noexec" in result.err


@pytest.mark.parametrize("umask", ["000", "077"])
def test_whatever_the_umask(umask: str, board: Board, file: Path) -> None:
    """The cache is its user's alone; the agent has the umask of its caller."""
    words = ("sh", "-c", f'umask {umask}; exec "$@"', "sh", file)
    assert board.start(*words, "hello", "a", "b").out == HELLO
    for path in board.home.rglob("*"):
        assert path.is_symlink() or not stat.S_IMODE(path.stat().st_mode) & 0o022 or "store" in path.parts
    assert board.start(*words, "write", "new").code == 0
    assert stat.S_IMODE((board.folder / "new").stat().st_mode) == 0o666 & ~int(umask, 8)


def test_what_the_caller_has_set_for_other_programs(ours: Board, file: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    for name in ("json", "os", "sitecustomize", "encodings"):
        (evil / f"{name}.py").write_text("raise SystemExit('evil')")
    for name in ("libz.so.1", "libexpat.so.1", "libffi.so.8"):  # of the bootstrap's Python, not of any shell
        (evil / name).write_bytes(b"")
    env = {
        "LD_LIBRARY_PATH": str(evil),
        "LD_PRELOAD": f"{evil}/libz.so.1",
        "PYTHONPATH": str(evil),
        "PYTHONHOME": str(evil),
        "PYTHONSTARTUP": f"{evil}/json.py",
        "TAR_OPTIONS": "--exclude=*",
        "GZIP": "-1 -n",
        "CDPATH": "/tmp",
        "LC_ALL": "de_DE.UTF-8",
        "name": "mine",
        "base": "mine",
        "work": "mine",
        "user": "mine",
    }
    there = Board(ours.folder, env=env)
    passed = [f"--rvbundle-env={name}" for name in ("name", "base", "work", "user")]
    for shell in SHELLS.values():
        shutil.rmtree(ours.bootstraps, ignore_errors=True)
        for _ in range(2):
            result = there.start(*shell, file, *passed, "facts")
            seen = json.loads(result.out)["env"]
            assert [seen[name] for name in ("name", "base", "work", "user")] == ["mine"] * 4
            assert not {"LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH"} & set(seen)


def test_ten_first_starts_at_once(board: Board, file: Path) -> None:
    starts = [board.popen(shell, file, "hello", str(n)) for n, shell in enumerate(["dash", "bash"] * 5)]
    for number, start in enumerate(starts):
        assert start.communicate(timeout=300) == (f"hello {number}\n", "")
        assert start.returncode == 0
    assert board.installed() == [name_of(file)]


def wait_for_work(board: Board, start: "subprocess.Popen[str]") -> Path:
    """Wait until a first start has begun to unpack; return the folder that it unpacks into."""
    while start.poll() is None:
        for path in board.bootstraps.glob("tmp.*/bin"):
            return path.parent
        time.sleep(0.001)
    raise AssertionError(f"it has ended: {start.communicate()}")


def test_killed_during_the_first_start(ours: Board, file: Path) -> None:
    killed = ours.popen("setsid", "dash", file, "hello")
    stray = wait_for_work(ours, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert ours.installed() == [stray.name]
    assert ours.start(file, "hello", "a", "b").out == HELLO
    assert ours.installed() == [name_of(file), stray.name]  # it may be one that is being unpacked
    long_ago = time.time() - 2 * 3600
    os.utime(stray, (long_ago, long_ago))
    shutil.rmtree(ours.bootstraps / name_of(file))
    assert ours.start(file, "hello", "a", "b").out == HELLO
    assert ours.installed() == [name_of(file)]


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_first_start(
    number: signal.Signals, shell: tuple[str, ...], ours: Board, file: Path
) -> None:
    start = ours.popen("setsid", *shell, file, "hello")
    wait_for_work(ours, start)
    os.killpg(start.pid, number)
    out, _ = start.communicate(timeout=60)
    assert (out, ours.installed()) == ("", [])
    assert start.returncode in (128 + number, -number)


def test_a_bootstrap_that_was_damaged_from_outside(ours: Board, file: Path) -> None:
    """Without its mark it is none; with it, only --rvbundle-verify looks."""
    assert ours.start(file, "hello", "a", "b").out == HELLO
    place = ours.bootstraps / name_of(file)
    (place / "ready").unlink()
    (place / "bin/python3").write_bytes(b"damaged")
    assert ours.start(file, "hello", "a", "b").out == HELLO
    assert ours.start(file, "--rvbundle-verify").code == 0
    (place / "lib/extra").write_bytes(b"")
    result = ours.start(file, "--rvbundle-verify")
    assert (result.code, result.out) == (107, "")
    assert result.err.startswith("error: the bootstrap is damaged: lib/extra does not belong to it\n")


@pytest.mark.parametrize("place", ["bootstrap", "cold pack", "image", "end"])
@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_cut_short(place: str, shell: tuple[str, ...], ours: Board, built: Path, tmp_path: Path) -> None:
    found = table(built)
    section = found.sections[0]
    image = built.with_suffix(".rvb").stat().st_size
    size = {
        "bootstrap": section.offset + section.size // 2,
        "cold pack": (section.offset + section.size + found.size) // 2,
        "image": found.size - image // 2,
        "end": found.size - 1,
    }[place]
    short = cut(built, tmp_path / "x.run", size)
    result = ours.start(*shell, short, "hello")
    assert (result.code, result.out) == (107, "")
    assert result.err == (
        f"error: {short} is cut short: {size} bytes of {found.size} are here\n\n"
        "hint: copy the file again from its source\n"
    )
    assert ours.installed() == []


def test_cut_short_after_the_first_start(warm: Board, file: Path, tmp_path: Path) -> None:
    short = cut(file, tmp_path / "x.run", table(file).size - 1)
    result = warm.start(short, "hello")
    assert (result.code, result.out) == (107, "")
    assert f"{short} is cut short: {table(file).size - 1} bytes of {table(file).size} are here" in result.err
    with short.open("ab") as longer:
        longer.write(b"more")
    assert "3 bytes stand behind its end" in warm.start(short, "hello").err


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_a_byte_of_the_bootstrap(
    share: float, shell: tuple[str, ...], ours: Board, file: Path, tmp_path: Path
) -> None:
    section = table(file).sections[0]
    head = file.read_bytes()[section.offset :][:4200].index(b"RV") + 4200  # behind what fills the last block
    damaged = changed(file, tmp_path / "x.run", section.offset + head + int((section.size - head) * share))
    result = ours.start(*shell, damaged, "hello")
    assert (result.code, result.out) == (107, ""), result.err
    assert "damaged" in result.err
    assert ours.installed() == []


def test_every_byte_of_the_header(ours: Board, file: Path, tmp_path: Path) -> None:
    """Whatever is changed there: the agent does not start, or nothing was lost; nothing is left behind."""
    script = file.read_bytes()[: table(file).sections[0].offset]
    accepted = 0
    for offset in range(11, len(script), 211):
        damaged = changed(file, tmp_path / "x.run", offset, bits=0x02)
        result = ours.start("dash", damaged, "hello")
        assert (result.code, result.out) != (0, "hello\n"), offset
        assert result.code, (offset, result)
        accepted += result.code == 107
        for name in ours.installed():
            assert name == name_of(file), offset
    assert accepted > len(script) // 211 // 2  # most damage is named for what it is


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_byte_of_the_image(share: float, warm: Board, file: Path, tmp_path: Path) -> None:
    image = (AGENTS / "probe", run_cli("inspect", file, "--json"))[1]
    size = json.loads(image.out)["size"]
    damaged = changed(file, tmp_path / "x.run", table(file).size - size + int(size * share))
    board = make_board(tmp_path)
    result = board.start(damaged, "hello")
    assert (result.code, result.out) == (107, "")
    assert "is damaged" in result.err
    verified = warm.start(damaged, "--rvbundle-verify")
    assert (verified.code, verified.out) == (107, "")


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_no_space(shell: tuple[str, ...], board: Board, file: Path, tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=4m,mode=777 tmpfs "{board.home}"'
    there = Board(board.folder, board.uid, mount, {"RVBUNDLE_CACHE": f"{board.home}/cache"})
    result = there.start(*shell, file, "hello")
    assert (result.code, result.out) == (108, "")
    assert "no space for the bootstrap: " in result.err
    assert f"KiB are needed at {board.home}/cache, 4" in result.err
    # and where df promises too much
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "df").write_text("#!/bin/sh\nprintf 'h\\ntmpfs 9999999 0 9999999 0%% /\\n'\n")
    (folder / "df").chmod(0o755)
    if shell[0] != "busybox":  # it takes its own df
        lied = Board(there.folder, there.uid, mount, {**there.env, "PATH": f"{folder}:{os.environ['PATH']}"})
        result = lied.start(*shell, file, "hello")
        assert result.code == 108
        assert f"KiB are needed at {board.home}/cache\n" in result.err


def test_no_space_leaves_nothing(file: Path, tmp_path: Path) -> None:
    board = make_board(tmp_path)
    mount = f'mount -t tmpfs -o size=6m tmpfs "{board.home}"'
    words = (
        "sh",
        "-c",
        f'"$@"; find "{board.home}" -type f; rm -rf "{board.home}"/.cache/x',
        "sh",
        file,
        "hello",
    )
    result = Board(board.folder, setup=mount).start(*words)
    assert result.out == ""
    assert "no space for the bootstrap" in result.err


@pytest.mark.parametrize(
    ("machine", "hint"),
    [
        ("riscv64", "build it with --self-running x86_64,riscv64"),
        ("armv7l", "such a file can be built for riscv64, aarch64 and x86_64"),
        ("", "such a file can be built for riscv64, aarch64 and x86_64"),
    ],
)
def test_another_machine(machine: str, hint: str, ours: Board, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "uname").write_text(f"#!/bin/sh\necho {machine}\n")
    (folder / "uname").chmod(0o755)
    there = Board(ours.folder, env={"PATH": f"{folder}:{os.environ['PATH']}"})
    for shell in ("dash", "bash"):
        result = there.start(shell, file, "hello")
        assert (result.code, result.out) == (110, "")
        assert result.err == (
            f"error: {file} does not run on this machine ({machine}); it has: x86_64\n\nhint: {hint}\n"
        )
    assert ours.installed() == []


@pytest.mark.parametrize(
    ("words", "out"),
    [
        (["hello", "--rvbundle-verbose", "a", "b"], "hello a b"),
        (["--rvbundle-no-cwd", "hello", "a", "--", "b"], "hello a -- b"),
        (["--", "hello", "--rvbundle-help"], "hello --rvbundle-help"),
        (["hello", "--", "--rvbundle-help"], "hello -- --rvbundle-help"),
        (["--rvbundle-env", "A=hello there", "hello", "-v", "--volume"], "hello -v --volume"),
        (["hello", "", "*", "$HOME", "a b"], "hello  * $HOME a b"),
        (["hello", "--rvbundle", "--rvbundled"], "hello --rvbundle --rvbundled"),
    ],
    ids=str,
)
def test_the_agents_words(words: list[str], out: str, warm: Board, file: Path) -> None:
    assert warm.start(file, *words).out == f"{out}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--rvbundle-volum", "a"],
            "no such option: --rvbundle-volum\n\nhint: did you mean --rvbundle-volume?",
        ),
        (["--rvbundle-xyz"], "no such option: --rvbundle-xyz\n\nhint: see --rvbundle-help"),
        (["hello", "--rvbundle-memory"], "--rvbundle-memory needs a value: --rvbundle-memory SIZE"),
        (["--rvbundle-memory=5"], "--rvbundle-memory 5: too little for Python to start"),
        (["--rvbundle-network=1"], "--rvbundle-network takes no value"),
        (["--rvbundle-help=1"], "--rvbundle-help takes no value"),
        (
            ["--rvbundle-help", "--rvbundle-doctor"],
            "--rvbundle-doctor and --rvbundle-help can't be had at once",
        ),
        (
            ["--rvbundle-network", "--rvbundle-no-network"],
            "--rvbundle-network and --rvbundle-no-network contradict each other",
        ),
    ],
    ids=str,
)
def test_wrong_words(words: list[str], said: str, warm: Board, file: Path) -> None:
    result = warm.start(file, *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {said}")


def test_options_of_a_run(warm: Board, file: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("content")
    volume = f"--rvbundle-volume={tmp_path}/data:/data:ro"
    assert warm.start(file, volume, "read", "/data/file").out == "content\n"
    assert (
        warm.start(file, "--rvbundle-volume", f"{tmp_path}/data:/data", "read", "/data/file").out
        == "content\n"
    )
    assert warm.start(file, "code", "3").code == 3
    assert warm.start(file, "die", "9").code == -9


def test_commands(warm: Board, file: Path) -> None:
    shown = warm.start(file, "--rvbundle-help")
    assert "--rvbundle-volume SRC:DST[:ro]" in shown.out
    assert shown.out.startswith(f"usage: {file} ")
    version = warm.start("sh", file, "--rvbundle-version").out
    assert "probe 1.0" in version
    assert f"bootstrap   {warm.bootstraps / name_of(file)}" in version
    explained = warm.start(file, "--rvbundle-explain", "--rvbundle-no-sandbox")
    assert "sandbox         none  (--rvbundle-no-sandbox: the agent can do whatever you can)" in explained.out
    assert f"cold pack       {file}  (it is inside the image's file)" in explained.out
    assert "kernel" in warm.start(file, "--rvbundle-doctor").out
    verified = warm.start(file, "--rvbundle-verify")
    assert verified.out.splitlines()[0] == "bootstrap for x86_64: intact"
    assert len(verified.out.splitlines()) == 3  # with the image and its cold pack
    assert [shown.err, explained.err, verified.err] == [""] * 3


def test_hints_are_those_of_the_file(warm: Board, file: Path) -> None:
    deny = "echo 0 >/proc/sys/user/max_user_namespaces"
    plain = ["unshare", "--user", "--map-root-user", "sh", "-c", f'{deny}; exec "$@"', "sh"]
    result = warm.start(*plain, "setpriv", "--bounding-set=-sys_admin", file, "--rvbundle-explain")
    assert "rvbundle run" not in result.out + result.err


def test_prune(file: Path, tmp_path: Path) -> None:
    board = make_board(tmp_path)
    assert board.start(file, "hello", "a", "b").out == HELLO
    (board.bootstraps / ("0" * 32)).mkdir()
    (board.bootstraps / ("0" * 32) / "ready").write_bytes(b"")
    pruned = board.start(file, "--rvbundle-cache-prune")
    assert pruned.out.startswith("removed 1 unpacked images (")
    assert pruned.out.endswith("removed 1 bootstraps (0 MiB), kept 1 that run, this one too\n")
    assert board.installed() == [name_of(file)]
    assert board.start(file, "hello", "a", "b").out == HELLO


def test_it_is_an_image_to_every_command(file: Path, tmp_path: Path) -> None:
    ran = run_cli("run", file, "--", "hello", "a", "b", cwd=tmp_path)
    assert ran.out == HELLO
    assert run_cli("verify", file).out.startswith("bootstrap for x86_64: intact\n")
    assert run_cli("extract", file, tmp_path / "tree").out.endswith("whole\n")
    assert "it is inside the image's file" in run_cli("explain", file).out


def test_where_the_cold_pack_goes(built: Path, tmp_path: Path) -> None:
    with_cold = table(built).size
    assert built.with_suffix(".cold.rvb").exists()  # the image of its own still has one
    sizes = {}
    for where in ("separate", "drop", "embed"):
        file = build(AGENTS / "probe", tmp_path / where, "x86_64", "--cold", where)
        sizes[where] = table(file).size
        board = make_board(tmp_path / where)
        explained = board.start(file, "--rvbundle-explain").out
        said = {
            "separate": f"cold pack       {file.with_suffix('.cold.rvb')}  (found beside the image)",
            "drop": "cold pack       none  (there is no probe-1.0.cold.rvb beside the image)",
            "embed": f"cold pack       {file}  (it is inside the image's file)",
        }
        assert said[where] in explained
    assert sizes["embed"] == with_cold > sizes["separate"] == sizes["drop"]


def test_the_same_bytes_from_another_cache(built: Path, tmp_path: Path) -> None:
    other = tmp_path / "cache"
    (other / "build").mkdir(parents=True)
    # what would be downloaded, made without a change of ours, or takes long
    for name in ("debian", "frames", "packages", "lock", "tools", "analysis"):
        source = TEST_CACHE / "build" / name
        if source.exists():
            (other / "build" / name).symlink_to(source)
    env = {"RVBUNDLE_CACHE": str(other)}
    result = run_cli("build", AGENTS / "probe", "-o", tmp_path / "o", "--self-running", "x86_64", env=env)
    assert result.code == 0, result.err
    assert (tmp_path / "o" / built.name).read_bytes() == built.read_bytes()


def python_of(boot: Path) -> list[str]:
    """Return the words that start a bootstrap's Python."""
    words = [boot / "lib/ld.so", "--inhibit-cache", "--argv0", boot / "bin/python3", "--library-path"]
    return [*map(str, [*words, boot / "lib", boot / "bin/python3"]), "-I", "-S", "-B"]


def test_its_python_brings_all_that_is_imported(warm: Board, file: Path) -> None:
    """Every module of ours can be imported there, and so can what it imports."""
    boot = warm.bootstraps / name_of(file)
    (package,) = boot.glob("lib/python3.*/rvbundle_runtime")
    found = [path.relative_to(package.parent).with_suffix("") for path in package.rglob("*.pyc")]
    names = [".".join(path.parts).removesuffix(".__init__") for path in found if path.name != "__main__"]
    assert len(names) > 20
    code = "import importlib, sys; print(len([importlib.import_module(name) for name in sys.argv[1:]]))"
    done = subprocess.run([*python_of(boot), "-c", code, *names], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{len(names)}\n", "")


def test_its_python_shows_tracebacks_of_faults(warm: Board, file: Path) -> None:
    boot = warm.bootstraps / name_of(file)
    words = [*python_of(boot), boot / "start.pyc", "run"]  # too few words
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'File "start.py", line ' in done.stderr
    assert "rvbundle_runtime/selfrun.py" in done.stderr
    assert done.stderr.endswith("IndexError: list index out of range\n")


def test_the_bar_for_bootstraps(file: Path) -> None:
    """Without emulators: at most 8 MB packed."""
    assert 4e6 < table(file).sections[0].size <= 8e6
