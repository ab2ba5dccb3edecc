"""What a master answers to a slave, and what a cut may take, against a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.ha.rules.epochs import FLOOR_EPOCH, EpochEntry, WrittenOver, common_point
from hastore.ha.rules.following import (
    MasterView,
    answer_follow,
    check_identity,
    cut_loses_confirmed,
    diverged,
    kept_log,
    refused_log,
)
from hastore.ha.rules.promotion import kept_apart
from hastore.protocol.hello import Refused, Resync, RewindTo, StreamFrom
from tests.ha.rules.test_epochs import histories, model_common
from tests.protocol.test_hello import make_hello

E1, E2, E3 = 1 << 16 | 1, 2 << 16 | 2, 3 << 16 | 3
ONE, TWO = EpochEntry(E1, 0, 1, (1, 2, 3)), EpochEntry(E2, 500, 1, (1, 2, 3))


def master(**changes):
    fields = {
        "epoch": E2, "promised_epoch": E2,
        "history": (ONE, TWO), "min_offset": 0, "max_offset": 900, "file_size": 1 << 30,
    }  # fmt: skip
    return MasterView(**{**fields, **changes})


def slave(**changes):
    fields = {"promised_epoch": E2, "history": (ONE,), "max_offset": 500, "confirmed_offset": 0}
    return make_hello(**{**fields, **changes})


def test_a_slave_at_its_own_end_streams_from_there():
    for end in (0, 1, 499, 500):
        assert answer_follow(master(), slave(max_offset=end)) == StreamFrom(end)
    both = slave(history=(ONE, TWO), max_offset=900)
    assert answer_follow(master(), both) == StreamFrom(900)


def test_an_unshared_tail_is_rewound():
    assert answer_follow(master(), slave(max_offset=700)) == RewindTo(500, 1)
    other = EpochEntry(E3, 450, 1, (1, 2, 3))
    later = master(epoch=4 << 16 | 1, promised_epoch=4 << 16 | 1)
    tail = slave(promised_epoch=4 << 16 | 1, history=(ONE, other), max_offset=450)
    assert answer_follow(later, tail) == RewindTo(450, 1)


def test_what_a_master_has_lost_of_its_own_epoch_is_not_cut_from_its_slave():
    ahead = slave(history=(ONE, TWO), max_offset=1000)
    answer = answer_follow(master(), ahead)
    assert isinstance(answer, Refused) and "begins a new epoch with them" in answer.reason
    assert answer.written_over is None
    assert "`hastore promote` on node" in answer.reason
    given_up = slave(history=(ONE, TWO), max_offset=1000, accept_loss=True)
    assert answer_follow(master(), given_up) == RewindTo(900, 2)
    written = master(opened_at=700)  # since its restart it has other bytes of the epoch from there
    answer = answer_follow(written, ahead)
    assert isinstance(answer, Refused) and "do not promote node" in answer.reason
    assert answer.written_over == 700
    assert answer_follow(written, given_up) == RewindTo(700, 2)
    first = master(opened_at=700, unmet=700)  # it has given this slave nothing of that
    inside = {"history": (ONE, TWO), "max_offset": 800}
    answer = answer_follow(first, slave(**inside))
    assert isinstance(answer, Refused) and "do not promote node" in answer.reason
    assert answer_follow(first, slave(**inside, accept_loss=True)) == RewindTo(700, 2)
    assert answer_follow(first, slave(**inside, unclean=True)) == StreamFrom(800)
    assert answer_follow(written, slave(**inside)) == StreamFrom(800)


def test_an_empty_slave_starts_at_the_beginning():
    assert answer_follow(master(), slave(history=(), max_offset=0)) == StreamFrom(0)
    never_wrote = slave(history=(EpochEntry(E3, 0, 1, ()),), max_offset=0)
    assert answer_follow(master(), never_wrote) == RewindTo(0, 0)


def test_without_a_usable_common_point_it_is_a_resync():
    begun = master(min_offset=600)
    entries = (ONE, TWO)
    assert answer_follow(begun, slave(max_offset=400)) == Resync(600, entries)
    assert answer_follow(begun, slave(max_offset=0, history=())) == Resync(600, entries)
    assert answer_follow(master(min_offset=400), slave(max_offset=300)) == Resync(400, (ONE,))
    stranger = slave(history=(EpochEntry(E3, 0, 1, ()),), max_offset=300)
    assert answer_follow(master(), stranger) == Resync(0, (ONE,))
    # The slave's own retention has passed the common point.
    late = slave(history=(ONE, EpochEntry(E3, 450, 1, ())), min_offset=480, max_offset=490)
    assert answer_follow(master(), late) == Resync(0, (ONE,))


def test_confirmed_data_beyond_a_lost_point_is_refused():
    begun = master(min_offset=600)
    assert isinstance(answer_follow(begun, slave(max_offset=400, confirmed_offset=400)), Resync)
    tail = slave(max_offset=700, history=(ONE, EpochEntry(E3, 450, 1, ())), confirmed_offset=650)
    answer = answer_follow(begun, tail)
    assert isinstance(answer, Refused) and "--accept-loss" in answer.reason


def test_a_log_whose_epochs_are_forgotten_is_copied_again():
    floor = EpochEntry(FLOOR_EPOCH, 0, 1, (1, 2, 3))
    forgot = master(history=(floor, TWO))
    assert answer_follow(forgot, slave(max_offset=400, confirmed_offset=400)) == Resync(0, (floor,))
    beyond = slave(max_offset=1 << 30, confirmed_offset=1 << 29)
    answer = answer_follow(forgot, beyond)
    assert isinstance(answer, Refused) and "--accept-loss" in answer.reason
    told = slave(max_offset=1 << 30, confirmed_offset=1 << 29, accept_loss=True)
    assert answer_follow(forgot, told) == Resync(0, (floor,))
    assert answer_follow(forgot, slave(history=(), max_offset=0)) == StreamFrom(0)


def test_an_interrupted_copy_of_another_log_starts_again():
    floor = EpochEntry(FLOOR_EPOCH, 0, 1, (1, 2, 3))
    mine = {"history": (floor,), "max_offset": 400, "digest_to": 400}
    forgot = master(history=(floor, TWO), digest=b"a" * 32)
    assert answer_follow(forgot, slave(**mine, digest=b"a" * 32)) == StreamFrom(400)
    assert answer_follow(forgot, slave(**mine, digest=b"b" * 32)) == Resync(0, (floor,))
    assert isinstance(answer_follow(forgot, slave(**mine)), Refused)  # the digest is missing


def test_promises_come_first():
    higher = answer_follow(master(), slave(promised_epoch=E3))
    assert isinstance(higher, Refused) and higher.promised_epoch == E3
    lower = answer_follow(master(), slave(promised_epoch=E1, max_offset=700))
    assert isinstance(lower, Refused) and "promise" in lower.reason


def test_files_of_another_size_are_refused_with_the_key():
    answer = answer_follow(master(), slave(file_size=1 << 20))
    assert isinstance(answer, Refused) and "commitlog_file_size" in answer.reason


@given(histories(), st.integers(0, 9), histories(), st.integers(0, 9))
def test_every_answer_is_the_models(mine, my_end, theirs, their_end):
    """With complete logs from 0 a master answers StreamFrom or RewindTo the common point."""
    mine = tuple(e for e in mine if e.start <= my_end)
    theirs = tuple(e for e in theirs if e.start <= their_end)
    view = master(history=theirs, max_offset=their_end)
    answer = answer_follow(view, slave(history=mine, max_offset=my_end))
    common, kept = model_common(mine, my_end, theirs, their_end)
    if common == my_end and kept == len(mine) and (kept or my_end == 0):
        assert answer == StreamFrom(my_end)
    elif kept or my_end == 0:
        assert answer == RewindTo(common, kept)
    else:
        assert answer == Resync(0, tuple(e for e in theirs if e.start == 0))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cluster": "x"}, "cluster"), ({"group": "x"}, "cluster"), ({"node": 1}, "own"),
        ({"node": 9}, "list"), ({"store_id": "new"}, "store"),
    ],
)  # fmt: skip
def test_callers_outside_the_group_are_refused_with_the_reason(changes, word):
    known = {2: "ab" * 16}
    assert check_identity(make_hello(), "c", "g", 1, (1, 2, 3), known) is None
    problem = check_identity(make_hello(**changes), "c", "g", 1, (1, 2, 3), known)
    assert problem is not None and word in problem


def test_a_cut_loses_whole_confirmed_records_only():
    # Records of 100 bytes, the last whole one ends at 1000.
    assert not cut_loses_confirmed(500, 500, 100, 1000)
    assert not cut_loses_confirmed(500, 599, 100, 1000)  # the limit is inside the first record
    assert cut_loses_confirmed(500, 600, 100, 1000)
    assert cut_loses_confirmed(0, 1000, 100, 1000)
    assert not cut_loses_confirmed(1000, 1000, None, 1000)
    assert not cut_loses_confirmed(1000, 1050, None, 1000)  # only a partial record goes
    assert cut_loses_confirmed(550, 1000, None, 1000)  # inside a record, with more records after it


def test_no_promotion_mixes_what_a_master_has_written_over():
    over = slave(node=1, history=(ONE, TWO), max_offset=900, unmet={2: 700})
    tail = {"node": 2, "history": (ONE, TWO), "max_offset": 800}
    for hellos in ([over, slave(**tail)], [slave(node=3), slave(**tail), over]):
        assert "nodes 1 and 2 have other messages" in str(diverged(hellos))
    for healthy in (
        slave(**{**tail, "max_offset": 700}),
        slave(**{**tail, "history": (ONE,)}),
        slave(**{**tail, "node": 3}),
        slave(**tail, unclean=True),  # it may be restored from a backup of another node
        slave(**tail, promised_epoch=TWO.epoch + 65536),  # it may have copied this from another
    ):
        assert diverged([over, healthy]) is None
    unwritten = slave(node=1, history=(ONE, TWO), max_offset=700, unmet={2: 700})
    assert diverged([unwritten, slave(**tail)]) is None  # the master fetches what node 2 has


def test_a_refused_slave_parts_where_its_master_had_written_other_bytes():
    over = WrittenOver(E1, 300, 1)
    tail = {"max_offset": 450, "written_over": over}  # of epoch 1, which ends at 500 here
    assert answer_follow(master(), slave(**tail)) == RewindTo(300, 1)
    assert isinstance(answer_follow(master(), slave(**tail, min_offset=350)), Resync)
    confirmed = slave(**tail, min_offset=350, confirmed_offset=400)
    answer = answer_follow(master(), confirmed)
    assert isinstance(answer, Refused) and "the group disagrees" in answer.reason
    # An unclean one, which may have more of the epoch than its master had, says it itself.
    again = {**tail, "unclean": True, "promised_epoch": E1}
    open_yet = master(epoch=E1, promised_epoch=E1, history=(ONE,))
    answer = answer_follow(open_yet, slave(**again))
    assert isinstance(answer, Refused) and answer.written_over == 300
    assert answer_follow(open_yet, slave(**again, accept_loss=True)) == RewindTo(300, 1)


def test_a_log_that_its_master_has_refused_is_neither_opened_nor_copied():
    over = WrittenOver(E2, 700, 1)
    both = {"history": (ONE, TWO), "max_offset": 800}
    refused = slave(node=2, **both, written_over=over)
    other = slave(node=3, **both)
    behind = slave(node=3, **{**both, "max_offset": 700})
    text = str(refused_log([refused], 2))
    assert "node 1, the master of epoch" in text and "`hastore promote --accept-loss`" in text
    assert refused_log([refused, other], 2) == refused_log([behind, refused], 3) == text
    assert refused_log([other, refused], 3) is None  # it has what the master has written
    later = slave(node=3, history=(ONE, TWO, EpochEntry(E3, 700, 1, (1, 2, 3))), max_offset=700)
    assert refused_log([refused, later], 2) is refused_log([later, refused], 3) is None
    # With --accept-loss.
    assert kept_log(refused, [refused, other]) == over
    assert kept_log(refused, [refused, later]) is kept_log(other, [other, refused]) is None
    entry = EpochEntry(4 << 16 | 2, 800, 1, (1, 2, 3))
    mine = (*kept_apart((ONE, TWO), over, entry), entry)
    assert common_point((ONE, TWO), 900, mine, 850) == (700, 2)
    assert [one.epoch for one in mine[2:]] == [3 << 16 | 2, 4 << 16 | 2]
    master_over = slave(node=1, history=(ONE, TWO), max_offset=900, unmet={2: 700})
    assert diverged([refused, master_over], 2) is None
    assert diverged([refused, master_over]) is not None
