"""What launchers share: the emulators to choose among, and what goes before a program."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rvbundle_runtime.host import Emulator, Host

# Where the sandbox shows emulators: each file is a read-only mount of its own.
FOLDER = "/run/rvbundle/emulator.d"
_PAGE = 4096  # bytes
SMALL_PAGES = (
    "boot a kernel with pages of 4 KiB (Raspberry Pi 5: kernel=kernel8.img in /boot/firmware/config.txt)"
)


@dataclass(frozen=True)
class Start:
    """How programs are started: `words` come before each, `files` (host's path, the sandbox's) are visible.

    `argv0` is the emulator's option, after the words, whose value is the program's argv[0]; `argv0_variable`
    a variable that says the same. `env` are variables that the emulator needs in every process; `preload` is
    the one by which it preloads libraries into programs, "" where their own ld.so does that. Where `program`
    is not empty, the first word is a copy of the starter (starter.py) that executes these words: the emulator
    can't be executed by itself. `memory` are the bytes of data that the emulator takes in each process.
    `starts_children`: it knows its programs' children by itself, all but scripts.
    """

    words: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    program: tuple[str, ...] = ()
    argv0: str = ""
    argv0_variable: str = ""
    preload: str = ""
    memory: int = 0
    starts_children: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, program: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words that start `program`, which is to see `argv` (its name first)."""
        if not self.words:
            return argv
        return (*self.words, *((self.argv0, *argv[:1]) if self.argv0 else ()), program, *argv[1:])

    def settings(self) -> str:
        """Return the file that tells emulate.so the same (docs/emulation.md)."""
        lines = [f"emulator {self.words[0]}", *(f"word {word}" for word in self.words[1:])]
        lines += [f"argv0 {self.argv0}"] if self.argv0 else []
        lines += [f"argv0-variable {self.argv0_variable}"] if self.argv0_variable else []
        lines += [f"variable {name}={value}" for name, value in self.env.items()]
        return "".join(f"{line}\n" for line in lines)


def usable(host: Host, kind: str, arch: str) -> Emulator | None:
    """Return the first emulator of `kind` for programs for `arch` that has passed its probe."""
    return next((e for e in host.emulators if (e.kind, e.guest, e.probe) == (kind, arch, "")), None)


def why_pages(host: Host, arch: str) -> str:
    """Return why the kernel's page size is wrong for an emulated payload for `arch`, "" if it is not.

    box64 does not start where it was built for another size. QEMU copies what it can't map; but only whole
    pages of the kernel can be protected, so that absent pages of a trimmed library would be readable, as
    zeros, beside present ones. Libraries for arm64 are laid out, and trimmed, for pages of up to 64 KiB.
    """
    if host.page_size == _PAGE or arch == "aarch64":
        return ""
    return f"the kernel's pages are of {host.page_size >> 10} KiB, and payloads for {arch} need 4 KiB"


def why_none(host: Host, kind: str, arch: str, names: str) -> str:
    """Return why no emulator of `kind` runs programs for `arch`; `names` is what was looked for."""
    pages = why_pages(host, arch)
    if pages or usable(host, kind, arch):
        return pages
    found = [f"{e.path} {e.probe}" for e in host.emulators if (e.kind, e.guest) == (kind, arch)]
    return "; ".join(found) or f"there is no {names} in PATH"


def itself(emulator: Emulator, confined: bool) -> Start:
    """Return what starts the emulator: where it is linked dynamically, its ld.so with a folder of libraries.

    `confined`: it lies in the sandbox, whose other libraries are the payload's, of another architecture.
    There it is still executed by one word, as which a starter stands.
    """
    if not confined:
        if emulator.carried:
            folder = emulator.loader.rpartition("/")[0]
            return Start((emulator.loader, "--library-path", folder, emulator.path))
        return Start((emulator.path,))
    name = f"{FOLDER}/{emulator.path.rpartition('/')[2]}"
    if not emulator.loader:
        return Start((name,), ((emulator.path, name),))
    loader = f"{FOLDER}/{emulator.loader.rpartition('/')[2]}"
    files = [(path, f"{FOLDER}/{path.rpartition('/')[2]}") for path in emulator.libraries]
    files += [(emulator.loader, loader), (emulator.path, f"{name}.program")]
    program = (loader, "--library-path", FOLDER, "--argv0", name, f"{name}.program")
    return Start((name,), tuple(files), program)
