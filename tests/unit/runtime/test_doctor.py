import json
from dataclasses import replace
from typing import Any

import pytest

from rvbundle_runtime import doctor
from rvbundle_runtime.binfmt import NO_BINFMT
from rvbundle_runtime.checkup import Confinement, Facts, StorePlace
from rvbundle_runtime.doctor import FAIL, OK, WARN, Finding, examine
from rvbundle_runtime.errors import UsageError
from rvbundle_runtime.host import Emulator, Memory
from rvbundle_runtime.processor import Cluster, Processor, parse_cpuinfo
from rvbundle_runtime.trials import Outcome
from tests.unit.runtime import machines

X86_CPUINFO = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu sse4_2 popcnt fma avx2 avx512f amx_bf16\n"
)
ARM_CPUINFO = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd sve bf16 i8mm\n"
# StarFive JH7110 (VisionFive 2) and SpacemiT K1 (Banana Pi F3), as their kernels say it.
VISIONFIVE = "processor\t: 0\nhart\t\t: 1\nisa\t\t: rv64imafdc_zicntr_zicsr_zba_zbb\nmmu\t\t: sv39\n"
BANANA_PI = "processor\t: 0\nisa\t\t: rv64imafdcv_zicbom_zba_zbb_zbs_zvfh_zvl128b_zvl256b\nmmu\t\t: sv39\n"

PRELOADED = "nothing: children of emulated agents are started through the emulator by a preloaded library"
TRUST = " or, if you trust the agent as you trust yourself: rvbundle run --no-sandbox"
ENOUGH = ": enough, for nothing of an image has a fixed address; "
ENOUGH += "other emulated programs that ask for addresses above"

INSTALL = (
    "install QEMU's user mode, version 9.0 or newer, as a static program (Debian 13: apt install qemu-user), "
    "or name a folder that has one: RVBUNDLE_EMULATORS=FOLDER"
)
QEMU = Emulator("qemu", "x86_64", "/usr/bin/qemu-x86_64", "10.0.13")


def failing(probe: str) -> Emulator:
    return Emulator("qemu", "x86_64", "/opt/qemu-x86_64", probe=probe)


GOOD = Facts(
    arch="x86_64",
    kernel="6.12.48+deb13-amd64",
    page_size=4096,
    uid=1000,
    namespaces_denied="",
    namespaces_fix="",
    confinement=Confinement(),
    processor=parse_cpuinfo(X86_CPUINFO),
    cpus=(0, 1, 2, 3),
    usable=(0, 1, 2, 3),
    top_address=0x7FFC_8F2C_A000,
    memory=Memory(8 << 30, 6 << 30),
    store=StorePlace("/home/me/.cache/rvbundle", "your cache folder", "", 50 << 30),
    shm_free=4 << 30,
)
VISIONFIVE_2 = replace(
    GOOD,
    arch="riscv64",
    kernel="6.6.20-starfive",
    processor=parse_cpuinfo(VISIONFIVE),
    mmu="sv39",
    top_address=0x3F_FFE6_B000,
    emulators=(QEMU,),
)
PI_5 = replace(
    GOOD,
    arch="aarch64",
    kernel="6.12.47+rpt-rpi-2712",
    page_size=16384,
    processor=parse_cpuinfo(ARM_CPUINFO),
    top_address=1 << 47,
    emulators=(QEMU,),
)


def denied(why: str, fix: str, **others: Any) -> Facts:
    """Return facts of a machine whose kernel denies user namespaces."""
    return replace(
        GOOD, namespaces_denied=why, namespaces_fix=fix, confinement=Confinement(why, fix), **others
    )


def test_a_good_machine_has_only_good_lines() -> None:
    findings = examine(GOOD)
    assert [f.level for f in findings] == [OK] * len(findings)
    assert not any(f.advice for f in findings)
    assert [f.topic for f in findings] == [
        *("kernel", "namespaces", "sandbox", "binfmt", "emulators", "emulators", "page size", "addresses"),
        *("processors", "memory", "store", "/dev/shm", "zstd"),
    ]


