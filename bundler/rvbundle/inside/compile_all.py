"""Compile sources to bytecode that is the same every time: `compile_all.py < jobs.json > failures.json`.

A job is [source, destination, name in tracebacks, drop docstrings]. The bytecode is "unchecked-hash" (PEP
552): it is never compared with its source.
"""

import dis
import importlib.util
import inspect
import json
import multiprocessing
import os
import sys
import types
import warnings
from typing import Any, List, Optional


def _walk(code: types.CodeType, held: List[Any]) -> None:
    """Hold a second reference to every object of a code object.

    marshal writes a back-reference mark only for objects with more than one reference, and how many a
    string has depends on what this process compiled before (CPython issue 78274). With at least two
    everywhere the bytes depend on the source alone.
    """
    _hold(code.co_consts, held)
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        held.extend(names)
        held.append(names)
    held += [code.co_filename, code.co_name, code.co_code]
    held += [getattr(code, name, None) for name in ("co_qualname", "co_linetable", "co_exceptiontable")]


def _hold(value: Any, held: List[Any]) -> None:
    held.append(value)
    if isinstance(value, types.CodeType):
        _walk(value, held)
    elif isinstance(value, (tuple, frozenset)):
        for item in value:
            _hold(item, held)


def _without_docstrings(code: types.CodeType) -> types.CodeType:
    """Empty the docstrings of a code object and of those in it.

    They become "" rather than None, so that whoever handles a docstring as text still can. One that the
    code also uses otherwise (equal constants are one) stays.
    """
    consts = [_without_docstrings(c) if isinstance(c, types.CodeType) else c for c in code.co_consts]
    place = _docstring_place(code)
    if place is not None:
        consts[place] = ""
    return code.replace(co_consts=tuple(consts))


def _docstring_place(code: types.CodeType) -> Optional[int]:
    """Return which constant is the docstring and nothing else; None if there is none that can go."""
    if code.co_flags & inspect.CO_OPTIMIZED:  # a function: its first constant, which its code does not load
        flag = getattr(inspect, "CO_HAS_DOCSTRING", None)  # Python 3.13 and newer
        has = code.co_flags & flag if flag else not code.co_name.startswith("<")  # a lambda has none
        place, uses = (0, 0) if has and code.co_consts and isinstance(code.co_consts[0], str) else (-1, 0)
    else:  # a module or class: it begins with __doc__ = constant
        place, uses = _assigned_docstring(code), 1
    return place if place >= 0 and _count(code.co_code, dis.hasconst, place) == uses else None


def _assigned_docstring(code: types.CodeType) -> int:
    if "__doc__" not in code.co_names:
        return -1
    store = bytes([dis.opmap["STORE_NAME"], code.co_names.index("__doc__")])
    at = code.co_code.find(store)
    if at < 2 or at % 2 or code.co_code[at - 2] != dis.opmap["LOAD_CONST"]:
        return -1
    place = code.co_code[at - 1]
    return place if isinstance(code.co_consts[place], str) else -1


def _count(instructions: bytes, opcodes: List[int], argument: int) -> int:
    """Return how often one of the opcodes has an argument that ends in this byte."""
    found = 0
    for opcode in opcodes:
        pair = bytes([opcode, argument & 255])
        at = instructions.find(pair)
        while at >= 0:
            found += at % 2 == 0
            at = instructions.find(pair, at + 1)
    return found


# What a source that reads docstrings, or has them read, contains.
_DOCSTRING_READERS = (b"__doc__", b"getdoc")


def _compile(job: List[Any]) -> Optional[List[str]]:
    source, destination, name, drop = job
    import marshal

    with open(source, "rb") as file:
        data = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(data, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        return [source, f"{type(error).__name__}: {error}"]
    if drop and not any(word in data for word in _DOCSTRING_READERS):
        code = _without_docstrings(code)
    held: List[Any] = []
    _hold(code, held)
    body = marshal.dumps(code)
    flags = (0b01).to_bytes(4, "little")
    with open(destination, "wb") as file:
        file.write(importlib.util.MAGIC_NUMBER + flags + importlib.util.source_hash(data) + body)
    return None


def main() -> None:
    """Read the jobs, compile them on all cores, write the failures."""
    jobs = json.load(sys.stdin)
    sys.setrecursionlimit(10000)
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        failures = [f for f in pool.imap(_compile, jobs, 32) if f]
    json.dump(failures, sys.stdout)


if __name__ == "__main__":
    main()
