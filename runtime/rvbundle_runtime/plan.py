"""Everything that a run decides, each choice with its reason. Pure: nothing is touched here.

`rvbundle explain` prints a plan; `launch.py` carries it out.
"""

import os.path
from dataclasses import dataclass

from rvbundle_runtime import blas, runinfo
from rvbundle_runtime.absent import GUARD
from rvbundle_runtime.choice import NAMESPACES, NONE, ROOT, Choice
from rvbundle_runtime.decision import Decision, Situation, Wanted
from rvbundle_runtime.emulation import BINFMT, Emulation, plan_emulation
from rvbundle_runtime.errors import SandboxError
from rvbundle_runtime.host import ENV_ALLOWED, ENV_PROXIES, Host
from rvbundle_runtime.options import RunOptions
from rvbundle_runtime.selection import Launch, native_launch
from rvbundle_runtime.store import PayloadInfo

HOME = "/home/agent"
PAGER_SOCKET = "/run/rvbundle/pager"
PRESENT_FILE = "/run/rvbundle/present"


@dataclass(frozen=True)
class Mount:
    """A host path that the agent sees; `optional` ones may be missing on the host."""

    source: str
    target: str
    read_only: bool
    optional: bool = False


@dataclass(frozen=True)
class Plan:
    """How the agent will be started. Paths in `argv` and `workdir` are those that the agent sees.

    `preload` are the lines of the sandbox's /etc/ld.so.preload; None leaves it as the payload has it.
    `report` is the text of the file that tells the agent of all this (runinfo.py).
    """

    root: str
    info: PayloadInfo
    sandbox: str
    network: bool
    mounts: tuple[Mount, ...]
    env: dict[str, str]
    argv: tuple[str, ...]
    workdir: str
    memory: int | None
    cold: str | None
    choices: tuple[Choice, ...]
    emulation: Emulation | None = None
    preload: tuple[str, ...] | None = None
    report: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """The words to execute: `argv`, by way of the emulator where the kernel does not see to that."""
        return self.emulation.command(self.argv) if self.emulation else self.argv


@dataclass(frozen=True)
class ColdPack:
    """The cold pack that a run may use: its path ("" for none) and why it is that one.

    `unusable`: one lies beside the image, but is damaged or of another image.
    """

    path: str
    reason: str
    unusable: bool = False


def make_plan(
    host: Host,
    root: str,
    info: PayloadInfo,
    options: RunOptions,
    cold: ColdPack,
    launch: Launch | None = None,
    decision: Decision | None = None,
) -> Plan:
    """Decide how to run the payload `info` unpacked at `root`: natively without `launch`.

    `decision` is the backend; without one it is what is taken without a measurement.

    Raises SandboxError.
    """
    launch = launch or native_launch(host)
    decision = decision or _unmeasured(host, launch, info, options, cold)
    sandbox, why_sandbox = _choose_sandbox(host, options)
    network = info.network if options.network is None else options.network
    why_network = "the recipe says so" if options.network is None else "the command line says so"
    if sandbox == NONE:
        network, why_network = True, "without a sandbox there is no way to take it away"
    mounts = _mounts(host, options, network)
    confined = sandbox != NONE
    prefix = "" if confined else root
    emulation, emulating = plan_emulation(host, launch, info, sandbox, root, decision)
    choices = [
        Choice("payload", info.arch, launch.why_payload),
        *emulating,
        Choice("sandbox", sandbox, why_sandbox),
        Choice("network", "on" if network else "off", why_network),
        Choice("cold pack", cold.path or "none", cold.reason, warn=cold.unusable),
        *decision.choices,
        Choice(
            "working folder",
            host.cwd if options.cwd or not confined else "empty",
            ("seen as /agent" if confined else "no sandbox: the folder itself")
            if options.cwd or not confined
            else "--no-cwd",
        ),
    ]
    own = emulation.start.memory if emulation else 0
    if options.memory is not None:
        why_memory = "--memory (RLIMIT_DATA)" + (f", and {own >> 20} MiB for the emulator" if own else "")
        choices.append(Choice("memory", f"{options.memory >> 20} MiB of data per process", why_memory))
    env = _environment(host, info, options, network, confined, root, decision, emulation)
    choices.append(Choice("environment", ", ".join(sorted(env)), "only these variables reach the agent"))
    return Plan(
        root=root,
        info=info,
        sandbox=sandbox,
        network=network,
        mounts=mounts,
        env=env,
        argv=(*(prefix + word if word.startswith("/") else word for word in info.argv), *options.arguments),
        workdir="/agent" if confined else host.cwd,
        memory=None if options.memory is None else options.memory + own,
        cold=cold.path or None,
        choices=tuple(choices),
        emulation=emulation,
        preload=_preload_list(emulation) if confined else None,
        report=runinfo.describe(host, info, launch, decision, tuple(choices)),
    )


