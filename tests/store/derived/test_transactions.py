"""The open transactions of a log: the same as its records say, after any cut, kill and loss."""

import os
import random
import shutil

import msgspec
import pytest

from hastore.errors import Status
from hastore.record.codec import build_record, decode_record
from hastore.record.layout import FLAG_ROLLBACK
from hastore.record.properties import find_property
from hastore.record.transactions import (
    ASIDE_TOPIC,
    CHECKS_TOPIC,
    HALF_TOPIC,
    IMMUNITY,
    OP_TOPIC,
    Ended,
    build_checks,
    build_ended,
    checks_in,
    commit,
    ended_in,
    half_in,
    half_pairs,
    prepare,
    set_aside,
)
from hastore.store.append.results import own_records
from hastore.store.derived import transactions
from hastore.store.message_store import MessageStore
from tests.dledger.store.kit import opened as opened_entries
from tests.store.kit import BORN, HOST, config, crash_copy, message, opened, put

SEED = int(os.environ.get("HASTORE_SEED", "0"))
SEEDS = int(os.environ.get("HASTORE_SEEDS", "6"))
DERIVED = (
    *("consumequeue", "index", "hastore/transactions", "hastore/replay", "hastore/idempotence"),
)


def half(key, *, topic="T", body=b"body", **more):
    """The record of a half message; None: without a key."""
    properties = {"TRAN_MSG": "true", "PGROUP": "producers", **more}
    if key is not None:
        properties["UNIQ_KEY"] = key
    waiting = prepare(topic, 1, properties)
    pairs = [tuple(one.split("\x01")) for one in waiting.properties.decode().split("\x02") if one]
    pairs += [("TRANSACTION_CHECK_TIMES", more["times"])] if "times" in more else []
    return build_record(
        HALF_TOPIC, body, queue_id=0, properties=pairs, born_timestamp_ms=1, born_host=BORN
    )


def put_own(store, *records):
    results = store.put_encoded(records, [own_records] * len(records))
    found = [result for one in results for result in one]
    assert all(result.status is Status.PUT_OK for result in found), found
    return [result.offset for result in found]


def how_ended(store, offset):
    found = store.transactions.ended(offset)
    return None if found is None else found[1]


def records_of(store):
    assert store.wait_dispatched(store.whole_offset, 60), store.problems
    at, found = store.min_offset, []
    lead = store.log.form.lead
    while at < store.max_offset:
        raw = store.reader.record_bytes(at + lead)
        if raw is None:  # a blank, or an entry without a record
            at += store.file_size - at % store.file_size
            continue
        found.append(decode_record(raw))
        at += lead + len(raw)
    return found


class Model:
    """What a log says of transactions, read in one go."""

    def __init__(self, records):
        self.open, self.unsaid, self.ended = [], set(), {}
        for record in records:
            self.take(record)

    def find(self, test):
        return next((one for one in self.open if test(one)), None)

    def with_half(self, column, value):
        return self.find(lambda one: any(half[column] == value for half in one["halves"]))

    def end(self, one, how):
        self.open.remove(one)
        self.unsaid |= {place for _, place in one["halves"]}
        self.ended |= {offset: how for offset, _ in one["halves"]}

    def take(self, record):
        key = find_property(record.properties, b"UNIQ_KEY") or b""
        named = record.prepared_transaction_offset
        names = lambda one: any(offset == named for offset, _ in one["halves"])  # noqa: E731
        if record.topic == HALF_TOPIC:
            said = half_in(record.properties)
            identity = tuple(said.identity)
            known = self.find(lambda one: key and one["identity"] == identity)
            one = {"key": key, "identity": identity, "halves": [], "checks": 0}
            if known is not None:
                self.open.remove(known)
                one = known
            one["halves"].append((record.physical_offset, record.queue_offset))
            one["checks"] = max(one["checks"], said.checks)
            self.open.append(one)
        elif record.topic == OP_TOPIC:
            for place in ended_in(record.body):
                one = self.with_half(1, place)
                if one is not None:
                    self.end(one, Ended.ROLLED_BACK)
                self.unsaid.discard(place)
        elif record.topic == CHECKS_TOPIC:
            for offset, checks in checks_in(record.properties):
                one = self.with_half(0, offset)
                if one is not None:
                    one["checks"] = max(one["checks"], checks)
        elif record.sys_flag & FLAG_ROLLBACK == 8:
            one = self.find(names)
            if one is not None and one["key"] == key:
                self.end(one, Ended.COMMITTED)
        elif record.topic == ASIDE_TOPIC:
            said = half_in(record.properties)  # it keeps these properties
            identity = tuple(said.identity)
            one = self.find((lambda one: one["identity"] == identity) if key else names)
            if one is not None:
                self.end(one, Ended.SET_ASIDE)


