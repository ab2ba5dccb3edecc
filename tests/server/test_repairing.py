"""A running node repairs its log from the other one: no restart, in both modes."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from hastore import Producer
from hastore.config.model import DLedgerConfig, HAConfig, Mode, NodeAddress
from hastore.errors import CorruptRecordError
from hastore.fs.filesystem import file_name
from hastore.protocol.hello import REPAIR_BYTES_MAX, RangeOf, Refused
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from tests.ha.nodes import wait_for
from tests.process.harness import Ports
from tests.server.kit import config_in_group
from tests.store.kit import FILE_SIZE, scribble

AnyNode = Node | DLedgerNode
COUNT = 90


class Pair:
    """Two nodes with the same log, all of it readable and synced."""

    def __init__(self, made: list[AnyNode]) -> None:
        def roles() -> list[int | None]:
            return [node.backend.master_node() for node in made]

        wait_for(lambda: roles() in ([1, 1], [2, 2]), "a master that both know")
        self.made = made
        self.master = next(node for node in made if node.config.node == roles()[0])
        self.other = next(node for node in made if node is not self.master)
        wait_for(lambda: self.master.backend.status()["takes_default"], "synchronous puts")
        with Producer(self.master.api.endpoint, acks="all") as producer:
            results = [
                producer.send("TopicA", b"%06d" % number * 120, queue=0) for number in range(COUNT)
            ]
            self.places = [one.result().offset for one in results]
        end = self.master.backend.store.max_offset
        assert end > FILE_SIZE, "two files"

        def are_same() -> bool:
            return all(
                min(store.readable_offset, store.dispatched_offset, store.flush()) >= end
                for store in (one.backend.store for one in made)
            )

        wait_for(are_same, "the same log")

    @staticmethod
    def path(node: AnyNode, offset: int) -> tuple[pathlib.Path, int]:
        """Return the file that holds an offset, and the position in it."""
        folder = pathlib.Path(node.backend.store.log.directory)
        return folder / file_name(offset - offset % FILE_SIZE), offset % FILE_SIZE

    def rot(self, node: AnyNode, number: int) -> None:
        """Change bytes of the body of a message, on the disk of a node."""
        path, at = self.path(node, self.places[number])
        scribble(str(path), at + 100, b"\xff\xfe\xfd")

    def raw(self, node: AnyNode) -> bytes:
        folder = pathlib.Path(node.backend.store.log.directory)
        return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))

    def pull(self, node: AnyNode, number: int) -> int:
        store = node.backend.store
        return store.reader.pull(
            "TopicA", 0, number,
            max_messages=1, max_bytes=1 << 20, limit_offset=store.readable_offset,
        ).count  # fmt: skip


@pytest.fixture(
    scope="module", params=[(Mode.CLASSIC, False), (Mode.DLEDGER, True)], ids=["classic", "dledger"]
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A pair in either mode, one of them with a secret; each test leaves its log sound."""
    mode, has_secret = request.param
    tmp_path = tmp_path_factory.mktemp("pair")
    fields: dict[str, object] = {"mode": mode}
    if has_secret:
        (tmp_path / "secret").write_bytes(b"32 bytes that nobody else knows.")
        (tmp_path / "secret").chmod(0o600)
        fields["ha"] = HAConfig(secret_file=str(tmp_path / "secret"))
    with contextlib.closing(Ports()) as ports, contextlib.ExitStack() as stack:
        nodes = {number: NodeAddress(**each) for number, each in ports.addresses(2).items()}
        made: list[AnyNode] = []
        for number in nodes:
            config = config_in_group(tmp_path, number, nodes, **fields)
            if mode is Mode.DLEDGER:
                patient = DLedgerConfig(election_timeout_ms=2_000)
                config = replace(config, role=None, dledger=patient)
                made.append(DLedgerNode(config, lambda: None))
            else:
                made.append(Node(config, lambda: None))
            made[-1].start()
            stack.callback(made[-1].stop)
        yield Pair(made)


def test_what_a_scrubber_finds_is_repaired_on_the_master_and_on_the_other_node(pair: Pair) -> None:
    whole = pair.raw(pair.master)
    for node, numbers in ((pair.master, (0, 17, COUNT - 1)), (pair.other, (5, 18, 19))):
        for number in numbers:
            pair.rot(node, number)
        node.scrub.scrub()
        status = node.backend.status()
        assert status["scrub"]["damages"] == [], status
        assert status["scrub"]["repaired_bytes"] > 3 * 700
        assert not any("damaged" in one for one in status["problems"])
        assert pair.raw(node)[: len(whole)] == whole
        assert [pair.pull(node, number) for number in numbers] == [1, 1, 1]
        assert "hastore_repaired_bytes_total{" in node.metrics.render().decode()
    with Producer(pair.master.api.endpoint, acks="all") as producer:
        assert producer.send_sync("TopicA", b"goes on").offset is not None


