"""Cut code off at each place in turn where a signal's exception may come.

CPython looks for signals behind calls, at the begin of functions and at jumps backward. A `with`
statement of a lock is left alone: nothing comes between the taking of the lock and the block, nor
between the block and the release, and a tracer could not tell.
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
    """What a signal's handler raises."""


def cut_everywhere(make: Callable[[], Made], run: Callable[[Made], object]) -> Iterator[Made]:
    """Yield what `make` made, once for each place of hastore's code that `run` came to.

    The last one was not cut off at all.
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
        self._looked: set[FrameType] = set()  # frames whose last instruction looks for signals

    def cut(self, run: Callable[[Made], object], made: Made) -> bool:
        before = sys.gettrace()
        gc.disable()  # no finalizer of something else is to be cut off
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
            line = linecache.getline(code.co_filename, frame.f_lineno)
            if not line.lstrip().startswith("with "):
                self._detached -= 1
                if self._detached == -1:
                    raise Cut
        if code.co_code[frame.f_lasti] in _LOOKS:
            self._looked.add(frame)
