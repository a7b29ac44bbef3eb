"""Which pages of a shared library are kept, and the trimmed library as a sparse file.

The second part of trimming inside libraries, after `runtime/native/tracer.c`.

`plan` is pure: bytes and page numbers in, a frozen plan out. `apply` writes what the plan says.
A trimmed library has its original size and offsets; only the program header table is new (behind
the end of the file). Every read-only or executable PT_LOAD becomes one PT_LOAD per range that is
kept, and one without any permission per range that is absent: so the library stays contiguous for
ld.so (dladdr, dlsym and dl_iterate_phdr see addresses in absent ranges as its own, as before).
"""

import mmap
import os
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Data = bytes | bytearray | memoryview | mmap.mmap

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SHDR = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_PHDR = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_RELA = struct.Struct("<QIIq")  # Elf64_Rela, little-endian: offset, type, symbol, addend
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP, _PT_PHDR = 1, 2, 3, 6
_PT_GNU_EH_FRAME, _PT_GNU_STACK, _PT_GNU_RELRO = 0x6474E550, 0x6474E551, 0x6474E552
_PF_X, _PF_W, _PF_R = 1, 2, 4
_SHF_WRITE, _SHF_ALLOC, _SHF_EXECINSTR = 1, 2, 4
_SHT_PROGBITS, _SHT_RELA, _SHT_NOBITS, _SHT_DYNSYM = 1, 4, 8, 11
_DT_TEXTREL, _DT_FLAGS, _DF_TEXTREL = 22, 30, 4
_STT_GNU_IFUNC = 10
_IRELATIVE = {62: 37, 183: 1032, 243: 58}  # by e_machine: R_X86_64_, R_AARCH64_, R_RISCV_IRELATIVE
_UNWIND = frozenset({".eh_frame", ".eh_frame_hdr", ".gcc_except_table"})
_CONSTANTS = ".rodata"
_AROUND = 65536  # bytes of constants next to used ones that are kept: other data, other rows of a table
_ALWAYS_CODE = frozenset({".init", ".fini"})
_SMALLEST_PAGE, _LARGEST_PAGE = 4096, 65536
_MOST_HEADERS = 0xFFFE  # 0xffff (PN_XNUM) has another meaning
_NAME = struct.Struct("<I20x")  # Elf64_Sym.st_name
_RUN_TIME = tuple(
    b"_Unwind_Resume __cxa_begin_catch __cxa_end_catch __cxa_rethrow __cxa_throw __cxa_allocate_exception"
    b" __cxa_free_exception __cxa_get_exception_ptr __cxa_call_unexpected"
    b" __cxa_call_terminate _ZSt9terminatev".split()
)
_EM_X86_64, _EM_AARCH64 = 62, 183
_HDR_HEAD = 12  # bytes of .eh_frame_hdr before its table, as every linker writes it
_PAD_SIZE = 64  # of a landing pad that only destroys and goes on
_OMIT, _INDIRECT = 0xFF, 0x80  # DW_EH_PE_*
_SIZES = {0x00: 8, 0x02: 2, 0x03: 4, 0x04: 8, 0x0A: 2, 0x0B: 4, 0x0C: 8}  # of an encoded pointer
_CODES = {0x00: "<Q", 0x02: "<H", 0x03: "<I", 0x04: "<Q", 0x0A: "<h", 0x0B: "<i", 0x0C: "<q"}
_DAMAGED = (struct.error, IndexError, ValueError, OverflowError, KeyError)


@dataclass(frozen=True, order=True)
class Range:
    """Bytes from `start` up to, not including, `stop`."""

    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """A PT_LOAD of the original that is not writable, and what is absent of it at run time."""

    vaddr: int
    offset: int
    filesz: int
    prot: int  # as mmap wants it: 1 read, 2 write, 4 execute
    absent: tuple[Range, ...]  # addresses as linked, on page bounds; vaddr - offset + file offset


@dataclass(frozen=True)
class TrimPlan:
    """What is kept of a library; the ranges are file offsets. hot and cold together are the whole file."""

    size: int  # of the original file
    hot: tuple[Range, ...]  # kept: sorted, merged, on page bounds where inside a PT_LOAD
    cold: tuple[Range, ...]  # the rest of the PT_LOADs that are not writable, and what only debuggers read
    headers: bytes  # the new ELF header
    table: bytes  # the new program header table,
    table_offset: int  # and where it goes
    sections: dict[str, tuple[int, int]]  # name -> (hot bytes, cold bytes)
    reason: str  # "", or why the library is left whole (then hot is everything)
    segments: tuple[Segment, ...] = ()
    marks: tuple[Range, ...] = ()  # cold bytes that the file holds too: see _Unwind.marks
    notes: tuple[str, ...] = ()  # for reports: what was kept though it might have gone
    places: tuple[tuple[str, Range], ...] = ()  # the sections' file offsets
    tables: tuple[tuple[str, Range], ...] = ()  # (section, its hot file offsets) of what is rows of numbers

    @property
    def kept(self) -> tuple[Range, ...]:
        """All that the trimmed file holds of the original: hot ranges and marks."""
        return _merge([*self.hot, *self.marks])


class _WholeError(Exception):
    """The library can't be trimmed safely; the text says why."""


