"""Promotions in a group of three nodes with real sockets and stores."""

import errno
import functools
import os
import threading
from unittest.mock import Mock

import msgspec
import pytest

from hastore.errors import NotStoredError, PromotionRefused, StoreFullError
from hastore.ha import promoter
from hastore.ha.hello import peer
from hastore.ha.hello.accepting import AcceptSocketService
from hastore.ha.node.node_state import CutIntent
from hastore.protocol.hello import Promised, Purpose
from hastore.service import raise_failure
from hastore.store import replay, retention
from tests.ha.nodes import FILE_SIZE, wait_for
from tests.ha.slave.test_following import fill


def in_step(master, *slaves):
    wait_for(
        lambda: all(
            s.linked
            and s.store.max_offset == master.store.max_offset
            and s.state.history == master.state.history
            for s in slaves
        ),
        "being in step",
    )
    for slave in slaves:
        assert slave.bytes() == master.bytes(slave.store.min_offset)


def close(node):
    """Make a node's port unreachable and end its links."""
    node.ha.acceptor.stop()
    for connection in node.ha.accepted.all():
        connection.close("the test")


def reopen(node):
    """Make the port reachable again."""
    node.ha.acceptor = AcceptSocketService(node.ha.accept, on_failure=raise_failure)
    node.ha.bind(node.address)
    node.ha.acceptor.start()


@pytest.fixture
def three(make_group):
    group = make_group(3)
    return [group.start(n) for n in (1, 2, 3)]


@pytest.fixture
def running(three):
    """Node 1 is master, the others are in sync, one record is confirmed."""
    one, two, last = three
    one.promote()
    two.follow()
    last.follow()
    wait_for(lambda: two.linked and last.linked)
    assert one.put_confirmed(b"first")[0] == "PUT_OK"
    in_step(one, two, last)
    return three


def test_three_from_empty(three):
    one, two, last = three
    entry = one.promote()
    assert (entry.start, entry.acks, entry.nodes) == (0, 1, (1, 2, 3))
    assert entry.epoch == 1 << 16 | 1
    assert {n.state.data.promised_epoch for n in three} == {entry.epoch}
    two.follow()
    last.follow()
    wait_for(lambda: two.linked and last.linked)
    assert one.put_confirmed(b"x") in {("PUT_OK", "SYNC_MEM(1)"), ("PUT_OK", "SYNC_MEM(2)")}


def test_a_lone_candidate_waits_and_names_the_missing_nodes(make_group):
    one = make_group(3).start(1)
    with pytest.raises(PromotionRefused, match="waiting for node 2, 3") as refused:
        one.promote()
    assert not refused.value.final
    assert one.state.data.promised_epoch == 0, "a survey raises no promise"


def test_two_of_three_are_enough_and_one_is_not_of_a_pair_with_two_acks(make_group):
    group = make_group(3)
    one, _two = group.start(1), group.start(2)
    assert one.promote().epoch
    other = make_group(2)
    alone = other.start(1)
    assert alone.promote().epoch  # N = 2, acks = 1: each node has everything


def test_the_old_master_is_fenced_by_the_promise(running):
    one, two, last = running
    two.promote()
    assert not one.member.open_epoch and one.superseded == [two.member.open_epoch]
    with pytest.raises(NotStoredError):
        one.put(b"too late")
    one.follow()
    in_step(two, one, last)
    assert two.put_confirmed(b"second")[0] == "PUT_OK"


def test_waiting_puts_of_a_superseded_master_end_with_their_fate_open(running):
    one, two, last = running
    last.unfollow()
    two.unfollow()
    wait_for(lambda: not one.ha.slaves())
    outcome = []
    waiting = threading.Thread(
        target=lambda: outcome.append(one.put_confirmed(b"waits", within_ms=600_000))
    )
    waiting.start()
    wait_for(lambda: one.transfer.waiting == 1)
    two.promote()
    waiting.join(60)  # at once, not at its deadline
    assert outcome == [("FLUSH_SLAVE_TIMEOUT", "MASTER_MEM")]


