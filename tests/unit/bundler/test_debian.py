import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rvbundle import debian
from rvbundle.debian import Archive, Package
from rvbundle_runtime.errors import EnvironmentSetupError
from tests.debs import make_deb

HEX = hashlib.sha256(b"package").hexdigest()
POOL = "http://deb.example/debian/pool/main"


@pytest.mark.parametrize("text", ["trixie", "sid", "trixie-backports", "bookworm/updates", "unstable", "a"])
def test_suites(text: str) -> None:
    assert debian.is_suite(text)


@pytest.mark.parametrize("text", ["", "Trixie", "13", "-x", "a b", "a\nb", "a\n", "[x]", "a'b", "ü", "a#"])
def test_no_suites(text: str) -> None:
    assert not debian.is_suite(text)


@pytest.mark.parametrize(
    ("line", "package"),
    [
        (
            f"'{POOL}/d/dash/dash_0.5.12-12_riscv64.deb' dash_0.5.12-12_riscv64.deb 98632 SHA256:{HEX}",
            Package("dash", "0.5.12-12", HEX),
        ),
        (
            f"'{POOL}/z/zlib1g.deb' zlib1g_1%3a1.3.dfsg+really1.3.1-1+b1_arm64.deb 1 SHA256:{HEX}",
            Package("zlib1g", "1:1.3.dfsg+really1.3.1-1+b1", HEX),
        ),
        (
            f"'{POOL}/t/tzdata_2025b~rc1_all.deb' tzdata_2025b~rc1_all.deb 2 SHA256:{HEX}",
            Package("tzdata", "2025b~rc1", HEX),
        ),
        (
            f"'file:/srv/a b/libstdc++6_14.2_amd64.deb' libstdc++6_14.2_amd64.deb 2 SHA256:{HEX}",
            Package("libstdc++6", "14.2", HEX),
        ),
    ],
    ids=["usual", "epoch", "for all", "file"],
)
def test_lines_of_apt(line: str, package: Package) -> None:
    assert list(debian.parse_uris(f"{line}\n")) == [package]
    assert list(debian.parse_uris(f"Reading package lists...\n{line}\n{line}\n")) == [package, package]


@pytest.mark.parametrize(
    "text",
    ["", "E: Broken\n", f"'x' a_1_all.deb 5 MD5Sum:{HEX[:32]}\n", f"'x' a_1_all.deb 5 SHA256:{HEX[:-1]} \n"],
    ids=["nothing", "error", "other digest", "short digest"],
)
def test_other_lines(text: str) -> None:
    assert list(debian.parse_uris(text)) == []


DEB822 = """\
Types: deb
# {commented}
URIs: {address}
Suites: bookworm bookworm-updates
Components: main

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
"""


def etc(folder: Path, **texts: str) -> Path:
    """Write files below a folder like /etc/apt; a name's "__" stands for a dot."""
    (folder / "sources.list.d").mkdir(parents=True)
    for name, text in texts.items():
        place = name.replace("__", ".")
        (folder / (place if place == "sources.list" else f"sources.list.d/{place}")).write_text(text)
    return folder


