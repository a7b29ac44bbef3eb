"""ELF facts as frozen values, and the strip. The only module that imports lief.

lief reads; what is written is copied by us, so that no load segment ever moves.
"""

import mmap
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rvbundle_runtime.errors import FreezeError
from rvbundle_runtime.machine import E_MACHINE

if TYPE_CHECKING:
    import lief

_MAGIC = b"\x7fELF"
_MACHINES = {number: arch for arch, number in E_MACHINE.items()}
_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SHDR = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_PHDR = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_SHF_ALLOC = 2
_SHT_NOBITS = 8
_TAIL = struct.Struct("<Q")  # see `split_tail`
_KEPT_SECTIONS = frozenset({"", ".shstrtab"})  # of those that are not loaded


@dataclass(frozen=True)
class ElfFacts:
    """What the freeze needs to know of a shared library or program."""

    machine: str
    soname: str
    needed: tuple[str, ...]
    search: tuple[str, ...]  # DT_RUNPATH or DT_RPATH, $ORIGIN not expanded
    interpreter: str
    has_symbols: bool  # a symbol table or debug sections that a strip would take away


def is_elf(path: Path) -> bool:
    """Tell whether a file starts like an ELF file."""
    try:
        with path.open("rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


def is_extension(path: Path) -> bool:
    """Tell whether a shared library is a Python extension module: it has PyInit_NAME for its own name.

    Only names that start with "lib" are looked into: for others the name alone is taken as proof.
    """
    stem = path.name.partition(".")[0]
    if not stem.startswith("lib"):
        return stem.isidentifier()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(f"\0PyInit_{stem}\0".encode()) >= 0


def read_facts(path: Path) -> ElfFacts:
    """Return the facts of the ELF file at `path`; raises FreezeError if it can't be read."""
    import lief  # late: it costs 0.7 s, which a build that changes nothing, or fails early, need not pay

    lief.logging.disable()
    config = lief.ELF.ParserConfig()
    config.parse_relocations = config.parse_dyn_symbols = config.parse_symtab_symbols = False
    config.parse_symbol_versions = config.parse_notes = config.parse_overlay = False
    with warnings.catch_warnings():  # lief's bindings warn of values that they have no name for
        warnings.simplefilter("ignore")
        try:
            binary = lief.ELF.parse(str(path), config)
            if binary is None:
                raise FreezeError(f"{path} is no readable ELF file")
            return _facts(binary)
        except (ValueError, AttributeError, OverflowError, UnicodeDecodeError) as error:
            raise FreezeError(f"{path} is a damaged ELF file: {error}") from None


def _facts(binary: "lief.ELF.Binary") -> ElfFacts:
    import lief

    tag = lief.ELF.DynamicEntry.TAG
    search: list[str] = []
    soname = ""
    for entry in binary.dynamic_entries:
        if isinstance(entry, lief.ELF.DynamicEntryRunPath | lief.ELF.DynamicEntryRpath):
            search += entry.paths
        elif entry.tag == tag.SONAME and isinstance(entry, lief.ELF.DynamicSharedObject):
            soname = str(entry.name)
    return ElfFacts(
        machine=_MACHINES.get(_number(binary.header.machine_type), "other"),
        soname=soname,
        needed=tuple(str(library) for library in binary.libraries),
        search=tuple(search),
        interpreter=str(binary.interpreter) if binary.has_interpreter else "",
        has_symbols=any(_has_symbols(s.name) for s in binary.sections),
    )


def _number(value: object) -> int:
    """Return the number of an enumeration's member, or of one that lief has no name for."""
    number = getattr(value, "value", value)
    return number if isinstance(number, int) else -1


def _has_symbols(name: str | bytes) -> bool:
    text = name if isinstance(name, str) else name.decode("utf-8", "replace")
    return text == ".symtab" or text.startswith((".debug_", ".zdebug_"))


def _is_strippable(name: str, flags: int) -> bool:
    return not flags & _SHF_ALLOC and name not in _KEPT_SECTIONS


def split_tail(path: Path) -> tuple[bytes, bytes] | None:
    """Take symbol tables and debug sections off the ELF file at `path`; None where that can't be done.

    Returns (stripped file, tail). All that is loaded keeps its bytes and offsets; behind it come only a
    new section-name table and the headers of the sections that stay. `join_tail` undoes it exactly; the
    tail is: how many leading bytes are common (8 bytes, little-endian), the original ELF header (64
    bytes), the original bytes behind the common ones.
    """
    data = path.read_bytes()
    if data[:7] != _MAGIC + b"\x02\x01\x01":  # 64 bits, little-endian, version 1
        return None
    try:
        return _split_tail(data)
    except (struct.error, ValueError, IndexError, KeyError, OverflowError):
        return None  # its headers are damaged: it is left as it is


def _split_tail(data: bytes) -> tuple[bytes, bytes] | None:
    header = list(_EHDR.unpack_from(data))
    shoff, phoff, phentsize, phnum = header[6], header[5], header[9], header[10]
    shentsize, shnum, shstrndx = header[11], header[12], header[13]
    if shentsize != _SHDR.size or not shnum or shoff + shnum * shentsize > len(data):
        return None
    sections = [list(_SHDR.unpack_from(data, shoff + i * shentsize)) for i in range(shnum)]
    names = [_section_name(data, sections, shstrndx, s) for s in sections]
    strippable = [_is_strippable(n, s[2]) for n, s in zip(names, sections, strict=True)]
    common = _end_of_kept(data, phoff, phentsize, phnum, sections, strippable, names)
    if common is None or not any(strippable):
        return None
    kept = [i for i in range(shnum) if not strippable[i]]
    renumbered = {old: new for new, old in enumerate(kept)}
    table, offsets = _name_table([names[i] for i in kept])
    name_offset = common
    header_offset = (name_offset + len(table) + 7) // 8 * 8
    out = []
    for index in kept:
        section = sections[index].copy()
        section[0] = offsets[names[index]]
        if names[index] == ".shstrtab":
            section[4], section[5] = name_offset, len(table)
        section[6] = renumbered.get(section[6], 0)  # sh_link
        if section[1] in (4, 9) and section[2] & 0x40:  # SHT_RELA, SHT_REL with SHF_INFO_LINK: a section
            section[7] = renumbered.get(section[7], 0)
        out.append(_SHDR.pack(*section))
    header[6], header[12], header[13] = header_offset, len(kept), renumbered[shstrndx]
    padding = bytes(header_offset - name_offset - len(table))
    stripped = _EHDR.pack(*header) + data[_EHDR.size : common] + table + padding + b"".join(out)
    tail = _TAIL.pack(common) + data[: _EHDR.size] + data[common:]
    return stripped, tail


def join_tail(stripped: bytes, tail: bytes) -> bytes | None:
    """Return the original file that `split_tail` took apart; None if the two do not fit together."""
    if len(tail) < _TAIL.size + _EHDR.size:
        return None
    (common,) = _TAIL.unpack_from(tail)
    if not _EHDR.size <= common <= len(stripped):
        return None
    start = _TAIL.size
    header = tail[start : start + _EHDR.size]
    return header + stripped[_EHDR.size : common] + tail[start + _EHDR.size :]


def _section_name(data: bytes, sections: list[list[int]], shstrndx: int, section: list[int]) -> str:
    if shstrndx >= len(sections):
        return ""
    start = sections[shstrndx][4] + section[0]
    return data[start : data.index(b"\0", start)].decode("utf-8", "replace")


def _end_of_kept(
    data: bytes,
    phoff: int,
    phentsize: int,
    phnum: int,
    sections: list[list[int]],
    strippable: list[bool],
    names: list[str],
) -> int | None:
    """Return where the bytes that must stay end; None if what could go lies between them."""
    end = phoff + phnum * phentsize
    for index in range(phnum):
        place = phoff + index * phentsize
        (offset,) = struct.unpack_from("<Q", data, place + 8)  # p_offset
        (size,) = struct.unpack_from("<Q", data, place + 32)  # p_filesz
        end = max(end, offset + size)
    for section, goes, name in zip(sections, strippable, names, strict=True):
        if not goes and name != ".shstrtab" and section[1] != _SHT_NOBITS and section[2] & _SHF_ALLOC:
            end = max(end, section[4] + section[5])
    gone = [s[4] for s, goes in zip(sections, strippable, strict=True) if goes and s[1] != _SHT_NOBITS]
    if any(start < end for start in gone):
        return None
    return end if end <= len(data) else None


def _name_table(names: list[str]) -> tuple[bytes, dict[str, int]]:
    table, offsets = b"\0", {"": 0}
    for name in names:
        if name not in offsets:
            offsets[name] = len(table)
            table += name.encode() + b"\0"
    return table, offsets


def load_segments_aligned(data: bytes) -> bool:
    """Tell whether every PT_LOAD's offset and address agree modulo its alignment (else ld.so refuses)."""
    try:
        phoff, phentsize, phnum = (_EHDR.unpack_from(data)[i] for i in (5, 9, 10))
        headers = [_PHDR.unpack_from(data, phoff + index * phentsize) for index in range(phnum)]
    except (struct.error, OverflowError):
        return False
    for kind, _, offset, address, _, size, _, align in headers:
        if kind == 1 and (offset + size > len(data) or (align > 1 and (offset - address) % align)):
            return False
    return True