def test_a_master_cut_off_cannot_confirm_and_its_tail_goes(running):
    one, two, last = running
    close(one)
    unseen = one.put_confirmed(b"nobody sees this", within_ms=500)
    assert unseen == ("FLUSH_SLAVE_TIMEOUT", "MASTER_MEM")
    start = two.promote().start
    assert start == two.store.max_offset
    wait_for(lambda: last.linked)
    assert two.put_confirmed(b"second")[0] == "PUT_OK"
    assert one.member.open_epoch  # it does not know yet
    for reply in peer.ask_all(one.member, Purpose.SURVEY):
        one.member.observe_epoch(reply.hello.promised_epoch, "the survey")
    assert not one.member.open_epoch
    one.ha.close_epoch("x")
    one.follow()
    in_step(two, one, last)
    assert b"nobody" not in one.bytes() and one.client.archived_bytes > 0


def test_a_lagging_node_catches_up_before_it_opens(running):
    one, two, last = running
    last.unfollow()
    wait_for(lambda: len(one.ha.slaves()) == 1)
    fill(one, 3 * FILE_SIZE)
    assert one.put_confirmed(b"confirmed by two alone")[0] == "PUT_OK"
    two.unfollow()
    close(one)
    end = two.store.max_offset
    assert last.store.max_offset < end
    entry = last.promote()  # answers: itself and two, which is ahead
    assert entry.start == end and b"confirmed by two alone" in last.bytes()
    assert any("catching up from node 2" in text for text in last.said)
    two.follow()
    in_step(last, two)


def test_a_candidate_cuts_its_own_tail_to_follow_the_most_advanced(running):
    one, two, last = running
    two.unfollow()
    last.unfollow()
    close(one)
    shared = one.store.max_offset
    fill(one, shared + 5000)  # a long tail of epoch 1 that nobody else has
    one.member.step_down()
    one.ha.close_epoch("x")
    two.promote()  # with last
    last.follow()
    wait_for(lambda: last.linked)
    assert two.put_confirmed(b"of two")[0] == "PUT_OK"  # shorter, but of a later epoch
    two.unfollow()
    last.unfollow()
    one.store.free_bytes = lambda: 4000  # the tail is archived first
    with pytest.raises(PromotionRefused, match="make room"):
        one.promote()
    assert two.member.open_epoch
    del one.store.free_bytes
    entry = one.promote()
    assert entry.start == two.store.max_offset and one.bytes(0, entry.start) == two.bytes()
    assert b"of two" in one.bytes()
    reopen(one)
    two.follow()
    last.follow()
    in_step(one, two, last)


def test_no_catch_up_refuses_to_change_anything(running):
    one, two, last = running
    last.unfollow()
    wait_for(lambda: len(one.ha.slaves()) == 1)
    one.put_confirmed(b"more")
    before = last.state.data
    with pytest.raises(PromotionRefused, match="is ahead") as refused:
        last.promote(no_catch_up=True)
    assert refused.value.final and last.state.data == before and one.member.open_epoch
    assert two.linked


def test_a_source_that_changes_during_the_copy_is_asked_again(running, monkeypatch):
    one, two, last = running
    last.unfollow()
    wait_for(lambda: len(one.ha.slaves()) == 1)
    fill(one, 2 * FILE_SIZE)
    one.put_confirmed(b"x")
    two.unfollow()
    close(one)
    answering = two.state.promise
    copies = []

    copy = promoter.CatchUp._copy

    def interrupted(*args):
        copies.append(1)
        if len(copies) == 1:  # another candidate gets a promise in between
            answering(last.state.data.promised_epoch + (1 << 16))
        return copy(*args)

    monkeypatch.setattr(promoter.CatchUp, "_copy", interrupted)
    with pytest.raises(PromotionRefused) as refused:
        last.promote()
    assert not refused.value.final and not last.member.open_epoch
    entry = last.promote()
    assert len(copies) == 2 and entry.start == two.store.max_offset


