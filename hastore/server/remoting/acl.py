"""Who sends the requests of RocketMQ's protocol, and whether they may: on a node with identities.

    request --AccessKey, Signature--> identity --rights.py--> its handler
                   |                             |
                   +-- 16: not proved            +-- 16: forbidden

Each request proves by itself who sends it (security/rocketmq_acl.py); RocketMQ's clients know no
login. The first proof on a connection also makes its client known, as that of a key does: the
connection belongs to that identity from then on, and ends when it is revoked or has other rights.

A forwarded request is checked by both nodes, each by its own file: the one that the client asks,
and the master. So neither an old file at one node nor a node that was taken over gives a right that
the other one refuses. What a node asks another one for itself (`forwarding.ASKED`) is not signed.

A stranger is told the same whether the AccessKey or the Signature is wrong, after the same work.
Wrong ones are counted by the source that they come from, a host or an IPv6 network of 64 bits:
beyond WRONG_PER_S nothing of its new connections is checked within that second. A connection ends
with its WRONG_MAX-th.

A request that is more than its identity's quota waits for SLOW_MS at most, or is refused with 2
(server/api/quotas.py).

Everything here runs with the API's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hastore.addresses import address_text
from hastore.clock import Clock
from hastore.protocol.remoting import Answer, Code, Frame, size_of
from hastore.record.delays import RETRY_PREFIX
from hastore.security.identities import Identities, Proof
from hastore.security.identity import Identity
from hastore.security.rocketmq_acl import ACCESS_KEY, SIGNATURE, SIGNATURE_BYTES, TOKEN, signer
from hastore.security.scram import NAME
from hastore.server.api.access import POSITIONS_MOVED, REFUSED_MAX, Access, may_read, no_right
from hastore.server.api.connections import Connection
from hastore.server.api.places import source_of
from hastore.server.remoting.door import (
    WITHOUT_BODY,
    Door,
    RemotingRefusal,
    RemotingRequest,
    signer_of,
)
from hastore.server.remoting.forwarding import FORWARDED
from hastore.server.remoting.reads import COMMITS
from hastore.server.remoting.rights import NEEDS, NEW_TOPICS, may_see, may_send

WRONG_MAX = REFUSED_MAX  # of one connection
WRONG_PER_S = 4  # of one source
SOURCES_MAX = 1_024  # whose wrong ones are counted; the oldest makes room for one more
SLOW_MS = 1_000.0  # so long a request waits for its quota; RocketMQ's clients wait for 3 s
_BEHIND_MS = 0.001  # a wait, so that a request is handled after those of before
WAITING_MAX = 1_000  # requests that wait for their quotas, of all identities
WAITING_BYTES = 16 * 1024 * 1024
_WINDOW_MS = 1_000.0
# A consumer that is slowed stays in its group.
_FREE = frozenset({
    Code.HEART_BEAT, Code.UNREGISTER_CLIENT, Code.GET_CONSUMER_LIST_BY_GROUP, Code.LOCK_BATCH_MQ,
    Code.UNLOCK_BATCH_MQ, Code.GET_ROUTEINFO_BY_TOPIC, Code.GET_BROKER_CLUSTER_INFO,
})  # fmt: skip
_TOPIC_FIELDS: dict[int, str] = {
    Code.SEND_MESSAGE: "topic", Code.SEND_MESSAGE_V2: "b", Code.SEND_BATCH_MESSAGE: "b",
}  # fmt: skip
_PULLS = frozenset({Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE})
_GROUP_FIELDS: dict[int, str] = {
    Code.UPDATE_CONSUMER_OFFSET: "consumerGroup", Code.INVOKE_BROKER_TO_RESET_OFFSET: "group",
    Code.PULL_MESSAGE: "consumerGroup", Code.LITE_PULL_MESSAGE: "consumerGroup",
}  # fmt: skip
_ROUTE = Code.GET_ROUTEINFO_BY_TOPIC
_NOT_SIGNED = (
    "this node asks its clients who they are: give the client an AccessKey and a SecretKey "
    "(AclClientRPCHook, mqadmin's conf/tools.yml), which `hastore keys new NAME --rocketmq` makes"
)
_TOO_MANY = "too many wrong signatures came from this host just now; try again"


# Changes that are lines of the audit log, whatever comes of them.
NOTED: dict[int, str] = {
    Code.UPDATE_AND_CREATE_TOPIC: "topic set",
    Code.UPDATE_AND_CREATE_TOPIC_LIST: "topic set",
    Code.DELETE_TOPIC_IN_BROKER: "topic delete",
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: "group set",
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: "group set",
    Code.DELETE_SUBSCRIPTIONGROUP: "group delete",
    Code.INVOKE_BROKER_TO_RESET_OFFSET: POSITIONS_MOVED,
}
_ABOUT = ("topic", "group", "groupName", "timestamp", "offset")  # fields that say of what
_ABOUT_BYTES = 200  # of a body, which has the names in other requests


@dataclass(slots=True)
class AclCounts:
    """What became of the requests of RocketMQ's clients that had to be signed, since the start."""

    signed: int = 0  # by an identity
    unproved: int = 0  # without a signature, or with a wrong one
    forbidden: int = 0  # signed, but the identity lacks the right, or has as much as it may keep

    def status(self) -> dict[str, int]:
        """Return the object in the node's status. Any thread may ask."""
        return {"signed": self.signed, "unproved": self.unproved, "forbidden": self.forbidden}


