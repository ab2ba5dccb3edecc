"""The rules one by one: the fault budget, real time, positions, what a history must prove."""

import pytest

from hastore.errors import UsageError
from hastore.history.rules import events as e
from hastore.history.rules.budget import Budget, parse_level
from hastore.history.rules.events import Commit, Epoch, Fault, Header, Ok, Place, Position, Send
from tests.history.healthy import check

HEADER = Header(nodes=3)


def d(number: int) -> str:
    return e.digest_of("T", None, b"%d" % number)


def acked(number: int, began: int, ended: int, offset: int | None = None, **more) -> list[e.Event]:
    offset = 100 * number if offset is None else offset
    ok = {"level": "SYNC_MEM(1)", "offset": offset, "queue": 0, "queue_offset": number, "epoch": 1}
    return [Send("p", number, began, "T", d(number)), Ok("p", number, ended, **(ok | more))]


def read(*numbers: int, t: int = 1000, client: str = "c") -> e.Read:
    seen = [e.Seen(number, 100 * number, d(number)) for number in numbers]
    return e.Read(client, t, t, "T", 0, seen)


# -- the fault budget


def excuse(level: str, *faults: Fault, since: int = 10, epoch: int = 0, epochs=(), header=HEADER):
    found = parse_level(level)
    assert found is not None
    why = Budget(header, faults, map(Epoch, epochs)).excuse(found, epoch, since)
    return None if why is None else why.text


def test_levels_are_read_as_replies_state_them() -> None:
    for text in ("MASTER_MEM", "MASTER_DISK", "CLASSIC", "QUORUM_DISK", "SYNC_DISK(2)"):
        assert str(parse_level(text)) == text
    for text in ("", "SYNC_MEM", "SYNC_MEM(0)", "SYNC_MEM(x)", "MASTER", "QUORUM"):
        assert parse_level(text) is None


def test_a_kill_excuses_nothing() -> None:
    for level in ("MASTER_MEM", "SYNC_MEM(1)", "QUORUM_MEM", "CLASSIC"):
        assert excuse(level, Fault(20, "kill", 1), Fault(20, "pause", 2)) is None


def test_what_only_the_master_has_is_lost_with_it_or_by_a_failover() -> None:
    first, again, other = 1 << 16 | 1, 2 << 16 | 1, 2 << 16 | 2
    assert excuse("MASTER_MEM", epoch=first, epochs=(first, again)) is None
    assert excuse("MASTER_MEM", epoch=first, epochs=(first, other)) is not None
    assert excuse("MASTER_DISK", epoch=first, epochs=(first, other)) is not None
    assert excuse("SYNC_MEM(1)", epoch=first, epochs=(first, other)) is None
    power = Fault(20, "power", 1)
    assert excuse("MASTER_MEM", power, epoch=first) is not None
    assert excuse("MASTER_DISK", power, epoch=first) is None
    assert excuse("MASTER_MEM", power, epoch=1 << 16 | 2) is None, "another node's"
    assert excuse("MASTER_MEM", power, epoch=first, since=30) is None, "before it"
    assert excuse("MASTER_DISK", Fault(20, "lost", 1), epoch=first) is not None


def test_a_planned_flip_keeps_what_the_master_had() -> None:
    first, other = 1 << 16 | 1, 2 << 16 | 2
    level = parse_level("MASTER_MEM")
    assert level is not None
    assert Budget(HEADER, (), [Epoch(other, planned=True)]).excuse(level, first, 0) is None


