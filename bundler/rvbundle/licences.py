"""What a payload is made of, by licence, and where each part's source is.

A wheel says so in its METADATA, a Debian package in /usr/share/doc/PACKAGE/copyright; so does a system
library of this machine where dpkg knows which package it is of. Only names and addresses go into an image's
index: the texts themselves are files of the payload, in the cold pack.
"""

import email.parser
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rvbundle import __version__, process

DOC, COMMON = "usr/share/doc", "usr/share/common-licenses"
FILE = "licences.json"  # beside a frozen tree
UNKNOWN = "unknown"
_DETAIL = "licences"  # the key in an index's details
_SHOWN = 6  # names of licences; packages such as torch are under dozens
_SHORT = 60  # letters: a longer License field holds the licence's text
_PYTHON_SOURCE = "https://www.python.org/downloads/source/"
# Labels of Project-URL (packaging.python.org, "Well-known Project URLs in Metadata"), the best first.
_SOURCE_LABELS = ("source", "sourcecode", "repository", "github", "code", "homepage", "home", "download")
_CLASSIFIER = "License :: "
# Trove classifiers whose last part is not a name that people use (pypi.org/classifiers).
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "GNU Affero General Public License v3": "AGPL-3.0",
    "GNU General Public License (GPL)": "GPL",
    "GNU General Public License v2 (GPLv2)": "GPL-2.0",
    "GNU General Public License v2 or later (GPLv2+)": "GPL-2.0-or-later",
    "GNU General Public License v3 (GPLv3)": "GPL-3.0",
    "GNU General Public License v3 or later (GPLv3+)": "GPL-3.0-or-later",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.0-or-later",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0",
    "GNU Lesser General Public License v3 or later (LGPLv3+)": "LGPL-3.0-or-later",
    "GNU Library or Lesser General Public License (LGPL)": "LGPL",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# Source packages that are in every payload, and whose texts say it in words only; from these texts.
_KNOWN = (
    (re.compile(r"glibc"), "LGPL-2.1+"),
    (re.compile(r"gcc-\d+"), "GPL-3+ with GCC runtime library exception"),
    (re.compile(r"python3\.\d+"), "PSF-2.0"),
)
_FIRST_LINES = (  # of licence texts that stand in the License field
    ("MIT License", "MIT"),
    ("The MIT License", "MIT"),
    ("BSD 3-Clause", "BSD-3-Clause"),
    ("BSD 2-Clause", "BSD-2-Clause"),
    ("Apache License", "Apache-2.0"),
)
_LICENCE_FILE = re.compile(r"(?:licen[cs]e|copying|notice)", re.IGNORECASE)
_COMMON_NAME = re.compile(rf"/{COMMON}/([A-Za-z0-9.+-]*[A-Za-z0-9+])")
_OWN_TEXT = f"{DOC}/rvbundle/LICENSE"
_METADATA = re.compile(r"-info/(?:METADATA|PKG-INFO)$")
_OF_PYTHON = re.compile(r"^usr/(?:bin/python|lib/python)3|/libpython3[^/]*$")
# Licences whose publisher must give the source as well (GPL, LGPL, AGPL; MPL and EPL for their own files).
_WITH_SOURCE = re.compile(r"\b[AL]?GPL|GNU|\bMPL|\bEPL|\bCDDL", re.IGNORECASE)


@dataclass(frozen=True)
class Licence:
    """A component and its licences: short names joined with AND, OR or commas, as its packagers have them.

    `source` says where the source is (an address, or a Debian source package with its version), `where` is
    the path in the payload at which the licence's text lies; both are "" if unknown.
    """

    component: str
    version: str
    licence: str
    source: str
    where: str

    @property
    def wants_source(self) -> bool:
        """Tell whether one of its licences asks of a publisher to give the source, too."""
        return bool(_WITH_SOURCE.search(self.licence))


@dataclass(frozen=True)
class Component:
    """A component with the paths in the payload that are of it."""

    licence: Licence
    paths: tuple[str, ...]


@dataclass(frozen=True)
class DebianPackage:
    """A binary package: its version, and the source package that it was built from."""

    name: str
    version: str
    source: str
    source_version: str


