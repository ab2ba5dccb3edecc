"""Where a put's microseconds go inside master and slave: step by step, in one thread, caches hot.

    python -m benchmarks.steps [--rounds 2000] [--dir /dev/shm] [single frame many ...]

Both nodes' stores and HA sides are real, and so are the sockets between them. There is no client
connection, and no thread is woken: each step is called in turn. So this separates the steps, and
shows the effect of a change to one of them (compare minima, in turn with the code before the
change). In running nodes a put costs two to three times as much: see `benchmarks.puts`.
"""

import argparse
import pathlib
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from benchmarks.common import BODY_BYTES, MIB, scratch, touch_memory
from hastore.client.producer.preparer import RecordEncoder
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import ApiConfig, Config, HAConfig, NodeAddress, Role, StoreConfig
from hastore.fs.filesystem import REAL
from hastore.ha.master.group_transfer import GroupTransferService
from hastore.ha.master.ha_service import HAConnection, HAService
from hastore.ha.node.member import Member
from hastore.ha.node.node_state import NodeState
from hastore.ha.rules.epochs import EpochEntry
from hastore.ha.slave.slave_stream import SlaveStream
from hastore.protocol import api
from hastore.protocol.ha_link import ReportDecoder
from hastore.protocol.hello import Purpose
from hastore.record.codec import Host
from hastore.server.api.puts import PutHandler
from hastore.server.api.replies import Failures
from hastore.server.backend import NodeBackend
from hastore.service import raise_failure
from hastore.store.message_store import MessageStore

# name -> number of connections that put at the same time, records in each payload
CASES = {"single": (1, 1), "frame": (1, 64), "large": (1, 230), "many": (64, 1), "many4": (64, 4)}
STEPS = (
    "decode", "admit", "append", "slave receives", "slave takes", "report comes", "report counts",
    "answer", "encode",
)  # fmt: skip
EPOCH = 1 << 16 | 1
FILE_BYTES = 256 * MIB
TOUCHED_BYTES = 1536 * MIB
NAP_S, NAP_EVERY = 0.012, 50  # pauses outside the measurement, in which replay catches up
WARM_SHARE = 5  # the first fifth of the rounds is a warm-up
HOST = Host.parse("127.0.0.1:10911")


class Side:
    """One node: its store, its state and its membership of the group."""

    def __init__(self, folder: pathlib.Path, number: int) -> None:
        address = NodeAddress(api="tcp://127.0.0.1:0", ha="127.0.0.1:1", http="")
        root = str(folder / f"node{number}")
        REAL.make_dirs(root)
        store = StoreConfig(root=root, commitlog_file_size=FILE_BYTES)
        self.config = Config(
            cluster="bench", group="g0", node=number, role=Role.SYNC_MASTER, acks=1,
            nodes={1: address, 2: address}, store=store, ha=HAConfig(),
        )  # fmt: skip
        self.state = NodeState(REAL, root)
        self.state.load(number, "bench", "g0")
        self.store = MessageStore(store, store_host=HOST)
        self.store.open()
        self.state.begin_boot("written", alone=False, log_end=0)
        self.state.promise(EPOCH, 1, (1, 2))
        self.member = Member(
            self.config, self.store, self.state, SYSTEM_CLOCK, None, on_failure=raise_failure
        )


class _Client:
    """A connection of the client API, and its producer."""

    def __init__(self, number: int) -> None:
        self.run = 0
        self.guard = None  # nobody asks who it is
        self.next_at: int | None = 0
        self._encoder = RecordEncoder(f"{number:032x}", Host.parse("127.0.0.1:0"))
        self._sequence = 0

    def payload(self, count: int) -> bytes:
        """Return the next records, to four queues in turn."""
        records = []
        for _ in range(count):
            number = self._sequence
            self._sequence += 1
            body = b"x" * BODY_BYTES
            records.append(self._encoder.encode("steps", body, number % 4, [], number, 1))
        return b"".join(records)


