"""The share of each member is that of RocketMQ's AllocateMessageQueueAveragely.

allocations.txt is what that class of 5.3.3 has answered. A line has the numbers of members and of
queues, and each member's share: its first queue, + and how many; - for none.
"""

from __future__ import annotations

import pathlib
import random

import pytest

from hastore.protocol.allocation import in_order, share_of

TABLE = pathlib.Path(__file__).with_name("allocations.txt").read_text().splitlines()


@pytest.mark.parametrize("members", range(1, 13))
def test_the_shares_are_java_s(members: int) -> None:
    lines = [line.split() for line in TABLE if line.startswith(f"{members} ")]
    assert len(lines) == 20
    ids = [f"m{number:02d}" for number in range(members)]
    for _, queues, shares in lines:
        found = [share_of(int(queues), ids, one) for one in ids]
        assert ",".join(f"{s.start}+{len(s)}" if s else "-" for s in found) == shares


def test_ids_are_sorted_as_java_sorts_them() -> None:
    """Java compares UTF-16 code units, so that an emoji comes before U+FFFD."""
    ids = ["b", "a", "B", "10", "9", "\ufffd", "\U0001f600", "a#1", "a@1", "\xe4", "a"]
    java = ["10", "9", "B", "a", "a#1", "a@1", "b", "\xe4", "\U0001f600", "\ufffd"]
    assert in_order(ids) == java


def test_each_queue_has_one_owner_among_any_members() -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        ids = in_order({str(rng.random()) for _ in range(rng.randint(1, 80))})
        queues = rng.randint(0, 200)
        shares = [list(share_of(queues, ids, one)) for one in ids]
        assert sum(shares, []) == list(range(queues))
        sizes = {len(share) for share in shares}
        assert max(sizes) - min(sizes) <= 1
    assert not share_of(4, ["a"], "b")