@dataclass(frozen=True)
class Origin:
    """Debian's packages that files come from: `owners` is {path relative to `root`: package's name}."""

    root: Path = Path("/")
    owners: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, DebianPackage] = field(default_factory=dict)

    def owner(self, source: Path) -> str:
        """Return the package that the file `source` is of; "" if that is none of these."""
        if not source.is_relative_to(self.root):
            return ""
        path = str(source.relative_to(self.root))
        # Packages that were made for systems without a merged /usr name their files without it.
        return self.owners.get(path) or self.owners.get(path.removeprefix("usr/"), "")


class Part(Protocol):
    """A file of a payload: its path there, where it came from, the distribution that it belongs to."""

    @property
    def path(self) -> str: ...
    @property
    def source(self) -> Path: ...
    @property
    def package(self) -> str: ...


# --- pure: what texts say ---


def of_metadata(text: str, files: Sequence[str] = ()) -> Licence:
    """Read a wheel's METADATA; `files` are the paths in the payload of the files beside it."""
    fields = email.parser.HeaderParser().parsestr(text)
    texts = [path for path in files if _LICENCE_FILE.match(os.path.basename(path)) or "/licenses/" in path]
    return Licence(
        fields.get("Name", ""),
        fields.get("Version", ""),
        _name_in(
            fields.get("License-Expression", ""),
            fields.get("License", ""),
            fields.get_all("Classifier", []),
        ),
        _source_in(
            fields.get_all("Project-URL", []), fields.get("Home-page", ""), fields.get("Download-URL", "")
        ),
        min(texts, key=_rank_of_text, default=""),
    )


def _rank_of_text(path: str) -> tuple[bool, int, str]:
    """Put licences before notices and lists of authors, and those of the whole before those of parts."""
    name = os.path.basename(path).lower()
    return not name.startswith(("licen", "copying")), len(path), path


def _name_in(expression: str, licence: str, classifiers: Iterable[str]) -> str:
    """Return the name of a licence; the older fields say it less exactly (PEP 639)."""
    lines = [line.strip() for line in licence.splitlines() if line.strip()]
    if expression.strip():
        return _one_line(expression)
    if len(lines) == 1 and len(lines[0]) <= _SHORT and lines[0].upper() != "UNKNOWN":
        return lines[0]
    names = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith(_CLASSIFIER)]
    names = [_CLASSIFIERS.get(name, name) for name in names if name != "OSI Approved"]
    if names:
        return _joined(names)
    return next((name for start, name in _FIRST_LINES if lines and lines[0].startswith(start)), UNKNOWN)


def _source_in(urls: Iterable[str], home: str, download: str) -> str:
    labelled: dict[str, str] = {}
    for text in urls:
        label, _, url = text.partition(",")
        labelled.setdefault(re.sub(r"[^a-z]", "", label.lower()), url.strip())
    found = next((labelled[label] for label in _SOURCE_LABELS if label in labelled), "")
    return found or _known(home) or _known(download)


def _known(text: str) -> str:
    return "" if text.strip().upper() == "UNKNOWN" else text.strip()


def of_copyright(package: DebianPackage, text: str) -> Licence:
    """Read a Debian package's copyright file; "" stands for one that is not there.

    In the machine-readable form (dep-team.pages.debian.net/deps/dep5) licences have names; elsewhere it is
    said which of /usr/share/common-licenses the text refers to.
    """
    where = f"{DOC}/{package.name}/copyright"
    names = _dep5_names(text) if _is_dep5(text) else []
    if not text:
        name = UNKNOWN
    elif names:
        name = _joined(names)
    else:
        name = _in_words(package, _common_names(text), where)
    source = f"Debian source package {package.source} {package.source_version}"
    return Licence(package.name, package.version, name, source, where if text else "")


def _in_words(package: DebianPackage, common: Sequence[str], where: str) -> str:
    """Return what to say of a text without machine-readable names, which refers to `common` licences."""
    known = next((name for pattern, name in _KNOWN if pattern.fullmatch(package.source)), "")
    if known:
        return f"{known} (see its text)"
    return f"see its text (names {_joined(common)})" if common else f"see {where}"


def _is_dep5(text: str) -> bool:
    first = text.lstrip().partition("\n")[0].lower()
    return first.startswith("format") and ("copyright-format" in first or "dep5" in first or "dep-5" in first)