def test_two_copies_need_two_losses_at_a_time() -> None:
    one, other = Fault(20, "power", 1), Fault(30, "power", 2)
    assert excuse("SYNC_MEM(1)", one, Fault(40, "power", 1)) is None, "the same one twice"
    assert excuse("SYNC_MEM(1)", one, other) is not None
    assert excuse("SYNC_MEM(2)", one, other) is None
    assert excuse("SYNC_DISK(1)", one, other) is None
    assert excuse("SYNC_MEM(1)", one, Fault(25, "in-sync", 1), other) is None
    assert excuse("SYNC_MEM(1)", one, other, since=25) is None, "one of them was before"
    assert excuse("SYNC_DISK(1)", Fault(20, "lost", 1), Fault(30, "lost", 2)) is not None
    assert excuse("SYNC_MEM(1)", Fault(20, "lost", 1), other) is not None


def test_a_lost_disk_that_has_all_again_is_lost_no_more() -> None:
    one, healed, other = Fault(20, "lost", 1), Fault(30, "in-sync", 1), Fault(40, "lost", 2)
    for level in ("SYNC_MEM(1)", "SYNC_DISK(1)", "QUORUM_MEM", "QUORUM_DISK"):
        assert excuse(level, one, healed, other) is None
        assert excuse(level, one, healed, Fault(35, "lost", 1)) is None
        assert excuse(level, one, other, Fault(50, "in-sync", 1)) is not None, "too late"
        assert excuse(level, one, Fault(30, "in-sync", 3), other) is not None, "another node"


def test_a_majority_needs_the_loss_of_a_majority() -> None:
    lost = [Fault(20 + node, "lost", node) for node in (1, 2, 3)]
    assert excuse("QUORUM_DISK", lost[0]) is None
    assert excuse("QUORUM_DISK", *lost[:2]) is not None
    assert excuse("QUORUM_DISK", *lost[:2], header=Header(nodes=5)) is None
    assert excuse("QUORUM_DISK", *lost, header=Header()) is None, "nobody says how many there are"
    power = [Fault(20, "power", node) for node in (1, 2, 3)]
    assert excuse("QUORUM_DISK", *power) is None
    assert excuse("QUORUM_MEM", *power) is not None


def test_an_operator_may_give_messages_up() -> None:
    assert excuse("SYNC_DISK(2)", Fault(20, "accept-loss")) is not None
    assert excuse("SYNC_DISK(2)", Fault(5, "force-unclean")) is None, "before it"


def test_readers_of_asynchronous_masters_may_see_what_a_failover_loses() -> None:
    lost = [e.Log(0, 100), e.Record(0, 100, "T", 0, 0, d(0))]
    epochs = [Epoch(1 << 16 | 1), Epoch(2 << 16 | 2)]
    more = Send("p", 1, 1, "T", d(1)), e.Info("p", 1, 2)
    lines = [*acked(0, 1, 2), *more, *epochs, read(0, 1), *lost]
    assert "durable" in check([Header(), *lines]).broken
    report = check([Header(mode="async"), *lines])
    assert report.ok and report.losses == 1


def test_without_a_failover_readers_of_asynchronous_masters_never_go_back() -> None:
    """The one epoch of such a group is no failover, whatever is not known of a read."""
    first, again, other = 1 << 16 | 1, 2 << 16 | 1, 2 << 16 | 2
    sent = [line for n in (0, 1, 2) for line in acked(n, n, n, level="MASTER_MEM", epoch=first)]
    back = [*sent, read(0, 1, 2), read(0, t=1001)]
    commits = [
        line
        for t, position in ((1010, 3), (1020, 1))
        for line in (Commit("c", t, t, "G", [Place("T", 0, position)]), Ok("c", t, t + 1))
    ]
    for lines, promise in ((back, "monotonic"), ([*sent, read(0, 1, 2), *commits], "positions")):
        for epochs in ((), (first, again)):
            report = check([Header(mode="async"), *map(Epoch, epochs), *lines])
            assert set(report.broken) == {promise}, (promise, epochs)
        report = check([Header(mode="async"), Epoch(other), *lines])
        assert not report.broken and report.losses, "a failover excuses it"
    assert excuse("CLASSIC", epochs=(first,)) is not None, "of a RocketMQ master before it"


