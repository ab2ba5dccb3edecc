"""Run walks, each in a process of its own, forked from one that has loaded everything and done
nothing else.

A walk replaces modules' globals, and leaves threads where they were killed. And it must not depend
on what the tests of this process have done before, or on the order of a set of strings: modules
keep things, and Python hashes strings anew in each process unless it is told a seed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from tests.world import install
from tests.world.machines import make_small_files
from tests.world.plans import Outcome, Plan
from tests.world.walk import run_plan

HASHES = "PYTHONHASHSEED"
LIMIT_S = 300.0  # of real time: for a thread of the product that never waits


def _nothing() -> None:
    return


def _walk(
    plan: Plan, before: Callable[[], object], how: dict[str, Any], answer: Connection
) -> None:
    """Take one walk; send what came of it, or the stack of what has failed."""
    gc.disable()  # a finalizer must not run at another place in the next walk of this seed
    try:
        install.load_all()  # the process that forks has done that, if all went well there
        install.install()
        make_small_files()
        before()
        found: Outcome | str = run_plan(plan, **how)
    except BaseException:
        found = traceback.format_exc()
    answer.send(found)


def run(plan: Plan, *, before: Callable[[], object] = _nothing, **how: Any) -> Outcome:
    """Run a plan; `before` (a function of a module) may change the product there, to plant a
    mistake. Raises RuntimeError if the world itself fails, or takes too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.world.loaded"])
    with mock.patch.dict(os.environ, {HASHES: "0"}):
        forkserver.ensure_running()
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=_walk, args=(plan, before, how, writing), daemon=True)
    child.start()
    writing.close()
    try:
        if not reading.poll(LIMIT_S):
            raise RuntimeError(f"a walk takes longer than {LIMIT_S:g} s of real time")
        found: Outcome | str = reading.recv()
    except EOFError as gone:
        raise RuntimeError("the process of the walk has died") from gone
    finally:
        reading.close()
        child.kill()
        child.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found
