"""Logs that share only bytes of some RocketMQ master are compared before a node continues."""

import contextlib
import hashlib
import pathlib

import pytest

from hastore.errors import PromotionRefused
from hastore.ha.replica import digests
from hastore.ha.replica.digests import WINDOW_BYTES, WINDOWS, digest_of, windows
from hastore.ha.rules.epochs import EpochEntry, classic_range, nothing_to_compare
from hastore.ha.rules.following import MasterView, answer_follow
from hastore.protocol.hello import Refused, Resync, StreamFrom
from hastore.record.codec import build_record
from tests.ha.nodes import HOST, wait_for
from tests.protocol.test_hello import make_hello

MIB = 1 << 20
E1 = 1 << 16 | 1
ZERO, ONE = EpochEntry(0, 0, 1, (1, 2)), EpochEntry(E1, 500, 1, (1, 2))


class Bytes:
    """A log whose bytes are a function of their offset; files of 1 MiB."""

    def __init__(self, end, odd=range(0), start=0):
        self.min_offset, self.max_offset, self.odd, self.read = start, end, odd, 0

    @contextlib.contextmanager
    def view(self, offset, max_bytes):
        size = min(max_bytes, MIB - offset % MIB)
        data = bytearray(size)
        for at in range(max(self.odd.start, offset), min(self.odd.stop, offset + size)):
            data[at - offset] = 1
        self.read += size
        yield memoryview(data)


def test_a_small_range_is_read_whole():
    assert windows(5, 5) == []
    assert windows(5, 64 * MIB) == [(5, 64 * MIB)]
    log = Bytes(3 * MIB)
    assert digest_of(log, 7, 3 * MIB - 1) == hashlib.sha256(bytes(3 * MIB - 8)).digest()
    for odd in (0, MIB, 3 * MIB - 1):
        assert digest_of(Bytes(3 * MIB, range(odd, odd + 1)), 0, 3 * MIB) != digest_of(
            log, 0, 3 * MIB
        )


def test_a_large_range_is_bounded_and_ends_are_never_missed():
    end = 16 << 30
    places = windows(100, end)
    assert len(places) == WINDOWS and places[0][0] == 100 and places[-1][1] == end
    assert sum(stop - start for start, stop in places) == WINDOWS * WINDOW_BYTES == 64 * MIB
    gaps = [later[0] - place[1] for place, later in zip(places, places[1:], strict=False)]
    assert 0 < min(gaps) and max(gaps) < 16 * MIB + WINDOW_BYTES


def test_a_difference_as_long_as_a_gap_is_found():
    end, equal = 200 * MIB, Bytes(200 * MIB)
    own = digest_of(equal, 0, end)
    assert equal.read == 64 * MIB
    assert digest_of(Bytes(end, range(end - 1, end)), 0, end) != own
    gap = windows(0, end)[1][0]
    assert digest_of(Bytes(end, range(91 * MIB, 91 * MIB + gap)), 0, end) != own


def test_no_digest_of_missing_bytes():
    assert digest_of(Bytes(10, start=4), 3, 10) == b""
    assert digest_of(Bytes(10), 3, 11) == b""
    assert digest_of(Bytes(10), 3, 3) == b""


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (((ZERO,), 0, 400), ((ZERO, ONE), 0, 900), (0, 400)),
        (((ZERO,), 0, 700), ((ZERO, ONE), 0, 900), (0, 500)),
        (((ZERO,), 0, 400), ((ZERO, ONE), 100, 900), (100, 400)),
        (((EpochEntry(0, 200, 1, (1, 2)),), 200, 400), ((ZERO, ONE), 100, 900), (200, 400)),
        (((ZERO, ONE), 0, 600), ((ZERO, ONE), 0, 900), None),  # an epoch of their own
        (((), 0, 0), ((ZERO, ONE), 0, 900), None),
        (((ZERO,), 0, 400), ((ONE,), 0, 900), None),
        (((ZERO,), 0, 400), ((ZERO, ONE), 400, 900), None),  # retention has removed it
    ],
)
def test_the_range_is_that_of_epoch_0(mine, theirs, expected):
    (history, low, end), (other, other_low, other_end) = mine, theirs
    assert classic_range(history, low, end, other, other_low, other_end) == expected
    assert classic_range(other, other_low, other_end, history, low, end) == expected
    blind = nothing_to_compare(history, low, end, other, other_low, other_end)
    assert blind == (other_low == 400)


def test_a_slave_must_say_the_right_digest():
    def answer(own=b"d" * 32, **changes):
        view = MasterView(E1, E1, (ZERO, ONE), 0, 900, 1 << 30, own)
        said = {"digest_from": 0, "digest_to": 400, "digest": b"d" * 32, **changes}
        fields = {"promised_epoch": E1, "history": (ZERO,), "max_offset": 400}
        return answer_follow(view, make_hello(confirmed_offset=0, **fields, **said))

    assert answer() == StreamFrom(400)
    for wrong in (
        {"own": b"e" * 32},
        {"own": b""},
        {"digest": b""},
        {"digest_from": 1},
        {"digest_to": 399},
    ):
        refused = answer(**wrong)
        assert isinstance(refused, Refused) and "RocketMQ master" in refused.reason, wrong