def test_a_promise_whose_answer_is_lost_does_not_count(running, monkeypatch):
    one, two, last = running
    two.unfollow()
    last.unfollow()
    close(one)
    ask = peer.ask_all

    def lossy(member, purpose, **more):
        replies = ask(member, purpose, **more)
        if purpose is not Purpose.PROMISE:
            return replies
        return [peer.SurveyReply(reply.node, reply.address, problem="lost") for reply in replies]

    monkeypatch.setattr(promoter, "ask_all", lossy)
    with pytest.raises(PromotionRefused, match="has 1"):
        two.promote()
    promised = two.state.data.promised_epoch
    assert last.state.data.promised_epoch == promised  # it did promise
    monkeypatch.undo()
    entry = two.promote()
    assert entry.epoch > promised, "an epoch given up is never used again"
    assert last.promote().epoch > entry.epoch


def test_a_master_whose_slave_promised_to_a_candidate_that_died(running, monkeypatch):
    one, two, last = running
    monkeypatch.setattr(
        promoter.Promoter,
        "_require_enough",
        require_enough_after(promoter.Promoter._require_enough),
    )
    with pytest.raises(PromotionRefused, match="dies"):
        last.promote()
    monkeypatch.undo()
    assert two.state.data.promised_epoch == last.state.data.promised_epoch
    assert not one.member.open_epoch, "it promised too"
    one.promote()
    wait_for(lambda: two.linked)
    assert one.put_confirmed(b"again")[0] == "PUT_OK"


def require_enough_after(require_enough):
    """Let a candidate die after it has collected promises."""

    def dying(self, required, answers, replies, flags):
        if any(isinstance(reply.answer, Promised) for reply in replies):
            raise PromotionRefused("the candidate dies")
        require_enough(self, required, answers, replies, flags)

    return dying


def test_unclean_nodes_do_not_count_unless_forced(running):
    one, two, last = running
    two.unfollow()
    last.unfollow()
    close(one)
    last.state.save(unclean=True)
    with pytest.raises(PromotionRefused, match="unclean: node 3"):
        two.promote()
    assert two.state.data.promised_epoch == one.member.open_epoch
    two.promote(force_unclean=True)
    assert two.member.open_epoch


def test_an_unclean_candidate_does_not_count_itself_and_is_clean_once_open(running):
    one, two, last = running
    two.unfollow()
    two.state.save(unclean=True)
    two.promote()  # nodes one and last answer: two clean nodes
    assert not two.state.data.unclean
    del one, last


def test_a_change_of_acks_needs_every_node(running):
    one, two, last = running
    close(one)
    changed = msgspec.structs.replace(two.config, acks=2)
    with pytest.raises(PromotionRefused, match="node 1"):
        two.promote(changed)
    assert two.state.data.promised_epoch != 0 and not two.member.open_epoch
    one.member.step_down()
    one.ha.close_epoch("x")
    reopen(one)
    entry = two.promote(changed)
    assert entry.acks == 2
    one.follow()
    wait_for(lambda: one.linked and last.linked)
    assert two.put_confirmed(b"on all") == ("PUT_OK", "SYNC_MEM(2)")
    last.unfollow()
    wait_for(lambda: len(two.ha.slaves()) == 1)
    assert two.put_confirmed(b"on two only", within_ms=500)[0] == "FLUSH_SLAVE_TIMEOUT"