@pytest.mark.parametrize(
    ("facts", "level", "topic", "text", "advice"),
    [
        pytest.param(GOOD, OK, "kernel", "Linux 6.12.48+deb13-amd64 on x86_64", "", id="kernel"),
        pytest.param(
            replace(GOOD, arch="armv7l", emulators=(QEMU,)),
            FAIL,
            "kernel",
            "Linux 6.12.48+deb13-amd64 on armv7l: there are payloads for aarch64, riscv64, x86_64 only",
            "use such a machine",
            id="architecture",
        ),
        pytest.param(
            replace(VISIONFIVE_2, kernel="4.9.0"),
            FAIL,
            "kernel",
            "Linux 4.9.0 on riscv64 is too old",
            "use Linux 4.15 or newer (what payloads' C library and rvbundle call is not in older ones)",
            id="kernel too old",
        ),
        pytest.param(
            replace(GOOD, kernel="strange"), OK, "kernel", "Linux strange on x86_64", "", id="kernel odd"
        ),
        pytest.param(
            denied(
                "the kernel allows none (user.max_user_namespaces is 0)",
                "sudo sysctl -w user.max_user_namespaces=15000",
            ),
            FAIL,
            "namespaces",
            "no user namespaces: the kernel allows none (user.max_user_namespaces is 0)",
            f"sudo sysctl -w user.max_user_namespaces=15000;{TRUST}",
            id="namespaces denied",
        ),
        pytest.param(
            denied("operation not permitted", "allow user namespaces on this machine", container="docker"),
            FAIL,
            "namespaces",
            "no user namespaces: operation not permitted",
            "allow user namespaces on this machine; in this container: start it with docker run "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            f"--security-opt systempaths=unconfined;{TRUST}",
            id="namespaces denied in docker",
        ),
        pytest.param(
            denied("the kernel allows none", "sudo sysctl -w x=1", container="docker"),
            FAIL,
            "namespaces",
            "no user namespaces: the kernel allows none",
            f"sudo sysctl -w x=1;{TRUST}",
            id="namespaces denied by the kernel below docker",
        ),
        pytest.param(
            denied("operation not permitted", "allow user namespaces on this machine", container="lxc"),
            FAIL,
            "namespaces",
            "no user namespaces: operation not permitted",
            "allow user namespaces on this machine; in this container (lxc): let its engine allow user "
            f"namespaces and mounts;{TRUST}",
            id="namespaces denied in another container",
        ),
        pytest.param(
            denied("operation not permitted", "allow them", seccomp=2),
            FAIL,
            "namespaces",
            "no user namespaces: operation not permitted",
            "allow them; a seccomp filter is in force here: what set it up (a container engine?) must allow "
            f"them;{TRUST}",
            id="namespaces denied by seccomp",
        ),
        pytest.param(
            replace(
                denied("the kernel allows none", "sudo sysctl -w x=1", uid=0),
                confinement=Confinement(root_only=True),
            ),
            WARN,
            "namespaces",
            "no user namespaces: the kernel allows none; root can do without, other users can't",
            "sudo sysctl -w x=1",
            id="namespaces denied to root",
        ),
        pytest.param(
            replace(
                GOOD, confinement=Confinement("sandbox: could not mount /dev: Permission denied", "look")
            ),
            FAIL,
            "sandbox",
            "sandbox: could not mount /dev: Permission denied",
            "look",
            id="sandbox fails",
        ),
        pytest.param(
            replace(
                GOOD, confinement=Confinement("sandbox: start: No space left on device"), container="podman"
            ),
            FAIL,
            "sandbox",
            "sandbox: start: No space left on device",
            "see the kernel log (dmesg); in this container: start it with podman run "
            "--security-opt seccomp=unconfined --security-opt unmask=ALL",
            id="sandbox fails in podman",
        ),
        pytest.param(
            replace(GOOD, confinement=Confinement(shared_proc=True), container="docker"),
            WARN,
            "sandbox",
            "it can be made, but agents see the processes of this container: no new /proc is allowed",
            "nothing, or in this container: start it with docker run --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined",
            id="proc is shared",
        ),
        pytest.param(
            replace(
                VISIONFIVE_2, binfmt="the kernel gives a user namespace none of its own (Linux 6.7 does)"
            ),
            WARN,
            "binfmt",
            "a sandbox can have no binfmt_misc of its own: the kernel gives a user namespace none of its own "
            "(Linux 6.7 does)",
            PRELOADED,
            id="binfmt before 6.7",
        ),
        pytest.param(
            replace(GOOD, binfmt=NO_BINFMT),
            WARN,
            "binfmt",
            "a sandbox can have no binfmt_misc of its own: the kernel has none",
            f"sudo modprobe binfmt_misc; or {PRELOADED}",
            id="binfmt not in the kernel",
        ),
        pytest.param(
            replace(VISIONFIVE_2, emulators=()),
            WARN,
            "emulators",
            "x86_64: none: images without a payload for riscv64 can't run",
            INSTALL,
            id="no emulator",
        ),
        pytest.param(
            VISIONFIVE_2,
            OK,
            "emulators",
            "aarch64: none, and none is needed for payloads of riscv64",
            "",
            id="no emulator that is needed",
        ),
        pytest.param(
            VISIONFIVE_2,
            OK,
            "emulators",
            "x86_64: /usr/bin/qemu-x86_64, version 10.0.13, passes its probe",
            "",
            id="an emulator",
        ),
        pytest.param(
            replace(VISIONFIVE_2, emulators=(failing("is version 8.2.2, which is known to crash"),)),
            WARN,
            "emulators",
            "x86_64: /opt/qemu-x86_64 is version 8.2.2, which is known to crash",
            INSTALL,
            id="an emulator that is too old",
        ),
        pytest.param(
            replace(VISIONFIVE_2, emulators=(failing("did not end within 10 s in its probe"),)),
            WARN,
            "emulators",
            "x86_64: /opt/qemu-x86_64 did not end within 10 s in its probe",
            INSTALL,
            id="an emulator that hangs",
        ),
        pytest.param(
            replace(VISIONFIVE_2, emulators=(failing("is not executable"),)),
            WARN,
            "emulators",
            "x86_64: /opt/qemu-x86_64 is not executable",
            "chmod +x /opt/qemu-x86_64",
            id="an emulator that is not executable",
        ),
        pytest.param(
            replace(VISIONFIVE_2, emulators=(failing("was ended by SIGSEGV in its probe"), QEMU)),
            OK,
            "emulators",
            "x86_64: /opt/qemu-x86_64 was ended by SIGSEGV in its probe: not used",
            "",
            id="an emulator that crashes beside one that works",
        ),
        pytest.param(
            PI_5,
            WARN,
            "page size",
            "16 KiB: arm64 payloads run (they are laid out for up to 64 KiB); emulated x86_64 and riscv64 "
            "ones need 4 KiB",
            "to emulate, boot a kernel with pages of 4 KiB (Raspberry Pi 5: kernel=kernel8.img in "
            "/boot/firmware/config.txt)",
            id="pages of 16 KiB on arm64",
        ),
        pytest.param(
            replace(VISIONFIVE_2, page_size=65536),
            FAIL,
            "page size",
            "64 KiB: payloads for riscv64 need 4 KiB",
            "boot a kernel with pages of 4 KiB",
            id="pages of 64 KiB on riscv64",
        ),
        pytest.param(GOOD, OK, "addresses", "programs have 47 bits", "", id="addresses"),
        pytest.param(
            VISIONFIVE_2,
            OK,
            "addresses",
            f"Sv39, programs have 38 bits{ENOUGH} 2^38 fail",
            "",
            id="sv39",
        ),
        pytest.param(
            replace(VISIONFIVE_2, mmu="sv48"),
            OK,
            "addresses",
            "Sv48, programs have 47 bits",
            "",
            id="sv48",
        ),
        pytest.param(
            replace(VISIONFIVE_2, mmu=""),
            OK,
            "addresses",
            f"programs have 38 bits{ENOUGH} 2^38 fail",
            "",
            id="sv39 by the stack",
        ),
        pytest.param(
            replace(PI_5, top_address=0x7F_FFFF_F000),
            OK,
            "addresses",
            f"programs have 39 bits{ENOUGH} 2^39 fail",
            "",
            id="39 bits on arm64",
        ),
        pytest.param(
            GOOD, OK, "processors", "4 of 4 may be used; sse4_2, avx2, fma, avx512f, amx_bf16", "", id="x86"
        ),
        pytest.param(
            replace(GOOD, processor=parse_cpuinfo("flags\t\t: fpu sse2\n")),
            WARN,
            "processors",
            "4 of 4 may be used; no vector extension known; no SSE4.2: kernels of numeric libraries that "
            "builds trace need it",
            "keep the cold pack at hand",
            id="old x86",
        ),
        pytest.param(PI_5, OK, "processors", "4 of 4 may be used; asimd, bf16, i8mm, sve", "", id="arm64"),
        pytest.param(
            replace(VISIONFIVE_2, usable=(2,)),
            OK,
            "processors",
            "1 of 4 may be used; rv64imafdc, no vector extension: numeric code is scalar, zba, zbb",
            "",
            id="riscv64 without vectors",
        ),
        pytest.param(
            replace(VISIONFIVE_2, processor=parse_cpuinfo(BANANA_PI)),
            OK,
            "processors",
            "4 of 4 may be used; rv64imafdcv, vectors of 256 bits, zba, zbb, zbs, zvfh, zvl128b, zvl256b",
            "",
            id="riscv64 with vectors",
        ),
        pytest.param(
            replace(VISIONFIVE_2, processor=parse_cpuinfo("isa\t\t: rv64imac\n")),
            FAIL,
            "processors",
            "4 of 4 may be used; rv64imac, no vector extension: numeric code is scalar; without f, d",
            "payloads are built for rv64gc: use a board that has it",
            id="riscv64 without floating point",
        ),
        pytest.param(
            replace(VISIONFIVE_2, processor=Processor()),
            OK,
            "processors",
            "4 of 4 may be used; no vector extension known",
            "",
            id="riscv64 of which the kernel says nothing",
        ),
        pytest.param(GOOD, OK, "memory", "6144 MiB available of 8192 MiB", "", id="memory"),
        pytest.param(
            replace(GOOD, memory=Memory(2 << 30, 300 << 20)),
            WARN,
            "memory",
            "300 MiB available of 2048 MiB: an agent with torch may not fit",
            "end other programs, or add swap",
            id="little memory",
        ),
        pytest.param(
            replace(GOOD, memory=Memory(8 << 30, 6 << 30, 256 << 20)),
            WARN,
            "memory",
            "256 MiB available of 8192 MiB, the control group allows 256 MiB: "
            "an agent with torch may not fit",
            "end other programs, or add swap",
            id="memory limit",
        ),
        pytest.param(
            GOOD,
            OK,
            "store",
            "/home/me/.cache/rvbundle (your cache folder), 51200 MiB free",
            "",
            id="store",
        ),
        pytest.param(
            replace(
                GOOD,
                store=StorePlace("/c", "RVBUNDLE_CACHE says so", "/c is on a file system mounted noexec", 1),
            ),
            FAIL,
            "store",
            "images can't be unpacked and run: /c is on a file system mounted noexec",
            "set RVBUNDLE_CACHE to a folder of yours on a file system that is not read-only or noexec",
            id="noexec",
        ),
        pytest.param(
            replace(GOOD, store=StorePlace("/c", "RVBUNDLE_CACHE says so", "", 100 << 20)),
            WARN,
            "store",
            "/c (RVBUNDLE_CACHE says so), 100 MiB free: an agent with torch may not fit",
            "free some space (rvbundle cache prune), or set RVBUNDLE_CACHE to a folder on a larger disk",
            id="little space",
        ),
        pytest.param(
            replace(GOOD, store=StorePlace("/c", "RVBUNDLE_CACHE says so", "", 0)),
            FAIL,
            "store",
            "/c (RVBUNDLE_CACHE says so), 0 MiB free: too little for any image",
            "free some space (rvbundle cache prune), or set RVBUNDLE_CACHE to a folder on a larger disk",
            id="no space",
        ),
        pytest.param(
            replace(GOOD, shm_free=None),
            WARN,
            "/dev/shm",
            "there is no /dev/shm: with --no-sandbox, processes can't share memory (a sandbox has its own)",
            "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            id="no shm",
        ),
        pytest.param(
            replace(GOOD, shm_free=63 << 20, container="docker"),
            WARN,
            "/dev/shm",
            "63 MiB free: little for processes that share tensors, with --no-sandbox (a sandbox has its own)",
            "docker run --shm-size 1g",
            id="little shm",
        ),
        pytest.param(
            replace(GOOD, zstd="this Python has no zstd decoder"),
            FAIL,
            "zstd",
            "this Python has no zstd decoder",
            "pip install zstandard, or use Python 3.14 or newer",
            id="no decoder",
        ),
    ],
)
def test_findings(facts: Facts, level: str, topic: str, text: str, advice: str) -> None:
    assert Finding(level, topic, text, advice) in examine(facts)
    # Nothing but a look at the topic itself, and at what needs it, gets worse.
    others = [f for f in examine(facts) if f.topic not in (topic, "namespaces", "sandbox", "page size")]
    assert {f.level for f in others} == {OK}


