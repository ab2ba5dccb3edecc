"""The locks of queues for consumers that read in order: of each queue, at most one holds it.

A consumer asks every 20 s for the locks of its queues, and believes for 30 s (at most LOCK_MS, by
its configuration) in a lock that it was given. A lock lives LOCK_MS at the master. No two consumers
believe in the same lock, also over a failover:

- A lock goes to another consumer only after a record in the log says so, which is confirmed as a
  message is. So a new master knows each consumer that may believe in a lock.
- A new master does not know when those consumers asked last. It keeps each recorded lock for its
  holder for LOCK_MS + PROOF_MS from the time on when it became the master. The holder itself may
  go on at once.
- A superseded master may not know yet that it is one. So a lock is renewed only with a proof: a
  record that was appended at most PROOF_MS ago and is confirmed by now. When it was appended there
  was no new master yet, so each consumer's belief ends before the new master's wait does. Renewals
  of all consumers share one record for PROOF_MS.
- A consumer that gives a lock back is named in a record, too, so that a new master need not wait
  for it. That record need not be confirmed: it can only free a lock that its own holder gave back.
- A superseded master may still renew a lock that was given back to the new one. So what is given
  back within PROOF_MS of the new master's beginning ends no lock that it knows from the records.
- A lock that was given back and is asked for again is another one: neither a record nor a proof
  that was under way for the former gives it. A failover could lose its record, and keep the unlock.
- What a consumer gives back may arrive late, as it does not wait for an answer. It ends no lock
  that the consumer has asked for since.
- A record of a lock that is still asked for is repeated after REPEAT_MS. So a new master whose log
  reaches back LASTS_MS knows all of them. If it does not, because retention was too quick, no lock
  that it does not know is given during that wait. That time is added up from record to record: by
  the wall clock alone, one that jumps ahead would end all locks.

There is room for MAX_LOCKS. An identity may have as many as are left for others, so alone half of
them: one that takes all that it gets leaves locks for the next one.

Under an ASYNC_MASTER a confirmation is the master's own, so a lock is as safe there as a message:
a failover may forget it. This module is pure; times are monotonic ms of this node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from hastore.protocol.committed_positions import MAX_LOCKS, RecordedLocks
from hastore.shares import Shares

LOCK_MS = 60_000.0  # how long a lock lives without being renewed
PROOF_MS = 5_000.0  # how old the proof may be that this node is the master
CONFIRM_MS = 3_000.0  # a record that takes longer to be confirmed gives no lock; below PROOF_MS
REPEAT_MS = 10 * 60_000.0  # when the record of a lock that is still held is repeated
LASTS_MS = 3 * REPEAT_MS  # a record older than that is of no lock that is still held

TIDY_MS = 1_000.0  # so often at most all locks are looked at for want of room
Queue = tuple[str, int]  # topic, queue id


class Lock:
    """A queue's lock, from the time on when it was free, or another one's."""

    __slots__ = (
        "asked_ms", "holder", "in_order", "is_found", "owner", "recorded_ms", "until_ms",
    )  # fmt: skip

    def __init__(
        self,
        holder: str,
        until_ms: float,
        asked_ms: float,
        *,
        in_order: bool = False,
        is_found: bool = False,
        owner: str | None = None,
    ) -> None:
        self.holder = holder
        self.owner = owner  # the identity that asked for it; None: not known, or there is none
        self.in_order = in_order  # its holder consumes in order, as far as it has said it
        self.until_ms = until_ms
        self.asked_ms = asked_ms  # when its holder's last request for it came
        self.is_found = is_found  # in the records of earlier epochs
        self.recorded_ms: float | None = None  # when its record was appended, once it is confirmed


Claims = Mapping[Queue, Lock]


class Wish(NamedTuple):
    """What a consumer may have of the queues that it asked for: just these locks, no later ones.

    `renewed` needs a proof, `new` a record of its own, which is a proof, too. `lacks` says whether
    there was no room for another one.
    """

    renewed: Claims
    new: Claims
    lacks: bool = False


class QueueLocks:
    """The locks that this node gives as the master, in one epoch."""

    def __init__(self) -> None:
        self.epoch: int | None = None  # None: the records were not read yet
        self._locks: dict[str, dict[Queue, Lock]] = {}  # by group
        self._count = 0
        self._owned: Shares[str] = Shares()  # locks by owner
        self._tidied_ms = -TIDY_MS
        self._since_ms = 0.0  # when this node has become the master, at the latest
        self._unknown_ms = -1.0  # until then a queue without a known lock may have a holder
        self._proof_ms = -PROOF_MS  # when the last confirmed record was appended

    @property
    def count(self) -> int:
        """The number of locks that are known, ended ones included."""
        return self._count

    def begin(
        self, epoch: int, recorded: RecordedLocks, since_ms: float, *, complete: bool = True
    ) -> None:
        """Begin as the master of an epoch, at the latest since `since_ms`, from the records.

        All records of earlier epochs must have been read. Unless they are `complete`, any queue
        may have a holder that is not known.
        """
        self.epoch = epoch
        self._locks = {}
        self._count = 0
        self._owned = Shares()
        self._proof_ms = -PROOF_MS
        self._since_ms = since_ms
        until_ms = since_ms + LOCK_MS + PROOF_MS
        self._unknown_ms = -1.0 if complete else until_ms
        for (group, topic), locks in recorded.items():
            of_group = self._locks.setdefault(group, {})
            for queue, one in locks.items():
                of_group[topic, queue] = Lock(one.holder, until_ms, since_ms, is_found=True)
                self._count += 1

    def end(self) -> None:
        """Forget all: this node is not the master of that epoch any more."""
        self.epoch = None
        self._locks = {}
        self._count = 0
        self._owned = Shares()
        self._proof_ms = -PROOF_MS

    def prove(self, appended_ms: float) -> None:
        """Note that a record which was appended then is confirmed."""
        self._proof_ms = max(self._proof_ms, appended_ms)

    def is_proved(self, now_ms: float) -> bool:
        """Whether locks may be renewed without another record."""
        return now_ms - self._proof_ms <= PROOF_MS

    def ask(
        self,
        group: str,
        client: str,
        queues: Iterable[Queue],
        now_ms: float,
        came_ms: float,
        *,
        in_order: bool = True,
        owner: str | None = None,
        may_add: bool = True,
        is_queue: Callable[[Queue], bool] = lambda _queue: True,
    ) -> Wish:
        """Return which of the queues a consumer may have; what is `new` is reserved for it.

        `came_ms` is when its request came to a node. A consumer of hastore's has locks whether or
        not its group consumes `in_order`. It gets those that it does not have only if it
        `may_add` some, and of queues that there are; `owner` is its identity.
        """
        of_group = self._locks.get(group, {})
        renewed: dict[Queue, Lock] = {}
        new: dict[Queue, Lock] = {}
        lacks = False
        for queue in dict.fromkeys(queues):
            lock = of_group.get(queue)
            if lock is not None and lock.holder == client:
                lock.asked_ms = max(lock.asked_ms, came_ms)
                lock.in_order = in_order
                if lock.owner is None:
                    self._own(lock, owner)
                recorded_ms = lock.recorded_ms
                fresh = recorded_ms is not None and now_ms < recorded_ms + REPEAT_MS
                (renewed if fresh else new)[queue] = lock
                continue
            is_free = now_ms >= (self._unknown_ms if lock is None else lock.until_ms)
            if not (is_free and may_add and is_queue(queue)):
                continue
            if not self._has_room(now_ms, owner, 1 if lock is None else 0):
                lacks = True
                continue
            of_group = self._locks.setdefault(group, {})
            self._forget(of_group, queue)  # that one has ended
            lock = Lock(client, now_ms + LOCK_MS, came_ms, in_order=in_order)
            of_group[queue] = new[queue] = lock
            self._count += 1
            self._own(lock, owner)
        return Wish(renewed, new, lacks)

    def _own(self, lock: Lock, owner: str | None) -> None:
        lock.owner = owner
        if owner is not None:
            self._owned.change(owner, 1)

    def _forget(self, of_group: dict[Queue, Lock], queue: Queue) -> None:
        lock = of_group.pop(queue, None)
        if lock is None:
            return
        self._count -= 1
        if lock.owner is not None:
            self._owned.change(lock.owner, -1)

    def _has_room(self, now_ms: float, owner: str | None, more: int) -> bool:
        """Whether there is room for one more lock of an owner, and `more` in all."""
        if self._is_full(owner, more) and now_ms >= self._tidied_ms + TIDY_MS:
            self._drop_ended(now_ms)
        return not self._is_full(owner, more)

    def _is_full(self, owner: str | None, more: int) -> bool:
        left = MAX_LOCKS - self._count
        return left < more or (owner is not None and self._owned[owner] >= max(left, 1))

    def tidy(self, now_ms: float) -> None:
        """Forget the locks that have ended, once there are many."""
        if self._count > MAX_LOCKS // 4:
            self._drop_ended(now_ms)

    def problems(self) -> list[str]:
        """Return for the status that the room for locks is nearly used up; any thread may ask."""
        count = self._count
        crowding = self._owned.crowding(MAX_LOCKS, count)
        if crowding is None:
            return []
        owner, own = crowding
        return [
            f"{count:,} locks of queues are held, {own:,} by identity {owner or '-'}; at most"
            f" {MAX_LOCKS:,} may be, and by an identity as many as are left: look at its consumers"
        ]

    def grant(self, group: str, claims: Claims, now_ms: float) -> list[Queue]:
        """Renew a consumer's locks until LOCK_MS from now; return those that it still has."""
        granted = []
        for queue, lock in self._still(group, claims):
            lock.until_ms = max(lock.until_ms, now_ms + LOCK_MS)
            granted.append(queue)
        return granted

    def settle(self, group: str, claims: Claims, recorded_ms: float) -> None:
        """Note when the record of locks was appended, which is confirmed."""
        for _, lock in self._still(group, claims):
            lock.recorded_ms = max(recorded_ms, lock.recorded_ms or recorded_ms)

    def _still(self, group: str, claims: Claims) -> list[tuple[Queue, Lock]]:
        of_group = self._locks.get(group, {})
        return [each for each in claims.items() if of_group.get(each[0]) is each[1]]

    def release(
        self, group: str, client: str, queues: Iterable[Queue], came_ms: float
    ) -> list[Queue]:
        """End a consumer's locks of these queues; return those that ended.

        Another one may have them at once. `came_ms` is when the request came to a node.
        """
        of_group = self._locks.get(group)
        if of_group is None:
            return []
        is_early = came_ms <= self._since_ms + PROOF_MS
        released = []
        for queue in queues:
            lock = of_group.get(queue)
            if lock is None or lock.holder != client or lock.asked_ms > came_ms:
                continue
            if is_early and lock.is_found:
                continue
            self._forget(of_group, queue)
            released.append(queue)
        if not of_group:
            del self._locks[group]
        return released

    def holder(self, group: str, queue: Queue, now_ms: float) -> str | None:
        """Return who has a queue's lock; None if nobody has."""
        lock = self._locks.get(group, {}).get(queue)
        return lock.holder if lock is not None and lock.until_ms > now_ms else None

    def owners(self, group: str, now_ms: float) -> dict[Queue, str]:
        """Return who has the locks of a group's queues."""
        of_group = self._locks.get(group, {})
        return {queue: one.holder for queue, one in of_group.items() if one.until_ms > now_ms}

    def is_in_order(self, group: str, now_ms: float) -> bool:
        """Whether a consumer of the group that consumes in order has a lock."""
        of_group = self._locks.get(group, {})
        return any(lock.in_order and lock.until_ms > now_ms for lock in of_group.values())

    def _drop_ended(self, now_ms: float) -> None:
        self._tidied_ms = now_ms
        for group, of_group in list(self._locks.items()):
            for queue in [queue for queue, one in of_group.items() if one.until_ms <= now_ms]:
                self._forget(of_group, queue)
            if not of_group:
                del self._locks[group]