def test_a_node_outside_the_epochs_list_follows_and_confirms_nothing(make_group):
    group = make_group(3)
    pair = {n: group.addresses[n] for n in (1, 2)}
    one, two = group.start(1, nodes=pair), group.start(2, nodes=pair)
    one.promote()
    two.follow()
    wait_for(lambda: two.linked)
    one.put_confirmed(b"first")
    two.unfollow()
    one.member.learn_nodes(group.addresses)  # the operator adds node 3 to the file
    new = group.start(3)
    new.follow()
    wait_for(lambda: new.linked and new.store.max_offset == one.store.max_offset)
    assert one.put_confirmed(b"second", within_ms=500)[0] == "FLUSH_SLAVE_TIMEOUT"
    assert new.store.max_offset == one.store.max_offset
    two.follow()
    wait_for(lambda: two.linked)
    one.promote(group.config(1))  # the next epoch has all three
    assert one.state.history[-1].nodes == (1, 2, 3)
    two.unfollow()
    wait_for(lambda: new.linked)
    assert one.put_confirmed(b"third") == ("PUT_OK", "SYNC_MEM(1)")


def test_rivals_never_share_an_epoch_and_one_of_them_stays(three):
    errors, entries = [], []

    def rival(node):
        for _ in range(5):
            try:
                entries.append(node.promote(again=True))
            except PromotionRefused as refused:
                errors.append(refused)

    threads = [threading.Thread(target=rival, args=(node,)) for node in three]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    epochs = [entry.epoch for entry in entries]
    assert len(set(epochs)) == len(epochs)
    last = three[0]
    entry = last.promote()
    assert entry.epoch > max(epochs, default=0)
    assert [n.number for n in three if n.member.open_epoch] == [1]


def test_an_epoch_starts_at_a_record(running):
    """A partial record at the log's end is cut before the epoch opens."""
    one, two, last = running
    two.unfollow()
    last.unfollow()
    close(one)
    end = two.store.max_offset
    one.put(b"z" * 5000)
    piece = one.bytes(end, end + 700)
    two.store.append_replica(end, piece)
    assert two.store.max_offset == end + 700 and two.store.whole_offset == end
    assert two.promote().start == end == two.store.max_offset
    assert two.put(b"of two") > end


def test_a_partial_record_on_a_full_disk_ends_no_promotion(running, monkeypatch):
    """It gave up when the other nodes had promised: nobody took puts then."""
    one, two, last = running
    two.unfollow()
    last.unfollow()
    close(one)
    end = two.store.max_offset
    one.put(b"z" * 5000)
    two.store.append_replica(end, one.bytes(end, end + 700))
    promised = last.state.data.promised_epoch
    with monkeypatch.context() as full:
        full.setattr(two.store, "free_bytes", lambda: 699)
        with pytest.raises(PromotionRefused, match="699 bytes free of the 700") as early:
            two.promote()
    assert not early.value.final and last.state.data.promised_epoch == promised

    def no_room(offset, name):
        raise StoreFullError("no room for 700 bytes", needed_bytes=700)

    with monkeypatch.context() as full:  # others took the room meanwhile
        full.setattr(two.store, "archive", no_room)
        with pytest.raises(PromotionRefused, match="no room for 700") as late:
            two.promote()
    assert not late.value.final
    assert two.promote(again=True).start == end


def test_a_cut_whose_last_write_failed_is_finished_before_the_epoch_opens(running):
    one, two, _ = running
    two.unfollow()
    two.state.save(intent=CutIntent(two.store.max_offset, 1))  # and the bytes are cut
    entry = two.promote()
    assert two.state.data.intent is None  # or the next start cuts off all of the new epoch
    assert two.state.history == (*one.state.history, entry)


def test_a_restarted_node_keeps_promise_history_and_log(running, tmp_path):
    one, two, last = running
    two.promote()
    epoch, log = two.member.open_epoch, one.bytes()
    group_config = one.config
    one.stop(clean=False)
    again = type(one)(group_config, None)
    try:
        assert again.state.data.promised_epoch == epoch
        assert again.bytes() == log and not again.state.data.unclean
        again.follow()
        in_step(two, again)
        assert again.state.history[-1].epoch == epoch
    finally:
        again.stop()
    del last, tmp_path