def test_a_message_that_an_operator_sent_again_is_found_elsewhere() -> None:
    first, other = 1 << 16 | 1, 2 << 16 | 2
    lost = acked(0, 1, 2, offset=700, level="MASTER_MEM", epoch=first)
    rest = [*acked(1, 30, 31, offset=0, queue_offset=0, epoch=other), Epoch(other)]
    rest += [e.Rescued(700, d(0)), e.Log(0, 200, archives=True)]
    rest += [e.Record(0, 100, "T", 0, 0, d(1)), e.Record(100, 100, "T", 0, 1, d(0))]
    assert "once" in check([HEADER, *lost, *rest]).broken
    assert check([HEADER, *lost, *rest, Fault(50, "resend")]).ok


# -- sends


def test_who_overlaps_has_no_order() -> None:
    lines = [*acked(1, 10, 20), *acked(0, 15, 30), read(0, 1)]
    assert check([HEADER, *lines]).ok
    lines = [*acked(1, 10, 20), *acked(0, 20, 30), read(0, 1)]
    assert check([HEADER, *lines]).ok, "at the same time"
    lines = [*acked(1, 10, 20), *acked(0, 21, 30), read(0, 1)]
    assert set(check([HEADER, *lines]).broken) == {"linear"}


def test_each_message_that_is_in_another_place_is_found() -> None:
    lines = [*acked(0, 1, 2), *acked(1, 3, 4), e.Log(0, 200)]
    log = [e.Record(0, 100, "T", 1, 0, d(0)), e.Record(100, 100, "T", 0, 0, d(1))]
    report = check([HEADER, *lines, *log])
    assert [one.text for one in report.findings] == [
        "the message at 0 was acknowledged as T[0] 0, it is T[1] 0",
        "the message at 100 was acknowledged as T[0] 1, it is T[0] 0",
    ]


def test_an_answer_without_a_queue_offset_contradicts_no_place() -> None:
    """The node could not read the message that an earlier attempt had stored."""
    lines = [Send("p", 1, 1, "T", d(0)), Ok("p", 1, 2, "SYNC_MEM(1)", 0, 1)]
    log = [e.Log(0, 200), e.Record(0, 100, "T", 1, 0, d(0))]
    assert check([HEADER, *lines, *log]).ok
    assert not check([HEADER, *lines, e.Log(0, 200)]).ok, "it must be there nevertheless"
    elsewhere = [e.Log(0, 200), e.Record(0, 100, "T", 2, 0, d(0))]
    assert not check([HEADER, *lines, *elsewhere]).ok, "the queue is known"
    seen = e.Read("c", 9, 9, "T", 1, [e.Seen(0, 0, d(0))])
    assert check([HEADER, *lines, seen]).ok


def test_equal_messages_are_as_many_as_were_sent() -> None:
    same = d(7)
    sends = [Send("p", n, n, "T", same) for n in range(3)]
    ends = [Ok("p", n, 10, "SYNC_MEM(1)", 100 * n, 0, n, 1) for n in range(2)]
    ends += [e.Info("p", 2, 10)]
    for count in (2, 3, 4):
        log = [e.Record(100 * n, 100, "T", 0, n, same) for n in range(count)]
        report = check([HEADER, *sends, *ends, e.Log(0, 1000), *log])
        assert report.ok == (count < 4), count


