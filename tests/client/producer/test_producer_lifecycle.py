"""A producer that is dropped, open at exit, forked, pickled or interrupted."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from hastore import Producer
from hastore.client.producer import cluster_producer
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    ClientError,
    HastoreError,
    MessageIllegalError,
    NotStoredError,
    OutcomeUnknown,
    UsageError,
)
from hastore.registry.cluster_watch import GroupSeen
from tests.api_fakes import ILLEGAL, FakePut
from tests.client.conftest import Node
from tests.client.interrupts import interrupt_everywhere
from tests.client.producer.test_producer import bodies

ROOT = pathlib.Path(__file__).resolve().parents[3]
NOBODY = "tcp://127.0.0.1:9"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def sender_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ProducerSender"]


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def run(script: str, *arguments: str, timeout_s: float = 120.0) -> tuple[str, str]:
    """Run a Python program in a process of its own; return its stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_dropped_it_warns_and_goes_on_with_what_is_under_way(node: Node) -> None:
    node.backend.transfer.hold = True
    producer = Producer([node.address], linger_ms=60_000, delivery_timeout_s=120)
    future = producer.send("t", b"1", queue=0)
    with pytest.warns(ResourceWarning, match="not closed: messages not acknowledged: 1 to 't'"):
        del producer
        gc.collect()
    wait_for(lambda: node.backend.transfer.waiting)
    node.backend.transfer.hold = False
    node.backend.transfer.end_all()
    assert future.result(60).queue_offset == 0
    wait_for(lambda: not sender_threads())


def test_dropped_it_gives_up_at_the_delivery_timeout() -> None:
    producer = Producer([NOBODY], delivery_timeout_s=0.2)
    future = producer.send("t", b"1", queue=0)
    with pytest.warns(ResourceWarning, match="127.0.0.1:9 was not closed"):
        del producer
        gc.collect()
    assert isinstance(future.exception(5), ClientError)
    wait_for(lambda: not sender_threads())


def test_dropped_with_an_unanswered_put_it_ends_at_the_delivery_timeout(node: Node) -> None:
    node.backend.transfer.hold = True
    producer = Producer([node.address], delivery_timeout_s=0.3)
    future = producer.send("t", b"1", queue=0)
    wait_for(lambda: node.backend.transfer.waiting)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del producer
        gc.collect()
    assert isinstance(future.exception(5), OutcomeUnknown)
    wait_for(lambda: not sender_threads(), 2.0)


@pytest.mark.parametrize("scheme", ["tcp", "zmq+tcp"])
def test_dropped_ones_leave_no_thread_and_no_descriptor(node: Node, scheme: str) -> None:
    address = node.address.replace("tcp", scheme, 1)
    with Producer([address]) as producer:
        producer.send_sync("t", b"0", queue=0)
    gc.collect()
    before = descriptors()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(50):
            producer = Producer([address])
            if number % 2:
                producer.send_sync("t", b"1", queue=0)
            else:
                producer.send("t", b"1", queue=0)
        del producer
        gc.collect()
    assert sum("was not closed" in str(each.message) for each in caught) == 50
    wait_for(lambda: not sender_threads())
    gc.collect()
    wait_for(lambda: descriptors() <= before)  # the node closes its ends too


def test_dropped_in_its_own_thread(node: Node) -> None:
    """A callback held the last reference."""
    node.backend.transfer.hold = True
    held = [Producer([node.address])]
    future = held[0].send("t", b"1", queue=0)
    dropped = threading.Event()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        future.add_done_callback(lambda _: (held.clear(), dropped.set()))
        wait_for(lambda: node.backend.transfer.waiting)
        node.backend.transfer.end_all()
        assert dropped.wait(60)
        wait_for(lambda: not sender_threads())


def test_a_callback_that_waits_for_its_own_thread_is_told_so(node: Node) -> None:
    node.backend.transfer.hold = True
    with Producer([node.address], max_in_flight=2) as producer:
        futures = [producer.send("t", b"1", queue=0) for _ in range(2)]
        said: list[BaseException] = []

        def refill(_: object) -> None:
            try:
                producer.send("t", b"2", queue=0)
                producer.send("t", b"3", queue=0)
            except ClientError as failure:
                said.append(failure)

        def wait(_: object) -> None:
            try:
                producer.flush()
            except ClientError as failure:
                said.append(failure)

        futures[0].add_done_callback(refill)
        futures[1].add_done_callback(wait)
        wait_for(lambda: node.backend.transfer.waiting)
        node.backend.transfer.end_all()
        wait_for(lambda: said)
        node.backend.transfer.hold = False
        node.backend.transfer.end_all()
        assert all("callback" in str(failure) for failure in said)


