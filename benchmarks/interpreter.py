"""Describe the running Python, and whether it was built with profile-guided optimisation (PGO).

Python code runs slower without PGO, so each result names its interpreter.
"""

import os
import platform
import sys
import sysconfig
from typing import Any

_SIGNS = ("--enable-optimizations", "-fprofile-use")
_FLAGS = ("CONFIG_ARGS", "PY_CFLAGS", "PY_CFLAGS_NODIST")
# All of these are in listobject.c, whose code takes some 20 KiB. With a profile the compiler places
# hot and cold functions in separate sections, more than a MiB apart.
_ONE_FILE = ("PyList_New", "PyList_Append", "PyList_Insert", "PyList_GetItem", "PyList_Reverse")
_APART_BYTES = 256 * 1024


def spread_bytes() -> int | None:
    """Return the distance between the functions of one source file; None if it is unknown."""
    try:
        import ctypes

        functions = [getattr(ctypes.pythonapi, name) for name in _ONE_FILE]
        places = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    except (ImportError, AttributeError):  # not CPython, or without ctypes
        return None
    found = [place for place in places if place]
    return max(found) - min(found)


def pgo() -> tuple[bool | None, str]:
    """Return whether this interpreter was built with PGO (None: unknown), and the evidence.

    Debian builds with PGO but does not record the flags in sysconfig; the layout of the code then
    shows it.
    """
    flags = " ".join(str(sysconfig.get_config_var(name) or "") for name in _FLAGS)
    for sign in _SIGNS:
        if sign in flags:
            return True, sign
    spread = spread_bytes()
    if spread is None:
        return None, "neither flags nor layout"
    return spread > _APART_BYTES, "the layout of its code"


def describe() -> dict[str, Any]:
    """Return a description of this interpreter, without a path of the machine."""
    built, seen_by = pgo()
    return {
        "implementation": platform.python_implementation(),
        "version": platform.python_version(),
        "name": os.path.basename(os.path.realpath(sys.executable)),
        "compiler": platform.python_compiler(),
        "pgo": built,
        "pgo_seen_by": seen_by,
    }


def text_of(machine: dict[str, Any]) -> str:
    """Return the interpreter of a result's machine as text for a report."""
    one = machine.get("interpreter")
    if one is None:  # an old result, which did not record it
        return f"Python {machine['python']}"
    built = {True: "built with PGO", False: "built without PGO", None: "PGO unknown"}[one["pgo"]]
    return f"{one['implementation']} {one['version']} ({one['name']}, {one['compiler']}, {built})"