@pytest.fixture
def quick_replay(monkeypatch):
    """Replay, and who waits for it, tries again soon."""
    monkeypatch.setattr(promoter, "REPLAY_WAIT_S", 0.01)
    monkeypatch.setattr(replay, "_RETRY_S", 0.01)


def block_replay(node):
    """Let the disk have no room for what replay writes next; return the call that ends it."""
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    queues = node.store.queues

    def full(_batch):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    queues.dispatch = full
    return functools.partial(delattr, queues, "dispatch")


def blocked(node):
    return node.store.replay.blocked_reason is not None


@pytest.mark.usefixtures("quick_replay")
def test_a_candidate_whose_replay_is_blocked_fences_nobody(running):
    """It could take no put as master, so the master goes on; the promotion waits before it asks."""
    one, two, last = running
    end = block_replay(two)
    one.put_confirmed(b"x")
    wait_for(lambda: blocked(two))
    promised = two.state.data.promised_epoch
    with pytest.raises(PromotionRefused, match="replay stopped at .*No space left") as refused:
        two.promote()
    assert not refused.value.final, "it goes on by itself once there is room"
    assert "tries again each second" in str(refused.value)
    assert {n.state.data.promised_epoch for n in running} == {promised}
    assert one.put_confirmed(b"y")[0] == "PUT_OK" and two.linked and last.linked
    end()
    wait_for(lambda: not blocked(two), "replay goes on")
    assert two.promote(again=True).start == two.store.max_offset


def test_a_candidate_whose_replay_is_far_behind_fences_nobody(running, monkeypatch):
    one, two, _last = running
    monkeypatch.setattr(promoter, "REPLAY_GAP_BYTES", 1000)
    monkeypatch.setattr(promoter, "REPLAY_WAIT_S", 0.01)
    with two.store.replay.paused():
        fill(one, FILE_SIZE)
        end = one.store.max_offset
        wait_for(lambda: two.store.max_offset == end)
        behind = end - two.store.dispatched_offset
        with pytest.raises(PromotionRefused, match=f"is {behind:,} bytes behind") as refused:
            two.promote()
        assert not refused.value.final and one.member.open_epoch
    wait_for(lambda: two.store.dispatched_offset == end)
    assert two.promote(again=True).start == end


def test_a_candidate_without_room_for_the_catch_up_fences_nobody(running):
    one, two, last = running
    last.unfollow()
    wait_for(lambda: len(one.ha.slaves()) == 1)
    fill(one, 2 * FILE_SIZE)
    last.store.free_bytes = lambda: 1000
    with pytest.raises(PromotionRefused, match="has 1,000 bytes free of the .* make room"):
        last.promote()
    assert one.member.open_epoch and one.put_confirmed(b"y")[0] == "PUT_OK" and two.linked
    del last.store.free_bytes
    assert last.promote(again=True).start == one.store.max_offset


def test_a_candidate_without_room_for_whole_files_fences_nobody(running, monkeypatch):
    """It lacked less than was free, but a log grows by a whole file: it fenced a healthy master."""
    one, two, last = running
    last.unfollow()
    wait_for(lambda: len(one.ha.slaves()) == 1)
    fill(one, FILE_SIZE + 1000)
    allocator, promised = last.store.log.allocator, one.state.data.promised_epoch
    wait_for(lambda: allocator.spare_bytes == FILE_SIZE)
    monkeypatch.setattr(last.store, "free_bytes", lambda: FILE_SIZE - 1)
    with monkeypatch.context() as full:
        full.setattr(type(allocator), "spare_bytes", 0)
        with pytest.raises(PromotionRefused, match=f"free of the {FILE_SIZE:,} that"):
            last.promote()
        # The disk may give no file although it has as much room.
        full.setattr(last.store, "free_bytes", lambda: FILE_SIZE)
        full.setattr(allocator, "failure_reason", "spare: no room for it")
        with pytest.raises(PromotionRefused, match="another log file here: .* no room for it"):
            last.promote()
    assert one.state.data.promised_epoch == promised and one.member.open_epoch and two.linked
    assert last.promote(again=True).start == one.store.max_offset  # the spare is enough