def test_without_a_log_the_copies_that_were_read_are_counted() -> None:
    """Under a second number, as of a retry that took another one."""
    one, other, third = e.Seen(0, 0, d(7)), e.Seen(1, 100, d(7)), e.Seen(2, 200, d(7))
    ok = {"level": "SYNC_MEM(1)", "offset": 0, "queue": 0, "queue_offset": 0, "epoch": 1}
    first = [Send("p", 1, 1, "T", d(7)), Ok("p", 1, 2, **ok)]
    again = [Send("p", 2, 3, "T", d(7)), e.Info("p", 2, 5)]
    failed = [Send("p", 2, 3, "T", d(7)), e.Fail("p", 2, 5)]

    def broken(*lines: e.Event, seen: tuple[e.Seen, ...] = (one, other)) -> list[str]:
        reads = [e.Read(name, 9, 9, "T", 0, list(seen)) for name in ("c", "other")]
        report = check([HEADER, *lines, *reads])
        assert all(one.lines for one in report.findings)
        return [one.promise for one in report.findings]

    assert broken(*first) == ["once"]
    assert broken(*first, seen=(one,)) == []
    assert broken(*first, *again) == [], "an unknown outcome may be stored"
    assert broken(*first, *again, seen=(one, other, third)) == ["once"]
    assert broken(*first, *failed) == ["once"]
    assert broken(*first, Fault(5, "resend")) == []
    first[0].attempts = 2
    assert broken(*first) == [], "it does not number"
    first[0].attempts = 1
    gone = [e.Log(300, 400), e.Record(300, 100, "T", 0, 3, d(8)), *acked(8, 6, 7, 300)]
    gone[-1].queue_offset = 3
    assert "once" in broken(*first, *gone), "retention has removed both"


def test_what_a_failover_took_from_a_reader_may_be_elsewhere_since() -> None:
    old, new = 1 << 16 | 1, 2 << 16 | 2
    ok = {"level": "MASTER_MEM", "offset": 0, "queue": 0, "queue_offset": 0, "epoch": new}
    sent = [Send("p", 1, 1, "T", d(7)), Ok("p", 1, 20, **ok)]
    before = e.Read("c", 9, 9, "T", 0, [e.Seen(5, 500, d(7), old)])
    after = e.Read("other", 30, 30, "T", 0, [e.Seen(0, 0, d(7), new)])
    assert check([Header(mode="async"), *sent, before, after]).ok


def test_a_client_that_does_not_number_may_store_a_message_as_often_as_it_tries() -> None:
    log = [e.Log(0, 1000), *(e.Record(100 * n, 100, "T", 0, n, d(0)) for n in range(3))]
    for attempts in (2, 3):
        lines = acked(0, 1, 2)
        lines[0].attempts = attempts
        assert check([HEADER, *lines, *log]).ok == (attempts == 3)


@pytest.mark.parametrize(
    ("acks", "level", "broken"),
    [("all", "", True), ("1", "", True), (None, "SYNC_MEM(1)", True), ("0", "", False)],
)
def test_an_answer_names_the_place_of_its_message(acks, level, broken) -> None:
    """Without a place nobody would look whether the message is there."""
    lines = [Send("p", 1, 10, "T", d(1), acks=acks), Ok("p", 1, 11, level)]
    report = check([HEADER, *acked(0, 1, 2), *lines, read(0)])
    assert set(report.broken) == ({"level"} if broken else set())


@pytest.mark.parametrize(
    ("acks", "level", "broken"),
    [(1, "SYNC_MEM(1)", False), (2, "SYNC_MEM(1)", True), (2, "SYNC_DISK(1)", True),
     (2, "SYNC_MEM(2)", False), (2, "CLASSIC", False)],
)  # fmt: skip
def test_all_are_as_many_slaves_as_the_group_asks_for(acks, level, broken) -> None:
    lines = [Send("p", 0, 1, "T", d(0), acks="all"), Ok("p", 0, 2, level, 0, 0, 0, 1)]
    report = check([Header(nodes=3, acks=acks), *lines, read(0)])
    assert set(report.broken) == ({"level"} if broken else set())


@pytest.mark.parametrize("acks", [None, "1", "all"])
def test_in_mode_dledger_a_majority_confirms_whatever_is_asked_for(acks) -> None:
    for level, broken in (("QUORUM_MEM", set()), ("MASTER_MEM", {"level"}), ("CLASSIC", {"level"})):
        lines = [Send("p", 0, 1, "T", d(0), acks=acks), Ok("p", 0, 2, level, 0, 0, 0, 1)]
        report = check([Header(mode="dledger", nodes=3), *lines, read(0)])
        assert set(report.broken) == broken, level