def check(store, found=None):
    """Compare what a store knows with its log; return the model."""
    model = Model(records_of(store) if found is None else found)
    table = store.transactions
    halves = table.halves()
    assert [(one.key, [*one.earlier, (one.offset, one.place)], one.checks) for one in halves] == [
        (one["key"], one["halves"], one["checks"]) for one in model.open
    ]
    for one, wanted in zip(halves, model.open, strict=True):
        assert all(table.find(offset) is one for offset, _ in wanted["halves"])
    assert set(table.unsaid()) == model.unsaid
    assert len(table) == len(model.open)
    return model


class Walk:
    """A random log of transactions."""

    def __init__(self, folder, seed, open_store):
        self.random = random.Random(seed)
        self.folder, self.open_store = folder, open_store
        self.root = folder / "0"
        self.copies = self.keys = 0
        self.store = open_store(self.root)

    def step(self):
        steps = [(self.begin, 30), (self.end, 25), (self.other, 15), (self.again, 5)]
        steps += [(self.cut, 6), (self.restart, 3), (self.kill, 3)]
        names, weights = zip(*steps, strict=True)
        self.random.choices(names, weights)[0]()

    def begin(self):
        new = []
        for _ in range(self.random.randint(1, 3)):
            self.keys += 1
            key = None if self.random.random() < 0.1 else f"k{self.keys}"
            if key is not None and self.random.random() < 0.2:
                key = f"k{self.random.randint(1, self.keys)}"  # perhaps another one's, too
            more = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "7"} if self.random.random() < 0.2 else {}
            more["PGROUP"] = self.random.choice(("producers", "others"))
            new.append(half(key, body=bytes(self.random.choice((10, 3_000))), **more))
        put_own(self.store, *new)

    def pick(self):
        """Return a half message of the log, open or not, and its record."""
        model = Model(records_of(self.store))
        places = [place for one in model.open for place in one["halves"]]
        if self.random.random() < 0.1:
            places += [(offset, 0) for offset in model.ended]
        return self.random.choice(places)[0] if places else None

    def end(self):
        offset = self.pick()
        if offset is None:
            return
        raw = self.store.reader.record_bytes(offset)
        record, how = decode_record(raw), self.random.random()
        if how < 0.5:
            put_own(self.store, commit(raw).record)
        elif how < 0.8:
            put_own(self.store, *build_ended([record.queue_offset], 1, HOST))
        elif how < 0.9:
            put_own(self.store, set_aside(raw, 15))
        else:
            put_own(self.store, build_checks([(offset, self.random.randint(1, 5)), (7, 1)], 1))
        if self.random.random() < 0.5:
            said = self.store.transactions.unsaid()
            if said:
                text = b"".join(b"%d," % place for place in said)
                properties = [("WAIT", "true"), ("TAGS", "d")]
                put_own(self.store, build_record(
                    OP_TOPIC, text, queue_id=0, properties=properties, born_timestamp_ms=1,
                    born_host=BORN,
                ))  # fmt: skip

    def again(self):
        """A half message is put again, as RocketMQ's clients and brokers do."""
        offset = self.pick()
        if offset is not None:
            record = decode_record(self.store.reader.record_bytes(offset))
            key = find_property(record.properties, b"UNIQ_KEY")
            if key is not None:
                group = find_property(record.properties, b"PGROUP").decode()
                times = str(self.random.randint(1, 9))
                put_own(self.store, half(key.decode(), PGROUP=group, times=times))

    def other(self):
        self.keys += 1
        size = self.random.choice((10, 5_000))
        flags = self.random.choice((0, 8))
        put(self.store, message(self.keys, size=size, sys_flag=flags))

    def cut(self):
        found = records_of(self.store)
        if found:
            last = found[-self.random.randint(1, min(len(found), 30))]
            self.store.truncate(last.physical_offset - self.store.log.form.lead)

    def restart(self):
        self.store.close()
        self.lose()
        self.store = self.open_store(self.root)

    def kill(self):
        self.copies += 1
        root = self.folder / str(self.copies)
        crash_copy(self.store, root)
        self.store.close()
        shutil.rmtree(self.root)
        self.root = root
        self.lose()
        self.store = self.open_store(root)

    def lose(self):
        if self.random.random() < 0.5:
            for name in DERIVED:
                if self.random.random() < 0.5:
                    path = self.root / name
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def plain(root):
    store = MessageStore(config(root), store_host=HOST)
    store.open()
    return store


