"""A RocketMQ slave registers here as at a name server, and is told who its master is.

    103   REGISTER_BROKER     the master's remoting address and its HA address
    104   UNREGISTER_BROKER   nothing is kept of it

A RocketMQ slave knows its master's remoting address only from its name server, and asks again every
30 s. So a slave whose `namesrvAddr` has the API addresses of a group's nodes follows that group,
whichever node is its master. Routes have nothing to do with it: clients do not see the slave here.
"""

from __future__ import annotations

from hastore.config.model import Config
from hastore.protocol.remoting import Answer, Code, encode_body
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.group_requests import needed, number

_SCHEME = "tcp://"
_LONG_MAX = 2**63 - 1


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