def _dep5_names(text: str) -> list[str]:
    """Return the licences of all `Files` paragraphs, that of `*` first; debian/ is not in what is built."""
    paragraphs = [_paragraph(part) for part in re.split(r"\n\s*\n", text)]
    of_files = [
        p for p in paragraphs if not all(path.startswith("debian/") for path in p.get("files", "").split())
    ]
    of_files.sort(key=lambda p: p["files"].split() != ["*"])
    names: list[str] = []
    for paragraph in [p for p in paragraphs if "format" in p] + of_files:
        name, _, rest = paragraph.get("license", "").partition("\n")
        names += [_one_line(name)] if name.strip() else _common_names(rest)
    return names


def _paragraph(text: str) -> dict[str, str]:
    """Read the fields of a paragraph, names in lower case; lines that go on keep their line breaks."""
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line[:1] in (" ", "\t") and name:
            fields[name] += f"\n{line.strip()}"
        elif ":" in line and not line.startswith("#"):
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    return fields


def _common_names(text: str) -> list[str]:
    return list(dict.fromkeys(_COMMON_NAME.findall(text)))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _joined(names: Iterable[str]) -> str:
    """Join names; of many, the first is shown, those that ask for the source, and others up to a few."""
    distinct = list(dict.fromkeys(names))
    ranked = sorted(distinct[1:], key=lambda name: not _WITH_SOURCE.search(name))
    shown = {*distinct[:1], *ranked[: _SHOWN - 1]}
    more = f", and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
    return ", ".join(name for name in distinct if name in shown) + more


# --- thin: reading them ---


def ask_dpkg(paths: Iterable[Path]) -> Origin:
    """Return the packages of this machine that own `paths`; none where there is no dpkg."""
    if shutil.which("dpkg-query") is None:
        return Origin()
    wanted = {str(path) for path in paths}
    patterns = sorted(wanted | {path.removeprefix("/usr") for path in wanted})
    listed = process.run(["dpkg-query", "--search", *patterns], check=False).stdout.decode(errors="replace")
    owners = {}
    for line in listed.splitlines():
        names, found, path = line.partition(": ")
        if found and path.startswith("/") and not names.startswith("diversion "):
            owners[path[1:]] = names.partition(",")[0].partition(":")[0]
    return Origin(Path("/"), owners, {p.name: p for p in _installed(sorted(set(owners.values())))})


_FORMAT = r"${Package}\t${Version}\t${source:Package}\t${source:Version}\n"


def _installed(names: Sequence[str]) -> Iterator[DebianPackage]:
    if names:
        done = process.run(["dpkg-query", "--show", f"--showformat={_FORMAT}", *names], check=False)
        for line in done.stdout.decode(errors="replace").splitlines():
            yield DebianPackage(*line.split("\t"))


def of_file(deb: Path) -> DebianPackage:
    """Return what the file of a package says of it; raises ToolError if it is none."""
    done = process.run(["dpkg-deb", "--show", f"--showformat={_FORMAT}", deb])
    return DebianPackage(*done.stdout.decode().strip().split("\t"))


def of_packages(root: Path, packages: Iterable[DebianPackage]) -> tuple[Licence, ...]:
    """Return the licences of Debian packages that are unpacked at `root`, sorted by name."""
    found = [of_copyright(package, _copyright(root, package.name)) for package in packages]
    return tuple(sorted(found, key=lambda licence: licence.component))


def _copyright(root: Path, package: str) -> str:
    try:
        return (root / DOC / package / "copyright").read_text(errors="replace")
    except OSError:
        return ""


def owned(parts: Iterable[Part], origin: Origin) -> tuple[str, ...]:
    """Return the names of Debian's packages that some of `parts` come from, sorted."""
    return tuple(sorted({origin.owner(part.source) for part in parts} - {""}))


def texts(parts: Iterable[Part], origin: Origin) -> dict[str, Path]:
    """Return {path in the payload: file} of the copyright texts of the packages that `parts` come from.

    With them come the common licences that they refer to, from this machine where the packages lack them,
    and rvbundle's own.
    """
    own = _own_text()
    found: dict[str, Path] = {_OWN_TEXT: own} if own else {}
    names: list[str] = []
    for package in owned(parts, origin):
        path = f"{DOC}/{package}/copyright"
        if (origin.root / path).is_file():
            found[path] = Path(os.path.realpath(origin.root / path))
            names += _common_names(_copyright(origin.root, package))
    for name in sorted(set(names)):
        for root in (origin.root, Path("/")):
            if (root / COMMON / name).is_file():
                found.setdefault(f"{COMMON}/{name}", Path(os.path.realpath(root / COMMON / name)))
    return found