def test_a_quota_is_a_line_of_its_own() -> None:
    findings = examine(replace(GOOD, quota=1.5))
    assert [f.level for f in findings if f.topic == "processors"] == [OK, WARN]
    assert (
        Finding(
            WARN,
            "processors",
            "the control group gives the time of 1.5 of them; numeric libraries start a thread for each that "
            "may be used",
            "rvbundle run --env OMP_NUM_THREADS=1, or raise the limit",
        )
        in findings
    )
    assert all(f.level == OK for f in examine(replace(GOOD, quota=4.0)))


def machine(name: str) -> Facts:
    """Return facts of a recorded machine, nothing else of which is worth a line."""
    host = machines.to_host(machines.load(name))
    return replace(
        GOOD,
        arch=host.arch,
        processor=host.processor,
        cpus=host.cpus,
        usable=host.usable,
        clusters=host.clusters,
        emulators=(QEMU,),
    )


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "sapphire-rapids",
            [
                "Intel(R) Xeon(R) Platinum 8480+ (family 6, model 143, stepping 6): 112 of 112 may be used; "
                "sse4_2, avx2, fma, avx_vnni, avx512f, avx512_vnni, avx512_bf16, avx512_fp16, amx_tile, "
                "amx_bf16, amx_int8"
            ],
        ),
        (
            "graviton4",
            [
                "Neoverse V2 (implementer 0x41, part 0xd4f, variant 0, revision 1): 96 of 96 may be used; "
                "asimd, asimdhp, asimddp, bf16, i8mm, sve, sve2"
            ],
        ),
        (
            "sg2042",
            [
                "mvendorid 0x5b7, marchid 0x0, mimpid 0x0: 64 of 64 may be used; rv64imafdc, xtheadvector: "
                "vectors of version 0.7, for which libraries use scalar code"
            ],
        ),
        (
            "spacemit-k3",
            [
                "spacemit,x100 (mvendorid 0x710, marchid 0x8000000058000002, mimpid 0x33d8a600): 8 of 16 may "
                "be used; rv64imafdcvh, vectors of 256 bits, zba, zbb, zbs, zfbfmin, zfh, zfhmin, zvfbfmin, "
                "zvfbfwma, zvfh, zvfhmin",
                "they are of 2 kinds: 0-7 spacemit,x100; 8-15 Spacemit(R) A100, not for this process",
            ],
        ),
        (
            "arm-phone",
            [
                "Cortex-A510 (implementer 0x41, part 0xd46, variant 1, revision 1): 8 of 8 may be used; "
                "asimd, asimdhp, asimddp, bf16, i8mm",
                "they are of 4 kinds: 7 Cortex-X3 (capacity 1024); 3-4 Cortex-A715 (capacity 855); "
                "5-6 Cortex-A710 (capacity 855); 0-2 Cortex-A510 (capacity 280)",
            ],
        ),
    ],
)
def test_processors_of_real_machines(name: str, texts: list[str]) -> None:
    found = [f for f in examine(machine(name)) if f.topic == "processors"]
    assert found == [Finding(OK, "processors", text) for text in texts]