class OneGroup:
    """What a cluster of one group is known to have, without ZooKeeper."""

    problem = None

    def __init__(self, address: str) -> None:
        self.groups = {"g0": GroupSeen((address,), ())}

    def with_topic(self, _topic: str) -> list[str]:
        return list(self.groups)

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> None: ...


class Inside:
    """A clock that is read in the middle of a send: there garbage may be collected as well."""

    monotonic_ms = staticmethod(SYSTEM_CLOCK.monotonic_ms)

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.said: list[str] = []

    def wall_ms(self) -> int:
        if self.calls:
            try:
                self.calls.pop()()
            except ClientError as refused:
                self.said.append(str(refused))
        return SYSTEM_CLOCK.wall_ms()


def test_a_finalizer_that_runs_in_the_middle_of_a_send_is_told_so(node: Node) -> None:
    """Such as a connection's that logs a line, by a handler that ships it. It waited for ever."""
    clock, results = Inside(), list[Any]()

    def work() -> None:
        with Producer([node.address], clock=clock) as producer:
            clock.calls = [
                lambda: producer.send("t", b"x", queue=0),
                lambda: producer.send_sync("t", b"x", queue=0),
                lambda: producer.send_batch("t", [b"x"], queue=0),
                producer.close,
            ]
            sent: list[Any] = [producer.send("t", b"%d" % n, queue=0) for n in range(2)]
            sent += [producer.send_batch("t", [b"%d" % n], queue=0) for n in range(2, 4)]
            results.extend(each.result(60) for each in sent)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert len(results) == 4 and len(clock.said) == 4
    assert all("in the middle of a call" in each for each in clock.said)
    assert bodies(node) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("call", ["send_sync", "transaction", "flush"])
def test_a_callback_that_would_wait_is_refused_before_it_sends(
    node: Node, monkeypatch: pytest.MonkeyPatch, whole: bool, call: str
) -> None:
    """What it waits for, its own thread would have to do."""
    address: Any = [node.address]
    more: dict[str, Any] = {}
    if whole:
        monkeypatch.setattr(cluster_producer, "ClusterGroups", lambda *_: OneGroup(node.address))
        address = "zk://127.0.0.1:1/shop"
    elif call == "transaction":
        more = {"transaction_group": "g"}
    with Producer(address, delivery_timeout_s=20.0, **more) as producer:
        producer.send_sync("t", b"0")
        node.backend.transfer.hold = True
        said: list[BaseException] = []

        def wait(_: object) -> None:
            producer.send("t", b"2")  # it need not wait
            try:
                if call == "flush":
                    producer.flush()
                else:
                    getattr(producer, call)("t", b"3")
            except HastoreError as failure:
                said.append(failure)

        first = producer.send("t", b"1")
        first.add_done_callback(wait)
        wait_for(lambda: node.backend.transfer.waiting)
        node.backend.transfer.hold = False
        node.backend.transfer.end_all()
        wait_for(lambda: said, 10.0)
        wanted = "one group" if whole and call == "transaction" else "callback must not wait"
        assert wanted in str(said[0])
        assert producer.flush(60.0)
    assert sorted(bodies(node)) == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    "wrong",
    [{"topic": "a b"}, {"body": b"x" * (4 * 1024 * 1024 + 1)}, {"tags": 7}, {"delay_level": 0}],
    ids=["topic", "body", "tags", "delay_level"],
)
def test_wrong_arguments_for_a_whole_cluster_are_refused_at_once(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    """Also while no group has a master: that would take the delivery timeout."""
    node = make_node(writable=False)
    monkeypatch.setattr(cluster_producer, "ClusterGroups", lambda *_: OneGroup(node.address))
    with Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=3.0) as producer:
        with pytest.raises(UsageError):
            producer.send(**{"topic": "t", "body": b"", **wrong})


EXIT = """
import sys
from hastore import Producer
producer = Producer([sys.argv[1]], delivery_timeout_s=600)
producer.send("orders", b"1", queue=0)
producer.send("orders", b"2", queue=0)
"""


def test_at_exit_it_says_what_was_not_acknowledged(node: Node) -> None:
    node.backend.transfer.hold = True
    for address in (node.address, NOBODY):
        _, said = run(EXIT, address)  # without waiting ten minutes for the puts
        assert "was not closed: messages not acknowledged: 2 to 'orders'" in said
    _, said = run(EXIT + "producer.close(0)", NOBODY)
    assert "was not closed" not in said
    assert "nobody has asked: 2; the last failure: SERVICE_NOT_AVAILABLE" in said