def collect(parts: Iterable[Part], origin: Origin, python: str) -> tuple[Component, ...]:
    """Return what a payload is made of: its wheels, Debian's packages, and the rest; sorted by name.

    `python` is the version of an interpreter that is of no package.
    """
    by_owner: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        by_owner.setdefault(_owner(part, origin), []).append(part)
    found = [
        Component(licence, tuple(part.path for part in files))
        for (kind, name), files in by_owner.items()
        for licence in _licences(kind, name, files, origin, python)
    ]
    return tuple(sorted(found, key=lambda component: order(component.licence)))


def order(licence: Licence) -> tuple[str, str]:
    """Return what licences are sorted by."""
    return licence.component.lower(), licence.version


_DEBIAN, _WHEEL, _PYTHON, _OURS, _OTHER = "debian", "wheel", "python", "rvbundle", "other"


def _owner(part: Part, origin: Origin) -> tuple[str, str]:
    """Return what a file is of: the kind of component, and its name or path."""
    package = origin.owner(part.source)
    if package in origin.packages:
        return _DEBIAN, package
    if part.package:
        return (_OURS if part.package == _OURS else _WHEEL), part.package
    return (_PYTHON, "") if _OF_PYTHON.search(part.path) else (_OTHER, part.path)


def _licences(kind: str, name: str, files: Sequence[Part], origin: Origin, python: str) -> Iterator[Licence]:
    paths = [part.path for part in files]
    if kind == _DEBIAN:
        yield of_copyright(origin.packages[name], _copyright(origin.root, name))
    elif kind == _WHEEL:
        for part in files:
            if _METADATA.search(part.path):
                folder = os.path.dirname(part.path)
                beside = [path for path in paths if path.startswith(f"{folder}/")]
                yield of_metadata(part.source.read_text(errors="replace"), beside)
    elif kind == _PYTHON and any(path.startswith("usr/bin/python3") for path in paths):
        text = next((path for path in paths if path.endswith("/LICENSE.txt")), "")
        yield Licence("Python", python, "PSF-2.0", _PYTHON_SOURCE, text)
    elif kind == _OURS:
        yield of_rvbundle()
    elif kind == _OTHER:
        yield Licence(name, "", UNKNOWN, f"copied from {files[0].source}", "")


def held(components: Iterable[Component], paths: Container[str]) -> tuple[Licence, ...]:
    """Return the licences of the components that have files among `paths`; bytecode counts as its source."""
    return tuple(
        c.licence
        for c in components
        if any(path in paths or (path.endswith(".py") and f"{path}c" in paths) for path in c.paths)
    )


def of_rvbundle() -> Licence:
    """Return the licence of what rvbundle itself puts into payloads and files."""
    return Licence("rvbundle", __version__, "Apache-2.0", "", _OWN_TEXT if _own_text() else "")


def _own_text() -> Path | None:
    """Return rvbundle's own licence as it is installed; None where it was left out."""
    try:
        files = importlib.metadata.files("rvbundle") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name == "LICENSE"]
    return found[0] if found and found[0].is_file() else None


# --- kept with a frozen tree, and in an index ---


def save(components: Iterable[Component], folder: Path) -> None:
    """Write the components of a frozen tree into its stage's folder."""
    (folder / FILE).write_text(json.dumps([[astuple(c.licence), c.paths] for c in components]))


def load(folder: Path) -> tuple[Component, ...]:
    """Read what `save` wrote."""
    rows = json.loads((folder / FILE).read_text())
    return tuple(Component(Licence(*licence), tuple(paths)) for licence, paths in rows)


def to_details(parts: Mapping[str, Sequence[Licence]]) -> dict[str, Any]:
    """Return what an index says of licences, by parts of the file (such as "payload riscv64")."""
    return {_DETAIL: {name: [list(astuple(row)) for row in rows] for name, rows in parts.items()}}


def from_details(details: Mapping[str, Any]) -> dict[str, tuple[Licence, ...]] | None:
    """Read an index's details; None if it has no list. Raises ValueError if what it has is no such list."""
    value = details.get(_DETAIL)
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(rows, list) for rows in value.values()):
        raise ValueError("expected a table of lists")
    for row in [row for rows in value.values() for row in rows]:
        if not isinstance(row, list) or len(row) != 5 or not all(isinstance(text, str) for text in row):
            raise ValueError("expected rows of five texts")
    return {str(name): tuple(Licence(*row) for row in rows) for name, rows in value.items()}