def test_lists_of_processors() -> None:
    facts = replace(GOOD, clusters=(Cluster((0, 1, 2, 5, 7, 8), 0, "a"), Cluster((3,))))
    assert Finding(OK, "processors", "they are of 2 kinds: 0-2,5,7-8 a; 3") in examine(facts)


def tried(*outcomes: Outcome, **others: Any) -> list[Finding]:
    return [f for f in examine(replace(GOOD, trials=outcomes, **others)) if f.topic == "trials"]


def test_what_trials_say() -> None:
    bf16 = replace(GOOD.processor, flags=GOOD.processor.flags | {"avx512_bf16"})
    text = "instructions that work: avx512_bf16"
    assert tried(Outcome("avx512_bf16", True, 1), processor=bf16) == [Finding(OK, "trials", text)]
    text = "instructions that do not: avx512_bf16"
    assert tried(Outcome("avx512_bf16", False)) == [Finding(OK, "trials", text)]
    assert tried() == []


def test_trials_that_contradict_the_kernel() -> None:
    has = Processor(flags=frozenset("imafdcv") | {"zvfh"})
    outcomes = (Outcome("v", True, 32), Outcome("zvfh", False), Outcome("zvfbfwma", True, 1))
    refused = "zvfh: the kernel says that it is there, but its instructions are refused"
    assert tried(*outcomes, arch="riscv64", processor=has) == [
        Finding(
            OK, "trials", "instructions that work: v (256 bits), zvfbfwma; instructions that do not: zvfh"
        ),
        Finding(WARN, "trials", refused, "nothing, but do not ask libraries for it"),
        Finding(OK, "trials", "zvfbfwma: it works, but the kernel does not tell of it"),
    ]