class _OddUnwindError(Exception):
    """The unwind data can't be taken apart; it is kept whole."""


@dataclass(frozen=True)
class _Load:
    index: int  # in the program header table
    flags: int
    offset: int
    vaddr: int
    filesz: int
    memsz: int
    align: int

    @property
    def trimmed(self) -> bool:
        return self.filesz > 0 and self.filesz == self.memsz and self.flags in (_PF_R, _PF_X, _PF_R | _PF_X)


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    vaddr: int
    offset: int
    size: int


@dataclass(frozen=True)
class _Elf:
    header: tuple[bytes, int, int, int, int, int, int, int, int, int, int, int, int, int]
    programs: list[tuple[int, int, int, int, int, int, int, int]]
    loads: list[_Load]
    sections: list[_Section]

    def load_of(self, vaddr: int) -> _Load | None:
        for load in self.loads:
            if load.vaddr <= vaddr < load.vaddr + load.filesz:
                return load
        return None

    def section(self, name: str) -> _Section | None:
        return next((s for s in self.sections if s.name == name and s.kind != _SHT_NOBITS), None)


def plan(
    data: Data,
    touched: Container[int],
    watched: Container[int],
    grain: int = 4096,
    gap: int = 4,
    *,
    page: int = 4096,
    cover: bool = True,
    pads: bool = False,
    symbols: bool = True,
) -> TrimPlan:
    """Plan what is kept of the library `data`.

    `touched` and `watched` hold page numbers (address as linked // `page`): those that were used, and those
    whose use would have been seen. What is kept is aligned to `grain`; up to `gap` absent grains
    between two kept ones are kept too. `cover` adds the PT_LOADs without permission (see above).
    `symbols` keeps symbol tables that only debuggers read.
    `pads` keeps the landing pads of functions on used pages, which an exception runs that no trace has seen.
    """
    with memoryview(data) as view:
        try:
            elf = _read(view, grain)
            return _plan(view, elf, touched, watched, grain, gap, page, cover, pads, symbols)
        except _WholeError as error:
            return _whole(view, str(error))
        except _DAMAGED as error:
            return _whole(view, f"damaged headers ({type(error).__name__})")


def apply(data: Data, trim: TrimPlan, path: Path) -> None:
    """Write the trimmed library to `path` as a sparse file; the caller makes it durable."""
    with memoryview(data) as view, path.open("wb") as file:
        if len(view) != trim.size:
            raise ValueError(f"the plan is for a file of {trim.size} bytes, this one has {len(view)}")
        file.truncate(max(trim.size, trim.table_offset + len(trim.table)))
        for part in trim.kept:
            file.seek(part.start)
            with view[part.start : part.stop] as piece:
                file.write(piece)
        file.seek(0)
        file.write(trim.headers)
        file.seek(trim.table_offset)
        file.write(trim.table)
    os.chmod(path, 0o755)


def constants(data: Data) -> tuple[tuple[int, Range], ...]:
    """Return address and file range of each section of constants; none for a library that is left whole."""
    with memoryview(data) as view:
        try:
            sections = _read(view, _SMALLEST_PAGE).sections
        except (_WholeError, *_DAMAGED):
            return ()
    return tuple((s.vaddr, Range(s.offset, s.offset + s.size)) for s in sections if _is_constant(s))


def restore_table(trim: TrimPlan) -> tuple[Segment, ...]:
    """Return what a guard needs at run time: the original segments and what is absent of each."""
    return trim.segments


def _whole(view: memoryview, reason: str) -> TrimPlan:
    size = len(view)
    everything = (Range(0, size),) if size else ()
    return TrimPlan(size, everything, (), bytes(view[: _EHDR.size]), b"", size, {}, reason)


# Reading the headers


def _read(view: memoryview, grain: int) -> _Elf:
    if len(view) < _EHDR.size or bytes(view[:7]) != b"\x7fELF\x02\x01\x01":
        raise _WholeError("no ELF file of 64 bits, little-endian")
    header = _EHDR.unpack_from(view)
    kind, phoff, shoff = header[1], header[5], header[6]
    phentsize, phnum, shentsize, shnum, shstrndx = header[9:14]
    if kind != 3:  # ET_DYN
        raise _WholeError("no shared library")
    if not shoff or not shnum or shentsize != _SHDR.size or shoff + shnum * shentsize > len(view):
        raise _WholeError("no section headers")
    if phentsize != _PHDR.size or phnum == 0xFFFF or phoff + phnum * phentsize > len(view):
        raise _WholeError("odd program headers")
    programs = [_PHDR.unpack_from(view, phoff + i * phentsize) for i in range(phnum)]
    loads = [_Load(i, p[1], p[2], p[3], p[5], p[6], p[7]) for i, p in enumerate(programs) if p[0] == _PT_LOAD]
    _check_loads(view, loads, grain)
    _check_programs(view, programs)
    return _Elf(header, programs, loads, _sections(view, shoff, shnum, shstrndx))


