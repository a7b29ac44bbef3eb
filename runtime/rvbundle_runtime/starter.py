"""The program that starts an emulator with its options: runtime/native/starter.c and settings. Pure."""

import errno
import os

from rvbundle_runtime.launchers import Start

_SETTINGS, _SETTINGS_SIZE = b"rvbundle starter: the settings go here\n\0", 8192  # as in starter.c
_MARK_AT = 15  # the last byte of e_ident's padding, which nobody looks at


def with_settings(starter: bytes, start: Start, plain: bool = False) -> bytes:
    """Return the program `starter` with the settings of `start`; raises OSError if there are too many.

    `plain`: it is executed by its name, and not by the kernel for another program.
    """
    texts = [
        *(["p"] if plain else []),
        *(f"w{word}" for word in start.words),
        *([f"0{start.argv0}"] if start.argv0 else []),
    ]
    texts += [f"a{start.argv0_variable}"] if start.argv0_variable else []
    texts += [f"v{name}={value}" for name, value in start.env.items()]
    settings = b"".join(os.fsencode(text) + b"\0" for text in texts)
    place = starter.index(_SETTINGS)
    if len(settings) >= _SETTINGS_SIZE:
        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG), "settings of the emulator")
    data = bytearray(starter)
    data[place : place + _SETTINGS_SIZE] = settings.ljust(_SETTINGS_SIZE, b"\0")
    return bytes(data)


def marked(program: bytes) -> bytes:
    """Return a program that no rule matches: else the kernel would run an emulator by itself, and so on.

    That matters where it is for the architecture that it emulates.
    """
    data = bytearray(program)
    data[_MARK_AT] = 1
    return bytes(data)