ONE_LINE = "deb [signed-by=/k] http://one.example/debian bookworm main contrib # ours\n"


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ({"sources__list": ONE_LINE}, "http://one.example/debian"),
        (
            {"sources__list": f"#deb http://old.example/debian x main\n\n{ONE_LINE}"},
            "http://one.example/debian",
        ),
        (
            {"sources__list": "  # deb http://old.example/debian x main\ndeb http://n.example/debian/ x\n"},
            "http://n.example/debian/",
        ),
        (
            {"a__list": "deb http://x.example/debian-security x main\n" + ONE_LINE},
            "http://one.example/debian",
        ),
        (
            {
                "debian__sources": DEB822.format(
                    commented="http://old.example/debian", address="https://d.example/debian"
                )
            },
            "https://d.example/debian",
        ),
        (
            {
                "debian__sources": DEB822.format(
                    commented="", address="mirror+file:///etc/apt/mirrors/debian.list"
                )
            },
            "mirror+file:///etc/apt/mirrors/debian.list",
        ),
        (
            {
                "z__list": "deb http://z.example/debian x main\n",
                "b__sources": "URIs: http://b.example/debian\n",
            },
            "http://b.example/debian",
        ),
        (
            {"sources__list": ONE_LINE, "a__list": "deb http://a.example/debian x main\n"},
            "http://one.example/debian",
        ),
        (
            {"a__list__save": "deb http://old.example/debian x main\n", "b__list": ONE_LINE},
            "http://one.example/debian",
        ),
    ],
    ids=[
        *("one line", "comments", "slash", "not security", "deb822", "list of mirrors", "by name"),
        *("sources.list first", "what apt does not read"),
    ],
)
def test_the_mirror_of_this_machine(tmp_path: Path, texts: dict[str, str], found: str) -> None:
    assert debian.mirror({}, etc(tmp_path, **texts)) == found
    assert debian.mirror({"RVBUNDLE_DEBIAN_MIRROR": ""}, tmp_path) == found
    assert debian.mirror({"RVBUNDLE_DEBIAN_MIRROR": "file:///srv/d"}, tmp_path) == "file:///srv/d"


@pytest.mark.parametrize(
    "texts",
    [
        {},
        {"ubuntu__sources": "Types: deb\nURIs: http://archive.example/ubuntu/\nSuites: noble\n"},
        {"sources__list": "# deb http://old.example/debian x main\n"},
        {"sources__list": "deb http://x.example/debian-ports x main\n"},
    ],
    ids=["nothing", "ubuntu", "a comment", "another archive"],
)
def test_no_mirror(tmp_path: Path, texts: dict[str, str]) -> None:
    with pytest.raises(EnvironmentSetupError) as caught:
        debian.mirror({}, etc(tmp_path, **texts))
    assert caught.value.message == "this machine's apt knows no Debian archive"
    assert caught.value.hint == "name one: RVBUNDLE_DEBIAN_MIRROR=ADDRESS rvbundle build …"
    assert debian.mirror({"RVBUNDLE_DEBIAN_MIRROR": "http://x"}, tmp_path) == "http://x"


def test_sources_that_can_not_be_read(tmp_path: Path) -> None:
    folder = etc(tmp_path, a__list=ONE_LINE)
    (folder / "sources.list").write_bytes(b"\xff\xfe")
    (folder / "sources.list.d/0.list").mkdir()
    assert debian.mirror({}, folder) == "http://one.example/debian"