def test_what_a_reader_meets_is_repaired_without_waiting_for_a_pass(pair: Pair) -> None:
    scrub = pair.master.scrub
    before = scrub.repaired_bytes
    pair.rot(pair.master, 30)
    with pytest.raises(CorruptRecordError):
        pair.pull(pair.master, 30)
    wait_for(lambda: scrub.repaired_bytes > before, "the repair")
    wait_for(lambda: not pair.master.backend.store.log.fenced, "the end of the fence")
    assert pair.pull(pair.master, 30) == 1


def test_what_no_crc_shows_is_compared_with_the_other_node_and_repaired(pair: Pair) -> None:
    """The properties of a waiting message, as whoever would deliver it notes it."""
    with Producer(pair.master.api.endpoint, acks="all") as producer:
        sent = [producer.send_sync("Later", b"%d" % n, delay_level=18) for n in range(3)]
    offset = sent[1].offset
    assert offset is not None

    def is_there() -> bool:
        stores = [node.backend.store for node in pair.made]
        return all(
            min(one.readable_offset, one.dispatched_offset, one.flush()) > sent[2].offset
            for one in stores
        )

    wait_for(is_there, "the same log")
    scrub, reader = pair.master.scrub, pair.master.backend.store.reader
    whole = pair.raw(pair.master)
    path, _ = pair.path(pair.master, offset)
    at = path.read_bytes().index(b"REAL_TOPIC\x01Later", offset % FILE_SIZE) + 13
    scribble(str(path), at, b"$")
    before = scrub.repaired_bytes
    reader.note_wrong(offset)
    wait_for(lambda: scrub.repaired_bytes > before, "the repair")
    assert pair.raw(pair.master)[: len(whole)] == whole
    # Both nodes have the same bytes: nothing is written, and all is served.
    before = scrub.repaired_bytes
    reader.note_wrong(sent[2].offset)
    at = sent[2].offset - pair.master.backend.store.log.form.lead
    wait_for(lambda: at in scrub._unrepaired, "the comparison")
    assert "the same bytes" in scrub._unrepaired[at]
    assert scrub.repaired_bytes == before and not pair.master.backend.store.log.fenced
    assert scrub.problems() == []


def test_what_is_damaged_at_both_is_fenced_and_all_else_is_served(pair: Pair) -> None:
    assert pair.places[30] < FILE_SIZE  # the first file, from offset 0
    before = {id(node): pair.raw(node) for node in pair.made}
    for node in pair.made:
        pair.rot(node, 30)
    hurt = {id(node): pair.raw(node) for node in pair.made}
    assert hurt != before
    for node in pair.made:
        node.scrub.scrub()
        (one,) = node.backend.status()["scrub"]["damages"]
        assert "do not fit either" in one["not_repaired"]
        assert any("no other node can repair it now" in text for text in node.backend.problems())
        assert pair.pull(node, 29) == pair.pull(node, 31) == 1
        with pytest.raises(CorruptRecordError):
            pair.pull(node, 30)
        assert pair.raw(node) == hurt[id(node)], "nothing was changed"
    path, at = pair.path(pair.master, pair.places[30])
    scribble(str(path), at + 100, before[id(pair.master)][pair.places[30] + 100 :][:3])
    for node in pair.made:
        node.scrub.scrub()
        assert pair.raw(node) == before[id(node)] and pair.pull(node, 30) == 1


def test_the_answer_to_a_repair_has_only_what_readers_may_see(pair: Pair) -> None:
    store, other = pair.master.backend.store, pair.master.config.node
    dial = pair.other._dial_repair

    def ask(start: int, end: int) -> object:
        made = dial(other, start, end)
        made.close()
        return made.answer

    end = store.readable_offset
    found = ask(100, 5000)
    assert isinstance(found, RangeOf) and found.data == pair.raw(pair.master)[100:5000]
    if pair.master.config.mode is Mode.CLASSIC:
        assert found.epochs == ((pair.master.state.last_epoch, 100),)
    for start, stop in ((end - 10, end + 10), (end + FILE_SIZE, end + FILE_SIZE + 1)):
        beyond = ask(start, stop)
        assert isinstance(beyond, RangeOf) and not beyond.data and beyond.readable_offset == end
    for start, stop in ((-5, 5), (5, 4), (0, REPAIR_BYTES_MAX + 1)):
        assert isinstance(ask(start, stop), Refused)
