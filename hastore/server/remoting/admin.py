"""What mqadmin asks about a node itself: its state, its configuration, and its replication.

    26         GET_BROKER_CONFIG: getBrokerConfig
    28         GET_BROKER_RUNTIME_INFO: brokerStatus, clusterList
    907        GET_BROKER_HA_STATUS: haStatus
    100, 101   PUT_KV_CONFIG, GET_KV_CONFIG: the order of a topic, for `updateTopic -o true`
    102        DELETE_KV_CONFIG: the same, for what deletes a topic (`deleteSubGroup -c`)

The names are RocketMQ's, the values this node's own. What a node does not know, such as totals of
past days, is left out: mqadmin shows 0 or nothing there. Nothing waits for a pool of threads or for
a lock of the page cache here, so what RocketMQ says of those is 0. Every node answers for itself.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from hastore import __version__
from hastore.config.model import Config, Flush, Mode
from hastore.protocol.remoting import VERSION, Answer, Code, encode_body
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.group_requests import needed, read_aside
from hastore.server.remoting.reads import Reads

SAMPLE_MS = 5_000.0
ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"
ORDER_MS, LOOK_MS = 2_000.0, 50.0  # how long, and how often a change of a topic is looked for
WINDOWS_MS = (10_000.0, 60_000.0, 600_000.0)  # over which RocketMQ says how much is done a second
RELEASE = __version__.partition(".dev")[0]  # clusterList has 22 columns for it
_SCHEME = "tcp://"
_HOUR_MS = 3_600_000
_UNIT, _PREFIXES = 1024, "KMGTPE"
_UNIT_BYTES = 20  # of a consume queue: docs/formats.md
_NO_LINK = "NO_LINK"
# clusterList shows these, and "null" for one that is missing.
_NEVER_WAIT = dict.fromkeys(
    [f"{pool}ThreadPoolQueue{what}" for pool in ("send", "pull", "ack")
     for what in ("Size", "HeadWaitTimeMills")]
    + ["pageCacheLockTimeMills"],
    0,
)  # fmt: skip

Counts = tuple[int, int]  # records replayed, records sent


class Rates:
    """How fast two counters rise, in each of the WINDOWS_MS."""

    def __init__(self, now_ms: float, counts: Counts) -> None:
        self._samples = deque([(now_ms, counts)], maxlen=int(WINDOWS_MS[-1] / SAMPLE_MS) + 2)

    def sample(self, now_ms: float, counts: Counts) -> None:
        """Note where the counters are; call this each SAMPLE_MS."""
        self._samples.append((now_ms, counts))

    def since(self, now_ms: float, counts: Counts) -> tuple[str, str]:
        """Return for each counter the rises per second, as RocketMQ writes them."""
        rises = [self._rise(now_ms, counts, window) for window in WINDOWS_MS]
        first, second = zip(*rises, strict=True)
        return " ".join(map(_decimal, first)), " ".join(map(_decimal, second))

    def _rise(self, now_ms: float, counts: Counts, window_ms: float) -> tuple[float, float]:
        """Return the rises since the latest sample that is as old as the window, or the oldest."""
        then_ms, before = self._samples[0]
        for at_ms, sampled in reversed(self._samples):
            if now_ms - at_ms >= window_ms:
                then_ms, before = at_ms, sampled
                break
        seconds = (now_ms - then_ms) / 1000
        if seconds <= 0:
            return 0.0, 0.0
        return (counts[0] - before[0]) / seconds, (counts[1] - before[1]) / seconds


class Admin:
    """The handlers of these requests; the API's lock is held in every call."""

    def __init__(self, door: Door, config: Config, reads: Reads) -> None:
        """Prepare; `config` is that of the node's start."""
        self._door = door
        self._clock = door.parts.clock
        self._backend = door.parts.backend
        self._config = config
        self._reads = reads
        self._boot_ms = self._clock.wall_ms()
        self._boot_at = self._clock.monotonic_ms()
        self._rates = Rates(self._boot_at, self._counts())
        if door.is_open:
            door.at(self._boot_at + SAMPLE_MS, self._sample)

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {
            Code.GET_BROKER_CONFIG: self.config,
            Code.GET_BROKER_RUNTIME_INFO: self.runtime,
            Code.GET_BROKER_HA_STATUS: self.replication,
            Code.PUT_KV_CONFIG: self.put_value,
            Code.GET_KV_CONFIG: self.value,
            Code.DELETE_KV_CONFIG: self.forget_value,
        }

    def _counts(self) -> Counts:
        return self._backend.store.replayed_records, self._reads.sent_records

    def _sample(self) -> None:
        now = self._clock.monotonic_ms()
        self._rates.sample(now, self._counts())
        self._door.at(now + SAMPLE_MS, self._sample)

    # -- state

    def runtime(self, request: RemotingRequest) -> None:
        """Answer how the node is, and what it does."""
        rates = self._rates.since(self._clock.monotonic_ms(), self._counts())

        def then(table: dict[str, str]) -> None:
            request.answer(Answer.SUCCESS, body=encode_body({"table": table}))

        read_aside(self._door, request, partial(self._read_runtime, rates), then)

    def _read_runtime(self, rates: tuple[str, str]) -> dict[str, str]:
        """Return RocketMQ's table; in a thread that may wait for the disk."""
        status, store = self._backend.status(), self._backend.store
        disk = shutil.disk_usage(self._config.store.root)
        puts, reads = rates
        found: dict[str, Any] = {
            **_NEVER_WAIT,
            "bootTimestamp": self._boot_ms,
            "brokerActive": _text(status["writable"]),
            "brokerVersion": VERSION,
            "brokerVersionDesc": f"hastore-{RELEASE}",
            "commitLogDirCapacity": f"Total : {_size(disk.total)}, Free : {_size(disk.free)}.",
            "commitLogDiskRatio": _decimal(disk.used / max(1, disk.used + disk.free)),
            "commitLogMaxOffset": status["max_offset"],
            "commitLogMinOffset": status["min_offset"],
            "dispatchBehindBytes": max(0, status["max_offset"] - status["dispatched_offset"]),
            "getTransferedTps": reads,  # as RocketMQ 4 spells it
            "getTransferredTps": reads,
            "putTps": puts,
            "remainHowManyDataToFlush": _size(status["max_offset"] - status["flushed_offset"]),
            "runtime": _duration(self._clock.monotonic_ms() - self._boot_at),
            "waitingPuts": status["waiting_puts"],  # a name of hastore's
        }
        found["consumeQueueDiskRatio"] = found["commitLogDiskRatio"]
        earliest = store.reader.first_record() if store.readable_offset else None
        if earliest is not None:
            found["earliestMessageTimeStamp"] = earliest.store_timestamp_ms
        return {key: str(value) for key, value in sorted(found.items())}

    # -- replication

    def replication(self, request: RemotingRequest) -> None:
        """Answer who copies this master's log, or which master this node follows."""
        read_aside(
            self._door, request, self._read_replication,
            lambda body: request.answer(Answer.SUCCESS, body=body),
        )  # fmt: skip

    def _read_replication(self) -> bytes:
        status = self._backend.status()
        is_master = status["master"] == self._config.node
        found: dict[str, Any] = {"haConnectionInfo": [], "master": is_master}
        if is_master:
            slaves = [one for one in status["slaves"] if one["state"] != _NO_LINK]
            found["haConnectionInfo"] = [_connection(one) for one in slaves]
            found["inSyncSlaveNums"] = sum(one["in_sync"] for one in slaves)
            found["masterCommitLogMaxOffset"] = status["max_offset"]
        else:
            followed = {"maxOffset": status["max_offset"]}
            address = self._followed(status)
            found["haClientRuntimeInfo"] = followed | ({"masterAddr": address} if address else {})
        return encode_body(found, standard=True)

    def _followed(self, status: Mapping[str, Any]) -> str | None:
        """Return the address of the node that this one follows; None if it knows none."""
        known = self._backend.ha_address(status["master"] or 0)
        return status.get("classic_master") if known is None else known

    # -- configuration

    def config(self, request: RemotingRequest) -> None:
        """Answer the settings that RocketMQ has, too, by its names."""
        request.answer(Answer.SUCCESS, body=_properties(self._settings()))

    def _settings(self) -> dict[str, str]:
        config, group = self._config, self._backend.master_map()
        store, own = config.store, config.nodes[config.node]
        is_master = group.master_node == config.node
        host, _, port = own.api.removeprefix(_SCHEME).rpartition(":")
        found: dict[str, Any] = {
            "autoCreateSubscriptionGroup": True,
            "autoCreateTopicEnable": config.remoting.auto_create_topics,
            "brokerClusterName": config.cluster,
            "brokerIP1": host,
            "brokerId": 0 if is_master else config.node,
            "brokerName": config.group,
            "brokerRole": _role(config, group.role, is_master),
            "defaultTopicQueueNums": store.default_queues,
            "enableDLegerCommitLog": config.mode is Mode.DLEDGER,
            "flushDiskType": "SYNC_FLUSH" if store.flush is Flush.SYNC else "ASYNC_FLUSH",
            "haListenPort": own.ha.rpartition(":")[2],
            "listenPort": port,
            "mappedFileSizeCommitLog": store.commitlog_file_size,
            "mappedFileSizeConsumeQueue": store.consume_queue_units * _UNIT_BYTES,
            "maxHashSlotNum": store.index_slots,
            "maxIndexNum": store.index_entries,
            "maxMessageSize": store.max_message_size,
            "storePathCommitLog": f"{store.root}/commitlog",
            "storePathRootDir": store.root,
        }
        if config.mode is Mode.CLASSIC:
            found["inSyncReplicas"] = config.acks + 1
        if store.retention.max_age_ms is not None:
            found["fileReservedTime"] = f"{store.retention.max_age_ms / _HOUR_MS:g}"
        return {key: _text(value) for key, value in found.items()}

    # -- the order of a topic

    def put_value(self, request: RemotingRequest) -> None:
        """Confirm that a topic is ordered: its own configuration says so, once it is replicated."""
        topic = _ordered_topic(request)
        text = f"topic {topic[:80]} is not ordered; `mqadmin updateTopic -o true` makes it"
        self._await_order(request, topic, True, text)

    def forget_value(self, request: RemotingRequest) -> None:
        """Confirm that a topic is not ordered, as one that was deleted just now."""
        topic = _ordered_topic(request)
        text = f"topic {topic[:80]} is ordered; `mqadmin updateTopic -o false` ends that"
        self._await_order(request, topic, False, text)

    def _await_order(
        self, request: RemotingRequest, topic: str, wanted: bool, otherwise: str
    ) -> None:
        """Answer once a topic is ordered or is not, as wanted; another node may know it sooner."""
        until_ms = self._clock.monotonic_ms() + ORDER_MS

        def look() -> None:
            if (self._order(topic) is not None) is wanted:
                request.answer(Answer.SUCCESS)
            elif self._clock.monotonic_ms() < until_ms:
                self._door.at(self._clock.monotonic_ms() + LOOK_MS, look)
            else:
                request.answer(Answer.SYSTEM_ERROR, remark=otherwise)

        look()

    def value(self, request: RemotingRequest) -> None:
        """Answer with the queues of a topic that is ordered, as its route has them."""
        topic = _ordered_topic(request)
        order = self._order(topic)
        if order is None:
            text = f"No config item, Namespace: {ORDER_NAMESPACE} Key: {topic[:80]}"
            raise RemotingRefusal(Answer.QUERY_NOT_FOUND, text)
        request.answer(Answer.SUCCESS, {"value": order})

    def _order(self, topic: str) -> str | None:
        found = self._backend.store.topic_table.find(topic)
        if found is None or not found.order:
            return None
        return f"{self._config.group}:{found.write_queues}"


