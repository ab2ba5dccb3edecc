"""Random walks of members that join, leave, sleep and are killed, in virtual time.

HASTORE_SEEDS=n makes n walks, HASTORE_SEED is the first one.
"""

from __future__ import annotations

import os
import random

import pytest

from hastore.protocol.committed_positions import decode_commit
from hastore.record.codec import decode_record
from hastore.server.remoting.own_members import OwnMembers
from tests.client.consumer.sharing_world import QUEUES, TOPICS, World

SEEDS = int(os.environ.get("HASTORE_SEEDS", "8"))
FIRST = int(os.environ.get("HASTORE_SEED", "0"))
STEPS = 400


@pytest.mark.parametrize("walk", range(SEEDS))
def test_no_queue_has_two_owners_and_each_message_comes_in_order(
    walk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = FIRST + walk if FIRST else random.SystemRandom().getrandbits(32)
    print(f"HASTORE_SEED={seed}")
    take_walk(seed, monkeypatch)


def take_walk(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a world go its way, then let all that is left be delivered; check everything."""
    world = World(seed, monkeypatch)
    rng = world.rng
    world.add()
    for _ in range(STEPS):
        act(world, rng.random())
        for _ in range(rng.choice((1, 5, 20))):
            world.step(rng.choice((50.0, 50.0, 500.0)))
    world.delays_ms = [1, 5, 20]
    world.flip()
    for member in world.alive:
        member.sleeps_until_ms = 0.0
    if all(one.leaves for one in world.alive):
        world.add()
    world.until(lambda: world.nexts == world.sent and is_shared(world))
    figures = {**world.counts, "again": world.again, "messages": sum(world.sent.values())}
    print(figures, f"{members_commit_what_is_their_own(world)} commits")


def act(world: World, action: float) -> None:
    """Do something to the world."""
    rng, now = world.rng, world.clock.now_ms
    alive = world.alive
    if action < 0.4:
        world.put(rng.randint(1, 30))
    elif action < 0.46 and len(alive) < 6:
        world.add()
    elif not alive:
        return
    elif action < 0.49:
        rng.choice(alive).leaves = True
    elif action < 0.52:
        rng.choice(alive).end()
        world.note("kill")
    elif action < 0.6:
        rng.choice(alive).sleeps_until_ms = now + rng.choice((1_000, 20_000, 58_000, 130_000))
        world.note("sleep")
    elif action < 0.64:
        rng.choice(alive).transport.cut(rng.choice(list(world.nodes)))
        world.note("cut")
    elif action < 0.67:
        world.flip(hangs=rng.random() < 0.4)
    elif action < 0.7:  # heartbeats and answers come late
        world.delays_ms = rng.choice(([1, 5, 20], [1, 100, 3_000], [1, 5, 20_000]))


def is_shared(world: World) -> bool:
    """Whether the members that are left have all queues, evenly."""
    sizes = [len(one.core.fetcher.mine) for one in world.alive]
    return sum(sizes) == len(TOPICS) * QUEUES


def members_commit_what_is_their_own(world: World) -> int:
    """Check in the node's log that each commit is its owner's; return how many there are."""
    holders: dict[tuple[str, int], str] = {}
    commits = 0
    for offset, _ in world.store.units["HASTORE_POSITIONS", 0]:
        body = decode_commit(decode_record(world.store.log, offset).body)
        for queue, holder in body.locks.items():
            holders[body.topic, queue] = holder
        if body.member:
            commits += 1
            assert {holders[body.topic, queue] for queue in body.positions} == {body.member}
    return commits


def test_a_world_finds_a_member_that_believes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walks would see it if members took a lease for longer than the lock."""
    monkeypatch.setattr("hastore.client.consumer.sharing.BELIEF", 1.3)
    world = World(5, monkeypatch)
    one = world.add()
    world.put(10)
    world.until(lambda: len(one.core.fetcher.mine) == 8)
    world.add()
    one.sleeps_until_ms = world.clock.now_ms + 200_000
    with pytest.raises(AssertionError):
        for _ in range(4_000):
            world.step()


def test_a_walk_finds_a_node_that_takes_commits_without_a_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One in five walks does; this one replays."""
    monkeypatch.setattr(OwnMembers, "fence", lambda _self, _commit: None)
    with pytest.raises(AssertionError):
        take_walk(7_014, monkeypatch)