class FakeApt:
    """Programs that stand for apt's, first in PATH; each notes its words, and does what a shell text says."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.log = folder / "bin", folder / "log"
        self.bin.mkdir()
        self.log.write_text("")
        self.says("apt-config")
        self.says("apt-cache", "echo dash; echo python3-numpy; echo libc6")

    def says(self, program: str, script: str = "") -> None:
        path = self.bin / program
        path.write_text(f'#!/bin/sh\necho "{program} $*" >>"{self.log}"\n{script}\n')
        path.chmod(0o755)

    def apt_get(self, update: str = "", install: str = "", download: str = "") -> None:
        self.says(
            "apt-get",
            f'case "$*" in\n*update*) {update or ":"};;\n*install*) {install or ":"};;\n'
            f"*download*) {download or ':'};;\nesac",
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApt:
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "keys.gpg").write_bytes(b"keys")
    monkeypatch.setenv("RVBUNDLE_DEBIAN_MIRROR", "http://deb.example/debian")
    monkeypatch.setenv("RVBUNDLE_DEBIAN_KEYRING", str(folder / "keys.gpg"))
    fake = FakeApt(folder)
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    fake.apt_get()
    return fake


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "a b", "trixie", "riscv64")


def uri(name: str, version: str = "1", digest: str = HEX) -> str:
    return f"'http://d/{name}' {name}_{version}_riscv64.deb 5 SHA256:{digest}"


def test_resolve(apt: FakeApt, archive: Archive) -> None:
    apt.apt_get(install=f"cat <<'X'\n{uri('zlib1g', '1%3a1.3')}\n{uri('dash')}\nX\n")
    assert debian.resolve(archive, ["dash"], ["python3-numpy", "python3-none"]) == (
        Package("dash", "1", HEX),
        Package("zlib1g", "1:1.3", HEX),
    )
    assert apt.calls == [
        "apt-config dump",
        "apt-get -qq --error-on=any update",
        "apt-cache pkgnames",
        "apt-get --print-uris --yes -q install dash python3-numpy",
    ]


def test_apt_stays_in_its_folder(apt: FakeApt, archive: Archive) -> None:
    """It takes from the machine's settings only how to reach an archive, and is told everything by a file."""
    apt.says("apt-config", """echo 'Acquire::http::Proxy "http://p:3128";'; echo 'DPkg::Post-Invoke "x";'""")
    apt.apt_get(update=f'echo "$APT_CONFIG $LC_ALL" >"{apt.bin}/env"')
    assert debian.known_packages(archive, ["dash", "x"]) == {"dash"}
    text = archive.configuration.read_text()
    assert 'APT::Architecture "riscv64";\nAPT::Architectures "riscv64";\n' in text
    assert 'Acquire::AllowInsecureRepositories "false";' in text
    assert 'Acquire::http::Proxy "http://p:3128";' in text
    assert "Post-Invoke" not in text
    assert f'Dir::State "{archive.home}/state";' in text
    assert (archive.home / "state/status").read_text() == ""  # nothing is installed
    assert (archive.home / "sources.list").read_text() == (
        f"deb [arch=riscv64 signed-by={apt.bin.parent}/keys.gpg] http://deb.example/debian trixie main\n"
    )
    assert (apt.bin / "env").read_text() == f"{archive.configuration} C.UTF-8\n"


@pytest.mark.parametrize(
    ("arch", "name"), [("x86_64", "amd64"), ("aarch64", "arm64"), ("riscv64", "riscv64")]
)
def test_architectures(apt: FakeApt, tmp_path: Path, arch: str, name: str) -> None:
    archive = Archive(tmp_path / "a", "trixie/updates", arch)
    debian.known_packages(archive, [])
    assert archive.home == tmp_path / f"a/trixie-updates-{arch}"
    assert f"arch={name} " in (archive.home / "sources.list").read_text()


NO_KEY = (
    "W: GPG error: http://d trixie InRelease: The following signatures couldn't be verified: NO_PUBKEY 6ED0"
)
UNSIGNED = "E: The repository 'http://d trixie InRelease' is not signed."
EXPIRED = "W: GPG error: http://d trixie InRelease: The following signatures were invalid: EXPKEYSIG 6ED0"
NO_RELEASE = "E: The repository 'http://d nosuch Release' does not have a Release file."
NOT_FOUND = "E: Failed to fetch http://d/dists/nosuch/InRelease  404  Not Found [IP: 1.2.3.4 80]"
OFFLINE = "E: Failed to fetch http://d/dists/trixie/InRelease  Could not resolve 'deb.example'"


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        *(
            (
                text,
                "the signature of Debian's trixie does not fit this machine's keys:",
                "a newer debian-archive",
            )
            for text in (NO_KEY, UNSIGNED, f"{EXPIRED}\n{UNSIGNED}")
        ),
        *(
            (text, "Debian's archive has no suite trixie for riscv64:", "debian:trixie and debian:sid have")
            for text in (NO_RELEASE, NOT_FOUND)
        ),
        (
            OFFLINE,
            "apt could not read Debian's trixie:",
            "the command was: apt-get -qq --error-on=any update",
        ),
    ],
    ids=["no key", "not signed", "expired key", "no Release", "404", "no network"],
)
def test_an_archive_that_can_not_be_read(
    apt: FakeApt, archive: Archive, said: str, message: str, hint: str
) -> None:
    apt.apt_get(update=f"cat >&2 <<'X'\n{said}\nX\nexit 100")
    for attempt in (
        lambda: debian.resolve(archive, ["dash"]),
        lambda: debian.known_packages(archive, ["dash"]),
    ):
        with pytest.raises(EnvironmentSetupError) as caught:
            attempt()
        lines = said.splitlines()
        assert caught.value.message == "\n".join([message, *(f"    {line}" for line in lines)])
        assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("E: Unable to locate package python3-foo", "python3-foo"),
        ("E: Package 'python3-foo' has no installation candidate", "python3-foo"),
        (
            "E: Unable to locate package b\nE: Couldn't find any package by glob 'b'\n"
            "E: Package 'a' has no installation candidate",
            "a, b",
        ),
    ],
    ids=["unknown", "no candidate", "two"],
)
def test_a_package_that_the_suite_lacks(apt: FakeApt, archive: Archive, said: str, names: str) -> None:
    apt.apt_get(install=f"cat >&2 <<'X'\n{said}\nX\nexit 100")
    with pytest.raises(EnvironmentSetupError) as caught:
        debian.resolve(archive, ["dash", "python3-foo"])
    assert caught.value.message == f"Debian's trixie has no package {names} for riscv64"
    assert caught.value.hint.startswith("another suite may have it (debian:sid), or")