@pytest.mark.parametrize("seed", range(SEED, SEED + SEEDS))
def test_a_store_knows_what_its_log_says(tmp_path, seed, monkeypatch):
    print(f"HASTORE_SEED={seed} HASTORE_SEEDS=1")
    if seed % 2:  # many states
        monkeypatch.setattr(transactions, "_STEP_BYTES", 2_000)
        monkeypatch.setattr(transactions, "_STEP_FACTOR", 1)
        monkeypatch.setattr(transactions, "_KEPT", 4)
    walk = Walk(tmp_path, seed, plain)
    seen = 0
    try:
        for _ in range(80):
            walk.step()
            seen = max(seen, len(check(walk.store).open))
        assert seen > 3
    finally:
        walk.store.close()


def test_a_log_of_entries_says_the_same(tmp_path):
    with opened_entries(tmp_path / "store") as entries:
        store = entries.messages

        def put_all(*raw):
            results = store.put_encoded(raw, 3, [own_records] * len(raw))
            return [result.offset for [result] in results]

        first, second, third = put_all(*[half(f"k{number}") for number in range(3)])
        put_all(commit(store.reader.record_bytes(second)).record)
        put_all(*build_ended([2], 1, HOST))
        records = [decode_record(store.reader.record_bytes(at)) for at in (first, second, third)]
        assert [record.queue_offset for record in records] == [0, 1, 2]
        assert store.wait_dispatched(store.whole_offset, 60)
        [one] = store.transactions.halves()
        assert (one.offset, one.place, one.key) == (first, 0, b"k0")
        assert how_ended(store, second) is Ended.COMMITTED
        assert how_ended(store, third) is Ended.ROLLED_BACK
        assert store.transactions.unsaid() == [1]


def test_a_damaged_file_only_makes_a_start_slower(tmp_path):
    with opened(tmp_path) as store:
        put_own(store, *[half(f"k{number}") for number in range(5)])
        check(store)
    path = tmp_path / "hastore" / "transactions"
    good = path.read_bytes()
    for damaged in (b"", good[:-1], good[:20] + b"\xff" + good[21:], b"HSTX" + bytes(60)):
        path.write_bytes(damaged)
        with opened(tmp_path) as store:
            assert len(check(store).open) == 5
    crafted = transactions._FRAME.pack(b"\x93\x01\x02\x03")  # a sound frame around another content
    path.write_bytes(crafted)
    with opened(tmp_path) as store:
        assert len(check(store).open) == 5


