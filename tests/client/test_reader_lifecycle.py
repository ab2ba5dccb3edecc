"""Consumer, Admin and Positions: dropped, open at exit, forked, pickled."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from hastore import Admin, Consumer, aio
from hastore.client.consumer.positions_client import Positions
from hastore.errors import ClientError, UsageError
from tests.client.conftest import Node
from tests.client.consumer.test_consumer_positions import fill

ROOT = pathlib.Path(__file__).parent.parent.parent
Use = Callable[[list[str]], Any]


def consumer(hosts: list[str]) -> Any:
    made = Consumer("t", hosts, timeout_s=120.0)
    assert made.poll(timeout_s=60.0)
    return made


def consumer_in_a_loop(hosts: list[str]) -> Any:
    made = Consumer("t", hosts, timeout_s=120.0)
    for _ in made:
        break
    return made


def admin(hosts: list[str]) -> Any:
    made = Admin(hosts, timeout_s=120.0)
    assert made.topics()
    return made


def positions(hosts: list[str]) -> Any:
    made = Positions(hosts, timeout_s=120.0)
    made.all()
    return made


def async_consumer(hosts: list[str]) -> Any:
    made = aio.Consumer("t", hosts, timeout_s=120.0)

    async def use() -> None:
        assert await made.poll(timeout_s=60.0)

    asyncio.run(use())
    return made


def async_admin(hosts: list[str]) -> Any:
    made = aio.Admin(hosts, timeout_s=120.0)

    async def use() -> None:
        assert await made.topics()

    asyncio.run(use())
    return made


USES: list[Use] = [
    consumer, consumer_in_a_loop, admin, positions, async_consumer, async_admin
]  # fmt: skip
uses = pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def quiet(node: Node) -> None:
    """Wait until the node has closed the connections that its clients closed."""
    limit = time.monotonic() + 60.0
    while True:
        with node.server._io_lock:  # it closes a socket a moment after it stops counting it
            if not node.server._connections.count:
                return
        assert time.monotonic() < limit
        time.sleep(0.01)


def closed_down_to(before: int) -> bool:
    """Wait until as many descriptors are open as before: ZeroMQ closes its own in its thread."""
    limit = time.monotonic() + 60.0
    while descriptors() > before and time.monotonic() < limit:
        time.sleep(0.01)
    return descriptors() <= before


@uses
@pytest.mark.parametrize("scheme", ["tcp", "zmq+tcp"])
def test_dropped_ones_leave_nothing_and_are_named(node: Node, use: Use, scheme: str) -> None:
    fill(node, 40)
    hosts = [node.address.replace("tcp", scheme)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        use(hosts)  # some descriptors are made once and stay
    gc.collect()
    quiet(node)
    before, threads = descriptors(), set(threading.enumerate())
    for _ in range(5):
        with pytest.warns(ResourceWarning) as told:
            use(hosts)
            gc.collect()
        (text,) = {str(each.message) for each in told}
        assert text.endswith("was not closed") and text.split()[0].lower().endswith(
            use.__name__.split("_")[-1] if "loop" not in use.__name__ else "consumer"
        )
    quiet(node)
    assert closed_down_to(before)
    assert set(threading.enumerate()) <= threads


@uses
def test_one_in_a_reference_cycle_is_closed_by_the_collector(node: Node, use: Use) -> None:
    fill(node, 40)
    cycle: list[Any] = [use([node.address])]
    cycle.append(cycle)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del cycle
        gc.collect()
    quiet(node)


@uses
def test_close_releases_everything_without_a_warning(node: Node, use: Use) -> None:
    fill(node, 40)
    gc.collect()
    quiet(node)
    before = descriptors()
    made = use([node.address])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            ended = made.close()
            if ended is not None:
                asyncio.run(ended)
        del made, ended
        gc.collect()
    quiet(node)
    assert descriptors() == before


@uses
def test_none_is_pickled_or_copied(node: Node, use: Use) -> None:
    fill(node, 40)
    made = use([node.address])
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UsageError, match="make one in each process"):
            act(made)
    ended = made.close()
    if ended is not None:
        asyncio.run(ended)


def sleeping(made: Any) -> threading.Event:
    """Return what is set once a call of a client waits for its nodes."""
    inside = threading.Event()
    transport = made._core.requester.transport
    real = transport.sleep

    def sleep(timeout_s: float) -> None:
        inside.set()
        real(timeout_s)

    transport.sleep = sleep
    return inside


def run_script(node: Node, body: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, which has `hosts` and the uses."""
    script = f"hosts = [{node.address!r}]\n" + textwrap.dedent(
        """
        import asyncio, os, sys, warnings
        sys.path.insert(0, {root!r})
        from tests.client.test_reader_lifecycle import *
        """
    ).format(root=str(ROOT))
    return subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", script + textwrap.dedent(body)],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip


@uses
def test_clients_open_at_exit_are_named_and_do_not_delay_it(node: Node, use: Use) -> None:
    fill(node, 40)
    ended = run_script(
        node,
        f"""
        made = [{use.__name__}(hosts) for _ in range(12)]
        print("last line")
        """,
    )
    assert (ended.returncode, ended.stdout) == (0, "last line\n"), ended.stderr
    assert ended.stderr.count("was not closed") == 12, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_poll_in_a_daemon_thread_does_not_delay_the_exit(node: Node) -> None:
    ended = run_script(
        node,
        """
        made = Consumer("t", hosts)
        inside = sleeping(made)
        thread = threading.Thread(target=made.poll, args=(1, 60.0), daemon=True)
        thread.start()
        assert inside.wait(60)
        print("last line")
        """,
    )
    assert (ended.returncode, ended.stdout) == (0, "last line\n"), ended.stderr


@uses
def test_in_a_forked_child_each_use_raises_at_once(node: Node, use: Use) -> None:
    fill(node, 400)
    ended = run_script(
        node,
        f"""
        made = {use.__name__}(hosts)
        warnings.simplefilter("error")
        calls = {{
            "seek_to_earliest": (), "__iter__": (), "__aiter__": (), "poll": (1, 120.0),
            "seek": (0, 0), "positions": (), "topics": (), "status": (), "maps": (), "all": (),
            "query_key": ("t", "k"), "commit": ("g", "t", {{0: 1}}), "committed": ("g", "t"),
        }}
        calls = {{name: given for name, given in calls.items() if hasattr(made, name)}}
        if "poll" in calls:
            calls |= {{"commit": (), "committed": ()}}

        def call(name, *given):
            got = getattr(made, name)(*given)
            if hasattr(got, "__await__"):
                got = asyncio.run(got)
            elif hasattr(got, "__anext__"):
                asyncio.run(first(got))
            elif hasattr(got, "__next__"):
                next(got)
            return got

        async def first(got):
            async for each in got:
                return each

        child = os.fork()
        if not child:
            for name, given in calls.items():
                began = time.monotonic()
                try:
                    call(name, *given)
                except ClientError as failure:
                    assert "forked" in str(failure), failure
                else:
                    raise AssertionError(name)
                assert time.monotonic() - began < 60.0
            ended = made.close()
            if ended is not None:
                asyncio.run(ended)
            own = admin(hosts)  # made here, it works
            own.close()
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        for name, given in calls.items():
            if "commit" not in name or "poll" not in calls:  # it has no group
                call(name, *given)
        ended = made.close()
        if ended is not None:
            asyncio.run(ended)
        print("last line")
        """,
    )
    assert (ended.returncode, ended.stdout) == (0, "last line\n"), ended.stderr
    assert not ended.stderr


def test_a_child_forked_in_the_middle_of_a_poll(node: Node) -> None:
    """A thread that the child does not have holds the lock of the poll."""
    ended = run_script(
        node,
        """
        made = Consumer("t", hosts)
        got = []
        inside = sleeping(made)
        thread = threading.Thread(target=lambda: got.append(made.poll(1, 600.0)))
        thread.start()
        assert inside.wait(60)
        child = os.fork()
        if not child:
            try:
                made.poll()
            except ClientError:
                made.close()
                sys.exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        made.close()
        thread.join(60)
        assert got == [[]], got
        print("last line")
        """,
    )
    assert (ended.returncode, ended.stdout) == (0, "last line\n"), ended.stderr


def test_an_error_names_the_client(node: Node) -> None:
    made = Consumer("orders", [node.address])
    made.close()
    with pytest.raises(ClientError, match=f"^Consumer of orders at {node.address} is closed$"):
        made.poll()