def _check_loads(view: memoryview, loads: list[_Load], grain: int) -> None:
    if not loads or loads[0].offset != 0:
        raise _WholeError("the first PT_LOAD does not start with the ELF header")
    end = 0
    for load in loads:
        if load.offset + load.filesz > len(view) or load.filesz > load.memsz:
            raise _WholeError("a PT_LOAD reaches behind the end of the file")
        if (load.offset - load.vaddr) % grain or (load.align > 1 and (load.offset - load.vaddr) % load.align):
            raise _WholeError(f"offset and address of a PT_LOAD differ modulo {grain} or its alignment")
        if load.vaddr // grain * grain < end:
            raise _WholeError("PT_LOADs overlap or are out of order")
        end = _up(load.vaddr + load.memsz, grain)
    by_offset = sorted((x.offset, x.offset + x.filesz) for x in loads if x.filesz)
    for (_, stop), (start, _) in pairwise(by_offset):
        if start < stop:
            raise _WholeError("PT_LOADs overlap in the file")


def _check_programs(view: memoryview, programs: list[tuple[int, int, int, int, int, int, int, int]]) -> None:
    stack = [p for p in programs if p[0] == _PT_GNU_STACK]
    if not stack or stack[0][1] & _PF_X:
        raise _WholeError(
            "it asks for an executable stack" if stack else "it does not say if its stack is executable"
        )
    for kind, _, offset, _, _, filesz, _, _ in programs:
        if filesz and offset + filesz > len(view):
            raise _WholeError("a program header points behind the end of the file")
        if kind == _PT_INTERP:
            raise _WholeError("a program, not a library")
        if kind == _PT_DYNAMIC:
            for tag, value in struct.iter_unpack("<qQ", view[offset : offset + filesz // 16 * 16]):
                if tag == 0:
                    break
                if tag == _DT_TEXTREL or (tag == _DT_FLAGS and value & _DF_TEXTREL):
                    raise _WholeError("text relocations")


def _sections(view: memoryview, shoff: int, shnum: int, shstrndx: int) -> list[_Section]:
    raw = [_SHDR.unpack_from(view, shoff + i * _SHDR.size) for i in range(shnum)]
    names = bytes(view[raw[shstrndx][4] : raw[shstrndx][4] + raw[shstrndx][5]])
    out = []
    for name, kind, flags, vaddr, offset, size, *_ in raw:
        text = names[name : names.index(b"\0", name)].decode("utf-8", "replace") if name < len(names) else ""
        if kind:
            if kind != _SHT_NOBITS and offset + size > len(view):
                raise _WholeError(f"section {text} reaches behind the end of the file")
            out.append(_Section(text, kind, flags, vaddr, offset, size))
    return out


# Planning


class _Pages:
    """The pages of the file: a flag for each, 1 where it is kept. A page that two PT_LOADs share is one."""

    def __init__(self, size: int, grain: int) -> None:
        self.grain = grain
        self.flags = bytearray(-(-size // grain))

    def keep(self, start: int, stop: int) -> None:
        """Keep the pages of these file offsets."""
        if start < stop:
            first, end = start // self.grain, min(-(-stop // self.grain), len(self.flags))
            self.flags[first:end] = b"\1" * (end - first)

    def runs(self, load: _Load, value: int = 1) -> Iterator[tuple[int, int]]:
        """Yield the runs of pages of a PT_LOAD whose flag is `value`: first and one after the last."""
        first, end = self.bounds(load)
        find = self.flags.find
        while first < end:
            start = find(value, first, end)
            if start < 0:
                return
            stop = find(1 - value, start, end)
            first = stop if stop >= 0 else end
            yield start, first

    def bounds(self, load: _Load) -> tuple[int, int]:
        return load.offset // self.grain, -(-(load.offset + load.filesz) // self.grain)

    def close_gaps(self, loads: Iterable[_Load], gap: int) -> None:
        for load in loads:
            first, end = self.bounds(load)
            for start, stop in list(self.runs(load, 0)):
                if first < start and stop < end and stop - start <= gap:
                    self.flags[start:stop] = b"\1" * (stop - start)

    def clipped(self, load: _Load, value: int) -> Iterator[Range]:
        """Yield the runs as file offsets, clipped to the PT_LOAD."""
        for start, stop in self.runs(load, value):
            yield Range(
                max(start * self.grain, load.offset), min(stop * self.grain, load.offset + load.filesz)
            )


def _plan(
    view: memoryview,
    elf: _Elf,
    touched: Container[int],
    watched: Container[int],
    grain: int,
    gap: int,
    page: int,
    cover: bool,
    pads: bool,
    symbols: bool,
) -> TrimPlan:
    pages = _Pages(len(view), grain)
    trimmed = [load for load in elf.loads if load.trimmed]
    _keep_always(elf, pages)
    _keep_used(pages, trimmed, touched, watched, page)
    _keep_around(elf, pages, touched, page)
    _keep_resolvers(view, elf, pages)
    notes: list[str] = []
    marks: tuple[Range, ...] = ()
    try:
        marks = _keep_unwind(view, elf, pages, trimmed, gap, pads)
    except (_OddUnwindError, *_DAMAGED) as error:
        notes.append(f"unwind data is kept whole: {error}")
        for section in elf.sections:
            if section.name in _UNWIND and section.kind != _SHT_NOBITS:
                pages.keep(section.offset, section.offset + section.size)
        pages.close_gaps(trimmed, gap)
    return _result(view, elf, pages, cover, symbols, marks, tuple(notes))


def _keep_unwind(
    view: memoryview, elf: _Elf, pages: _Pages, trimmed: list[_Load], gap: int, pads: bool
) -> tuple[Range, ...]:
    unwind = _Unwind(view, elf)
    if pads and unwind.count:
        unwind.keep_pads(view, pages)
        _keep_stubs(view, elf, pages)
    pages.close_gaps(trimmed, gap)
    while True:  # what is kept for unwinding may bring code along (a shared page, a gap)
        before = bytes(pages.flags)
        unwind.keep_for_hot_code(pages)
        pages.close_gaps(trimmed, gap)
        if pages.flags == before:
            return unwind.marks(pages)


def _is_constant(section: _Section) -> bool:
    flags = section.flags & (_SHF_ALLOC | _SHF_WRITE | _SHF_EXECINSTR)
    return section.name == _CONSTANTS and section.kind == _SHT_PROGBITS and flags == _SHF_ALLOC


def _is_candidate(section: _Section) -> bool:
    """Tell whether pages of this section may be absent: of constants, those that were watched."""
    if section.name in _UNWIND or _is_constant(section):
        return True
    return bool(section.flags & _SHF_EXECINSTR) and section.name not in _ALWAYS_CODE


def _keep_always(elf: _Elf, pages: _Pages) -> None:
    candidates = bytearray(len(pages.flags))
    alloc = [s for s in elf.sections if s.flags & _SHF_ALLOC and s.kind != _SHT_NOBITS and s.size]
    for section in alloc:
        if _is_candidate(section):
            first, end = section.offset // pages.grain, -(-(section.offset + section.size) // pages.grain)
            candidates[first:end] = b"\1" * (end - first)
    for load in elf.loads:
        first, end = pages.bounds(load)
        for number in range(first, end):
            if not candidates[number] or not load.trimmed:
                pages.flags[number] = 1
    for section in alloc:
        if not _is_candidate(section):
            pages.keep(section.offset, section.offset + section.size)
    pages.keep(0, _EHDR.size)
    for kind, _, offset, _, _, filesz, _, _ in elf.programs:  # notes and the like: usually sections too
        if kind not in (_PT_LOAD, _PT_PHDR, _PT_GNU_EH_FRAME, _PT_GNU_RELRO):
            pages.keep(offset, offset + filesz)


def _keep_used(
    pages: _Pages, trimmed: list[_Load], touched: Container[int], watched: Container[int], page: int
) -> None:
    flags, grain = pages.flags, pages.grain
    for load in trimmed:
        delta = load.vaddr - load.offset
        first, end = pages.bounds(load)
        low, high = load.vaddr // page, (load.vaddr + load.filesz - 1) // page
        for number in range(first, end):
            if not flags[number]:
                start = number * grain + delta
                for p in range(max(low, start // page), min(high, (start + grain - 1) // page) + 1):
                    if p in touched or p not in watched:
                        flags[number] = 1
                        break


def _keep_around(elf: _Elf, pages: _Pages, touched: Container[int], page: int) -> None:
    """Keep the constants around those that were used."""
    for section in elf.sections:
        if _is_constant(section):
            delta, end = section.offset - section.vaddr, section.vaddr + section.size
            for number in range(section.vaddr // page, -(-end // page)):
                if number in touched:
                    start = max(number * page - _AROUND, section.vaddr)
                    stop = min((number + 1) * page + _AROUND, end)
                    pages.keep(start + delta, stop + delta)


def _keep_address(elf: _Elf, pages: _Pages, vaddr: int, size: int) -> None:
    load = elf.load_of(vaddr)
    if load is not None:
        start = vaddr - load.vaddr + load.offset
        pages.keep(start, min(start + size, load.offset + load.filesz))


def _keep_resolvers(view: memoryview, elf: _Elf, pages: _Pages) -> None:
    """Keep the page of every IFUNC resolver, and the one after it: ld.so calls them while it relocates."""
    resolvers: set[int] = set()
    irelative = _IRELATIVE.get(elf.header[2])
    for section in elf.sections:
        if section.kind == _SHT_DYNSYM:
            symbols = bytes(view[section.offset : section.offset + section.size // 24 * 24])
            for index, info in enumerate(symbols[4::24]):
                if info & 15 == _STT_GNU_IFUNC:
                    resolvers.add(struct.unpack_from("<Q", symbols, index * 24 + 8)[0])
        elif section.kind == _SHT_RELA and section.flags & _SHF_ALLOC:
            table = view[section.offset : section.offset + section.size // 24 * 24]
            resolvers |= {addend for _, kind, _, addend in _RELA.iter_unpack(table) if kind == irelative}
    for vaddr in resolvers:
        if vaddr:
            _keep_address(elf, pages, vaddr, pages.grain + 1)


def _keep_stubs(view: memoryview, elf: _Elf, pages: _Pages) -> None:
    """Keep the PLT entries through which landing pads call the C++ run time (16 bytes each, usually)."""
    relocations, symbols, names = (elf.section(n) for n in (".rela.plt", ".dynsym", ".dynstr"))
    if relocations is None or symbols is None or names is None:
        return
    strings = bytes(view[names.offset : names.offset + names.size])
    wanted = {strings.find(b"\0" + name + b"\0") + 1 for name in _RUN_TIME} - {0}
    numbers = [
        n for (n,) in _NAME.iter_unpack(view[symbols.offset : symbols.offset + symbols.size // 24 * 24])
    ]
    table = view[relocations.offset : relocations.offset + relocations.size // 24 * 24]
    slots = [i for i, (_, _, symbol, _) in enumerate(_RELA.iter_unpack(table)) if numbers[symbol] in wanted]
    for section in (elf.section(".plt"), elf.section(".plt.sec")):
        if section is not None:
            before = section.size - 16 * (relocations.size // 24)  # its own first entry
            for slot in slots if before in (0, 16, 32) else ():
                start = section.offset + before + 16 * slot
                pages.keep(start, start + 16)


def _result(
    view: memoryview,
    elf: _Elf,
    pages: _Pages,
    cover: bool,
    symbols: bool,
    marks: tuple[Range, ...],
    notes: tuple[str, ...],
) -> TrimPlan:
    grain = pages.grain
    cold: list[Range] = []
    table: list[bytes] = []
    segments: list[Segment] = []
    by_index = {load.index: load for load in elf.loads}
    for index, program in enumerate(elf.programs):
        load = by_index.get(index)
        if load is None or not load.trimmed:
            if program[0] != _PT_PHDR:
                table.append(_PHDR.pack(*program))
            continue
        absent = list(pages.clipped(load, 0))
        parts = [(part, load.flags) for part in pages.clipped(load, 1)]
        if cover:
            parts += [(part, 0) for part in absent]
        delta = load.vaddr - load.offset
        for part, flags in sorted(parts):
            start, size = part.start + delta, part.stop - part.start
            align = max(load.align, grain)
            table.append(_PHDR.pack(_PT_LOAD, flags, part.start, start, start, size, size, align))
        cold += absent
        gone = tuple(Range(a * grain + delta, b * grain + delta) for a, b in pages.runs(load, 0))
        prot = load.flags >> 2 & 1 | load.flags & 2 | load.flags << 2 & 4
        segments.append(Segment(load.vaddr, load.offset, load.filesz, prot, gone))
    if len(table) > _MOST_HEADERS:
        raise _WholeError("too many program headers")
    if not symbols:
        cold += _only_for_debuggers(elf, len(view))
    cold = list(_merge(cold))
    # ld.so takes the table from memory if the pages of a PT_LOAD reach it, also where it then clears
    # them as .bss: the table stays clear of the last page of every one, whatever the page size.
    mapped = _up(max(load.offset + load.filesz for load in elf.loads), max(grain, _LARGEST_PAGE))
    offset = max(_up(len(view), 8), mapped)
    header = list(elf.header)
    header[5], header[10] = offset, len(table)
    hot = _complement(cold, len(view))
    sections: dict[str, tuple[int, int]] = {}
    for section in elf.sections:
        if section.kind != _SHT_NOBITS and section.size:
            absent_bytes = _overlap(cold, section.offset, section.offset + section.size)
            a, b = sections.get(section.name, (0, 0))
            sections[section.name] = (a + section.size - absent_bytes, b + absent_bytes)
    return TrimPlan(
        size=len(view),
        hot=hot,
        cold=tuple(cold),
        headers=_EHDR.pack(*header),
        table=b"".join(table),
        table_offset=offset,
        sections=sections,
        reason="",
        segments=tuple(segments),
        marks=marks,
        notes=notes,
        places=tuple(
            (s.name, Range(s.offset, s.offset + s.size))
            for s in elf.sections
            if s.kind != _SHT_NOBITS and s.size
        ),
        tables=tuple(_tables(elf, _merge([*hot, *marks]))),
    )


def _only_for_debuggers(elf: _Elf, size: int) -> Iterator[Range]:
    """Yield symbol tables and debug sections that lie apart from all that is loaded or read by name."""
    taken = [Range(load.offset, load.offset + load.filesz) for load in elf.loads]
    taken += [Range(p[2], p[2] + p[5]) for p in elf.programs]
    header = elf.header
    taken += [Range(0, _EHDR.size), Range(header[5], header[5] + header[10] * _PHDR.size)]
    taken.append(Range(header[6], header[6] + header[12] * _SHDR.size))
    debug = []
    for section in elf.sections:
        part = Range(section.offset, min(section.offset + section.size, size))
        strip = section.name in (".symtab", ".strtab") or section.name.startswith(".debug_")
        if section.flags & _SHF_ALLOC or not strip:
            taken += [part] if section.kind != _SHT_NOBITS else []
        elif section.kind != _SHT_NOBITS and part.start < part.stop:
            debug.append(part)
    for part in debug:
        if not any(part.start < other.stop and other.start < part.stop for other in taken):
            yield part


def _tables(elf: _Elf, kept: tuple[Range, ...]) -> Iterator[tuple[str, Range]]:
    """Yield what is kept of relocations, symbols and the table in .eh_frame_hdr, in whole words."""
    for section in elf.sections:
        word = {".rela.dyn": 8, ".rela.plt": 8, ".eh_frame_hdr": 4, ".dynsym": 8}.get(section.name)
        if word is None or section.kind == _SHT_NOBITS:
            continue
        start = section.offset + (_HDR_HEAD if section.name == ".eh_frame_hdr" else 0)
        for part in kept:
            a, b = max(part.start, _up(start, word)), min(part.stop, section.offset + section.size)
            if b - a >= word:
                yield section.name, Range(a, b - (b - a) % word)


def _merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    out: list[Range] = []
    for part in sorted(ranges):
        if out and part.start <= out[-1].stop:
            out[-1] = Range(out[-1].start, max(out[-1].stop, part.stop))
        elif part.start < part.stop:
            out.append(part)
    return tuple(out)


def _complement(ranges: Iterable[Range], size: int) -> tuple[Range, ...]:
    out: list[Range] = []
    position = 0
    for part in ranges:
        if position < part.start:
            out.append(Range(position, part.start))
        position = part.stop
    if position < size:
        out.append(Range(position, size))
    return tuple(out)


def _overlap(ranges: list[Range], start: int, stop: int) -> int:
    return sum(max(0, min(r.stop, stop) - max(r.start, start)) for r in ranges)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# Unwind data


@dataclass(frozen=True)
class _Cie:
    start: int  # in .eh_frame
    stop: int
    lsda: int  # encoding of the pointer to the LSDA; _OMIT if there is none
    skip: int  # size of the two code pointers of an FDE
    augmented: bool  # FDEs have augmentation data


class _Unwind:
    """.eh_frame_hdr, .eh_frame and .gcc_except_table, and what unwinding through hot code reads of them."""

    def __init__(self, view: memoryview, elf: _Elf) -> None:
        frame, table, lsdas = (elf.section(n) for n in (".eh_frame", ".eh_frame_hdr", ".gcc_except_table"))
        programs = [p for p in elf.programs if p[0] == _PT_GNU_EH_FRAME]
        self.elf = elf
        self.count = 0
        self.entries: list[int] = []
        if frame is None and table is None and lsdas is None and not programs:
            return  # nothing to unwind with
        if frame is None or table is None or len(programs) != 1:
            raise _OddUnwindError("no .eh_frame with an .eh_frame_hdr")
        if elf.load_of(frame.vaddr) is None or elf.load_of(table.vaddr) is None:
            raise _OddUnwindError("it is not loaded")
        if programs[0][3] != table.vaddr:
            raise _OddUnwindError("PT_GNU_EH_FRAME is not .eh_frame_hdr")
        self.frame, self.table, self.lsda_section = frame, table, lsdas
        self._read_table(view)
        self._read_frames(view)
        self.seen = bytearray(self.count)

    def _read_table(self, view: memoryview) -> None:
        table = self.table
        version, pointer, count, encoding = view[table.offset : table.offset + 4]
        # libgcc searches only such a table; for others it walks all of .eh_frame
        if version != 1 or encoding != 0x3B or count != 0x03 or pointer & 0x0F not in _SIZES:
            raise _OddUnwindError("no sorted table of the usual form")
        self.first = table.offset + 8 + _SIZES[pointer & 0x0F]  # of the table's entries, in the file
        (self.count,) = struct.unpack_from("<I", view, self.first - 4)
        if (
            self.first + 8 * self.count > table.offset + table.size
            or (table.vaddr + self.first - table.offset) % 4
        ):
            raise _OddUnwindError("a damaged table")
        words = _words(view, self.first, 2 * self.count)
        self.places, self.fdes = words[::2], words[1::2]
        if sorted(self.places) != self.places.tolist():
            raise _OddUnwindError("a table that is not sorted")

    def _read_frames(self, view: memoryview) -> None:
        """Read the bounds, the CIE and the LSDA of every entry of .eh_frame."""
        frame = self.frame
        raw = bytes(view[frame.offset : frame.offset + frame.size])
        words = _words(view, frame.offset, frame.size // 4)
        base = frame.vaddr
        starts: list[int] = []
        stops: list[int] = []
        owners: list[_Cie] = []
        pointers: list[int] = []  # address of the LSDA, 0 for none
        cies: dict[int, _Cie] = {}
        end, position = len(words), 0
        while position < end:
            length, number = words[position], position + 1
            if length == 0:
                position += 1  # an end mark: there may be more behind it
                continue
            if length == -1:  # 64 bits: the pointer to the CIE has 4 bytes all the same
                (length,) = struct.unpack_from("<Q", raw, position * 4 + 4)
                number = position + 3
            stop = number * 4 + length
            if length < 4 or length % 4 or stop > len(raw):
                raise _OddUnwindError("an entry of odd size")
            start, distance = position * 4, words[number]
            position = stop // 4
            if distance == 0:
                cie = cies.get(start) or _read_cie(raw, start, number * 4 + 4, stop)
                cies[start] = cie
                lsda = 0
            else:
                place = number * 4 - distance
                found = cies.get(place)
                cie = found if found is not None else _read_cie_at(raw, place)
                cies[place] = cie
                lsda = 0
                if cie.augmented and cie.lsda != _OMIT:
                    data = number * 4 + 4 + cie.skip
                    if raw[data]:
                        data += 1 if raw[data] < 0x80 else 2
                        if cie.lsda == 0x1B:
                            (lsda,) = struct.unpack_from("<i", raw, data)
                            lsda = lsda and lsda + base + data
                        else:
                            lsda = _pointer(raw, data, cie.lsda, base)
            starts.append(start)
            stops.append(stop)
            owners.append(cie)
            pointers.append(lsda)
        self.entries, self.stops, self.owners, self.pointers = starts, stops, owners, pointers
        self.lsdas = sorted(set(pointers))

    def keep_pads(self, view: memoryview, pages: _Pages) -> None:
        """Keep the landing pads of the functions on the pages that are kept now.

        Where a pad ends is not said anywhere; what it calls may be absent all the same.
        """
        found: set[int] = set()
        for low, high in self._functions(pages):
            for number in range(low, high + 1):
                index = bisect_left(self.entries, self.fdes[number] + self.table.vaddr - self.frame.vaddr)
                if index < len(self.entries) and self.pointers[index]:
                    function = self.places[number] + self.table.vaddr
                    found.update(self._pads(view, function, self.pointers[index]))
        for vaddr in found:
            _keep_address(self.elf, pages, vaddr, _PAD_SIZE)
            target = self._jump(view, vaddr)
            if target:
                _keep_address(self.elf, pages, target, _PAD_SIZE)

    def _jump(self, view: memoryview, vaddr: int) -> int:
        """Return where a pad jumps that only leads into the part of the function that was split off."""
        load = self.elf.load_of(vaddr)
        if load is None:
            return 0
        offset = vaddr - load.vaddr + load.offset
        code = bytes(view[offset : min(offset + 16, load.offset + load.filesz)])
        machine = self.elf.header[2]
        if machine == _EM_X86_64:
            place = code.find(0xE9, 0, len(code) - 4)  # jmp rel32, or bytes that look like it: kept in vain
            if place >= 0:
                return int(vaddr + place + 5 + struct.unpack_from("<i", code, place + 1)[0])
        elif machine == _EM_AARCH64:
            for place, (instruction,) in enumerate(struct.iter_unpack("<I", code[: len(code) // 4 * 4])):
                if instruction >> 26 == 5:  # b imm26
                    distance = (instruction & 0x3FFFFFF ^ 0x2000000) - 0x2000000
                    return int(vaddr + 4 * place + 4 * distance)
        return 0

    def _pads(self, view: memoryview, function: int, vaddr: int) -> Iterator[int]:
        """Yield the landing pads in the call-site table of an LSDA."""
        section = self.lsda_section
        if section is None or not section.vaddr <= vaddr < section.vaddr + section.size:
            return
        delta = section.offset - section.vaddr
        place, start = vaddr + delta + 1, function
        if view[place - 1] != _OMIT:  # the pads count from somewhere else
            if view[place - 1] != 0x1B:
                return
            start = vaddr + 1 + struct.unpack_from("<i", view, place)[0]
            place += 4
        place += 1
        if view[place - 1] != _OMIT:
            place = _skip_leb(view, place)
        encoding = view[place]
        size, place = _leb(view, place + 1)
        end = min(place + size, section.offset + section.size)
        while place < end:
            if encoding == 0x01:
                place = _skip_leb(view, _skip_leb(view, place))
                pad, place = _leb(view, place)
            elif encoding == 0x03:
                (pad,) = struct.unpack_from("<I", view, place + 8)
                place += 12
            else:
                return
            place = _skip_leb(view, place)
            if pad:
                yield start + pad

    def _functions(self, pages: _Pages) -> Iterator[tuple[int, int]]:
        """Yield the runs of the table's entries (first and last) for the code that is kept now."""
        places, base = self.places, self.table.vaddr
        for load in self.elf.loads:
            if load.flags & _PF_X:
                delta = load.vaddr - load.offset - base
                for start, stop in list(pages.runs(load)):
                    low = bisect_right(places, start * pages.grain + delta) - 1
                    high = bisect_right(places, stop * pages.grain + delta - 1) - 1
                    # equal places (functions of no size): libgcc may stop at any of them
                    low = bisect_left(places, places[low]) if low >= 0 else 0
                    if high >= low:
                        yield low, high

    def keep_for_hot_code(self, pages: _Pages) -> None:
        """Keep what unwinding reads for any address on the pages that are kept now."""
        if not self.count:
            return
        first = self.table.offset
        pages.keep(first, self.first + 8)
        pages.keep(self.first + 8 * (self.count - 1), self.first + 8 * self.count)
        for low, high in list(self._functions(pages)):
            self._keep_probes(pages, low, high)
            self._keep_entries(pages, low, high)

    def _keep_probes(self, pages: _Pages, low: int, high: int) -> None:
        """Keep what a binary search reads that ends at one of the entries `low` to `high` of the table.

        The search is libgcc's: it looks at the first and the last entry, then halves [0, last), and at
        each step compares with entry `middle` and with the one after it.
        """
        grain, flags, first = pages.grain, pages.flags, self.first
        work = [(0, self.count - 1, low, min(high, self.count - 2))]
        while work:
            start, stop, a, b = work.pop()
            if start >= stop or a > b:
                continue
            middle = (start + stop) // 2
            place = first + 8 * middle
            flags[place // grain] = 1
            flags[(place + 15) // grain] = 1
            if a < middle:
                work.append((start, middle, a, min(b, middle - 1)))
            if b > middle:
                work.append((middle + 1, stop, max(a, middle + 1), b))

    def _keep_entries(self, pages: _Pages, low: int, high: int) -> None:
        frame, seen, entries = self.frame, self.seen, self.entries
        delta = self.table.vaddr - frame.vaddr
        offset = frame.offset
        for number in range(low, high + 1):
            if seen[number]:
                continue
            seen[number] = 1
            place = self.fdes[number] + delta
            index = bisect_left(entries, place)
            if index == len(entries) or entries[index] != place or self.owners[index].start == place:
                raise _OddUnwindError("the table in .eh_frame_hdr does not fit .eh_frame")
            owner = self.owners[index]
            pages.keep(offset + place, offset + self.stops[index])
            pages.keep(offset + owner.start, offset + owner.stop)
            if self.pointers[index]:
                self._keep_lsda(pages, self.pointers[index])

    def _keep_lsda(self, pages: _Pages, vaddr: int) -> None:
        """Keep an LSDA; it says nowhere how long it is: the next one ends it."""
        section = self.lsda_section
        if section is None or not section.vaddr <= vaddr < section.vaddr + section.size:
            _keep_address(self.elf, pages, vaddr, 2 * pages.grain)
            return
        after = bisect_right(self.lsdas, vaddr)
        stop = section.vaddr + section.size
        if after < len(self.lsdas):
            stop = min(stop, self.lsdas[after])
        start = section.offset + vaddr - section.vaddr
        pages.keep(start, start + stop - vaddr)

    def marks(self, pages: _Pages) -> tuple[Range, ...]:
        """Return the entries of .eh_frame that a debugger needs to walk it though parts of it read as zeros.

        Zeros are end marks, which gdb and readelf step over. Behind a hole they must meet the start of an
        entry: so the file holds each entry whole that a hole cuts, and the CIE of each that it holds.
        """
        if not self.count:
            return ()
        out: set[Range] = set()
        offset, entries = self.frame.offset, self.entries
        load = self.elf.load_of(self.frame.vaddr)
        if load is None:
            return ()
        for start, stop in pages.runs(load):
            a, b = start * pages.grain - offset, stop * pages.grain - offset
            low, high = bisect_right(self.stops, a), bisect_left(entries, b)
            if low < high:
                for index in (low, high - 1):
                    out.add(Range(offset + entries[index], offset + self.stops[index]))
                for cie in {id(c): c for c in self.owners[low:high]}.values():
                    out.add(Range(offset + cie.start, offset + cie.stop))
        cold = list(pages.clipped(load, 0))
        return tuple(r for r in _merge(out) if _overlap(cold, r.start, r.stop))


def _words(view: memoryview, offset: int, count: int) -> "array[int]":
    words = array("i")
    words.frombytes(view[offset : offset + 4 * count])
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _read_cie_at(raw: bytes, start: int) -> _Cie:
    """Read a CIE that comes after its first FDE."""
    if start < 0:
        raise _OddUnwindError("an FDE without CIE")
    (length,) = struct.unpack_from("<I", raw, start)
    body = start + 4
    if length == 0xFFFFFFFF:
        (length,) = struct.unpack_from("<Q", raw, body)
        body += 8
    if length < 4 or body + length > len(raw) or raw[body : body + 4] != b"\0\0\0\0":
        raise _OddUnwindError("an FDE without CIE")
    return _read_cie(raw, start, body + 4, body + length)


def _read_cie(raw: bytes, start: int, body: int, stop: int) -> _Cie:
    version = raw[body]
    end = raw.index(b"\0", body + 1, stop)
    text = raw[body + 1 : end].decode("latin-1")
    if version not in (1, 3) or (text and text[0] != "z"):
        raise _OddUnwindError(f"a CIE of version {version} with augmentation {text!r}")
    place = _skip_leb(raw, _skip_leb(raw, end + 1))  # code and data alignment
    place = place + 1 if version == 1 else _skip_leb(raw, place)  # the return address's register
    code, lsda = 0, _OMIT
    if text:
        place = _skip_leb(raw, place)
        for letter in text[1:]:
            if letter == "R":
                code = raw[place]
                place += 1
            elif letter == "L":
                lsda = raw[place]
                place += 1
            elif letter == "P":
                if raw[place] & 0x7F == 0x50:
                    raise _OddUnwindError("an aligned personality pointer")
                place += 1 + _SIZES[raw[place] & 0x0F]
            elif letter not in "SBG":  # signal frame, aarch64's pointer keys and memory tags
                raise _OddUnwindError(f"a CIE with augmentation {text!r}")
    if place > stop:
        raise _OddUnwindError("a CIE that is too short")
    return _Cie(start, stop, lsda, 2 * _SIZES[code & 0x0F], bool(text))


def _leb(raw: bytes | memoryview, place: int) -> tuple[int, int]:
    """Read an unsigned LEB128 number; return it and the place behind it."""
    value = shift = 0
    while True:
        byte = raw[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place


def _skip_leb(raw: bytes | memoryview, place: int) -> int:
    while raw[place] & 0x80:
        place += 1
    return place + 1


def _pointer(raw: bytes, place: int, encoding: int, base: int) -> int:
    """Read a pointer to an LSDA; 0 is none."""
    if encoding & _INDIRECT or encoding & 0x70 not in (0, 0x10):
        raise _OddUnwindError(f"pointers of encoding {encoding:#x}")
    value: int = struct.unpack_from(_CODES[encoding & 0x0F], raw, place)[0]
    if value and encoding & 0x70:
        value = (value + base + place) & 0xFFFFFFFFFFFFFFFF
    return value