def test_what_retention_removes_is_forgotten_and_named(tmp_path, caplog):
    with opened(tmp_path) as store:
        offsets = put_own(store, *[half(f"k{number}") for number in range(3)])
        store.wait_dispatched(store.max_offset, 60)
        store.transactions.delete_before(offsets[1])
        assert [one.key for one in store.transactions.halves()] == [b"k1", b"k2"]
    assert "UNIQ_KEY k0" in caplog.text


def test_what_retention_removes_is_not_to_be_listed_as_ended_any_more(tmp_path):
    with opened(tmp_path) as store:
        offsets = put_own(store, *[half(f"k{number}") for number in range(3)])
        store.wait_dispatched(store.max_offset, 60)
        for offset in offsets:
            put_own(store, commit(store.reader.record_bytes(offset)).record)
        store.wait_dispatched(store.max_offset, 60)
        assert store.transactions.unsaid() == [0, 1, 2]
        store.transactions.delete_before(offsets[0])
        assert store.transactions.unsaid() == [0, 1, 2]
        store.transactions.delete_before(offsets[2])
        assert store.transactions.unsaid() == [2]
        store.transactions.delete_before(store.max_offset)
        assert store.transactions.unsaid() == []


def test_a_damaged_half_message_that_was_set_aside_has_ended(tmp_path):
    with opened(tmp_path) as store:
        put_own(store, half("k0"), half("k1", body=b"other"))
        store.wait_dispatched(store.max_offset, 60)
        first, second = store.transactions.halves()
        of_another = build_record(  # as a broker of RocketMQ does it: it names offset 0
            "TRANS_CHECK_MAX_TIME_TOPIC", b"set aside",
            queue_id=0, properties=[("UNIQ_KEY", "before"), ("PGROUP", "producers")],
            born_timestamp_ms=1, born_host=BORN,
        )  # fmt: skip
        put_own(store, of_another)
        store.wait_dispatched(store.max_offset, 60)
        assert len(store.transactions) == 2
        for one in (first, second):
            raw = store.reader.record_bytes(one.offset)
            put_own(store, set_aside(raw.replace(b"UNIQ_KEY\x01k", b"UNIQ_KEY\x01j"), 15))
        store.wait_dispatched(store.max_offset, 60)
        assert store.transactions.halves() == []
        assert how_ended(store, second.offset) is Ended.SET_ASIDE


def test_a_clients_own_flag_ends_nothing(tmp_path):
    """The store's first half message may lie at offset 0, which is no offset in other records."""
    with opened(tmp_path) as store:
        [offset] = put_own(store, half("k"))
        assert offset == 0
        put(store, message(1, sys_flag=8))
        assert len(check(store).open) == 1
        forged = commit(store.reader.record_bytes(offset)).record
        put_own(store, half("k2"))
        store.wait_dispatched(store.max_offset, 60)
        second = store.transactions.halves()[1].offset
        later = commit(store.reader.record_bytes(second)).record
        [[refused]] = store.put_encoded([later])
        assert refused.status is Status.MESSAGE_ILLEGAL and "committed" in refused.reason
        for topic in (HALF_TOPIC, OP_TOPIC, CHECKS_TOPIC):
            [[refused]] = store.put_encoded([message(1, topic=topic)])
            assert refused.status is Status.MESSAGE_ILLEGAL and "reserved" in refused.reason
        del forged
        assert len(check(store).open) == 2


@pytest.mark.parametrize("other", [{"PGROUP": "others"}, {"topic": "Other"}])
def test_the_key_of_another_producer_s_transaction_is_no_repeat(tmp_path, other):
    with opened(tmp_path) as store:
        first, second, again = put_own(store, half("k"), half("k", **other), half("k"))
        check(store)
        assert [one.offsets for one in store.transactions.halves()] == [[second], [first, again]]
        put_own(store, commit(store.reader.record_bytes(second)).record)
        check(store)
        [one] = store.transactions.halves()
        assert one.offsets == [first, again]
        assert how_ended(store, second) is Ended.COMMITTED
        assert how_ended(store, first) is None
        [third] = put_own(store, half("k", **other))
        put_own(store, set_aside(store.reader.record_bytes(third), 15))
        check(store)
        assert how_ended(store, third) is Ended.SET_ASIDE
        assert store.transactions.find(first) is one