class Rig:
    """A master and its slave, without threads between them."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.master, self.slave = master, slave = Side(folder, 1), Side(folder, 2)
        self.transfer = GroupTransferService(
            SYSTEM_CLOCK, master.store.flush_service.request, on_failure=raise_failure
        )
        self.transfer.start()
        self.ha = HAService(master.member, self.transfer)
        entry = EpochEntry(EPOCH, 0, 1, (1, 2))
        master.state.open_epoch((*master.state.history, entry))
        self.ha.open_epoch(entry, sync=True)
        master.member.open_epoch = EPOCH
        master.member.gate.open(EPOCH)
        self.near, self.far = _tcp_pair()
        self.link = HAConnection(self.ha, self.near, "127.0.0.1:1", 1)
        self.link.hello = slave.member.hello(Purpose.FOLLOW)
        self.ha._register(self.link, self.link.hello, 0)
        assert self.link.writer is not None
        self.link.writer.start()
        self.stream = SlaveStream(
            slave.member, self.far, epoch=EPOCH, history=(entry,), master_end=0,
            says_readers=True, counts_written=True,
        )  # fmt: skip
        self.stream._open_gate()
        self.stream._receiver.begin()
        self.stream.report()
        self.reports = ReportDecoder()
        self.link.reader._count_reports(self.reports.feed(self.near.recv(8)))
        master.store.hooks.on_append = self.ha.on_append
        master.store.hooks.on_flushed = self.ha.on_flushed
        node: Any = SimpleNamespace(failure=None)
        retention: Any = SimpleNamespace(kept=SimpleNamespace(find=None))
        roles: Any = SimpleNamespace(configured_role=Role.SYNC_MASTER, client=None)
        take_over: Any = SimpleNamespace()
        backend = NodeBackend(
            node, master.member, master.store, self.ha, self.transfer, retention, roles, None,
            take_over,
        )  # fmt: skip
        self.answers: list[api.PutDone] = []
        self.handler = PutHandler(
            backend, ApiConfig(), SYSTEM_CLOCK, lambda _, reply: self.answers.append(reply),
            lambda _, reason: None, Failures(SYSTEM_CLOCK),
        )  # fmt: skip
        self.buffer = memoryview(bytearray(256 * 1024))
        self.clients = [_Client(number) for number in range(64)]

    def round(self, connections: int, records: int) -> list[int]:
        """Take the puts of one round to their answers; return the nanoseconds of each step."""
        puts = []
        for number, client in enumerate(self.clients[:connections]):
            at = client.next_at if client.run else 0
            header = api.encode(api.Put(number + 1, run=1, at=at or 0))
            connection: Any = client
            puts.append((connection, header, client.payload(records)))
        watch, handler = _Watch(), self.handler
        requests = [(client, api.decode_request(head), body) for client, head, body in puts]
        watch.lap()
        now = SYSTEM_CLOCK.monotonic_ms()
        for client, request, payload in requests:
            assert isinstance(request, api.Put)
            handler.admit_put(client, request, payload, now)
        watch.lap()
        handler.append_admitted(now)
        watch.lap()
        watch.laps += self._replicate()
        watch.restart()
        handler.answer_ended()
        watch.lap()
        for reply in self.answers:
            api.encode(reply)
        watch.lap()
        assert [reply.status for reply in self.answers] == [api.Status.PUT_OK] * connections
        self.answers.clear()
        return watch.laps

    def _replicate(self) -> tuple[int, int, int, int]:
        """Let the slave receive everything and the master count its reports; time both."""
        end, takes = self.master.store.max_offset, [0, 0, 0, 0]
        while self.slave.store.max_offset < end:
            watch = _Watch()
            size = self.far.recv_into(self.buffer)
            watch.lap()
            self.stream._receive_bytes(self.buffer[:size])
            watch.lap()
            takes[0] += watch.laps[0]
            takes[1] += watch.laps[1]
        while self.master.store.confirmed_offset < end:
            watch = _Watch()
            data = self.near.recv(8192)
            watch.lap()
            self.link.reader._count_reports(self.reports.feed(data))
            watch.lap()
            takes[2] += watch.laps[0]
            takes[3] += watch.laps[1]
        return takes[0], takes[1], takes[2], takes[3]

    def close(self) -> None:
        """End all threads and close both stores."""
        self.master.member.step_down()
        self.link.close("the benchmark has ended")
        self.link.release()
        self.far.close()
        self.transfer.stop()
        for side in (self.master, self.slave):
            side.store.close()


class _Watch:
    """Nanoseconds from lap to lap."""

    def __init__(self) -> None:
        self.laps: list[int] = []
        self.restart()

    def restart(self) -> None:
        """Begin a lap."""
        self._began = time.perf_counter_ns()

    def lap(self) -> None:
        """End a lap, and begin the next."""
        now = time.perf_counter_ns()
        self.laps.append(now - self._began)
        self._began = time.perf_counter_ns()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


@contextmanager
def rigged(folder: pathlib.Path) -> Iterator[Rig]:
    """Lend a Rig, and close it afterwards."""
    rig = Rig(folder)
    try:
        yield rig
    finally:
        rig.close()


def tell(name: str, records: int, rounds: list[list[int]]) -> None:
    """Print the microseconds of each step for all records of a round, and the sum per record."""
    columns = list(zip(*rounds[len(rounds) // WARM_SHARE :], strict=True))
    print(f"{name:8}" + "".join(f"{step:>15}" for step in STEPS) + f"{'all':>10}{'a record':>10}")
    kinds: tuple[tuple[str, Callable[..., float]], ...] = (
        ("median", statistics.median),
        ("min", min),
    )
    for kind, pick in kinds:
        us = [pick(column) / 1000 for column in columns]
        text = "".join(f"{one:15.2f}" for one in us)
        print(f"{kind:8}{text}{sum(us):10.1f}{sum(us) / records:10.2f}", flush=True)


def main() -> None:
    """Run the named cases, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="case")
    parser.add_argument("--rounds", type=int, default=2_000)
    parser.add_argument("--dir", help="folder for the stores (default: the temporary folder)")
    settings = parser.parse_args()
    unknown = set(settings.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    sys.setswitchinterval(0.0005)  # as in a node
    with scratch(settings.dir, 2 * TOUCHED_BYTES) as folder:
        touch_memory(folder, TOUCHED_BYTES)
        with rigged(folder) as rig:
            for name in settings.cases:
                connections, records = CASES[name]
                rounds = []
                for number in range(settings.rounds if connections * records == 1 else 200):
                    rounds.append(rig.round(connections, records))
                    if number % NAP_EVERY == NAP_EVERY - 1:
                        time.sleep(NAP_S)
                tell(name, connections * records, rounds)


if __name__ == "__main__":
    main()
