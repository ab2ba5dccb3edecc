"""BrokerTables: a slave of a RocketMQ master asks it for what is not in the log, and keeps it.

    broker --21, 43, 45, 201--> checked --> config/*.json in the store, as the broker has them

A slave appends nothing to its log. So these files, and not records, are where the topics, the
positions, the delay offsets and the settings of groups are until a node of the group is promoted:
then the new master makes records of its own files, once (server/take_over.py).

**Rules for the files.** Each is replaced as a whole, durably, and only by an answer that can be
read: what the broker refuses, cuts off or garbles changes nothing. Of offsets what the answer does
not name stays, as RocketMQ's slaves keep it, but for positions of a topic that was deleted. A node
whose log has an epoch of its own group writes them no more: the broker is not its master then.

It also asks where the broker's log begins and ends (28): the HA link does not say how much a slave
lacks, nor that the broker has removed the place where a slave's log ends, and sends nothing more.

And it asks for the broker's settings (26), of which some must be the group's, too: what does not
move with them `notes` says, and the log once.

The question is repeated every EVERY_S while the HA link is up. A broker that cannot be asked is
said once, and again when the reason changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hastore.addresses import address_text, parse_address
from hastore.clock import Clock
from hastore.config.classic_key import Credentials
from hastore.errors import CorruptRecordError, HastoreError, UsageError
from hastore.fs.filesystem import FileSystem, read_or_empty
from hastore.protocol.remoting import Code
from hastore.record.delays import DELAYS_MS, format_levels, parse_levels
from hastore.server.broker_client import BrokerClient
from hastore.server.broker_tables import (
    DELAYS,
    GROUPS,
    MAX_BYTES,
    POSITIONS,
    TABLES,
    TOPICS,
    LogRange,
    Table,
    merged,
    named,
    read_delays,
    read_groups,
    read_log_range,
    read_positions,
    read_settings,
    read_topics,
    without_deleted,
)
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)

EVERY_S = 10.0  # as RocketMQ 4.9's slaves ask
BELOW_HA = 1  # a broker's port, unless it is configured: haListenPort is one above it by default
_MERGED = (POSITIONS, DELAYS)


def broker_address(classic_master: str, classic_broker: str | None) -> str:
    """Return where a RocketMQ master answers its clients, from its HA address without another."""
    if classic_broker is not None:
        return classic_broker
    endpoint = parse_address(classic_master)
    assert endpoint is not None, "the configuration was checked"
    return address_text(endpoint[0], endpoint[1] - BELOW_HA)


class BrokerTables(Service):
    """Ask the broker again and again; `problem` says why its tables are not known now."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        address: str,
        credentials: Callable[[], Credentials | None],
        clock: Clock,
        *,
        group: str,
        follows: Callable[[], bool],
        own_log: Callable[[], LogRange | None],
        file_size: int,
        delays_ms: Sequence[int] = DELAYS_MS,
        on_failure: OnFailure,
        every_s: float = EVERY_S,
    ) -> None:
        """Prepare; `follows()`: whether the broker is this node's master now.

        `group` is the name of this node's group, `file_size` its `commitlog_file_size`, `delays_ms`
        its `message_delay_level`.
        `own_log()` is None once the log has an epoch of its own group. `credentials()` may raise
        ConfigError.
        """
        super().__init__("BrokerTables", on_failure=on_failure)
        self._fs = fs
        self._root = root
        self._address = address
        self._credentials = credentials
        self._clock = clock
        self._group = group
        self._file_size = file_size
        self._delays_ms = tuple(delays_ms)
        self._of_size: str | None = None  # that the broker's log files have another size
        self._follows = follows
        self._own_log = own_log
        self._log: LogRange | None = None  # of the broker, as it said last
        self._every_s = every_s
        self._last: dict[Table, bytes] = {}  # the answers that the files have
        self._left_out: dict[Table, str] = {}
        self._of_settings: list[str] = []  # what the broker's settings mean for a migration
        self.problem: str | None = None
        self.taken_ms: int | None = None  # wall time of the last time that all was known

    def run(self) -> None:
        """Ask until stopped."""
        while not self.stopping.is_set():
            self.turn()
            self.stopping.wait(self._every_s)

    def turn(self) -> None:
        """Ask for all tables once, if the broker is the master now."""
        if not self._follows():
            return
        began_ms, problem = self._clock.wall_ms(), None
        try:
            with BrokerClient(self._address, self._credentials(), self._clock) as client:
                for table in TABLES:
                    try:
                        self._take(table, client.ask(table.code))
                    except HastoreError as failure:  # of this table; the others may be fine
                        problem = problem or f"{table.file}: {failure}"
                self._ask_log(client)
                self._ask_settings(client)
        except ConnectionError as failure:
            refused = isinstance(failure, ConnectionRefusedError)
            # By a reset or by its end: that depends on the moment, and must be said once.
            problem = problem or (str(failure) if refused else "it ends the connection")
        except (HastoreError, OSError) as failure:
            problem = problem or str(failure) or type(failure).__name__
        if problem is None:
            if self.taken_ms is None or self.problem is not None:
                log.info("have the topics, groups and positions of the broker %s", self._address)
            self.taken_ms = began_ms
        elif problem != self.problem:
            log.warning("%s", self._text(problem))
        self.problem = problem

    def problems(self) -> list[str]:
        """Return what an operator must look at."""
        found, follows = self._problems_of_log(), self._follows()
        if self._of_size is not None and self._own_log() is not None:
            found.append(self._of_size)
        if self.problem is not None and follows:
            found.append(self._text(self.problem))
        return found

    def notes(self) -> list[str]:
        """Return what an operator should know before the promotion, and what alarms nobody."""
        if self._own_log() is None:
            return []
        left_out = [
            f"{table.file} of the broker {self._address}: left out: {text}"
            for table in TABLES
            if (text := self._left_out.get(table))
        ]
        return [*self._of_settings, *left_out]

    def lag(self) -> int | None:
        """Return how many bytes the broker's log had beyond this one when it was asked last."""
        own = self._own_log()
        return None if own is None or self._log is None else max(0, self._log.end - own.end)

    def _problems_of_log(self) -> list[str]:
        own, broker = self._own_log(), self._log
        if own is None or broker is None or own.first == own.end:
            return []
        if own.end < broker.first:
            return [
                f"this log ends at {own.end}, but that of the RocketMQ broker {self._address} has"
                f" nothing before {broker.first} any more, so this node gets no more messages: stop"
                " it, move its store away, and start it with a new copy of the broker's log"
            ]
        if own.end < broker.end and not self._follows():
            return [
                f"this node follows no more, and lacks {broker.end - own.end} bytes of the log of"
                f" the RocketMQ broker {self._address}, which reached {broker.end} when it was"
                " asked last: a promotion would lose them; let this node follow to the end first"
            ]
        return []

    def _ask_log(self, client: BrokerClient) -> None:
        """Ask where the broker's log begins and ends; what is no answer changes nothing."""
        try:
            self._log = read_log_range(client.ask(Code.GET_BROKER_RUNTIME_INFO))
        except (HastoreError, OSError) as failure:
            log.debug("the broker %s does not say where its log is: %s", self._address, failure)

    def _ask_settings(self, client: BrokerClient) -> None:
        """Ask for the broker's settings; what is no answer changes nothing."""
        try:
            settings = read_settings(client.ask(Code.GET_BROKER_CONFIG))
        except (HastoreError, OSError) as failure:
            log.debug("the broker %s does not say its settings: %s", self._address, failure)
            return
        size, before = settings.get("mappedFileSizeCommitLog", ""), self._of_size
        self._of_size = None
        if size not in ("", str(self._file_size)):
            self._of_size = _problem_of_size(self._address, size, self._file_size)
            if before is None:
                log.error("%s", self._of_size)
        name, notes = settings["brokerName"], []
        levels = settings.get("messageDelayLevel", "")
        if levels and not self._has_levels(levels):
            notes.append(_note_of_levels(self._address, levels, self._delays_ms))
        if name != self._group:
            notes.append(
                f"the RocketMQ broker {self._address} has the brokerName {name:.80}, and this group"
                f" is {self._group}: consumers that keep their own positions (broadcasting,"
                " LocalFileOffsetStore) keep them by that name, and would begin at the end of each"
                " queue after the switch, and miss messages. If there are any, set `group:` to the"
                " broker's name on all nodes before the promotion"
            )
        if settings.get("enableLmq") == settings.get("enableMultiDispatch") == "true":
            notes.append(
                f"the RocketMQ broker {self._address} has light queues (enableLmq): they do not"
                " move, only the messages in their own topics. Let their consumers read to the end"
                " before the promotion"
            )
        for text in notes:
            if text not in self._of_settings:
                log.warning("before the migration: %s", text)
        self._of_settings = notes

    def _has_levels(self, text: str) -> bool:
        try:
            return parse_levels(text) == self._delays_ms
        except UsageError:
            return False

    def _text(self, problem: str) -> str:
        return (
            f"the RocketMQ broker {self._address} cannot be asked for its topics, groups and"
            f" positions: {problem}; they are taken over as this node last knew them"
            " (ha.classic_broker is the broker's address, ha.classic_key_file an AccessKey for it)"
        )

    def _take(self, table: Table, raw: bytes) -> None:
        """Keep an answer in its file, if it is one. Raises CorruptRecordError, OSError."""
        if self._last.get(table) == raw:
            return
        left_out = _check(table, raw)
        path, kept = f"{self._root}/{table.file}", raw
        if table in _MERGED:
            known = read_or_empty(self._fs, path, MAX_BYTES)
            if known and _is_valid(table, known):
                kept = merged(table, known, raw)
        if not self._follows():
            return  # promoted meanwhile: the files are being taken over
        self._fs.make_dirs(path.rpartition("/")[0])
        if table == TOPICS:
            self._forget_deleted(raw)
        self._fs.replace_bytes(path, kept)
        self._last[table] = raw
        if left_out and self._left_out.get(table) != left_out:
            log.warning("%s of the broker %s: left out: %s", table.file, self._address, left_out)
        self._left_out[table] = left_out

    def _forget_deleted(self, topics: bytes) -> None:
        """Drop the positions of topics that are not among these; the next answer may name some."""
        before = read_or_empty(self._fs, f"{self._root}/{TOPICS.file}", MAX_BYTES)
        path = f"{self._root}/{POSITIONS.file}"
        known = read_or_empty(self._fs, path, MAX_BYTES)
        if before and known and _is_valid(TOPICS, before) and _is_valid(POSITIONS, known):
            kept = without_deleted(known, before, topics)
            if kept != known:
                self._last.pop(POSITIONS, None)
                self._fs.replace_bytes(path, kept)


