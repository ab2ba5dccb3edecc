"""The check of a leader's entries: one by one and in bulk, against every kind of wrong bytes."""

import dataclasses
import random
import struct
import zlib
from dataclasses import dataclass, field

import msgspec
import pytest

from hastore.dledger.core.events import TakenEntries
from hastore.dledger.store import entry_check
from hastore.errors import CorruptRecordError, ProtocolError
from hastore.protocol.dledger import AppendRequest, MemberSet, wire_lists
from hastore.record.codec import decode_record, encode_record
from hastore.record.layout import CRC_MASK
from hastore.record.log_format import build_own, fill_in_crcs, members_in, pack_header, pack_unit
from tests.dledger.store.kit import copy_entries, data_of, opened, put
from tests.dledger.store.records import record
from tests.store.kit import HOST, message

SIZE = 1 << 20


@dataclass
class Entries:
    """Entries of some terms at a place of a log."""

    prev_index: int
    prev_term: int
    pos: int
    data: bytearray = field(default_factory=bytearray)
    runs: list[tuple[int, int]] = field(default_factory=list)
    units: list[bytes] = field(default_factory=list)
    lists: list[tuple[int, MemberSet]] = field(default_factory=list)
    crcs: bool = True  # False: as DLedger and earlier versions write entries
    last_crc: int = 0

    def add(self, term: int, number: int, *, group: MemberSet | None = None) -> None:
        pos, index = self.pos + len(self.data), self.prev_index + 1 + len(self.units)
        body = record(pos + 48, number, b"x" * (number * 37 % 300))
        if group is not None:
            body = build_own(group, physical_offset=pos + 48, now_ms=5, host=HOST)
            self.lists.append((index, group))
        entry = bytearray(pack_header(index, term, pos, len(body)) + body)
        if self.crcs:
            fill_in_crcs(entry, self.last_crc)
        self.last_crc = int.from_bytes(entry[40:44])
        self.data += entry
        self.units.append(pack_unit(index, term, pos, 48 + len(body)))
        if self.runs and self.runs[-1][0] == term:
            self.runs[-1] = term, self.runs[-1][1] + 1
        else:
            self.runs.append((term, 1))

    def request(self) -> AppendRequest:
        return AppendRequest(
            9, self.prev_index, self.prev_term, self.pos, len(self.data), tuple(self.runs), -1,
            *wire_lists(self.lists),
        )  # fmt: skip


def check(request, data, skip, least, monkeypatch):
    monkeypatch.setattr(entry_check, "_BULK_MIN", least)
    try:
        return entry_check.check_taken(request, memoryview(bytes(data)), skip, SIZE)
    except ProtocolError as refused:
        return str(refused)


