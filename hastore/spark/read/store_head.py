"""Follow the queues of a store in place: their ends, and the epochs of the records before them."""

from collections.abc import Collection, Mapping

from hastore.ha.rules.history import Standing, check_position, epoch_at
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import Stored
from hastore.spark.read.epoch_file import Entries, EpochFile
from hastore.spark.read.places import Place, Verdict
from hastore.store.offline.reader import StoreReader


class PathHead:
    """A store's directory. The epochs come from the node's state, which a RocketMQ store lacks."""

    def __init__(self, path: str) -> None:
        """Open the store; raises StoreError when there is none."""
        self.where = path
        self._reader = StoreReader(path)
        self._epochs = EpochFile(path)
        self._token: Entries | None = None

    def close(self) -> None:
        """Close the log's files."""
        self._reader.close()

    def token(self) -> object:
        """Return the epoch history at the last `available`; None without one."""
        return self._token

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues, of these topics or of all, with their ranges at this moment."""
        self._token = self._epochs.read()
        found = {
            TopicPartition(topic, queue_id): OffsetRange(*bounds)
            for topic, queues in self._reader.topics(topics).items()
            for queue_id, bounds in queues.items()
        }
        self._reader.close()  # a cut may replace the files that a RocketMQ store's limit has mapped
        return found

    def check_right(self, topic: str) -> None:
        """Do nothing: whoever may read the files may read all topics."""

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None if all are older."""
        bounds = self._reader.queue_range(*partition)
        found = self._reader.queue_offset_by_time(*partition, timestamp_ms)
        return None if bounds is None or found is None or found >= bounds[1] else found

    def limit_offset(self) -> int:
        """Return the physical offset at which reading ends now."""
        return self._reader.limit_offset

    def locate(
        self, ends: Mapping[TopicPartition, int], lows: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, Place]:
        """Return the place of each offset, or of the greatest readable one from `lows` to it."""
        while True:
            history = self._epochs.read()
            limit = self._reader.limit_offset
            found = {
                key: self._locate(key, end, lows.get(key, 0), limit, history)
                for key, end in ends.items()
            }
            if self._epochs.read() == history:
                return {key: place for key, place in found.items() if place is not None}

    def check(self, places: Mapping[TopicPartition, Place]) -> dict[TopicPartition, Verdict]:
        """Return whether the record before each place is still in the log."""
        while True:
            history = self._epochs.read()
            limit = self._reader.limit_offset
            found = {key: self._judge(key, place, limit, history) for key, place in places.items()}
            if self._epochs.read() == history:
                return found

    def _locate(
        self, key: TopicPartition, end: int, low: int, limit: int, history: Entries | None
    ) -> Place | None:
        stored = self._stored(key, end - 1, limit, history)
        if stored is not None or end <= low:
            return Place(end, stored)
        # A cut or retention has removed the record since the queue was listed.
        place = self._common(key, Place(end), limit, limit, history)
        return place if place.next > low else None

    def _judge(
        self, key: TopicPartition, place: Place, limit: int, history: Entries | None
    ) -> Verdict:
        if place.before is None:
            return Verdict(Standing.AGREED, place)
        if history is None or place.before.epoch is None:
            return self._compare(key, place, place.before, limit)
        standing, at = check_position(history, limit, place.before.epoch, place.before.offset)
        if standing is not Standing.LOST:
            return Verdict(standing, place)
        return Verdict(standing, self._common(key, place, at, limit, history))

    def _compare(self, key: TopicPartition, place: Place, before: Stored, limit: int) -> Verdict:
        """Compare a place by the record's offset alone: the store or the place has no epochs."""
        bounds = self._reader.queue_range(*key)
        if bounds is None or place.next <= bounds[0]:
            return Verdict(Standing.AGREED, place)
        if place.next > bounds[1]:
            if self._reader.is_hastore:
                return Verdict(Standing.BEHIND, place)
            return Verdict(Standing.LOST, Place(bounds[1], self._stored(key, bounds[1] - 1, limit)))
        found = self._stored(key, place.next - 1, limit)
        if found is None or found.offset == before.offset:
            return Verdict(Standing.AGREED, place)
        return Verdict(Standing.LOST, Place(bounds[0]))

    def _common(
        self, key: TopicPartition, place: Place, at: int, limit: int, history: Entries | None
    ) -> Place:
        """Return the place after the queue's last record that begins below `at`."""
        low, high = self._reader.queue_range(*key) or (0, 0)
        high = min(high, place.next)
        result = Place(low)
        while low < high:
            middle = (low + high) // 2
            stored = self._stored(key, middle, limit, history)
            if stored is not None and stored.offset < at:
                low = middle + 1
                result = Place(low, stored)
            else:
                high = middle
        return result

    def _stored(
        self, key: TopicPartition, offset: int, limit: int, history: Entries | None = None
    ) -> Stored | None:
        """Return where the record of a queue offset is; None if there is none."""
        if offset < 0:
            return None
        found = self._reader.queue_units(*key, offset, offset + 1, limit=limit).offsets
        if not found:
            return None
        return Stored(None if history is None else epoch_at(history, found[-1]), found[-1])
