"""Errors go from one process to another, as those of a worker of multiprocessing do."""

from __future__ import annotations

import copy
import pickle

import pytest

from hastore import Position, SendResult, Status, errors

RESULT = SendResult(Status.FLUSH_SLAVE_TIMEOUT, "t", 1, "MASTER_MEM", 100, 3)


@pytest.mark.parametrize(
    "failure",
    [
        errors.NotStoredError("BUSY: later", "BUSY"),
        errors.FlushDiskTimeout("late", RESULT),
        errors.FlushSlaveTimeout("late", RESULT),
        errors.PositionLostError("gone", 2, Position(3, 65_537, 20), "t"),
        errors.PromotionRefused("no", final=True),
        errors.StoreFullError("full", needed_bytes=7),
        errors.OutcomeUnknown("no answer"),
        errors.UsageError("queue: expected an int"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_an_error_is_the_same_in_another_process(failure: errors.HastoreError) -> None:
    failure.cluster_group = "g0"
    sent = pickle.loads(pickle.dumps(failure))  # noqa: S301 - as multiprocessing does
    for other in (sent, copy.copy(failure)):
        assert type(other) is type(failure)
        assert (str(other), other.args, vars(other)) == (str(failure), failure.args, vars(failure))