def test_a_delayed_message_may_be_in_its_topic_once() -> None:
    send = Send("p", 1, 1, "T", d(1), indirect=True)
    ok = Ok("p", 1, 2, "SYNC_MEM(1)", 5000, 3, 17, 1)  # where it waits
    for count in (0, 1, 2):
        log = [e.Record(100 * (n + 1), 100, "T", 0, n + 1, d(1)) for n in range(count)]
        first = e.Record(0, 100, "T", 0, 0, d(0))
        report = check([HEADER, *acked(0, 1, 2), send, ok, e.Log(0, 9000), first, *log])
        assert report.ok == (count < 2), count


def test_topics_of_others_prove_nothing_and_are_no_phantoms() -> None:
    others = e.Record(100, 100, "U", 0, 0, d(9))
    log = [e.Log(0, 200), e.Record(0, 100, "T", 0, 0, d(0)), others]
    assert check([HEADER, *acked(0, 1, 2), *log]).ok
    report = check([Header(topics=["T", "U"]), *acked(0, 1, 2), *log])
    assert set(report.broken) == {"phantom"}


# -- consumers


def test_a_seek_may_go_anywhere_and_a_filter_may_leave_out() -> None:
    lines = [line for n in range(6) for line in acked(n, 2 * n, 2 * n + 1)]
    seek = e.Seek("c", 1001)
    assert check([HEADER, *lines, read(3, 4), seek, read(0, 1, t=1002)]).ok
    assert set(check([HEADER, *lines, read(3, 4), read(0, 1)]).broken) == {"monotonic"}
    assert set(check([HEADER, *lines, read(0, 2)]).broken) == {"prefix"}
    filtered = e.Consumer("c", 0, filtered=True)
    assert check([HEADER, *lines, filtered, read(0, 2), read(5)]).ok
    assert set(check([HEADER, *lines, filtered, read(2), read(1)]).broken) == {"monotonic"}


def test_retention_may_remove_what_was_not_read() -> None:
    lines = [line for n in range(6) for line in acked(n, 2 * n, 2 * n + 1)]
    log = [e.Record(100 * n, 100, "T", 0, n, d(n)) for n in range(4, 6)]
    assert check([HEADER, *lines, read(0), read(4), e.Log(400, 600), *log]).ok
    log = [e.Record(100 * n, 100, "T", 0, n, d(n)) for n in range(3, 6)]
    report = check([HEADER, *lines, read(0), read(4), e.Log(300, 600), *log])
    assert set(report.broken) == {"prefix"}
    noted = Fault(500, "retention")
    assert check([HEADER, *lines, read(0), noted, read(4)]).ok


def test_a_group_that_has_no_position_may_begin_at_the_latest() -> None:
    lines = [line for n in range(6) for line in acked(n, 2 * n, 2 * n + 1)]
    lines += [e.Consumer(name, 0, "g") for name in ("c", "other")]
    late = [read(0, t=100), read(4, t=200, client="other")]
    assert check([HEADER, *lines, *late]).ok
    commit = [Commit("c", 1, 110, "g", [Place("T", 0, 1)]), Ok("c", 1, 120)]
    report = check([HEADER, *lines, *late, *commit])
    assert set(report.broken) == {"delivered"}
    reset = e.Reset(130, "g", "T", 0, 4)
    assert check([HEADER, *lines, *late, *commit, reset]).ok