def test_a_candidate_whose_store_is_closed_fences_nobody(running, monkeypatch):
    """It fenced a healthy master, and could not even sync its own log then."""
    one, two, last = running
    promised = one.state.data.promised_epoch
    why = "a sync of bytes [0, 100) failed"
    closed = property(lambda store: why if store is last.store else None)
    with monkeypatch.context() as broken:
        broken.setattr(type(last.store), "broken_reason", closed)
        with pytest.raises(PromotionRefused, match="the store is closed: a sync of bytes") as said:
            last.promote()
    assert not said.value.final, "it goes on after a restart"
    assert one.state.data.promised_epoch == promised and one.member.open_epoch and two.linked


def test_a_disk_that_becomes_full_in_the_catch_up_is_asked_for_no_more_promises(
    running, monkeypatch
):
    """Each second it took another epoch, and could not say how the master takes puts again."""
    one, two, last = running
    last.unfollow()
    wait_for(lambda: len(one.ha.slaves()) == 1)
    fill(one, FILE_SIZE + 1000)
    allocator = last.store.log.allocator
    wait_for(lambda: allocator.spare_bytes == FILE_SIZE)

    def no_room(target):
        raise StoreFullError("no room", needed_bytes=FILE_SIZE)

    with monkeypatch.context() as full:
        full.setattr(allocator, "take_spare", no_room)
        with pytest.raises(PromotionRefused, match="the disk became full"):
            last.promote()
        promised = one.state.data.promised_epoch
        full.setattr(type(allocator), "spare_bytes", 0)
        full.setattr(last.store, "free_bytes", lambda: 0)
        with pytest.raises(PromotionRefused, match="node 1 has been read-only .*hastore promote"):
            last.promote(again=True)
    assert one.state.data.promised_epoch == promised and not one.member.open_epoch
    one.promote()
    assert one.member.open_epoch and not last.member.open_epoch


def test_a_candidate_that_could_not_catch_up_fences_nobody(running, monkeypatch):
    """It was away until retention had removed what it lacks, and was promoted before a resync."""
    one, two, last = running
    two.unfollow()
    fill(one, one.store.max_offset + 3 * FILE_SIZE)
    in_step(one, last)
    one.store.flush()
    monkeypatch.setattr(retention, "expired_files", lambda *_: 2)
    assert one.store.retention.delete_expired(None) == 2
    monkeypatch.undo()
    with pytest.raises(PromotionRefused, match="its log begins at .* promote node 1") as refused:
        two.promote()
    assert refused.value.final and two.state.data.promised_epoch == one.member.open_epoch
    assert one.put_confirmed(b"the master goes on")[0] == "PUT_OK"


def test_a_candidate_that_would_cut_what_is_confirmed_fences_nobody(make_group):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    two.promote()
    two.put(b"of two")
    two.member.step_down()
    two.ha.close_epoch("x")
    close(two)
    two.store.set_limits(confirmed=two.store.max_offset)  # a false one
    one.promote()
    one.put(b"of one", b"of one")
    with pytest.raises(PromotionRefused, match="would lose confirmed records") as refused:
        two.promote()
    assert refused.value.final and one.member.open_epoch and b"of two" in two.bytes()
    assert two.promote(accept_loss=True).start == one.store.max_offset


