"""Read all groups of a cluster: a backend for each group, and numbers for their queues.

    partition = number of the group * 4,096 + queue      a topic has 4,096 queues at most
    number    = CRC-32 of the group's name, modulo 2**19

So the partition of a queue stays the same, whatever other groups come and go: a stream's checkpoint
names it. Two groups with one number cannot be read together; that is said. Of 33 groups two have
one number once in a thousand times, of 333 once in ten.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self, TypeVar

import pyarrow as pa

from hastore.addresses import ClusterAddress
from hastore.client.connections.cluster_groups import ClusterGroups, GroupNodes
from hastore.client.security import as_security
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ForbiddenError, UnreachableError, UsageError
from hastore.ha.rules.epochs import Standing
from hastore.record.topic_records import MAX_QUEUES
from hastore.spark.arrow.batch import BatchBuilder, QueueRows
from hastore.spark.arrow.record_fields import Ints, RecordFields
from hastore.spark.options.names import BOOTSTRAP, Names
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, QueueRange
from hastore.spark.options.source_options import DEFAULT_PATIENCE, GROUPS, Patience
from hastore.spark.read.backend import PlaceVerdict, QueuePlace, ReadableRange
from hastore.spark.read.servers import ServerBackend, ServerHead

NUMBERS = 1 << 19  # so that a partition fits in 31 bits
_T = TypeVar("_T")


def number_of(group: str) -> int:
    """Return the number of a group."""
    return zlib.crc32(group.encode()) % NUMBERS


def partition_of(group: str, queue: int) -> int:
    """Return the partition of a group's queue."""
    return number_of(group) * MAX_QUEUES + queue


def is_of_cluster(partition: int) -> bool:
    """Return whether a partition is one of a cluster, not a queue of a group that is read alone."""
    return partition >= MAX_QUEUES  # but for the groups with the number 0, one of 524,288


def number_in(key: TopicPartition) -> int:
    """Return the number of the group whose queue a partition is."""
    return key.partition // MAX_QUEUES


class _Groups:
    """The groups of a cluster, each with its part, by number."""

    def __init__(
        self,
        cluster: ClusterAddress,
        security: str | None,
        patience: Patience,
        needed: tuple[str, ...],
        make: Callable[[GroupNodes], Any],
        names: Names,
    ) -> None:
        """`make` returns a group's part, by its nodes.

        `needed` are the groups that the options name: they must be there.
        """
        self.where = str(cluster)
        self._cluster = cluster.cluster
        self._patience = patience
        self._needed = needed
        self._make = make
        self._names = names
        self._found = ClusterGroups(cluster, as_security(security), SYSTEM_CLOCK)
        self._found.start()
        self._parts: dict[int, tuple[str, Any]] = {}

    def close(self) -> None:
        """Close the parts, and follow ZooKeeper no more."""
        for _, part in self._parts.values():
            part.close()
        self._found.stop(1.0)

    def parts(self, *, whole: bool = False, wait_s: float | None = None) -> dict[int, Any]:
        """Return the part of each group that is known by now.

        Waits for ZooKeeper for `wait_s`, by default as long as a query that begins does. Raises
        UnreachableError if no group is known, or, with `whole`, if one of them cannot be
        read in ZooKeeper, or one that is needed is not there; UsageError for two groups with one
        number.
        """
        self._found.wait_read(self._patience.first_s if wait_s is None else wait_s)
        unread, groups = self._found.unread, self._found.groups
        if whole:
            self._check_whole(unread, groups)
        for name, seen in groups.items():
            number = number_of(name)
            if number not in self._parts:
                nodes = GroupNodes(self._found, self._cluster, name, seen.addresses)
                self._parts[number] = (name, self._make(nodes))
            other = self._parts[number][0]
            if other != name:
                raise UsageError(
                    f"the groups {other} and {name} of {self.where} have one number, and cannot be "
                    "read together: read each by zk://.../CLUSTER/GROUP"
                )
        if not self._parts:
            raise UnreachableError(
                f"{self._found.problem}; check {self._names.said(BOOTSTRAP)}"
                f"{self._patience.or_raise}"
            )
        return {number: part for number, (_, part) in self._parts.items()}

    def _check_whole(self, unread: Mapping[str, str], groups: Collection[str]) -> None:
        if unread:
            name = min(unread)
            raise UnreachableError(f"group {name} of {self.where} is not found: {unread[name]}")
        missing = [name for name in self._needed if name not in groups]
        if missing and groups:
            raise UnreachableError(
                f"group {missing[0]} of {self.where}, which the option {GROUPS!r} names, is not in "
                "ZooKeeper: start a node of it, or correct the option"
            )

    def of(self, key: TopicPartition, wait_s: float | None = None) -> tuple[Any, TopicPartition]:
        """Return a partition's group, and its queue there; waits as `parts` does."""
        [(_, part, own)] = self.split({key: None}, wait_s)
        [queue] = own
        return part, queue

    def split(
        self, table: Mapping[TopicPartition, _T], wait_s: float | None = None
    ) -> list[tuple[int, Any, dict[TopicPartition, _T]]]:
        """Return each group's number, its part, and its entries of a table by the queues there."""
        parts = self.parts(wait_s=wait_s)
        found: dict[int, dict[TopicPartition, _T]] = {}
        for key, value in table.items():
            number, queue = divmod(key.partition, MAX_QUEUES)
            if number not in parts:
                raise UsageError(
                    f"partition {key.partition} of {key.topic!r} is of no group that {self.where} "
                    "has"
                )
            found.setdefault(number, {})[TopicPartition(key.topic, queue)] = value
        return [(number, parts[number], own) for number, own in found.items()]

    def check_unlisted(self, topic: str) -> None:
        """Raise ForbiddenError if no group lets the client read a topic."""
        refused: ForbiddenError | None = None
        for part in self.parts().values():
            try:
                part.check_unlisted(topic)
            except ForbiddenError as failure:
                refused = failure
            else:
                return
        if refused is not None:
            raise refused


