"""The history checker accepts healthy histories and rejects each kind of corrupted one."""

import functools
import os
import random

import pytest

from hastore.history.rules.findings import PROMISES
from tests.history import mutations_of_messages, mutations_of_order, mutations_of_readers
from tests.history.healthy import check, healthy
from tests.history.mutations import MUTATIONS, Copy, Unfit

FIRST = int(os.environ.get("HASTORE_SEED", "0")) or random.SystemRandom().getrandbits(32)
COUNT = int(os.environ.get("HASTORE_SEEDS", "20"))
ENOUGH = max(2, COUNT // 50)  # histories in which a mutation must be found
MOST = max(300, COUNT)  # histories that may have nothing for it


MODULES = (mutations_of_messages, mutations_of_order, mutations_of_readers)


@functools.cache
def history(seed):
    """A healthy history; every second one without retention."""
    return healthy(seed, retention=seed % 2 == 0)


@pytest.fixture(scope="module")
def histories():
    """Healthy histories by their seeds."""
    print(f"HASTORE_SEED={FIRST} HASTORE_SEEDS={COUNT}")
    return {seed: history(seed) for seed in range(FIRST, FIRST + COUNT)}


def test_healthy_histories_are_accepted(histories):
    excused = 0
    for seed, lines in histories.items():
        report = check(lines, "flip", "kill", "unknown", "commit", "range")
        assert report.ok, f"HASTORE_SEED={seed}: {report.findings[:3]} {report.vacuous}"
        excused += report.losses
    assert excused, "no message was lost beyond the budget: the walks are too tame"


def test_so_are_those_without_a_log(histories):
    for seed, lines in histories.items():
        h = Copy(lines)
        h.without_log()
        report = check(h.lines, "flip")
        assert report.ok, f"HASTORE_SEED={seed}: {report.findings[:3]} {report.vacuous}"


def test_the_order_of_lines_of_different_clients_is_of_no_importance(histories):
    seed, lines = next(iter(histories.items()))
    header, *rest = lines
    by_client = {}
    for one in rest:
        by_client.setdefault(getattr(one, "client", ""), []).append(one)
    mixed = [one for client in sorted(by_client) for one in by_client[client]]
    report = check([header, *mixed])
    assert report.ok, f"HASTORE_SEED={seed}: {report.findings[:3]}"
    assert report.counts == check(lines).counts


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_corrupted_history_is_rejected(name):
    print(f"HASTORE_SEED={FIRST}")
    promise, mutate = MUTATIONS[name]
    met = 0
    for seed in range(FIRST, FIRST + MOST):
        rng, changed = random.Random(seed), Copy(history(seed))
        try:
            mutate(changed, rng)
        except Unfit:
            continue
        report = check(changed.lines)
        assert promise in report.broken, f"HASTORE_SEED={seed}: {report.broken}"
        assert all(one.lines for one in report.findings), report.findings
        met += 1
        if met == ENOUGH:
            return
    pytest.fail(f"only {met} of {MOST} histories have something for {name}")


def test_there_are_enough_kinds_and_each_promise_has_one():
    assert len(MUTATIONS) >= 40 and len(MODULES) == 3
    assert {promise for promise, _ in MUTATIONS.values()} == set(PROMISES)
