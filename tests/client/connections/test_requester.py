"""A request to the master, over the attempts that it takes."""

import time

import pytest

from hastore.client.connections.requester import Requester
from hastore.client.consumer.admin import Admin
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import OutcomeUnknown, Status, UnreachableError
from hastore.protocol import api

OK, TIMEOUT, REFUSED = Status.PUT_OK, Status.TIMEOUT, Status.SERVICE_NOT_AVAILABLE
ENDED = "its connection ends"
BUSY = Status.BUSY
FAILED = (BUSY, api.FENCED, api.POSITION_BEHIND, "FORBIDDEN")


def commit(rid):
    return api.Commit(rid, "g", "t", {0: api.Position(1)}, 1)


def outcome(attempts, timeout_s=0.5, make=api.AskStatus, replaced=False, ends_at_survey=0):
    """Return what ask_master returns if each attempt ends as stated, the last one for ever.

    With `replaced` another master is there for the second attempt. The time is up as soon as
    the survey of number `ends_at_survey` has found the master; then no attempt is answered.
    """
    requester = Requester(("tcp://127.0.0.1:1",), SYSTEM_CLOCK)
    left = list(attempts)
    surveys = 0

    def ask(_address, _make, timeout_s, **_options):
        yield 0.0
        if not timeout_s:
            raise UnreachableError("the time is up")
        status = left.pop(0) if len(left) > 1 else left[0]
        if status == ENDED:
            raise UnreachableError(ENDED)
        if status in FAILED:
            return api.Failed(1, status, "as it is"), b""
        return api.PutDone(1, status, requester.cluster.epoch), b""

    def survey(_timeout_s, **_options):
        nonlocal surveys
        yield 0.0
        surveys += 1
        if surveys == ends_at_survey:
            requester.left_s = lambda _deadline: 0.0
        requester.cluster.master = "tcp://127.0.0.1:1"
        requester.cluster.epoch = 2 if replaced and requester.cluster.epoch else 1

    requester.ask, requester.survey = ask, survey
    steps = requester.ask_master(make, timeout_s)
    try:
        wait_s = next(steps)
        while True:
            time.sleep(wait_s if wait_s < 0.1 else 0.1)
            wait_s = steps.send([])
    except StopIteration as end:
        return end.value[0].status
    finally:
        requester.close()


@pytest.mark.parametrize("first", [REFUSED, TIMEOUT, ENDED])
def test_a_request_is_repeated_until_a_master_does_it(first):
    assert outcome([first, first, OK], 30.0) is OK


@pytest.mark.parametrize("first", [Status.FLUSH_SLAVE_TIMEOUT, Status.FLUSH_DISK_TIMEOUT])
def test_what_is_stored_but_not_confirmed_is_repeated_and_never_reported_as_refused(first):
    assert outcome([first, OK], 30.0, make=commit) is OK
    assert outcome([first, REFUSED], make=commit) is first
    assert outcome([first, BUSY], make=commit) is first


@pytest.mark.parametrize("last", [REFUSED, BUSY, ENDED])
def test_what_a_master_that_was_replaced_has_stored_is_not_known_to_be_stored(last):
    first = Status.FLUSH_SLAVE_TIMEOUT
    assert outcome([first, last], make=commit) is first
    assert outcome([first, last], make=commit, replaced=True) is TIMEOUT


def test_the_last_refusal_is_returned_when_the_time_is_up():
    assert outcome([REFUSED]) is REFUSED


def test_no_attempt_is_made_when_the_time_is_up_as_the_master_is_found_again():
    assert outcome([REFUSED], ends_at_survey=2) is REFUSED


def test_an_attempt_that_may_have_been_done_is_never_reported_as_refused():
    assert outcome([TIMEOUT, REFUSED]) is TIMEOUT
    with pytest.raises(UnreachableError):
        outcome([ENDED, REFUSED])


@pytest.mark.parametrize("first", [TIMEOUT, ENDED])
@pytest.mark.parametrize("last", [api.FENCED, api.POSITION_BEHIND, "FORBIDDEN"])
def test_a_commit_that_may_have_been_stored_is_not_reported_as_failed(first, last):
    assert outcome([last], make=commit) == last, "the only attempt: nothing was committed"
    with pytest.raises(OutcomeUnknown, match=f"may be stored; last: {last}: as it is"):
        outcome([first, last], make=commit)
    assert outcome([first, last]) == last, "a question changes nothing"


def test_a_commit_that_may_have_been_stored_is_repeated_while_nodes_are_busy():
    assert outcome([ENDED, BUSY, OK], 30.0, make=commit) is OK
    assert outcome([TIMEOUT, BUSY], make=commit) is TIMEOUT
    with pytest.raises(UnreachableError):
        outcome([ENDED, BUSY], make=commit)


def test_an_admin_finds_nodes_that_are_back(node):
    """What one call has found is not what the next one finds."""
    with Admin([node.address]) as admin:
        admin.nodes()
        node.server.stop()
        for _ in range(3):
            with pytest.raises(UnreachableError, match="no answer"):
                admin.nodes()
        node.restart()
        [found] = admin.nodes()
        assert found.address == node.address