def _joined(
    tables: Iterable[tuple[int, Mapping[TopicPartition, _T]]],
) -> dict[TopicPartition, _T]:
    """Return one table of what groups have, with the partitions of the cluster."""
    return {
        TopicPartition(key.topic, number * MAX_QUEUES + key.partition): value
        for number, table in tables
        for key, value in table.items()
    }


class _OfGroups:
    """What batches and streams ask alike; `_known` has the groups while it is open."""

    @property
    def _known(self) -> _Groups:
        raise NotImplementedError

    def limit_offset(self) -> int | None:
        """Return None: each node enforces its own readable offset."""
        return None

    def ended(self, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return at which offset the last deletion of its topic ended each of these queues.

        A group that has left the cluster does not say.
        """
        numbers = self._known.parts().keys()
        groups = self._known.split(dict.fromkeys(key for key in keys if number_in(key) in numbers))
        return _joined((number, part.ended(own)) for number, part, own in groups)

    def absent(self, keys: Collection[TopicPartition]) -> dict[str, str]:
        """Return the nodes of the queues' groups that cannot be asked now."""
        numbers = self._known.parts().keys()
        groups = self._known.split(dict.fromkeys(key for key in keys if number_in(key) in numbers))
        found: dict[str, str] = {}
        for _, part, own in groups:
            found |= part.absent(own)
        return found

    def check_unlisted(self, topic: str) -> None:
        """Raise ForbiddenError if no group lets the client read the topic."""
        self._known.check_unlisted(topic)

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None if all are older."""
        part, own = self._known.of(partition)
        found: int | None = part.offset_by_time(own, timestamp_ms)
        return found


class _Renumbered:
    """A builder whose rows get the partition of the cluster instead of the queue."""

    def __init__(self, builder: BatchBuilder, base: int) -> None:
        self._builder = builder
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def build(
        self,
        data: memoryview,
        positions: Ints,
        base: int | None,
        queue: QueueRows | None,
        fields: RecordFields | None = None,
    ) -> pa.RecordBatch | None:
        """Build a batch; see BatchBuilder."""
        if queue is not None:
            queue = replace(queue, partition=self._base + queue.partition)
        return self._builder.build(data, positions, base, queue, fields)


class ClusterBackend(_OfGroups):
    """The nodes of all groups of a cluster; see Backend."""

    def __init__(
        self,
        cluster: ClusterAddress,
        fail_on_data_loss: bool,
        security: str | None = None,
        patience: Patience = DEFAULT_PATIENCE,
        needed: tuple[str, ...] = (),
        names: Names = Names.QUERY,
    ) -> None:
        self.where = str(cluster)
        self._names = names
        self._needed = needed
        self._cluster, self._security, self._patience = cluster, security, patience
        self._fail_on_data_loss = fail_on_data_loss
        self._groups: _Groups | None = None

    def __enter__(self) -> Self:
        self._groups = _Groups(
            self._cluster, self._security, self._patience, self._needed, self._make, self._names
        )
        return self

    def _make(self, nodes: GroupNodes) -> ServerBackend:
        at, fails = nodes.addresses(), self._fail_on_data_loss
        return ServerBackend(at, fails, self._security, self._patience, nodes, self._names)

    def __exit__(self, *_: object) -> None:
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    @property
    def _known(self) -> _Groups:
        assert self._groups is not None, "the backend is open"
        return self._groups

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues of every group; raises UnreachableError if a group does not answer."""
        parts = self._known.parts(whole=True)
        return _joined((number, part.available(topics)) for number, part in parts.items())

    @property
    def knows_deletions(self) -> bool:
        """Return False: nodes tell of topics that are there."""
        return False

    def readable(
        self, queues: Mapping[TopicPartition, OffsetRange]
    ) -> dict[TopicPartition, ReadableRange]:
        """Return the ranges up to the readable offset of each group."""
        groups = self._known.split(queues)
        return _joined((number, part.readable(own)) for number, part, own in groups)

    def log_range(self) -> tuple[int, int]:
        """Raise UsageError: nodes give messages by queue only."""
        raise UsageError("mode=log reads a store's directory; set the option 'path'")

    def read_log(self, span: LogRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Raise UsageError: nodes give messages by queue only."""
        raise UsageError("mode=log reads a store's directory; set the option 'path'")

    def read_queue(self, span: QueueRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range, from its group; waits for ZooKeeper as for nodes."""
        key = TopicPartition(span.topic, span.partition)
        part, own = self._known.of(key, self._patience.later_s)
        renumbered: Any = _Renumbered(builder, span.partition - own.partition)
        yield from part.read_queue(replace(span, partition=own.partition), renumbered)


class ClusterHead(_OfGroups):
    """The nodes of all groups of a cluster, followed by a stream; see Head."""

    def __init__(
        self,
        cluster: ClusterAddress,
        security: str | None = None,
        patience: Patience = DEFAULT_PATIENCE,
        needed: tuple[str, ...] = (),
        names: Names = Names.QUERY,
    ) -> None:
        self.where = str(cluster)
        self._groups = _Groups(
            cluster,
            security,
            patience,
            needed,
            lambda nodes: ServerHead(nodes.addresses(), security, patience, nodes, names),
            names,
        )
        self._begun = False

    @property
    def _known(self) -> _Groups:
        return self._groups

    def close(self) -> None:
        """Close the connections."""
        self._groups.close()

    def token(self) -> object:
        """Return the tokens of all groups."""
        return tuple(
            sorted((number, part.token()) for number, part in self._groups.parts().items())
        )

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues of every group; raises UnreachableError if a group does not answer."""
        # A group that comes later is read from its first message, once it can be.
        parts = self._groups.parts(whole=not self._begun)
        self._begun = True
        return _joined((number, part.available(topics)) for number, part in parts.items())

    def locate(
        self, ends: Mapping[TopicPartition, int], lows: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, QueuePlace]:
        """Return the place of each offset, or of the greatest readable one from `lows` to it."""
        of_lows = {number: own for number, _, own in self._groups.split(lows)}
        groups = self._groups.split(ends)
        return _joined(
            (number, part.locate(own, of_lows.get(number, {}))) for number, part, own in groups
        )

    def check(
        self, places: Mapping[TopicPartition, QueuePlace]
    ) -> dict[TopicPartition, PlaceVerdict]:
        """Return whether the record before each place is still in its group's log.

        A place in a group that has left the cluster stays: that its queue is gone, is told by
        `available`.
        """
        numbers = self._groups.parts().keys()
        left = {key: one for key, one in places.items() if number_in(key) not in numbers}
        groups = self._groups.split({key: one for key, one in places.items() if key not in left})
        found = _joined((number, part.check(own)) for number, part, own in groups)
        return found | {key: PlaceVerdict(Standing.AGREED, one) for key, one in left.items()}