def test_a_member_is_given_nothing_while_another_one_has_the_queue() -> None:
    """Also once: it has had the queue at some time in that call."""
    lines = [line for n in range(9) for line in acked(n, 2 * n, 2 * n + 1)]
    members = [e.Consumer(name, 0, "g", shared=True) for name in ("c", "m")]

    def other(began: int, t: int) -> e.Read:
        return e.Read("m", began, t, "T", 0, [e.Seen(2, 200, d(2))])

    def broken(*reads: e.Event) -> set[str]:
        return set(check([HEADER, *lines, *members, *reads]).broken)

    mine = [e.Read("c", t - 10, t, "T", 0, [e.Seen(n, 100 * n, d(n))])
            for n, t in ((0, 110), (1, 210), (2, 310))]  # fmt: skip
    assert broken(*mine, other(111, 299)) == {"owners"}
    assert broken(*mine, other(150, 160), other(400, 410)) == {"monotonic", "owners"}
    for began, t in ((90, 105), (109, 150), (250, 300), (305, 400)):
        assert not broken(*mine, other(began, t)), "the queue may have come or left meanwhile"
    left = [e.Revoked("c", 120, "T", 0), e.Assigned("c", 180, "T", 0)]
    assert not broken(mine[0], *left, *mine[1:], other(130, 160))


# -- positions


def committed(op: int, began: int, ended: int | None, position: int, **more) -> list[e.Event]:
    commit = Commit("c", op, began, "g", [Place("T", 0, position)], **more)
    return [commit, e.Info("c", op, 10_000) if ended is None else Ok("c", op, ended)]


def asked(position: int | None, began: int) -> Position:
    place = Place("T", 0, position)
    return Position("admin", began, began + 1, "g", [place], current=True)


def broken_by(*events: e.Event) -> bool:
    lines = [line for n in range(9) for line in acked(n, 2 * n, 2 * n + 1)]
    report = check([HEADER, *lines, e.Consumer("c", 0, "g"), read(*range(9), t=50), *events])
    assert set(report.broken) <= {"positions"}, report.findings
    return not report.ok


def test_a_position_never_goes_back_by_itself() -> None:
    five = committed(1, 100, 110, 5)
    assert not broken_by(*five, asked(5, 111))
    assert broken_by(*five, asked(4, 111)) and broken_by(*five, asked(None, 111))
    assert not broken_by(*five, asked(None, 105)), "while it is committed"
    assert broken_by(*five, *committed(2, 111, 120, 4))
    assert not broken_by(*five, *committed(2, 105, 120, 4)), "at the same time"
    fail = [Commit("c", 2, 111, "g", [Place("T", 0, 4)]), e.Fail("c", 2, 112)]
    assert not broken_by(*five, *fail, asked(5, 120))


def test_a_seek_or_an_operator_may_move_it_back() -> None:
    five, back = committed(1, 100, 110, 5), committed(2, 111, 120, 3, back=True)
    assert not broken_by(*five, *back, asked(3, 121))
    assert not broken_by(*five, *back, asked(5, 115)), "while it is moved"
    assert broken_by(*five, *back, asked(2, 121))
    assert not broken_by(*five, *committed(2, 111, None, 3, back=True), asked(3, 500))
    assert not broken_by(*five, e.Reset(111, "g", "T", 0, 1), asked(1, 112))
    assert broken_by(*five, e.Reset(111, "g", "T", 0, 1), asked(0, 112))


def test_a_member_begins_where_another_one_has_committed() -> None:
    """A position that was acknowledged and is lost: its messages are delivered again."""
    lines = [line for n in range(9) for line in acked(n, 2 * n, 2 * n + 1)]
    members = [e.Consumer(name, 0, "g", shared=True) for name in ("c", "m")]

    def broken(*events: e.Event, began: int = 300, header: Header = HEADER) -> set[str]:
        later = e.Read("m", began, 400, "T", 0, [e.Seen(3, 300, d(3)), e.Seen(4, 400, d(4))])
        return set(check([header, *lines, *members, read(*range(6), t=50), *events, later]).broken)

    five, three = committed(1, 100, 110, 5), committed(1, 100, 110, 3)
    assert broken(*five) == {"positions"}
    assert not broken(*three) and not broken(), "it begins there, or where it likes"
    assert not broken(*committed(1, 100, None, 5)), "nobody knows whether it was committed"
    assert not broken(*five, began=110) and not broken(*five, e.Seek("m", 200, "T", 0))
    assert not broken(*five, *committed(2, 120, 130, 3, back=True))
    assert not broken(*five, *committed(2, 120, None, 3, back=True))
    assert not broken(*five, e.Reset(120, "g", "T", 0, 2))
    alone = [e.Epoch(1 << 16 | 1), e.Epoch(2 << 16 | 2)]
    assert not broken(*five, *alone, header=Header(mode="async")), "readers saw what was lost"