def drawn() -> random.Random:
    """Draw a seed, and print it."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def some(chance: random.Random, count: int, *, crcs: bool | None = True) -> Entries:
    """Some entries; `crcs` None: leaders of several versions wrote them, turn by turn."""
    found = Entries(chance.choice((-1, 7, 10**6)), 2, chance.choice((0, 5000)))
    term = 2
    for number in range(count):
        term = min(9, term + (chance.random() < 0.1))
        found.crcs = chance.random() < 0.5 if crcs is None else crcs
        found.add(term, number)
    return found


def test_both_ways_take_the_same_entries(monkeypatch):
    chance = drawn()
    for _ in range(30):
        count = chance.randrange(1, 60)
        entries = some(chance, count, crcs=chance.choice((True, False, None)))
        if chance.random() < 0.2:
            entries.add(9, 1, group=MemberSet((1, 2), chance.choice(((), (3, 4)))))
        request, skip = entries.request(), chance.randrange(0, count + 1)
        found = [check(request, entries.data, skip, least, monkeypatch) for least in (1, 1 << 30)]
        assert found[0] == found[1]
        begin, new = found[0]
        assert bytes(new.units) == b"".join(entries.units[skip:])
        assert sum(number for _, number in new.runs) == len(entries.units) - skip
        assert begin == sum(int.from_bytes(unit[12:16]) for unit in entries.units[:skip])


def test_both_ways_refuse_what_is_changed_in_any_place(monkeypatch):
    chance = drawn()
    entries = some(chance, 40)
    request = entries.request()
    for _ in range(400):
        data = bytearray(entries.data)
        place = chance.randrange(len(data))
        data[place] ^= 1 << chance.randrange(8)
        for least in (1, 1 << 30):
            assert isinstance(check(request, data, 0, least, monkeypatch), str), place
    for change in (
        {"prev_index": request.prev_index + 1},
        {"pos": request.pos + 1},
        {"runs": ((1, 40),)},
        {"runs": ((10, 40),)},
        {"runs": ((9, 41),)},
        {"runs": ((9, 39),)},
        {"runs": ((9, 40), (8, 0))},
        {"runs": ()},
        {"size": request.size + 1},
        {"pos": SIZE - 100},
        {"members": ((request.prev_index + 1, (1,)),)},
    ):
        wrong = msgspec.structs.replace(request, **change)
        for least in (1, 1 << 30):
            assert isinstance(check(wrong, entries.data, 0, least, monkeypatch), str), change
    for size in (1, 47, 48, 60, len(entries.data) - 1):
        part = entries.data[:size]
        wrong = msgspec.structs.replace(request, size=size)
        for least in (1, 1 << 30):
            assert isinstance(check(wrong, part, 0, least, monkeypatch), str)


def test_of_entries_without_crcs_only_some_changes_are_found(monkeypatch):
    chance = drawn()
    entries = some(chance, 40, crcs=False)
    request = entries.request()
    refused = 0
    for _ in range(400):
        data = bytearray(entries.data)
        place = chance.randrange(len(data))
        data[place] ^= 1 << chance.randrange(8)
        found = [check(request, data, 0, least, monkeypatch) for least in (1, 1 << 30)]
        assert isinstance(found[0], str) == isinstance(found[1], str), place
        refused += isinstance(found[0], str)
    assert 200 < refused < 400


def test_the_next_entry_tells_that_the_crcs_of_one_became_zeros(monkeypatch):
    chance = drawn()
    entries = some(chance, 40, crcs=None)
    request = entries.request()
    at = 0
    for number, unit in enumerate(entries.units):
        data = bytearray(entries.data)
        has_crc = any(data[at + 40 : at + 44])
        data[at + 36 : at + 44] = bytes(8)
        after = at + int.from_bytes(unit[12:16])
        told = has_crc and any(data[after + 40 : after + 44])
        for least in (1, 1 << 30):
            found = check(request, data, 0, least, monkeypatch)
            assert isinstance(found, str) == told, (number, found)
            if told and least > 1:
                assert f"entry {request.prev_index + 1 + number} has the bodyCrc 0" in found
        at = after


def test_entries_that_do_not_follow_this_log_append_nothing(tmp_path):
    with opened(tmp_path / "a") as leader, opened(tmp_path / "b") as follower:
        put(leader, 3, *(message(number) for number in range(400)))
        put(follower, 5, message(0))
        found = leader.read(1, 1 << 20)
        with leader.messages.view(found.pos, found.size) as view:
            data = bytes(view)
        request = AppendRequest(5, 0, 3, found.pos, found.size, found.runs, -1)
        with pytest.raises(ProtocolError, match="term 3 follows term 5"):
            follower.append_taken(request, data, TakenEntries(0, found.last_index))
        with pytest.raises(ProtocolError, match="does not follow"):
            follower.append_taken(request, data, TakenEntries(1, found.last_index))
        assert follower.end_index == 0
        follower.truncate(0)
        far = leader.read(300, 1 << 20)
        with leader.messages.view(far.pos, far.size) as view:
            request = AppendRequest(5, -1, -1, far.pos, far.size, far.runs, -1)
            with pytest.raises(ProtocolError):
                follower.append_taken(request, bytes(view), TakenEntries(0, far.last_index))
        copy_entries(leader, follower)
        assert data_of(follower) == data_of(leader)


def test_a_follower_does_not_take_what_does_not_follow_its_last_entry(tmp_path):
    with opened(tmp_path / "a") as leader, opened(tmp_path / "b") as follower:
        put(leader, 3, *(message(number) for number in range(40)))
        found = leader.read(0, leader.end_position(19))
        with leader.messages.view(found.pos, found.size) as view:
            first = bytearray(view)
        at = leader.position(19)
        first[at + 36 : at + 44] = bytes(8)  # the rot that a single request cannot show
        request = AppendRequest(3, -1, -1, 0, found.size, found.runs, -1)
        follower.append_taken(request, first, TakenEntries(0, 19))
        with pytest.raises(ProtocolError, match="but entry 19 has the bodyCrc 0: that entry is"):
            copy_entries(leader, follower)
        assert follower.end_index == 19


def test_a_member_list_is_what_was_announced(monkeypatch):
    """A list with learners has version 2, and one without is what the version before writes."""
    entries, group = Entries(-1, 2, 0), MemberSet((1, 2, 3), (4, 5), (3,))
    entries.add(9, 1, group=group)
    request = entries.request()
    assert (request.members, request.learners) == (((0, (1, 2, 3)),), ((0, (4, 5), (3,)),))
    assert not isinstance(check(request, entries.data, 0, 1, monkeypatch), str)
    for change in ({"learners": ()}, {"learners": ((0, (4, 5), ()),)}, {"members": ((0, (1, 2)),)}):
        wrong = msgspec.structs.replace(request, **change)
        assert "the entries have the member lists" in check(wrong, entries.data, 0, 1, monkeypatch)
    lists = decode_record(bytes(entries.data[48:])).body
    assert lists[:10] == b"HSML" + bytes((0, 2, 0, 3, 0, 0)) and len(lists) == 8 + 12 + 4 + 12 + 4
    plain = build_own(MemberSet((1, 2, 3)), physical_offset=48, now_ms=5, host=HOST)
    body = decode_record(plain).body
    assert body[:-4] == b"HSML" + struct.pack(">HH3I", 1, 3, 1, 2, 3)
    assert members_in(plain) == ((1, 2, 3), (), ())


@pytest.mark.parametrize(
    "body",
    [
        b"HSML" + struct.pack(">HHI", 3, 1, 1),
        b"HSML" + struct.pack(">HHI", 2, 1, 1),
        b"HSML" + struct.pack(">HHIHHI", 2, 1, 1, 1, 1, 4),
        b"HSML" + struct.pack(">HHII", 1, 1, 1, 4),
    ],
)
def test_a_member_list_of_a_later_version_is_refused(body):
    body += struct.pack(">I", zlib.crc32(body))
    own = decode_record(build_own(None, physical_offset=48, now_ms=5, host=HOST))
    later = dataclasses.replace(own, body=body, body_crc=zlib.crc32(body) & CRC_MASK)
    with pytest.raises(CorruptRecordError, match="a later version of hastore wrote this log"):
        members_in(encode_record(later))
