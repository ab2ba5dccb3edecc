"""Which member of a group reads which queues of a topic: the rule that all members follow. Pure.

It is that of RocketMQ's consumers, their AllocateMessageQueueAveragely: every member sorts the
members' ids and takes the part of the queues that is its own. Members that know the same ids and
the same number of queues thus agree without a word, whatever client they are.
"""

from __future__ import annotations

from collections.abc import Iterable


def in_order(members: Iterable[str]) -> list[str]:
    """Return ids as Java sorts strings: by their UTF-16 code units."""
    return sorted(set(members), key=lambda one: one.encode("utf-16-be", "surrogatepass"))


def share_of(queues: int, members: list[str], member: str) -> range:
    """Return the queues of a topic that a member reads; `members` are `in_order`.

    The first members have one queue more than the others, if the number does not divide evenly.
    """
    if member not in members:
        return range(0)
    place, count = members.index(member), len(members)
    least, more = divmod(queues, count)
    begin = place * least + min(place, more)
    return range(begin, begin + least + (place < more))