@pytest.mark.usefixtures("quick_replay")
def test_a_replay_that_stops_after_the_fence_ends_the_wait_and_the_old_master_may_return(running):
    """It stops on what the candidate copies: nobody could know that before the fence."""
    one, two, last = running
    last.unfollow()
    wait_for(lambda: len(one.ha.slaves()) == 1)
    end = block_replay(last)
    fill(one, FILE_SIZE)
    with pytest.raises(PromotionRefused, match="replay stopped at .*No space left") as refused:
        last.promote()
    said = str(refused.value)
    assert "`hastore promote` there lets it take puts again" in said and "node 1 has" in said
    assert not refused.value.final and not one.member.open_epoch and not last.member.open_epoch
    # The promotion stays blocked, but before it fences anybody; so the old master can come back.
    entry = one.promote()
    with pytest.raises(PromotionRefused, match="node 1 has opened epoch") as refused:
        last.promote(again=True)
    assert refused.value.final and one.member.open_epoch == entry.epoch
    wait_for(lambda: two.linked)
    assert one.put_confirmed(b"z")[0] == "PUT_OK"
    end()
    last.follow()
    in_step(one, two, last)


@pytest.mark.parametrize("why", ["a newer promise", "another role"])
def test_the_wait_for_replay_ends_with_the_promotion(running, why, monkeypatch):
    one, two, last = running
    synced = two.store.flush

    def flush():
        """The promises are there and the log is synced; now comes the wait for replay."""
        synced()
        if why == "a newer promise":
            last.promote()
        else:
            two.called_off = lambda: "the operator makes this node a slave"

    monkeypatch.setattr(promoter, "REPLAY_WAIT_S", 0.01)
    with two.store.replay.paused():
        end = one.put(b"x")
        wait_for(lambda: two.store.max_offset == last.store.max_offset == end)
        two.store.flush = flush
        expected = "to another node" if why == "a newer promise" else "makes this node a slave"
        with pytest.raises(PromotionRefused, match=expected):
            two.promote()
        del two.store.flush
    assert not two.member.open_epoch
    assert bool(last.member.open_epoch) == (why == "a newer promise")


def test_a_planned_flip_waits_for_the_answer_of_the_master(running):
    """Also where enough others would do: a put of the master alone must not be lost."""
    one, two, last = running
    two.unfollow()
    last.unfollow()
    one.put(b"only here")
    close(one)
    promised = two.state.data.promised_epoch
    with pytest.raises(PromotionRefused, match="waiting for node 1, which may have") as refused:
        two.promote(needed_node=1)
    assert not refused.value.final
    assert two.state.data.promised_epoch == promised, "nobody was asked for a promise"
    reopen(one)
    assert one.member.open_epoch, "the master goes on meanwhile"
    entry = two.promote(needed_node=1)
    assert entry.start == one.store.max_offset == two.store.max_offset


@pytest.mark.parametrize("planned", [True, False])
def test_a_node_whose_disk_cannot_keep_a_promise_says_so(running, monkeypatch, planned):
    one, two, last = running
    promised = one.state.data.promised_epoch
    close(last)
    with monkeypatch.context() as disk:
        broken = OSError(errno.EROFS, "Read-only file system")
        disk.setattr(one.state, "promise", Mock(side_effect=broken))
        with pytest.raises(PromotionRefused, match="waiting for node 1") as refused:
            two.promote(needed_node=1 if planned else None)
    told = "its promise cannot be saved: [Errno 30] Read-only file system; see to its disk"
    assert told in str(refused.value) and not refused.value.final
    assert one.state.data.promised_epoch == promised and not two.member.open_epoch
    assert two.promote(again=True, needed_node=1).epoch > promised


def test_a_planned_flip_opens_nothing_if_the_master_answers_no_more(running, monkeypatch):
    one, two, _ = running
    ask_all = peer.ask_all

    def without_the_master(member, purpose, **more):
        skip = frozenset({1}) if purpose is Purpose.PROMISE else frozenset()
        return ask_all(member, purpose, skip=skip, **more)

    with monkeypatch.context() as patched:
        patched.setattr(promoter, "ask_all", without_the_master)
        with pytest.raises(PromotionRefused, match="waiting for node 1"):
            two.promote(needed_node=1)
    assert not two.member.open_epoch
    assert two.promote(again=True, needed_node=1).epoch > one.state.history[-1].epoch
