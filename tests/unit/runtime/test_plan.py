from dataclasses import replace

import pytest

from rvbundle_runtime import families
from rvbundle_runtime import plan as planning
from rvbundle_runtime.errors import SandboxError
from rvbundle_runtime.families import Family
from rvbundle_runtime.host import Host
from rvbundle_runtime.options import RunOptions, Volume
from rvbundle_runtime.plan import ColdPack, Mount, Plan, make_plan
from rvbundle_runtime.processor import Processor
from rvbundle_runtime.store import PayloadInfo

HOST = Host(
    arch="riscv64",
    kernel="6.6.0",
    page_size=4096,
    uid=1000,
    gid=1000,
    cwd="/home/me/work",
    environ={
        "HOME": "/home/me",
        "USER": "me",
        "LOGNAME": "me",
        "PATH": "/opt/bin:/usr/bin",
        "TERM": "xterm",
        "TZ": "UTC",
        "LD_PRELOAD": "/evil.so",
        "LD_LIBRARY_PATH": "/evil",
        "PYTHONPATH": "/evil",
        "OMP_NUM_THREADS": "7",
        "http_proxy": "http://proxy",
        "NO_PROXY": "localhost",
        "SECRET": "s3cret",
        "TMPDIR": "/scratch",
    },
    namespaces_denied="",
    namespaces_fix="",
)
INFO = PayloadInfo(
    "ab" * 32,
    "demo",
    "1.0",
    "riscv64",
    "wheels",
    "3.11.7",
    ("/usr/bin/python3", "/app/x.py", "-u"),
    "usr/lib/riscv64-linux-gnu",
    False,
    {"SEED": "1"},
)
NO_PACK = ColdPack("", "there is no x.cold.rvb beside the image")
ROOT = "/store/root"


def plan(host: Host = HOST, info: PayloadInfo = INFO, pack: ColdPack = NO_PACK, **options: object) -> Plan:
    return make_plan(host, ROOT, info, RunOptions("x.rvb", **options), pack)  # type: ignore[arg-type]


def choice(made: Plan, what: str) -> tuple[str, str]:
    (found,) = [c for c in made.choices if c.what == what]
    return found.value, found.reason


def test_plain_run() -> None:
    made = plan()
    assert (made.root, made.info, made.sandbox, made.network) == (ROOT, INFO, "namespaces", False)
    assert made.argv == ("/usr/bin/python3", "/app/x.py", "-u")
    assert (made.workdir, made.memory, made.cold) == ("/agent", None, None)
    assert choice(made, "payload") == ("riscv64", "native to this machine (riscv64)")
    assert choice(made, "sandbox") == ("namespaces", "user namespaces work here")
    assert choice(made, "network") == ("off", "the recipe says so")
    assert choice(made, "cold pack") == ("none", "there is no x.cold.rvb beside the image")
    assert choice(made, "working folder") == ("/home/me/work", "seen as /agent")
    assert choice(made, "backend") == ("any", "each library picks its kernels for this processor")


FAST = Family("avx2", ("avx2", "fma"), {"ATEN_CPU_CAPABILITY": "avx2"}, ("AVX512F",), "GenuineIntel")
SLOW = Family("baseline", ("sse4_2",), {"ATEN_CPU_CAPABILITY": "default"}, ("AVX2",))
TRIMMED = replace(INFO, families=(FAST, SLOW), trimmed=True)
ONLY = "without a cold pack only kernels that were traced"


