"""Run walks, each in a process of its own, which is forked from one that has loaded everything.

A walk replaces modules' globals, and leaves threads where they were killed. A fork has neither
before nor after it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import select
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.world import install
from tests.world.machines import make_small_files
from tests.world.plans import Outcome, Plan
from tests.world.walk import run_plan

LIMIT_S = 300.0  # of real time: for a thread of the product that never waits


def in_fork(call: Callable[[], dict[str, Any]], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return what `call` returns in a forked process; raises RuntimeError if it fails."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the other threads are not used
        child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            gc.disable()  # a finalizer must not run at another place in the next walk of this seed
            try:
                result = call()
            except BaseException:
                result = {"failure": traceback.format_exc()}
            with os.fdopen(writing, "w") as pipe:
                json.dump(result, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    data = bytearray()
    try:
        while select.select([reading], [], [], limit_s)[0]:
            piece = os.read(reading, 1 << 20)
            if not piece:
                break
            data += piece
        else:
            os.kill(child, signal.SIGKILL)
            raise RuntimeError(f"a walk takes longer than {limit_s:g} s of real time")
    finally:
        os.close(reading)
        os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(data or b'{"failure": "the process of the walk has died"}')
    if "failure" in found:
        raise RuntimeError(found["failure"])
    return found


def run(plan: Plan, *, before: Callable[[], object] = lambda: None, **how: Any) -> Outcome:
    """Run a plan in a fork; `before` may change the product there, to plant a mistake."""
    install.load_all()

    def walk() -> dict[str, Any]:
        install.install()
        make_small_files()
        before()
        outcome = run_plan(plan, **how)
        fields = [field.name for field in dataclasses.fields(outcome) if field.name != "plan"]
        return {name: getattr(outcome, name) for name in fields}

    found = in_fork(walk)
    return Outcome(plan=plan, **{**found, "fired": Counter(found["fired"])})
