"""Compile sources to bytecode that is the same every time: `compile_all.py < jobs.json > failures.json`.

A job is [source, destination, name in tracebacks]. The bytecode is "unchecked-hash" (PEP 552): it is
never compared with its source.
"""

import importlib.util
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


def _compile(job: List[str]) -> Optional[List[str]]:
    source, destination, name = job
    import marshal

    with open(source, "rb") as file:
        data = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(data, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        return [source, f"{type(error).__name__}: {error}"]
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