def _ordered_topic(request: RemotingRequest) -> str:
    """Return the topic whose order a request is about; other values are not kept."""
    namespace = needed(request.frame.fields, "namespace")
    if namespace != ORDER_NAMESPACE:
        text = f"hastore does not keep values of the namespace {namespace[:80]}"
        raise RemotingRefusal(Answer.REQUEST_CODE_NOT_SUPPORTED, text)
    return needed(request.frame.fields, "key")


def _role(config: Config, role: str, is_master: bool) -> str:
    """Return the role as RocketMQ names it; of mode dledger as its broker does."""
    if config.mode is Mode.CLASSIC:
        return role
    return "SYNC_MASTER" if is_master else "SLAVE"


def _connection(slave: Mapping[str, Any]) -> dict[str, Any]:
    known = {
        "addr": slave["address"],
        "diff": slave["lag_bytes"],
        "inSync": slave["in_sync"],
        "slaveAckOffset": slave["ack_offset"],
    }
    return {key: value for key, value in known.items() if value is not None}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _decimal(value: float) -> str:
    return f"{value:.4f}"


def _size(size: int) -> str:
    if size < _UNIT:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, len(_PREFIXES))
    return f"{size / _UNIT**power:.1f} {_PREFIXES[power - 1]}iB"


def _duration(ms: float) -> str:
    minutes, seconds = divmod(int(ms / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _properties(settings: Mapping[str, str]) -> bytes:
    """Return a file of Java's Properties."""
    return "".join(f"{key}={_escaped(value)}\n" for key, value in settings.items()).encode()


def _escaped(value: str) -> str:
    units = value.replace("\\", "\\\\").encode("utf-16-be", "surrogatepass")
    pairs = (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
    return "".join(chr(one) if 0x20 < one < 0x7F else f"\\u{one:04x}" for one in pairs)