CHILD = """
import multiprocessing, sys
from hastore import Producer

def work(address, closes):
    global producer
    producer = Producer([address], delivery_timeout_s=600)
    producer.send("orders", b"1", queue=0)
    if closes:
        multiprocessing.util.Finalize(None, producer.close, (0,), exitpriority=0)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    child = context.Process(target=work, args=(sys.argv[1], sys.argv[3] == "closes"))
    child.start()
    child.join()
    assert child.exitcode == 0
"""


@pytest.mark.parametrize("kind", ["fork", "forkserver", "spawn"])
def test_a_child_of_multiprocessing_says_what_was_not_acknowledged(
    tmp_path: pathlib.Path, kind: str
) -> None:
    """Only a spawned one calls atexit handlers."""
    (tmp_path / "child.py").write_text(CHILD)
    path = str(tmp_path / "child.py")
    run_it = f"import runpy; runpy.run_path({path!r}, run_name='__main__')"
    _, said = run(run_it, NOBODY, kind, "leaves")
    assert said.count("was not closed: messages not acknowledged: 1 to 'orders'") == 1
    assert "was not closed" not in run(run_it, NOBODY, kind, "closes")[1]


CLOSED_IN_ATEXIT = """
import atexit, os, sys, threading, time

clients, sent = [], []

def shutdown():
    files = [os.memfd_create("a file") for _ in range(16)]  # these get the freed descriptors
    for client in clients:
        client.close()
    print(sent[0], [os.pread(file, 99, 0) for file in files if os.fstat(file).st_size], flush=True)

def tell():
    while not clients[0]._window.closed:
        time.sleep(0.001)
    print("closing", flush=True)

if sys.argv[2] == "before":
    atexit.register(shutdown)
from hastore import Admin, Consumer, Producer
if sys.argv[2] == "after":
    atexit.register(shutdown)

clients.append(Producer([sys.argv[1]], delivery_timeout_s=600))
clients.append(Consumer("t", [sys.argv[1]]))
clients.append(Consumer("t", [sys.argv[1]], group="g", share=True))
clients.append(Admin([sys.argv[1]]))
threading.Thread(target=tell, daemon=True).start()
sent.append(clients[0].send("t", b"1", queue=0))
"""


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("scheme", ["tcp", "zmq+tcp"])
def test_an_atexit_handler_may_close_clients(node: Node, scheme: str, registered: str) -> None:
    """The handler comes after the exit's warning if it was registered before the import."""
    node.backend.transfer.hold = True
    address = node.address.replace("tcp", scheme, 1)
    with subprocess.Popen(
        [sys.executable, "-c", CLOSED_IN_ATEXIT, address, registered],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "closing\n"
            wait_for(lambda: node.backend.transfer.waiting)
            node.backend.transfer.end_all()
            said = process.stdout.readline()
            assert "returned SendResult" in said and said.endswith("> []\n"), said
            assert ("was not closed" in process.stderr.read()) == (registered == "before")
            assert process.wait(60) == 0
        finally:
            process.kill()


MADE_IN_ATEXIT = """
import atexit, sys, threading
from hastore import Consumer, Producer
from hastore.errors import NotStoredError

def no_thread(*arguments, **more):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def shutdown():
    for name in ("_start_new_thread", "_start_joinable_thread"):  # the latter from Python 3.13 on
        if hasattr(threading, name):
            setattr(threading, name, no_thread)
    nodes, ended = [sys.argv[1].replace("127.0.0.1", "localhost")], []
    with Producer(nodes, linger_ms=5) as producer:
        producer.send_sync("t", b"1", queue=0)
        producer.send("t", b"2", queue=0).add_done_callback(ended.append)
        producer.send_batch("t", [b"3", b"4"], queue=0).result(60)
        waits = producer.send("t", b"5", queue=0)
        waits.add_done_callback(lambda _: ended.append(producer.send("t", b"6", queue=0)))
        assert producer.flush(60)
    assert [future.exception(0) for future in ended] == [None, None]
    with Producer(["tcp://127.0.0.1:9"], delivery_timeout_s=0.1) as producer:
        late = producer.send("t", b"7", queue=0)
        assert isinstance(late.exception(0), NotStoredError)  # the time of `send` is bounded
    with Consumer("t", nodes) as consumer:
        print(consumer.poll(timeout_s=60)[0].body, flush=True)

atexit.register(shutdown)
"""


def test_an_atexit_handler_may_make_clients(node: Node) -> None:
    """Python 3.12 begins no thread any more once its exit has begun; here no version does."""
    said, errors = run(MADE_IN_ATEXIT, node.address)
    assert (said, errors) == ("b'1'\n", "")
    assert bodies(node) == [b"1", b"2", b"3", b"4", b"5", b"6"]


USED_IN_A_FINALIZER = """
import sys
from hastore import Producer
from hastore.errors import ClientError, HastoreError

class Owner:
    def __init__(self, do):
        self.do = do
        self.producer = Producer([sys.argv[1]], delivery_timeout_s=600)
        self.sent = self.producer.send("t", b"first", queue=0)

    def __del__(self):
        self.do(self)

def told(owner):
    try:
        owner.sent.result()
    except ClientError as failure:
        assert "its threads are stopped" in str(failure), failure

def do(owner):
    told(owner)
    assert owner.producer.flush()
    owner.producer.send_sync("t", b"sync", queue=0)
    owner.producer.send("t", b"result", queue=0).result()
    owner.producer.send_batch("t", [b"batch"], queue=0).result()
    owner.sent.result()
    owner.producer.close()
    print("closed", flush=True)

def close(owner):
    owner.producer.close()
    print(owner.sent.result().queue_offset, flush=True)

def give_up(owner):
    owner.producer.close(0)
    assert isinstance(owner.sent.exception(), HastoreError)  # NotStoredError if it was not sent
    print("gave up", flush=True)

owner = Owner(globals()[sys.argv[2]])
"""


def test_a_finalizer_at_exit_may_use_a_producer(node: Node) -> None:
    """After the atexit handlers no thread runs any more: the finalizer must not wait for one."""
    assert run(USED_IN_A_FINALIZER, node.address, "do")[0] == "closed\n"
    assert bodies(node) == [b"first", b"sync", b"result", b"batch"]
    assert run(USED_IN_A_FINALIZER, node.address, "close")[0] == "4\n"
    node.backend.transfer.hold = True
    assert run(USED_IN_A_FINALIZER, node.address, "give_up")[0] == "gave up\n"


FORK = """
import warnings
warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # of Python 3.12 and later
import os, sys, threading, time
from hastore import Producer
from hastore.errors import ClientError, OutcomeUnknown

producer = Producer([sys.argv[1]], max_in_flight=4, delivery_timeout_s=120)
producer.send_sync("t", b"first", queue=0)
ended, sent = threading.Event(), []

def work():
    while not ended.is_set():
        sent.append(producer.send_sync("t", b"other", queue=0) if len(sent) % 2 else
                    producer.send("t", b"other", queue=0).result(60))

def refused(what):
    began = time.monotonic()
    try:
        what()
    except ClientError as failure:
        assert "fork" in str(failure), failure
        assert time.monotonic() - began < 60.0
        return
    raise AssertionError("it was not refused")

def child(number, future):
    refused(lambda: producer.send("t", b"child"))
    refused(lambda: producer.send_sync("t", b"child", queue=0))
    refused(lambda: producer.send_batch("t", [b"child"]))
    refused(lambda: producer.flush())
    try:
        future.result(60)  # settled before, or at once
    except OutcomeUnknown as failure:
        assert "forked" in str(failure)
    producer.close()
    with producer:
        pass
    with Producer([sys.argv[1]]) as own:
        own.send_sync("t", b"own", queue=1)

threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
for number in range(20):
    future = producer.send("t", b"main", queue=2)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            child(number, future)
            code = 0
        finally:
            if number % 2:
                os._exit(code)
            sys.exit(code)
    assert os.waitpid(pid, 0)[1] == 0, number
    assert future.result(60).offset is not None
before = len(sent)
while len(sent) < before + 50:
    time.sleep(0.01)
ended.set()
for thread in threads:
    thread.join()
producer.close()
print(len(sent))
"""


@pytest.mark.parametrize("scheme", ["tcp", "zmq+tcp"])
def test_in_a_forked_child_calls_raise_and_the_parent_goes_on(node: Node, scheme: str) -> None:
    said, errors = run(FORK, node.address.replace("tcp", scheme, 1))
    assert errors == ""
    queues = node.backend.store.units
    assert int(said) == len(queues["t", 0]) - 1
    assert len(queues["t", 1]) == len(queues["t", 2]) == 20


def test_close_waits_no_longer_than_its_time_for_a_callback(node: Node) -> None:
    """What is unsettled ends after the callback, in whose thread."""
    entered, leave = threading.Event(), threading.Event()
    producer = Producer([node.address])
    node.backend.transfer.hold = True
    first = producer.send("t", b"1", queue=0)
    first.add_done_callback(lambda _: (entered.set(), leave.wait(60)))  # not in this thread
    wait_for(lambda: node.backend.transfer.waiting)
    node.backend.transfer.end_all()
    assert entered.wait(60)
    node.backend.transfer.hold = True
    second = producer.send("t", b"2", queue=0)
    try:
        began = time.monotonic()
        producer.close(timeout_s=0.05)
        assert time.monotonic() - began < 4.0
        assert not second.done()
    finally:
        leave.set()
    assert isinstance(second.exception(60), NotStoredError | OutcomeUnknown)
    wait_for(lambda: not producer._driver._thread.is_alive())


def test_a_second_close_does_not_give_up_what_the_first_waits_for(node: Node) -> None:
    node.backend.transfer.hold = True
    producer = Producer([node.address])
    future = producer.send("t", b"1", queue=0)
    wait_for(lambda: node.backend.transfer.waiting)
    closes = [threading.Thread(target=producer.close) for _ in range(2)]
    closes[0].start()
    wait_for(lambda: producer._window.closed)
    producer.close(0.01)
    closes[1].start()
    assert not future.done() and closes[0].is_alive()
    node.backend.transfer.end_all()
    for close in closes:
        close.join(60)
    assert future.result(60).queue_offset == 0
    assert not producer._driver._thread.is_alive()


@pytest.mark.parametrize("whole", [False, True])
def test_close_in_a_callback_raises_and_changes_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(cluster_producer, "ClusterGroups", lambda *_: OneGroup(node.address))
    address: Any = "zk://127.0.0.1:1/shop" if whole else [node.address]
    with Producer(address) as producer:
        node.backend.transfer.hold = True
        said: list[BaseException] = []

        def close(_: object) -> None:
            try:
                producer.close()
            except ClientError as failure:
                said.append(failure)

        futures = [producer.send("t", b"%d" % number) for number in range(3)]
        futures[0].add_done_callback(close)
        wait_for(lambda: node.backend.transfer.waiting)
        node.backend.transfer.hold = False
        node.backend.transfer.end_all()
        assert all(future.result(60).offset is not None for future in futures)
        wait_for(lambda: said)
        assert "callback must not wait" in str(said[0])
        producer.send_sync("t", b"3")


@pytest.mark.parametrize("whole", [False, True])
def test_its_end_says_how_many_failed_sends_nobody_has_asked(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    """As in fire and forget, where each Future is dropped."""
    monkeypatch.setattr(cluster_producer, "ClusterGroups", lambda *_: OneGroup(node.address))
    address: Any = "zk://127.0.0.1:1/shop" if whole else [node.address]
    with Producer(address) as producer:
        producer.send("t", b"stored, and not asked")
    assert not caplog.records
    with Producer(address) as producer:
        refused = FakePut(ILLEGAL, reason="refused")
        monkeypatch.setattr(node.backend.store, "_put_one", lambda *_: refused)
        for _ in range(2):
            producer.send("t", b"1")
        producer.send_batch("t", [b"2"] * 600)  # in parts, with one Future
        asked, raised, called = (producer.send("t", b"3") for _ in range(3))
        assert isinstance(asked.exception(60), MessageIllegalError)
        with pytest.raises(MessageIllegalError):
            raised.result(60)
        with pytest.raises(MessageIllegalError):
            producer.send_sync("t", b"4")
        called.add_done_callback(lambda _: None)
        assert producer.flush(), "what failed is settled"
    producer.close()
    [line] = [each.getMessage() for each in caplog.records]
    assert "has ended" in line and "nobody has asked: 3; the last failure: MESSAGE_ILLEGAL" in line


FORK_AT_THE_END = """
import gc, os, sys, threading, time, warnings
from hastore import Producer
from hastore.errors import OutcomeUnknown

warnings.simplefilter("ignore")
producer = Producer([sys.argv[2]], delivery_timeout_s=600)
future = producer.send("t", b"x", queue=0)
if sys.argv[1] == "closing":
    threading.Thread(target=producer.close, daemon=True).start()
    while not producer._lifecycle.closed:
        time.sleep(0.001)
else:
    del producer
    gc.collect()
pid = os.fork()
if not pid:
    failure = future.exception(60)
    assert isinstance(failure, OutcomeUnknown) and "forked" in str(failure), failure
    if sys.argv[1] == "closing":
        producer.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert not future.done(), "the parent goes on with it"
print("last line", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["closing", "dropped"])
def test_in_a_forked_child_a_future_ends_also_of_a_producer_that_is_about_to_end(
    node: Node, how: str
) -> None:
    node.backend.transfer.hold = True
    said, _ = run(FORK_AT_THE_END, how, node.address)
    assert said == "last line\n"


FORK_IN_HANDLER = """
import os, signal, sys, threading, time
from hastore import Producer
from hastore.errors import ClientError

main = os.getpid()
children = []

def handler(*_):
    pid = os.fork()
    if pid:
        children.append(pid)
    else:
        signal.alarm(60)  # a child that hangs dies

signal.signal(signal.SIGUSR1, handler)
producer = Producer([sys.argv[1]])
threading.Timer(0.3, lambda: os.kill(main, signal.SIGUSR1)).start()
end = time.monotonic() + 1.0
try:
    while time.monotonic() < end:
        producer.send_sync("t", b"1", queue=0)
except ClientError as failure:
    assert os.getpid() != main, failure
    os._exit(0 if "fork" in str(failure) else 2)
assert os.getpid() == main
assert os.waitpid(children[0], 0)[1] == 0
producer.close()
"""


def test_a_signal_handler_forks_during_a_put(node: Node) -> None:
    run(FORK_IN_HANDLER, node.address)


MULTIPROCESSING = """
import multiprocessing, sys
from hastore import Producer
from hastore.client.producer import cluster_producer
from hastore.errors import ClientError, HastoreError, NotStoredError, OutcomeUnknown, UsageError
from hastore.registry.cluster_watch import GroupSeen

def work(address, inherited):
    if inherited is not None:
        try:
            inherited.send("t", b"x")
            raise SystemExit(3)
        except ClientError:
            pass
    with Producer([address]) as producer:
        producer.send_sync("t", b"child", queue=0)

if __name__ == "__main__":
    kind, address = sys.argv[1:]
    context = multiprocessing.get_context(kind)
    with Producer([address]) as producer:
        producer.send_sync("t", b"parent", queue=0)
        if kind == "spawn":
            try:
                context.Process(target=work, args=(address, producer)).start()
                raise SystemExit(4)
            except UsageError as failure:
                assert "one in each process" in str(failure)
        children = [
            context.Process(target=work, args=(address, producer if kind == "fork" else None))
            for _ in range(2)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
            assert child.exitcode == 0, child.exitcode
        producer.send_sync("t", b"parent", queue=0)
"""


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_multiprocessing(node: Node, tmp_path: pathlib.Path, kind: str) -> None:
    script = tmp_path / "work.py"
    script.write_text(MULTIPROCESSING)
    done = subprocess.run(
        [sys.executable, script, kind, node.address], timeout=60, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(node.backend.store.units["t", 0]) == 4


def test_it_cannot_be_pickled_or_copied(node: Node) -> None:
    with Producer([node.address]) as producer:
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(UsageError, match="a Producer has connections and cannot be"):
                attempt(producer)


def test_closed_it_says_so(node: Node) -> None:
    producer = Producer([node.address])
    producer.close()
    for use in (
        lambda: producer.send("t", b""),
        lambda: producer.send_sync("t", b"", queue=0),
        lambda: producer.send_batch("t", []),
        lambda: producer.flush(),
    ):
        with pytest.raises(ClientError, match="is closed"):
            use()


def test_an_interrupted_constructor_leaves_no_thread(node: Node) -> None:
    made: list[Producer] = []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
        before = descriptors()
        run = interrupt_everywhere(lambda: None, lambda _: made.append(Producer([node.address])))
        for _ in run:
            pass
        assert len(made) == 1
        made.pop().close()
        gc.collect()
        wait_for(lambda: not sender_threads())
        gc.collect()
        # An eventfd that nobody holds yet is lost: that of the transport, and that of the driver.
        wait_for(lambda: descriptors() <= before + 2)


def test_after_an_interrupted_close_it_can_be_closed_again_or_dropped(node: Node) -> None:
    def make() -> list[Producer]:
        producer = Producer([node.address])
        producer.send("t", b"1", queue=0)
        return [producer]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, held in enumerate(interrupt_everywhere(make, lambda held: held[0].close())):
            if number % 2:
                held[0].close()
            held.clear()
            gc.collect()
            wait_for(lambda: not sender_threads())