def test_a_file_of_an_earlier_version_is_read(tmp_path):
    """It says of no transaction whose it is: then the key alone tells that one is repeated."""
    with opened(tmp_path) as store:
        first, second = put_own(store, half("k"), half("l"))
        check(store)
        end = store.whole_offset
    path = tmp_path / "hastore" / "transactions"
    table = [[at, place, 1, 0, None, key, []] for at, place, key in
             ((first, 0, b"k"), (second, 1, b"l"))]  # fmt: skip
    state = msgspec.msgpack.encode([end, table, []])
    path.write_bytes(transactions._FRAME.pack(msgspec.msgpack.encode([state])))
    with opened(tmp_path) as store:
        assert [one.group for one in store.transactions.halves()] == [None, None]
        [again, new] = put_own(store, half("k"), half("k", PGROUP="others"))
        put_own(store, set_aside(store.reader.record_bytes(second), 15))
        assert store.wait_dispatched(store.whole_offset, 60)
        assert [one.offsets for one in store.transactions.halves()] == [[first, again], [new]]
        assert how_ended(store, second) is Ended.SET_ASIDE


def test_many_half_messages_of_one_transaction_are_bounded(tmp_path):
    with opened(tmp_path) as store:
        offsets = put_own(store, *[half("k") for _ in range(100)])
        store.wait_dispatched(store.max_offset, 60)
        [one] = store.transactions.halves()
        assert len(one.earlier) == transactions.EARLIER_MAX
        assert store.transactions.find(offsets[-1]) is store.transactions.find(offsets[-60]) is one
        assert store.transactions.find(offsets[0]) is None


def test_a_topic_whose_transactions_nobody_ends_leaves_room_for_others(tmp_path, monkeypatch):
    """Who may produce to one topic could have kept all others out for 30 days."""
    monkeypatch.setattr(transactions, "OPEN_MAX", 8)
    with opened(tmp_path) as store:
        found = store.transactions

        def begin(topic, key):
            pairs = half_pairs(topic, 0, "producers", key, [(IMMUNITY, "2592000")])
            raw = build_record(
                HALF_TOPIC, b"", queue_id=0, properties=pairs, born_timestamp_ms=1, born_host=BORN
            )
            [(result,)] = store.put_encoded([raw])
            assert store.wait_dispatched(store.whole_offset, 60), store.problems
            return result

        assert found.problems() == []
        said = [begin("scratch", f"s{number}") for number in range(6)]
        assert [one.status for one in said] == [Status.PUT_OK] * 4 + [Status.BUSY] * 2
        assert said[4].reason.startswith("4 transactions are open, 4 of topic scratch: commit them")
        (problem,) = found.problems()
        assert problem.startswith("4 transactions are open, 4 of topic scratch; at most 8 may be")
        said = [begin("payments", f"p{number}") for number in range(3)]
        assert [one.status for one in said] == [Status.PUT_OK] * 2 + [Status.BUSY]
        # As soon as one of them has ended, there is room for another, also after a cut.
        ended, last = found.halves()[-2:]
        put_own(store, *build_ended([ended.place], 1, HOST))
        assert store.wait_dispatched(store.whole_offset, 60), store.problems
        assert found.why_full(b"payments") is None
        assert found.why_full(b"scratch") is not None
    with opened(tmp_path) as store:
        found = store.transactions
        assert store.wait_dispatched(store.whole_offset, 60), store.problems
        assert found.why_full(b"scratch") is not None and found.why_full(b"payments") is None
        store.truncate(last.offset)
        assert store.wait_dispatched(store.whole_offset, 60), store.problems
        assert found._of_topic == {b"scratch": 4, b"payments": 1}
