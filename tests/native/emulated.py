"""A mount namespace in which children are emulated by emulate.so, as in a sandbox without binfmt_misc."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

PRELOAD = "etc/ld.so.preload"
CONFIG = "/run/rvbundle/emulator"
_ETC = ("ld.so.cache", "passwd", "group", "nsswitch.conf")

# What every program that is started shows of itself. The odd path reaches the kernel's /proc: emulators
# answer for /proc/self/exe themselves.
SHOW = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
extern char **environ;
static int by_text(const void *a, const void *b) { return strcmp(*(char **)a, *(char **)b); }
int main(int n, char **a) {
    char text[4096];
    int count = 0;
    for (int i = 0; i < n && i < 20; i++) printf("[%.80s]", a[i]);
    printf(" %d\n", n);
    while (environ[count]) count++;
    qsort(environ, count, sizeof *environ, by_text);
    for (int i = 0; i < count && i < 20; i++) printf("{%.80s}", environ[i]);
    printf(" %d\n", count);
    printf("cwd %s\nopen", getcwd(text, sizeof text));
    for (int i = 0; i < 20; i++) if (fcntl(i, F_GETFD) >= 0) printf(" %d", i);
    ssize_t size = readlink("/proc/self/../self/exe", text, sizeof text - 1);
    text[size < 0 ? 0 : size] = 0;
    printf("\nhost %s\n", text);
    size = readlink("/proc/self/exe", text, sizeof text - 1);
    text[size < 0 ? 0 : size] = 0;
    printf("exe %s\n", text);
    return getenv("CODE") ? atoi(getenv("CODE")) : 0;
}
"""


@dataclass(frozen=True)
class Done:
    """How a program ended and what it wrote."""

    code: int
    out: str
    err: str

    def lines(self) -> list[str]:
        """What it wrote, without what tells what the kernel really ran."""
        return self.without_host().splitlines()

    def without_host(self) -> str:
        """All lines but those that tell what the kernel really runs."""
        return "".join(line for line in self.out.splitlines(True) if not line.startswith("host "))

    def hosts(self) -> set[str]:
        """What the kernel really ran, of all programs that showed themselves."""
        return {line.removeprefix("host ") for line in self.out.splitlines() if line.startswith("host ")}


@dataclass(frozen=True)
class World:
    """Runs programs natively, or emulated with all their children."""

    folder: Path
    emulator: Path
    preload: Path
    words: tuple[str, ...] = ()
    config: str = ""  # instead of the usual file

    def native(self, *words: str | Path, **more: str) -> Done:
        """Run a program without emulator."""
        return self._run("", [str(word) for word in words], more, "")

    def emulated(self, *words: str | Path, **more: str) -> Done:
        """Run a program under the emulator, its children by the preload."""
        lines = [f"emulator {self.emulator}", *(f"word {word}" for word in self.words), "argv0 -0", ""]
        command = [str(self.emulator), *self.words, *map(str, words)]
        return self._run(self.config or "\n".join(lines), command, more, f"{self.preload}\n")

    def same(self, *words: str | Path, **more: str) -> Done:
        """Run it both ways: nothing may differ but who runs it. Return what the emulated one did."""
        native, emulated = self.native(*words, **more), self.emulated(*words, **more)
        assert emulated.lines() == native.lines(), (native, emulated)
        assert (emulated.code, emulated.err) == (native.code, native.err), (native, emulated)
        assert emulated.hosts() <= {str(self.emulator)}
        assert len(native.hosts()) == 0 or emulated.hosts()
        return emulated

    def _run(self, config: str, command: list[str], more: dict[str, str], preload: str) -> Done:
        etc = self.folder / ("etc" if preload else "etc-native")
        etc.mkdir(exist_ok=True)
        for name in _ETC:
            if os.path.exists(f"/etc/{name}"):
                (etc / name).write_bytes(Path("/etc", name).read_bytes())
        if preload:
            (etc / "ld.so.preload").write_text(preload)
        steps = ["mount -t tmpfs none /run"]
        if config:
            path = self.folder / "emulator"
            path.write_text(config)
            steps += [f"mkdir {os.path.dirname(CONFIG)}", f"cp {shlex.quote(str(path))} {CONFIG}"]
        steps += [
            f"mount --bind {shlex.quote(str(etc))} /etc",
            f"cd {shlex.quote(str(self.folder))}",
            *(f"export {name}={shlex.quote(value)}" for name, value in more.items()),
            f"exec {shlex.join(command)}",
        ]
        unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
        if os.geteuid() != 0:
            unshare += ["--user", "--map-root-user"]
        done = subprocess.run(
            [*unshare, "sh", "-c", " && ".join(steps)],
            env={"PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        # qemu says so of itself when a signal ends its guest.
        err = re.sub(r"^qemu: uncaught target signal .*\n", "", done.stderr, flags=re.MULTILINE)
        return Done(done.returncode, done.stdout, err)
