"""What a RocketMQ slave asks its master for beside the log: its tables, and who its master is.

`SlaveTables` gives it what it needs to take the master's place:

    43    GET_ALL_CONSUMER_OFFSET           where each group is
    45    GET_ALL_DELAY_OFFSET              which delayed message of each level is delivered next
    61    GET_TIMER_METRICS                 none: there are no timer messages
    402   GET_ALL_MESSAGE_REQUEST_MODE      none: there are no POP consumers

It asks for the topics (21) and the settings of groups (201), too, every 10 s (4.9) or 60 s (5.3).
A slave replaces what it has by the answer: so a node that is no master, and may be behind, gives
none.

A delayed message that counts as delivered must have been delivered in the log that the slave has:
else a promotion of the slave would lose it. So 45 is answered as the log up to the slave's last
report says. A message that was delivered since then is delivered again by that slave. Without such
a report there is no answer, and the slave keeps what it has.

With `SlaveRegistration` a slave registers here as at a name server, and is told who its master is.

    103   REGISTER_BROKER     the master's remoting address and its HA address
    104   UNREGISTER_BROKER   nothing is kept of it

A RocketMQ slave knows its master's remoting address only from its name server, and asks again every
30 s. So a slave whose `namesrvAddr` has the API addresses of a group's nodes follows that group,
whichever node is its master. Routes have nothing to do with it: clients do not see the slave here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hastore.addresses import parse_address
from hastore.config.model import Config
from hastore.protocol.remoting import Answer, Code, encode_body
from hastore.record.topic_records import OWN_PREFIX
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.group_requests import needed, number, read_aside
from hastore.server.remoting.topics import version_of

DelayOffsets = Callable[[int], Mapping[int, int]]  # of the log below an offset, by level
_SCHEME = "tcp://"
_LONG_MAX = 2**63 - 1


class SlaveTables:
    """The handlers of these requests; the API's lock is held in every call."""

    def __init__(self, door: Door, positions: GroupPositions, delay_offsets: DelayOffsets) -> None:
        """Prepare; `delay_offsets` is called in a thread that may wait for the disk."""
        self._door = door
        self._backend = door.parts.backend
        self._positions = positions
        self._delay_offsets = delay_offsets

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {
            Code.GET_ALL_CONSUMER_OFFSET: self.positions,
            Code.GET_ALL_DELAY_OFFSET: self.delays,
            Code.GET_TIMER_METRICS: self.timers,
            Code.GET_ALL_MESSAGE_REQUEST_MODE: self.modes,
        }

    def positions(self, request: RemotingRequest) -> None:
        """Answer the positions of all groups, as a broker's consumerOffset.json has them."""
        self._need_master()

        def then(failure: Exception | None) -> None:
            if failure is not None:
                reason = self._door.parts.failures.note("a query of all positions", failure)[1]
                request.answer(Answer.SYSTEM_ERROR, remark=reason)
                return
            table = {
                f"{topic}@{group}": dict(sorted(self._positions.known(group, topic).items()))
                for group, topic in sorted(self._positions.pairs())
                if not group.startswith(OWN_PREFIX) and not topic.startswith(OWN_PREFIX)
            }
            self._answer_aside(request, lambda: table)

        self._positions.when_read(then)

    def delays(self, request: RemotingRequest) -> None:
        """Answer which delayed message of each level is next, as delayOffset.json has it."""
        self._need_master()
        host = request.address[0]

        def read() -> Mapping[int, int]:
            status = self._backend.status()
            slaves = [one for one in status.get("slaves", ()) if one.get("classic")]
            if not slaves:
                text = (
                    "no RocketMQ slave follows this node: how far one has the log is not known; it"
                    " needs ha.allow_classic_peers here, and this node's `ha` as haMasterAddress"
                )
                raise RemotingRefusal(Answer.SYSTEM_BUSY, text)
            own = [one for one in slaves if _host_of(one) == host] or slaves
            ends = [one["ack_offset"] for one in own if one["ack_offset"] is not None]
            if len(ends) < len(own):  # by offset 0 nothing was delivered: all would be again
                text = "a RocketMQ slave's link has just begun: it has not reported its log yet"
                raise RemotingRefusal(Answer.SYSTEM_BUSY, text)
            end = min(*ends, self._backend.store.readable_offset)
            return dict(sorted(self._delay_offsets(end).items()))

        self._answer_aside(request, read)

    def _answer_aside(
        self, request: RemotingRequest, read: Callable[[], Mapping[Any, Any]]
    ) -> None:
        """Answer with the offsets that `read` returns, in the form of a broker's file."""

        def encode() -> bytes:
            table = read()
            return encode_body({"dataVersion": version_of(table), "offsetTable": table})

        def answer(body: bytes) -> None:
            request.answer(Answer.SUCCESS, body=body)

        read_aside(self._door, request, encode, answer)

    def timers(self, request: RemotingRequest) -> None:
        """Answer that no topic has timer messages."""
        body = {"dataVersion": version_of({}), "timingCount": {}}
        request.answer(Answer.SUCCESS, body=encode_body(body))

    def modes(self, request: RemotingRequest) -> None:
        """Answer that no group has been told to share out queues at the node."""
        request.answer(Answer.SUCCESS, body=encode_body({"messageRequestModeMap": {}}))

    def _need_master(self) -> None:
        if not self._door.is_master:
            text = "this node is not the master, and what it knows may be old"
            raise RemotingRefusal(Answer.SYSTEM_BUSY, text)


def _host_of(slave: Mapping[str, Any]) -> str | None:
    endpoint = parse_address(slave["address"])
    return None if endpoint is None else endpoint[0]


class SlaveRegistration:
    """The handlers of these requests; the API's lock is held in every call."""

    def __init__(self, door: Door, config: Config) -> None:
        """Prepare; `config` is that of the node's start."""
        self._backend = door.parts.backend
        self._config = config

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {
            Code.REGISTER_BROKER: self.register,
            Code.UNREGISTER_BROKER: self.unregister,
        }

    def register(self, request: RemotingRequest) -> None:
        """Answer with the addresses of the group's master."""
        self._check(request)
        group = self._backend.master_map()
        address = self._backend.ha_address(group.master_node or 0)
        if address is None or group.master_api is None:
            raise RemotingRefusal(Answer.SYSTEM_BUSY, "the group has no master now; ask again")
        if its_own := request.frame.fields.get("brokerAddr"):
            self._backend.note_classic_slave(its_own)
        fields = {
            "haServerAddr": address,
            "masterAddr": group.master_api.removeprefix(_SCHEME),
        }
        request.answer(Answer.SUCCESS, fields, encode_body({"table": {}}))

    def unregister(self, request: RemotingRequest) -> None:
        """Confirm that a slave has gone."""
        self._check(request)
        request.answer(Answer.SUCCESS)

    def _check(self, request: RemotingRequest) -> None:
        """Raise RemotingRefusal for what is no slave of this group."""
        fields, group = request.frame.fields, self._config.group
        name = needed(fields, "brokerName")
        if not number(fields, "brokerId", 0, _LONG_MAX):
            text = "hastore is no name server of RocketMQ's masters: it has brokerId 0"
        elif not self._config.ha.allow_classic_peers:
            text = "RocketMQ's slaves can follow only a node with ha.allow_classic_peers: true"
        elif name != group:
            text = f"the brokerName of a slave of this group is {group}, not {name[:80]}"
        else:
            return
        raise RemotingRefusal(Answer.NO_PERMISSION, text)