def test_findings_about_positions_come_in_the_order_of_the_history() -> None:
    groups = [f"g{number}" for number in range(20)]
    commits = [
        event
        for op, (group, position) in enumerate([(g, p) for p in (5, 3) for g in groups])
        for event in (
            Commit("c", op, 100 + 2 * op, group, [Place("T", 0, position)]),
            Ok("c", op, 101 + 2 * op),
        )
    ]
    report = check([HEADER, *acked(0, 1, 2), read(0), *commits])
    assert [one.text.split()[3] for one in report.findings] == groups


# -- what a history must prove


def test_a_vacuous_history_fails_and_says_why() -> None:
    def why(*lines: e.Event, expect: tuple[str, ...] = ()) -> str:
        report = check([HEADER, *lines], *expect)
        assert not report.ok and not report.broken
        return " ".join(report.vacuous)

    assert "no send was acknowledged" in why()
    assert "nothing was read, and no log was compared" in why(*acked(0, 1, 2))
    lines = [*acked(0, 1, 2), Send("p", 1, 3, "T", d(1)), e.Info("p", 1, 5)]
    other = e.Read("c", 9, 9, "T", 0, [e.Seen(1, 100, d(1))])
    assert "none of the acknowledged messages was read" in why(*lines, other)
    lines = [*acked(0, 1, 2), *acked(1, 11, 12), read(0, 1)]
    assert "there was no kill between two acknowledgements" in why(*lines, expect=("kill",))
    late = Fault(20, "kill", 1)
    assert "no kill" in why(*lines, late, expect=("kill",)), "nothing went on after it"
    assert check([HEADER, *lines, Fault(5, "kill", 1)], "kill").ok
    assert "there was no flip" in why(*lines, expect=("flip",))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="has not ended, and begins again"):
        check([HEADER, Send("p", 1, 1, "T", d(1)), Send("p", 1, 2, "T", d(2))])
    with pytest.raises(UsageError, match="a second log"):
        check([HEADER, e.Log(0, 1), e.Log(0, 1)])
    with pytest.raises(UsageError, match="an offset, but no queue"):
        check([HEADER, Send("p", 1, 1, "T", d(1)), Ok("p", 1, 2, "SYNC_MEM(1)", 0)])
    with pytest.raises(UsageError, match="different headers"):
        check([HEADER, Header(mode="async")])
    with pytest.raises(UsageError, match="Send: invalid literal"):
        check([HEADER, Send("p", 1, 1, "T", "no digest at all")])


def test_a_range_digest_is_of_places_and_messages_in_any_order() -> None:
    rows = [(0, d(0)), (1, d(1)), (2, d(2))]
    assert e.range_digest(rows) == e.range_digest(reversed(rows))
    assert e.range_digest(rows) != e.range_digest([(0, d(1)), (1, d(0)), (2, d(2))])
    assert e.range_digest(rows) != e.range_digest(rows[:2])
    lines = [line for n in range(3) for line in acked(n, 2 * n, 2 * n + 1)]
    for count, expected in ((3, True), (2, False)):
        digest = e.range_digest(rows[:count])
        told = e.Range("job", 9, "T", 0, 0, 3, count, digest)
        assert check([HEADER, *lines, read(0, 1, 2), told]).ok == expected