def test_trials_that_could_not_be_made() -> None:
    text = "not all could be made: code can't be run from memory here"
    why = text.partition(": ")[2]
    assert tried(Outcome("avx512_bf16", False, unknown=why)) == [Finding(OK, "trials", text)]


def test_where_namespaces_are_denied_the_sandbox_has_no_line_of_its_own() -> None:
    findings = examine(denied("the kernel allows none", "fix"))
    assert [f.topic for f in findings].count("sandbox") == 0
    assert [f.level for f in findings if f.topic == "namespaces"] == [FAIL]


@pytest.mark.parametrize(
    ("facts", "code"),
    [(GOOD, 0), (PI_5, 0), (replace(GOOD, zstd="this Python has no zstd decoder"), 110)],
)
def test_the_exit_code_tells_of_failures_only(
    facts: Facts, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "read_facts", lambda _: facts)
    assert doctor.main([]) == code
    text = capsys.readouterr().out
    assert text.splitlines()[0] == f"ok    kernel      Linux {facts.kernel} on {facts.arch}"
    assert doctor.main(["--json"]) == code
    assert [Finding(**value) for value in json.loads(capsys.readouterr().out)] == list(examine(facts))


def test_what_to_do_stands_below(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "read_facts", lambda _: replace(GOOD, zstd="this Python has no zstd decoder"))
    doctor.main([])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "fail  zstd        this Python has no zstd decoder",
        "                  -> pip install zstandard, or use Python 3.14 or newer",
    ]


def test_other_words() -> None:
    with pytest.raises(UsageError, match="doctor: no such option: --yaml") as caught:
        doctor.main(["--yaml"])
    assert caught.value.hint == "the only one is --json"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: doctor [--json]\n")