def test_a_log_that_cannot_be_compared_any_more_is_not_continued():
    view = MasterView(E1, E1, (ZERO, ONE), 400, 900, 1 << 30)
    fields = {"promised_epoch": E1, "history": (ZERO,), "max_offset": 400, "confirmed_offset": 0}
    assert answer_follow(view, make_hello(**fields)) == Resync(400, (ZERO,))
    # Nothing of the old log is left then.
    assert answer_follow(view, make_hello(**fields, min_offset=400)) == StreamFrom(400)


def test_bytes_that_retention_took_before_the_comparison_do_not_count_as_equal():
    """The slave named the range when the master still had it; it looks again and names another."""
    said = {"digest_from": 0, "digest_to": 400, "digest": b"d" * 32}
    fields = {"promised_epoch": E1, "history": (ZERO,), "max_offset": 400, "confirmed_offset": 0}
    for start in (200, 400):
        view = MasterView(E1, E1, (ZERO, ONE), start, 900, 1 << 30)
        refused = answer_follow(view, make_hello(**fields, **said))
        assert isinstance(refused, Refused) and "try again" in refused.reason


def classic(node, *bodies):
    """Give a node the bytes that a RocketMQ master would have sent."""
    at = node.store.max_offset
    for number, body in enumerate(bodies):
        record = bytearray(
            build_record("T", body, queue_id=0, properties=(), born_timestamp_ms=1, born_host=HOST)
        )
        record[20:28] = number.to_bytes(8)  # queue offset
        record[28:36] = at.to_bytes(8)  # physical offset
        at = node.store.append_replica(at, bytes(record))
    node.state.take_entries([EpochEntry(0, 0, 1, (1, 2))])


def test_a_node_that_followed_the_same_master_continues(make_group):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    classic(one, b"a" * 100, b"b" * 100, b"c" * 100)
    classic(two, b"a" * 100, b"b" * 100)
    one.promote()
    two.follow()
    wait_for(lambda: two.linked)
    one.put_confirmed(b"x")
    wait_for(lambda: two.store.confirmed_offset == one.store.max_offset)
    assert two.bytes() == one.bytes()
    assert two.state.history == one.state.history


@pytest.mark.parametrize("bodies", [(b"a", b"X"), (b"X", b"b"), (b"X",)])
def test_a_node_that_followed_another_master_is_refused_and_keeps_its_bytes(make_group, bodies):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    classic(one, b"a" * 100, b"b" * 100)
    classic(two, *(body * 100 for body in bodies))
    kept = two.bytes()
    one.promote()
    two.follow()
    wait_for(lambda: "different RocketMQ masters" in (two.client.problem or ""))
    assert not two.linked and two.bytes() == kept
    assert "hastore demote -c FILE --accept-loss" in two.client.problem
    two.client.accept_loss = True  # what that command does
    wait_for(lambda: two.linked)
    one.put_confirmed(b"x")
    wait_for(lambda: two.store.confirmed_offset == one.store.max_offset)
    assert two.bytes() == one.bytes() and two.state.history == one.state.history
    assert not two.client.accept_loss
    (aside,) = (pathlib.Path(two.config.store.root) / "rescued").iterdir()
    assert (aside / "commitlog" / f"{0:020d}").read_bytes().startswith(kept)


def test_a_promotion_copies_nothing_from_another_masters_log(make_group):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    classic(one, b"a" * 100, b"b" * 100)
    classic(two, b"X" * 100, b"b" * 100, b"c" * 100)
    kept = one.bytes()
    with pytest.raises(PromotionRefused, match="different RocketMQ masters") as refused:
        one.promote()
    assert refused.value.final and one.bytes() == kept and one.member.open_epoch == 0


def test_a_promotion_catches_up_with_the_same_masters_log(make_group):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    classic(one, b"a" * 100, b"b" * 100)
    classic(two, b"a" * 100, b"b" * 100, b"c" * 100)
    one.promote()
    assert one.bytes() == two.bytes()


def test_reading_stops_at_the_ends_of_the_log(make_group, monkeypatch):
    """Windows that cross a file's end are read in pieces."""
    monkeypatch.setattr(digests, "WINDOWS", 4)
    monkeypatch.setattr(digests, "WINDOW_BYTES", 50_000)
    node = make_group(1).start(1, acks=0)
    node.promote()
    while node.store.max_offset < 400_000:
        node.put(b"x" * 900)
    assert len(windows(0, 400_000)) == 4
    assert len(digest_of(node.store, 0, 400_000)) == 32