def test_packages_that_do_not_go_together(apt: FakeApt, archive: Archive) -> None:
    apt.apt_get(
        install="cat <<'X'\nReading package lists...\nSome packages could not be installed.\n\n"
        "The following packages have unmet dependencies:\n a : Depends: b but it is not installable\nX\n"
        "echo 'E: Unable to correct problems, you have held broken packages.' >&2; exit 100"
    )
    with pytest.raises(EnvironmentSetupError) as caught:
        debian.resolve(archive, ["dash"])
    assert caught.value.message == (
        "apt could not find out what is needed from trixie:\n"
        "    The following packages have unmet dependencies:\n"
        "     a : Depends: b but it is not installable\n"
        "    E: Unable to correct problems, you have held broken packages."
    )
    assert caught.value.hint == "the command was: apt-get --print-uris --yes -q install dash"


@pytest.mark.parametrize("program", ["apt-get", "dpkg-deb"])
def test_a_machine_without_apt(
    tmp_path: Path, archive: Archive, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    (tmp_path / "bin").mkdir()
    if program == "dpkg-deb":
        (tmp_path / "bin/apt-get").write_text("")
        (tmp_path / "bin/apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    attempts: dict[str, Callable[[], object]] = {
        "apt-get": lambda: debian.resolve(archive, ["dash"]),
        "dpkg-deb": lambda: debian.unpack(archive, [], tmp_path / "root"),
    }
    with pytest.raises(EnvironmentSetupError) as caught:
        attempts[program]()
    assert caught.value.message == (
        f"there is no {program} on this machine, and Debian's packages are fetched by it"
    )
    assert caught.value.hint.startswith("build on Debian or Ubuntu (a container will do), or ")


def test_a_machine_without_debians_keys(
    apt: FakeApt, archive: Archive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RVBUNDLE_DEBIAN_KEYRING", str(tmp_path / "none.gpg"))
    with pytest.raises(EnvironmentSetupError) as caught:
        debian.resolve(archive, ["dash"])
    assert caught.value.message == (
        f"there is no {tmp_path}/none.gpg, by which the archive's signature is checked"
    )
    assert caught.value.hint == "apt install debian-archive-keyring"
    assert not any(call.startswith("apt-get") for call in apt.calls)


def package(content: bytes, name: str = "dash", version: str = "1") -> Package:
    return Package(name, version, hashlib.sha256(content).hexdigest())


def test_nothing_is_fetched_twice(apt: FakeApt, archive: Archive) -> None:
    """Not by another suite or architecture either: packages lie by their digests."""
    wanted = [package(b"first", "a"), package(b"second", "b", "1:2")]
    apt.apt_get(download="printf first >a_1_riscv64.deb; printf second >b_1%3a2_riscv64.deb")
    paths = debian.fetch(archive, wanted)
    assert [path.read_bytes() for path in paths] == [b"first", b"second"]
    assert [call for call in apt.calls if "apt-get" in call] == ["apt-get -qq download a=1 b=1:2"]
    assert not (archive.home / "fetched").exists()
    before = apt.calls
    for again in (archive, Archive(archive.folder, "sid", "aarch64")):
        assert debian.fetch(again, wanted) == paths
    assert apt.calls == before


def test_only_what_is_missing_is_fetched(apt: FakeApt, archive: Archive) -> None:
    first, second = package(b"first", "a"), package(b"second", "b")
    apt.apt_get(download="printf first >a_1_riscv64.deb")
    debian.fetch(archive, [first])
    apt.apt_get(download="printf second >b_1_riscv64.deb")
    debian.fetch(archive, [first, second])
    assert apt.calls[-1] == "apt-get -qq download b=1"


def test_a_damaged_package_is_fetched_again(apt: FakeApt, archive: Archive) -> None:
    """As a power failure may leave one."""
    wanted = package(b"first", "a")
    apt.apt_get(download="printf first >a_1_riscv64.deb")
    (path,) = debian.fetch(archive, [wanted])
    path.write_bytes(b"fir")
    assert debian.fetch(archive, [wanted])[0].read_bytes() == b"first"


def test_lists_that_are_older_than_the_lock_are_updated(apt: FakeApt, archive: Archive) -> None:
    new = f"{apt.bin}/new"
    apt.apt_get(update=f"touch {new}", download=f"test -e {new} && printf first >a_1_riscv64.deb || exit 100")
    debian.fetch(archive, [package(b"first", "a")])
    assert [call.split()[-1] for call in apt.calls if "apt-get" in call] == ["a=1", "update", "a=1"]


def test_an_archive_with_another_file_of_that_version(apt: FakeApt, archive: Archive) -> None:
    """What fits is kept all the same; nothing half-done stays behind."""
    good, bad = package(b"first", "a"), package(b"second", "b")
    apt.apt_get(download="printf first >a_1_riscv64.deb; printf other >b_1_riscv64.deb")
    with pytest.raises(EnvironmentSetupError) as caught:
        debian.fetch(archive, [good, bad])
    assert caught.value.message == (
        "b 1 as the lock has it can't be had from trixie:\n    the archive has another file of that version"
    )
    assert caught.value.hint == "write the lock anew: rvbundle lock RECIPE"
    assert [path.name for path in (archive.folder / "pool").iterdir()] == [f"{good.sha256}.deb"]
    assert not (archive.home / "fetched").exists()


def test_a_version_that_the_archive_no_longer_has(apt: FakeApt, archive: Archive) -> None:
    said = "E: Version '1' for 'b' was not found"
    apt.apt_get(download=f'echo "{said}" >&2; exit 100')
    with pytest.raises(EnvironmentSetupError) as caught:
        debian.fetch(archive, [package(b"first", "a"), package(b"second", "b")])
    assert caught.value.message == f"b 1 as the lock has it can't be had from trixie:\n    {said}"


@pytest.fixture
def deb(tmp_path: Path, apt: FakeApt, archive: Archive) -> Callable[..., Package]:
    """Return a function that makes a package of {path: text} (see `make_deb`) and puts it into the pool."""
    pool = archive.folder / "pool"
    pool.mkdir(parents=True)

    def make(name: str, files: dict[str, str]) -> Package:
        script = f"touch {tmp_path}/maintainer-script-ran"
        file = make_deb(tmp_path / f"{name}.deb", name, files, script=script)
        made = package(file.read_bytes(), name)
        file.rename(pool / f"{made.sha256}.deb")
        return made

    return make


def names(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_symlink() or p.is_file())


MERGED = ["bin", "lib", "lib64", "sbin"]


def test_unpack(tmp_path: Path, archive: Archive, deb: Callable[..., Package]) -> None:
    packages = [
        deb("one", {"usr/bin/one": "1", "usr/share/doc/one/copyright": "c", "usr/lib/a/x.py": "x"}),
        deb("two", {"usr/lib/a/y ü.py": "y", "usr/lib/a/link": "-> x.py", "usr/lib/b/empty/": ""}),
        deb("nothing", {}),
    ]
    unpacked = debian.unpack(archive, packages, tmp_path / "root")
    assert unpacked.root == tmp_path / "root"
    assert unpacked.owners == {
        "usr/bin/one": "one",
        "usr/share/doc/one/copyright": "one",
        "usr/lib/a/x.py": "one",
        "usr/lib/a/y ü.py": "two",
        "usr/lib/a/link": "two",
    }
    assert names(tmp_path / "root") == sorted([*MERGED, *unpacked.owners])
    assert (tmp_path / "root/usr/lib/b/empty").is_dir()
    assert not (tmp_path / "maintainer-script-ran").exists()


def test_owners_do_not_depend_on_the_locale(
    tmp_path: Path, archive: Archive, deb: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    made = deb("one", {"usr/lib/ü \\ x.py": "x"})
    assert debian.unpack(archive, [made], tmp_path / "root").owners == {"usr/lib/ü \\ x.py": "one"}


def test_what_no_agent_needs_is_left_out(
    tmp_path: Path, archive: Archive, deb: Callable[..., Package]
) -> None:
    files = [
        "usr/include/x.h",
        "usr/lib/x.so",
        "usr/lib/usr/share/man/x",
        "usr/share/info/x.info",
        "usr/share/lintian/overrides/x",
        "usr/share/locale/de/LC_MESSAGES/x.mo",
        "usr/share/man/man1/x.1",
        "usr/share/manual.txt",
    ]
    made = deb("one", dict.fromkeys(files, "x"))
    found = debian.unpack(archive, [made], tmp_path / "root").owners
    assert sorted(found) == ["usr/lib/usr/share/man/x", "usr/lib/x.so", "usr/share/manual.txt"]


@pytest.mark.parametrize("top", MERGED)
def test_folders_that_are_merged_into_usr(
    tmp_path: Path, archive: Archive, deb: Callable[..., Package], top: str
) -> None:
    """Older packages hold files outside of /usr; newer ones may hold the link itself."""
    packages = [deb("old", {f"{top}/x": "old"}), deb("new", {f"usr/{top}/y": "new"})]
    debian.unpack(archive, packages, tmp_path / "root")
    assert os.readlink(tmp_path / "root" / top) == f"usr/{top}"
    assert (tmp_path / f"root/usr/{top}/x").read_text() == "old"
    assert (tmp_path / f"root/{top}/y").read_text() == "new"


def test_a_package_with_the_link_itself(
    tmp_path: Path, archive: Archive, deb: Callable[..., Package]
) -> None:
    packages = [deb("base", {name: f"-> usr/{name}" for name in MERGED}), deb("new", {"usr/lib64/y": "y"})]
    debian.unpack(archive, packages, tmp_path / "root")
    assert [os.readlink(tmp_path / "root" / name) for name in MERGED] == [f"usr/{name}" for name in MERGED]
    assert (tmp_path / "root/lib64/y").read_text() == "y"


def test_only_what_is_asked_for(tmp_path: Path, archive: Archive, deb: Callable[..., Package]) -> None:
    """A package may hold nothing of it."""
    packages = [
        deb(
            "tools",
            {"usr/bin/tool-a": "a", "usr/bin/tool-b": "b", "usr/bin/other": "o", "usr/lib/tool-a": ""},
        ),
        deb("library", {"usr/lib/x.so": "x"}),
    ]
    unpacked = debian.unpack(archive, packages, tmp_path / "root", ("usr/bin/tool-a", "usr/bin/*-b", "none"))
    assert unpacked.owners == {"usr/bin/tool-a": "tools", "usr/bin/tool-b": "tools"}
    assert names(tmp_path / "root") == sorted([*MERGED, "usr/bin/tool-a", "usr/bin/tool-b"])


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever apt writes, it writes into its folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    assert list((tmp_path / "here").iterdir()) == []