def _problem_of_size(address: str, size: str, own: int) -> str:
    return (
        f"the log files of the RocketMQ broker {address} have {size:.20} bytes"
        f" (mappedFileSizeCommitLog), and those of this node {own}: its log cannot be copied so."
        " Stop this node, set store.commitlog_file_size to that size, move the store away, and"
        " start it with a new copy of the broker's log"
    )


def _note_of_levels(address: str, levels: str, own: Sequence[int]) -> str:
    return (
        f"the RocketMQ broker {address} has the messageDelayLevel {levels!r:.200}, and"
        f" store.message_delay_level of this node is {format_levels(own)!r}: delayed messages would"
        " come at another time than they were sent for. Before the promotion set it to the broker's"
        " on all nodes; each must build its queues anew: stop it, remove the file hastore/replay in"
        " its store, and start it"
    )


def _check(table: Table, raw: bytes) -> str:
    """Return what of a table is left out; raises CorruptRecordError if it is none."""
    if table == TOPICS:
        return named(read_topics(raw).left_out)
    if table == GROUPS:
        return named(read_groups(raw).left_out)
    if table == POSITIONS:
        return named(read_positions(raw).left_out)
    read_delays(raw)
    return ""


def _is_valid(table: Table, raw: bytes) -> bool:
    try:
        _check(table, raw)
    except CorruptRecordError:
        return False
    return True