def _unmeasured(
    host: Host, launch: Launch, info: PayloadInfo, options: RunOptions, cold: ColdPack
) -> Decision:
    from rvbundle_runtime import backends  # late: a run brings a decision along

    situation = Situation(host, launch, info, bool(cold.path))
    return backends.choose(backends.load_table(), situation, wanted(options))


def wanted(options: RunOptions) -> Wanted:
    """Return what the command line asks of the backend."""
    return Wanted(options.backend, options.threads, options.precision)


def _preload_list(emulation: Emulation | None) -> tuple[str, ...] | None:
    if emulation is None:
        return None
    if emulation.start.preload:
        return ()  # the list is not for the emulator's own ld.so, which would read it
    return None if emulation.children == BINFMT and not emulation.blas else emulation.preload


def _choose_sandbox(host: Host, options: RunOptions) -> tuple[str, str]:
    if not options.sandbox:
        needing = {
            "--volume": options.volumes,
            "--device": options.devices,
            "--no-network": options.network is False,
            "--no-cwd": not options.cwd,
        }
        for name, given in needing.items():
            if given:
                raise SandboxError(f"{name} needs the sandbox, and --no-sandbox turns it off")
        return NONE, "--no-sandbox: the agent can do whatever you can"
    if not host.namespaces_denied:
        return NAMESPACES, "user namespaces work here"
    if host.uid == 0:
        return ROOT, f"no user namespaces ({host.namespaces_denied}), but root can do without"
    raise SandboxError(
        f"the sandbox needs user namespaces, and they can't be had: {host.namespaces_denied}",
        f"{host.namespaces_fix}\n  or, if you trust the agent as you trust yourself: "
        "rvbundle run --no-sandbox",
    )


def _mounts(host: Host, options: RunOptions, network: bool) -> tuple[Mount, ...]:
    mounts = [
        # What numeric libraries ask about the machine: without it torch's cpuinfo complains.
        Mount("/sys/devices/system/cpu", "/sys/devices/system/cpu", read_only=True, optional=True),
        Mount("/sys/devices/system/node", "/sys/devices/system/node", read_only=True, optional=True),
        Mount("/sys/fs/cgroup", "/sys/fs/cgroup", read_only=True, optional=True),
        Mount("/etc/localtime", "/etc/localtime", read_only=True, optional=True),
        Mount("/usr/share/zoneinfo", "/usr/share/zoneinfo", read_only=True, optional=True),
    ]
    if network:
        mounts += [
            Mount(path, path, read_only=True, optional=True)
            for path in ("/etc/resolv.conf", "/etc/ssl/certs", "/etc/pki/tls/certs")
        ]
    if options.cwd:
        mounts.append(Mount(host.cwd, "/agent", read_only=False))
    mounts += [Mount(os.path.join(host.cwd, v.source), v.target, v.read_only) for v in options.volumes]
    mounts += [Mount(device, device, read_only=False) for device in options.devices]
    return tuple(mounts)


def _environment(
    host: Host,
    info: PayloadInfo,
    options: RunOptions,
    network: bool,
    confined: bool,
    root: str,
    decision: Decision,
    emulation: Emulation | None,
) -> dict[str, str]:
    env = dict(emulation.start.env) if emulation else {}
    env |= {name: host.environ[name] for name in ENV_ALLOWED if name in host.environ}
    if network:
        env |= {name: host.environ[name] for name in ENV_PROXIES if name in host.environ}
    env |= {
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        "SHELL": "/bin/sh",
        # No display and no sound card inside; without these pygame gives up (pygame#855, #2377).
        "SDL_VIDEODRIVER": "dummy",
        "SDL_AUDIODRIVER": "dummy",
    }
    if confined:
        env |= {"HOME": HOME, "USER": "agent", "LOGNAME": "agent"}
    else:
        env |= {n: host.environ[n] for n in ("HOME", "USER", "LOGNAME", "TMPDIR") if n in host.environ}
        env["PATH"] = f"{root}/usr/bin:{host.environ.get('PATH', '/usr/bin:/bin')}"
        if not (emulation and emulation.start.preload):  # else they would be for the emulator's own ld.so
            env["LD_LIBRARY_PATH"] = f"{root}/{info.libdir}"
    env |= decision.env
    if decision.library:
        env |= blas.environment(decision.library, info.libdir, "" if confined else root)
    env |= info.env
    if confined:
        env[runinfo.VARIABLE] = runinfo.FILE
    for name, value in options.env:
        if value is not None:
            env[name] = value
        elif name in host.environ:
            env[name] = host.environ[name]
    guard = (f"{root}/{GUARD}",) if info.trimmed else ()
    preload = emulation.preload if emulation else guard
    if confined:  # there /etc/ld.so.preload names them, whatever the environment
        return env
    if preload and not (emulation and emulation.start.preload):
        env["LD_PRELOAD"] = ":".join([*preload, *filter(None, [env.get("LD_PRELOAD")])])
    if info.trimmed:
        env["RVBUNDLE_ROOT"] = root
    return env