class Wrong:
    """Counts wrong signatures by source, for a second each.

    Who has more sources than are counted is checked more often, which costs little. So nobody can
    fill the table, and lock out those who are not in it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_ms = clock.monotonic_ms()
        self._of: dict[str, int] = {}

    def note(self, host: str) -> None:
        """Count one."""
        self._turn()
        source = source_of(host)
        if source not in self._of and len(self._of) >= SOURCES_MAX:
            del self._of[next(iter(self._of))]
        self._of[source] = self._of.get(source, 0) + 1

    def is_over(self, host: str) -> bool:
        """Whether nothing that comes from a host should be checked now."""
        if not self._of:
            return False
        self._turn()
        return self._of.get(source_of(host), 0) >= WRONG_PER_S

    def _turn(self) -> None:
        now = self._clock.monotonic_ms()
        if now - self._since_ms >= _WINDOW_MS:
            self._since_ms = now
            self._of.clear()


class Gate:
    """Lets requests through to their handlers, or answers them; see the module's text."""

    def __init__(
        self,
        door: Door,
        access: Access,
        welcome: Callable[[Connection], None],
        node: int,
        *,
        auto_create: bool,
        counts: AclCounts,
    ) -> None:
        """Prepare; `welcome` gives a client that has proved who it is the usual limits.

        `auto_create`: a send creates a topic, so every topic has a route.
        """
        missing = door.codes - NEEDS.keys()
        assert not missing, f"rights.py does not say what the codes {sorted(missing)} need"
        self._door = door
        self._access = access
        self._identities: Identities = access.identities
        self._welcome = welcome
        self._wrong_text = (
            "no identity here has this AccessKey and has signed the request with its secret; check "
            f"AccessKey and SecretKey, and the file of identities of node {node}"
        )
        self._auto_create = auto_create
        self._counts = counts
        self._wrong = Wrong(door.parts.clock)
        self._waiting = self._waiting_bytes = 0  # requests that wait for their quota
        self._slowed: Counter[Connection] = Counter()  # those of each connection

    def admits(self, request: RemotingRequest) -> bool:
        """Whether a request may be handled; if not, it is answered."""
        try:
            identity = self._identity_of(request)
            self._check(identity, request)
            wait_ms = self._wait_ms(identity, request)
        except RemotingRefusal as refusal:
            request.answer(refusal.code, remark=refusal.remark)
            self._end_if_hopeless(request.connection)
            return False
        self._counts.signed += 1
        self._note_outcome(identity, request)
        frame = request.frame
        if frame.code not in FORWARDED:  # it could be passed on, to a consumer
            for name in (ACCESS_KEY, SIGNATURE, TOKEN):
                frame.fields.pop(name, None)
        if not wait_ms:
            return True
        self._let_wait(request, wait_ms)
        return False

    def may_read(self, request: RemotingRequest, topic: str, *, or_admin: bool = False) -> bool:
        """Whether who has signed a request that was let through may read a topic."""
        identity = self._identities.find(signer_of(request))
        if identity is None:
            return False
        return (or_admin and identity.is_admin) or may_read(identity, topic)

    def may_send(self, request: RemotingRequest, topic: str) -> bool:
        """Whether who has signed a request that was let through may send to a topic."""
        identity = self._identities.find(signer_of(request))
        return identity is not None and may_send(identity, topic)

    def may_be_asked(self, connection: Connection, topic: str) -> bool:
        """Whether a client may get a message of a topic that it is asked about, as its producer."""
        proof = connection.proof
        identity = None if proof is None else self._identities.find(proof.identity.name)
        return identity is not None and may_send(identity, topic)

    def forbidden(self, request: RemotingRequest, why: str) -> RemotingRefusal:
        """Count and note that who has signed a request may not send it; return what to answer."""
        self._counts.forbidden += 1
        host, port = request.address
        self._access.note(
            Code(request.frame.code).name,
            identity=signer_of(request),
            address=address_text(host, port),
            outcome="forbidden",
            reason=why,
        )
        return RemotingRefusal(Answer.NO_PERMISSION, why)

    # -- who

    def _identity_of(self, request: RemotingRequest) -> Identity:
        """Return who has signed a request; raises RemotingRefusal."""
        frame, connection = request.frame, request.connection
        is_new = connection is not None and connection.proof is None
        if is_new and self._wrong.is_over(request.address[0]):
            self._counts.unproved += 1
            raise RemotingRefusal(Answer.SYSTEM_BUSY, _TOO_MANY)
        name, given = frame.fields.get(ACCESS_KEY, ""), frame.fields.get(SIGNATURE, "")
        if not name or not given:
            raise self._unproved(request, None, _NOT_SIGNED)
        if len(given) != SIGNATURE_BYTES or not NAME.fullmatch(name):
            raise self._unproved(request, None, self._wrong_text)
        version = self._identities.refresh(0) if is_new else self._identities.version
        found = self._signer(request, name, given)
        if found is None and self._identities.refresh(0) != version:
            found = self._signer(request, name, given)  # with a secret that is new
        if found is None:
            raise self._unproved(request, name, self._wrong_text)
        if connection is not None:
            self._claim(connection, found)
        return found.identity

    def _signer(self, request: RemotingRequest, name: str, given: str) -> Proof | None:
        identity, secrets = self._identities.secrets(name)
        frame = request.frame
        secret = signer([one.text for one in secrets], frame.fields, frame.body, given)
        return None if identity is None or secret is None else Proof(identity, None, secret)

    def _claim(self, connection: Connection, proof: Proof) -> None:
        """Let a connection be that of the identity which has signed its first request."""
        known = connection.proof
        if known is None:
            self._access.know(connection, proof)
            self._welcome(connection)
        elif known.identity.name != proof.identity.name:
            text = f"this connection is {known.identity.name}'s already; open another one"
            raise RemotingRefusal(Answer.NO_PERMISSION, text)
        elif known.secret != proof.secret:  # the older one may be revoked now
            connection.proof = proof

    def _unproved(
        self, request: RemotingRequest, claimed: str | None, reason: str
    ) -> RemotingRefusal:
        """Note that a request proves nothing; return what to answer."""
        self._counts.unproved += 1
        host, port = request.address
        self._access.note(
            "authenticate",
            identity=claimed,
            address=address_text(host, port),
            outcome="refused",
            reason=f"RocketMQ request {request.frame.code}: {reason}",
        )
        if request.connection is not None:
            self._wrong.note(host)
            request.connection.refused += 1
        return RemotingRefusal(Answer.NO_PERMISSION, reason)

    def _end_if_hopeless(self, connection: Connection | None) -> None:
        if connection is not None and connection.refused >= WRONG_MAX and not connection.ended:
            parts = self._door.parts
            parts.replies.flush_one(connection)
            parts.end(connection, f"{connection.refused} requests without a valid signature")

    # -- what

    def _check(self, identity: Identity, request: RemotingRequest) -> None:
        """Raise RemotingRefusal if an identity may not send a request."""
        frame = request.frame
        need = NEEDS.get(frame.code)
        if need is None:  # nobody handles it
            return
        if frame.body and frame.code in WITHOUT_BODY:
            text = f"request code {frame.code} has no body"
            raise RemotingRefusal(Answer.MESSAGE_ILLEGAL, text)
        why = need.check(identity, frame)
        if why is None and frame.code == _ROUTE:
            why = self._hide(identity, frame.fields)
        if why is None:
            return
        raise self.forbidden(request, why)

    def _note_outcome(self, identity: Identity, request: RemotingRequest) -> None:
        """Let the audit log have what comes of a change that an administrator asks for."""
        frame, reply = request.frame, request.reply
        action = NOTED.get(frame.code)
        if action is None:
            return
        name, address, what = identity.name, address_text(*request.address), _described(frame)

        def noted(one: RemotingRequest, answer: Frame | bytes | None) -> None:
            outcome, why = "asked", ""  # one way: nobody is told what came of it
            if isinstance(answer, Frame):
                outcome = "done" if answer.code == Answer.SUCCESS else "refused"
                why = "" if outcome == "done" else f": {answer.remark or answer.code}"
            self._access.administered(name, address, action, outcome, what + why)
            reply(one, answer)

        if frame.is_one_way:
            self._access.administered(name, address, action, "asked", what)
        else:
            request.reply = noted

    # -- how much

    def _wait_ms(self, identity: Identity, request: RemotingRequest) -> float:
        """Return how long a request must wait for its quota; raises RemotingRefusal.

        What another node has forwarded, that node has counted.
        """
        connection, frame = request.connection, request.frame
        if identity.quota is None:
            return 0.0
        why = self._why_not_kept(identity, frame)
        if why is not None:
            raise self.forbidden(request, why)
        meter = None if connection is None else connection.meter
        if meter is None or frame.code in _FREE:
            return 0.0
        full = self._waiting >= WAITING_MAX or self._waiting_bytes >= WAITING_BYTES
        now_ms = self._door.parts.clock.monotonic_ms()
        wait_ms = meter.ask(size_of(frame), now_ms, 0.0 if full else SLOW_MS)
        if wait_ms is None:
            raise RemotingRefusal(Answer.SYSTEM_BUSY, meter.why(identity.name))
        if not wait_ms and connection in self._slowed:
            return _BEHIND_MS  # those of before are due, and were not handled yet
        return wait_ms

    def _why_not_kept(self, identity: Identity, frame: Frame) -> str | None:
        """Return why a request may not make another topic, or keep another group's positions."""
        quotas, fields = self._access.quotas, frame.fields
        name = _TOPIC_FIELDS.get(frame.code)
        if name is not None:
            topic = fields.get(name, "")
            if topic.startswith(RETRY_PREFIX) and not identity.may_produce(topic):
                return None  # as a consumer of its group: none of the topics that are counted
            return quotas.why_no_topic(identity, topic)
        if frame.code == Code.CONSUMER_SEND_MSG_BACK:  # after a refusal it sends its own copy
            is_last = fields.get("delayLevel", "").startswith("-")
            return quotas.why_no_retries(identity, fields.get("group", ""), is_last=is_last)
        name = _GROUP_FIELDS.get(frame.code)
        if name is None:
            return None
        group, topic = fields.get(name, ""), fields.get("topic", "")
        if frame.code not in _PULLS:
            return quotas.why_no_position(identity, group, topic)
        try:
            flags = int(fields.get("sysFlag", ""))  # as the handler reads it
        except ValueError:
            return None  # the handler refuses it
        if flags & COMMITS and quotas.why_no_position(identity, group, topic) is not None:
            fields["sysFlag"] = str(flags & ~COMMITS)  # it reads, and keeps nothing
        return None

    def _let_wait(self, request: RemotingRequest, wait_ms: float) -> None:
        """Let a request be handled once its quota allows it."""
        size, connection = size_of(request.frame), request.connection
        assert connection is not None, "what was forwarded has no quota here"
        self._waiting += 1
        self._waiting_bytes += size
        self._slowed[connection] += 1

        def go_on() -> None:
            self._waiting -= 1
            self._waiting_bytes -= size
            self._slowed[connection] -= 1
            if not self._slowed[connection]:
                del self._slowed[connection]
            if not connection.ended:
                self._door.handle(request)

        self._door.at(self._door.parts.clock.monotonic_ms() + wait_ms, go_on)

    # -- what a client may know

    def _hide(self, identity: Identity, fields: dict[str, str]) -> str | None:
        """Let a topic that an identity may not see have the route of every new topic.

        So nobody learns whether it exists, and the client's own request is what is refused: of a
        route that is refused, RocketMQ's clients tell their application nothing but that there is
        none. Returns why not even that route is given.
        """
        topic = fields.get("topic", "")
        if may_see(identity, topic):
            return None
        if not self._auto_create:
            return no_right(identity, "consume", topic)
        fields["topic"] = NEW_TOPICS
        return None


def _described(frame: Frame) -> str:
    """Return what a change is about, for the audit log: names of its fields, or of its body."""
    given = [f"{one} {frame.fields[one]}" for one in _ABOUT if one in frame.fields]
    body = frame.body[:_ABOUT_BYTES].decode("utf-8", "replace")
    return ", ".join([Code(frame.code).name, *given, *([body] if body else [])])
