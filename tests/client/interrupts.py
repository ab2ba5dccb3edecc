"""Interrupts code at every point in turn where a signal handler's exception may be raised.

CPython handles signals after calls, at the start of functions and at backward jumps. `with`
statements are left out: CPython handles no signal between taking a lock and the block, nor between
the block and the release, and a tracer cannot tell these points apart.
"""

from __future__ import annotations

import dis
import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

Made = TypeVar("Made")
_LOOKS = {
    number
    for name, number in dis.opmap.items()
    if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
}


class Cut(BaseException):
    """The exception of a signal handler."""


def interrupt_everywhere(make: Callable[[], Made], run: Callable[[Made], object]) -> Iterator[Made]:
    """Yield the objects of `make`, one for each point at which `run` was interrupted.

    Points are those in hastore's code. The last object's `run` was not interrupted.
    """
    place = 0
    while True:
        made = make()
        was_cut = _Cutter(place).cut(run, made)
        yield made
        if not was_cut:
            return
        place += 1


class _Cutter:
    def __init__(self, place: int) -> None:
        self._detached = place
        self._looked: set[FrameType] = set()  # frames whose last instruction handles signals

    def cut(self, run: Callable[[Made], object], made: Made) -> bool:
        before = sys.gettrace()
        gc.disable()  # so that no unrelated finalizer is interrupted
        sys._getframe().f_trace_opcodes = True  # before: Python 3.12 looks at it in `settrace`
        sys.settrace(self._trace)
        try:
            run(made)
        except Cut:
            return True
        finally:
            sys.settrace(before)
            gc.enable()
        return self._detached < 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("hastore."):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._step(frame)
        elif event == "return":
            self._looked.discard(frame)
        return self._trace

    def _step(self, frame: FrameType) -> None:
        code = frame.f_code
        if frame in self._looked:
            self._looked.discard(frame)
            line = linecache.getline(code.co_filename, frame.f_lineno or 0)  # 0: of no line
            if not line.lstrip().startswith("with "):
                self._detached -= 1
                if self._detached == -1:
                    raise Cut
        if code.co_code[frame.f_lasti] in _LOOKS:
            self._looked.add(frame)