@pytest.mark.parametrize(
    ("processor", "family", "reason", "env"),
    [
        (
            Processor("GenuineIntel", frozenset({"avx2", "fma", "sse4_2"})),
            "avx2",
            ONLY,
            {"ATEN_CPU_CAPABILITY": "avx2"},
        ),
        (
            Processor("GenuineIntel", frozenset({"avx2", "fma", "sse4_2", "avx512f"})),
            "avx2",
            ONLY,
            {"ATEN_CPU_CAPABILITY": "avx2", "NPY_DISABLE_CPU_FEATURES": "AVX512F"},
        ),
        (
            Processor("AuthenticAMD", frozenset({"avx2", "fma", "sse4_2"})),
            "baseline",
            f"{ONLY}; not avx2: traced on GenuineIntel, and libraries run other code on AuthenticAMD",
            {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": "AVX2"},
        ),
        (
            Processor("GenuineIntel", frozenset({"sse4_2"})),
            "baseline",
            f"{ONLY}; not avx2: this processor has no avx2, fma",
            {"ATEN_CPU_CAPABILITY": "default"},
        ),
    ],
    ids=["traced here", "newer", "another maker", "older"],
)
def test_kernels_without_a_cold_pack(
    processor: Processor, family: str, reason: str, env: dict[str, str]
) -> None:
    made = plan(replace(HOST, processor=processor), TRIMMED)
    assert choice(made, "backend") == (family, reason)
    assert not any(c.warn for c in made.choices)
    held = ("ATEN_CPU_CAPABILITY", "NPY_DISABLE_CPU_FEATURES")
    assert {name: made.env[name] for name in held if name in made.env} == env


def test_kernels_that_no_trace_could_see() -> None:
    made = plan(replace(HOST, processor=Processor("X", frozenset())), TRIMMED)
    assert choice(made, "backend") == (
        "any",
        "none that were traced fit: not avx2: this processor has no avx2, fma; "
        "not baseline: this processor has no sse4_2",
    )
    assert [c.what for c in made.choices if c.warn] == ["backend"]
    assert "ATEN_CPU_CAPABILITY" not in made.env


def test_kernels_with_a_cold_pack() -> None:
    made = plan(info=TRIMMED, pack=ColdPack("/c.rvb", "named"))
    assert choice(made, "backend") == ("any", "each library picks its kernels for this processor")
    assert not any(c.warn for c in made.choices)
    assert "ATEN_CPU_CAPABILITY" not in made.env


VECTORS = replace(HOST, processor=Processor("", frozenset("imafdcv"), vlen=256))
RISCV = replace(
    INFO,
    families=families.to_trace("riscv64", VECTORS.processor, ()),
    trimmed=True,
    blas={"openblas": "0.3.29"},
)


@pytest.mark.parametrize(
    ("vlen", "family", "reason"),
    [
        (256, "zvl256b", ONLY),
        (1024, "zvl256b", ONLY),
        (128, "zvl128b", f"{ONLY}; not zvl256b: it needs vectors of 256 bits, and this processor's have 128"),
    ],
)
def test_vectors_without_a_cold_pack(vlen: int, family: str, reason: str) -> None:
    made = plan(replace(HOST, processor=replace(VECTORS.processor, vlen=vlen)), RISCV)
    assert choice(made, "backend") == (family, reason)
    assert made.env["OPENBLAS_CORETYPE"] == f"RISCV64_{family.upper()}"


def test_a_board_without_vectors() -> None:
    made = plan(info=RISCV)
    assert choice(made, "backend") == (
        "generic",
        f"{ONLY}; not zvl256b: this processor has no vectors; not zvl128b: this processor has no vectors",
    )


BAD = "OpenBLAS 0.3.33 computes nonsense with these kernels (OpenBLAS#5408, OpenBLAS#5811)"


def test_wrong_kernels_are_refused() -> None:
    made = plan(VECTORS, replace(RISCV, blas={"openblas": "0.3.33"}))
    assert choice(made, "backend") == ("zvl128b", f"{ONLY}; not zvl256b: {BAD}")


@pytest.mark.parametrize("traced", [RISCV.families, ()], ids=["with the cold pack", "nothing trimmed"])
def test_openblas_may_not_choose_wrong_kernels_either(traced: tuple[Family, ...]) -> None:
    pack = ColdPack("/c.rvb", "named") if traced else NO_PACK
    info = replace(RISCV, families=traced, blas={"openblas": "0.3.33"})
    made = plan(VECTORS, info, pack)
    value, reason = choice(made, "backend")
    assert value == "zvl128b"
    assert reason.endswith(f"; not any: OpenBLAS would choose zvl256b, and {BAD}; not zvl256b: {BAD}")
    assert made.env["OPENBLAS_CORETYPE"] == "RISCV64_ZVL128B"
    fine = plan(VECTORS, replace(info, blas={"openblas": "0.3.29"}), pack)
    assert choice(fine, "backend")[0] == "any"
    assert "OPENBLAS_CORETYPE" not in fine.env


def test_recipe_and_options_win_over_the_kernels() -> None:
    host = replace(HOST, processor=Processor("GenuineIntel", frozenset({"sse4_2"})))
    info = replace(TRIMMED, env={"ATEN_CPU_CAPABILITY": "recipe"})
    assert plan(host, info).env["ATEN_CPU_CAPABILITY"] == "recipe"
    given = plan(host, info, env=(("ATEN_CPU_CAPABILITY", "given"),))
    assert given.env["ATEN_CPU_CAPABILITY"] == "given"


def test_the_guard_without_a_sandbox() -> None:
    """In the sandbox /etc/ld.so.preload names it."""
    made = plan(info=TRIMMED, sandbox=False)
    assert made.env["LD_PRELOAD"] == "/store/root/usr/lib/rvbundle/guard.so"
    assert made.env["RVBUNDLE_ROOT"] == "/store/root"
    assert not {"LD_PRELOAD", "RVBUNDLE_ROOT"} & plan(info=TRIMMED).env.keys()
    assert not {"LD_PRELOAD", "RVBUNDLE_ROOT"} & plan(sandbox=False).env.keys()


def test_every_choice_has_a_reason() -> None:
    made = plan(memory=3 << 30, network=True, cwd=False)
    assert all(c.what and c.value and c.reason for c in made.choices)
    assert len({c.what for c in made.choices}) == len(made.choices)


def test_arguments_follow_the_start_words() -> None:
    assert plan(arguments=("--x", "/y")).argv == ("/usr/bin/python3", "/app/x.py", "-u", "--x", "/y")


def test_cold_pack_and_memory() -> None:
    made = plan(pack=ColdPack("/c.rvb", "named"), memory=3 << 29)
    assert made.cold == "/c.rvb"
    assert choice(made, "cold pack") == ("/c.rvb", "named")
    assert choice(made, "memory") == ("1536 MiB of data per process", "--memory (RLIMIT_DATA)")


def test_environment_inside_is_an_allow_list() -> None:
    assert plan().env == {
        "TERM": "xterm",
        "TZ": "UTC",
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        "SHELL": "/bin/sh",
        "SDL_VIDEODRIVER": "dummy",
        "SDL_AUDIODRIVER": "dummy",
        "HOME": "/home/agent",
        "USER": "agent",
        "LOGNAME": "agent",
        "RVBUNDLE_RUNTIME": "/run/rvbundle/rvbundle_runtime.json",
        "SEED": "1",
    }


def test_proxies_come_with_the_network() -> None:
    env = plan(network=True).env
    assert (env["http_proxy"], env["NO_PROXY"]) == ("http://proxy", "localhost")
    assert "SECRET" not in env


def test_env_options_win_over_the_recipe() -> None:
    env = plan(env=(("SEED", "2"), ("SECRET", None), ("MISSING", None), ("HOME", "/x"))).env
    assert (env["SEED"], env["SECRET"], env["HOME"]) == ("2", "s3cret", "/x")
    assert "MISSING" not in env


@pytest.mark.parametrize(
    ("recipe", "option", "expected"),
    [
        (False, None, ("off", "the recipe says so")),
        (True, None, ("on", "the recipe says so")),
        (False, True, ("on", "the command line says so")),
        (True, False, ("off", "the command line says so")),
    ],
)
def test_network(recipe: bool, option: bool | None, expected: tuple[str, str]) -> None:
    made = plan(info=replace(INFO, network=recipe), network=option)
    assert choice(made, "network") == expected
    assert made.network == (expected[0] == "on")
    assert any(m.source == "/etc/resolv.conf" for m in made.mounts) == made.network


def test_mounts() -> None:
    made = plan(
        volumes=(Volume("data", "/data", True), Volume("/abs", "/b")), devices=("/dev/dri", "/dev/snd")
    )
    own = [m for m in made.mounts if not m.optional]
    assert own == [
        Mount("/home/me/work", "/agent", read_only=False),
        Mount("/home/me/work/data", "/data", read_only=True),
        Mount("/abs", "/b", read_only=False),
        Mount("/dev/dri", "/dev/dri", read_only=False),
        Mount("/dev/snd", "/dev/snd", read_only=False),
    ]
    assert all(m.read_only for m in made.mounts if m.optional)


def test_no_cwd() -> None:
    made = plan(cwd=False)
    assert all(m.target != "/agent" for m in made.mounts)
    assert choice(made, "working folder") == ("empty", "--no-cwd")


def test_without_namespaces() -> None:
    host = replace(HOST, namespaces_denied="AppArmor denies them", namespaces_fix="sudo sysctl -w x=0")
    with pytest.raises(SandboxError) as caught:
        plan(host)
    assert caught.value.message == (
        "the sandbox needs user namespaces, and they can't be had: AppArmor denies them"
    )
    assert caught.value.hint == (
        "sudo sysctl -w x=0\n  or, if you trust the agent as you trust yourself: rvbundle run --no-sandbox"
    )


def test_root_can_do_without_namespaces() -> None:
    host = replace(HOST, uid=0, gid=0, namespaces_denied="they are off")
    assert choice(plan(host), "sandbox") == (
        "root",
        "no user namespaces (they are off), but root can do without",
    )


def test_no_sandbox() -> None:
    made = plan(sandbox=False)
    assert (made.sandbox, made.workdir) == (planning.NONE, "/home/me/work")
    assert made.argv == ("/store/root/usr/bin/python3", "/store/root/app/x.py", "-u")
    assert choice(made, "sandbox") == ("none", "--no-sandbox: the agent can do whatever you can")
    assert choice(made, "network") == ("on", "without a sandbox there is no way to take it away")
    assert choice(made, "working folder") == ("/home/me/work", "no sandbox: the folder itself")
    assert made.env["PATH"] == "/store/root/usr/bin:/opt/bin:/usr/bin"
    assert made.env["LD_LIBRARY_PATH"] == "/store/root/usr/lib/riscv64-linux-gnu"
    assert (made.env["HOME"], made.env["TMPDIR"]) == ("/home/me", "/scratch")
    assert not {"LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "SECRET"} & made.env.keys()


def test_no_sandbox_leaves_the_agents_arguments_alone() -> None:
    assert plan(sandbox=False, arguments=("/data",)).argv[-1] == "/data"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"volumes": (Volume("/a", "/b"),)},
            "--volume needs the sandbox, and --no-sandbox turns it off",
        ),
        ({"devices": ("dri",)}, "--device needs the sandbox, and --no-sandbox turns it off"),
        ({"network": False}, "--no-network needs the sandbox, and --no-sandbox turns it off"),
        ({"cwd": False}, "--no-cwd needs the sandbox, and --no-sandbox turns it off"),
    ],
    ids=["volume", "device", "no network", "no cwd"],
)
def test_what_needs_the_sandbox(options: dict[str, object], message: str) -> None:
    with pytest.raises(SandboxError) as caught:
        plan(sandbox=False, **options)
    assert caught.value.message == message


def test_no_sandbox_needs_no_namespaces() -> None:
    host = replace(HOST, namespaces_denied="denied", namespaces_fix="fix")
    assert plan(host, sandbox=False).sandbox == "none"


def test_a_plan_touches_nothing_of_its_inputs() -> None:
    before = dict(HOST.environ)
    plan(env=(("TERM", "dumb"),)).env["X"] = "y"
    assert HOST.environ == before
    assert INFO.env == {"SEED": "1"}
