"""Who a connection's client is, and what it may do. The API's lock is held in every call.

    stranger --a certificate that is an identity's---------> known --revoked--> ended
       |                                                       ^
       +--auth --> challenge, prove --> welcome ---------------+

A key that is proved beside a certificate counts instead of it. Pulls of the time before may still
wait, so the connection ends with either of the two identities.

A stranger may only prove who it is. It has the time of the handshake for that, and few attempts.
Every later request is checked against the rights of its identity. Records of puts are checked by
the store, by their own topics and producers (`guard`). When identities change, the connections of
those that were revoked or have other rights are ended; the client may connect again. So are those
whose certificate has expired.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hastore.addresses import is_loopback
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import AuthenticationError
from hastore.protocol import api
from hastore.protocol.api import POSITIONS_TOPIC, is_anothers, own_prefix
from hastore.record.delays import RETRY_PREFIX
from hastore.security.audit_log import Note
from hastore.security.identities import Identities, Proof
from hastore.security.identity import Identity, short
from hastore.security.scram import MECHANISM
from hastore.server.api.connections import Connection
from hastore.server.api.quotas import Quotas
from hastore.store.append.results import Guard

UNAUTHENTICATED = api.Status.UNAUTHENTICATED.value
FORBIDDEN = api.Status.FORBIDDEN.value
REFUSED_MAX = 8  # requests of a stranger that are answered
_ALL_TOPICS = "*"
_WHO = (
    "this node asks its clients who they are: name identity and key_file in the client's security "
    "file (HASTORE_SECURITY, or --security of commands; other clients: the request auth)"
)
_NO_TLS = (
    "a change of a node from another machine needs TLS, since whoever is on the way could make one "
    "too: set security.api: tls at the node, or give the command on its machine"
)
_NEVER = float("inf")
POSITIONS_MOVED = "positions moved"  # the audit log's action: consumers may do it often
_CHANGED = ("done", "asked", "unconfirmed")
_Sharing = api.Join | api.Leave | api.Lock | api.Unlock | api.SendBack | api.AskMembers
# Free of every quota; so is the question for the queues of one topic. A slowed member stays in its
# group, and keeps its queues.
_FREE = frozenset({
    api.Auth, api.Prove, api.AskMap, api.AskStatus, api.Join, api.Leave, api.Lock, api.Unlock,
})  # fmt: skip
_Topical = api.Pull | api.FindKey | api.FindTime | api.Fetch | api.Commit


class Access:
    """Find out who clients are, and check their requests."""

    def __init__(self, identities: Identities, note: Note, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._identities = identities
        self._note = note
        self._clock = clock
        self.quotas = Quotas(clock, may_read)
        self.logins = 0  # clients that proved an identity
        self.refused_logins = 0  # proofs and requests of strangers that were refused
        self._version = identities.version
        self._next_expiry_ms = _NEVER  # wall time at which the next client's certificate expires

    @property
    def identities(self) -> Identities:
        """The identities that count."""
        return self._identities

    @property
    def note(self) -> Note:
        """What writes to the audit log."""
        return self._note

    # -- strangers

    def know(self, connection: Connection, proof: Proof) -> None:
        """Note who a client is that has proved it otherwise, by a signed request."""
        self._welcome(connection, proof)

    def meet(self, connection: Connection) -> bool:
        """Whether a client's certificate proves an identity; called when TLS and ZMTP are open."""
        tls = connection.tls
        if tls is None or tls.peer is None or tls.peer.client_name is None:
            return False
        proof = self._identities.by_certificate(tls.peer.client_name)
        if proof is None:
            return False
        self._welcome(connection, proof)
        self._next_expiry_ms = min(self._next_expiry_ms, _expiry_ms(connection))
        return True

    def asks(self, connection: Connection, request: api.Request) -> bool:
        """Whether `answer` takes a request: a stranger's, or the proof of a key beside that of a
        certificate.
        """
        if connection.stranger:
            return True
        proof = connection.proof
        by_certificate = proof is not None and proof.by_certificate
        return by_certificate and isinstance(request, api.Proving)

    def answer(self, connection: Connection, request: api.Request) -> api.Reply:
        """Answer a stranger's request; after a Welcome it is none any more.

        Raises AuthenticationError if the exchange has failed; the caller then ends the connection.
        """
        connection.refused += 1
        if isinstance(request, api.Auth):
            if request.mechanism != MECHANISM:
                reason = f"the mechanism {short(request.mechanism)} is not known; {MECHANISM} is"
                return api.Failed(request.rid, UNAUTHENTICATED, reason)
            connection.exchange = self._identities.exchange()
            return api.Challenge(request.rid, connection.exchange.challenge(request.message))
        if isinstance(request, api.Prove):
            exchange, connection.exchange = connection.exchange, None
            if exchange is None:
                raise AuthenticationError("a proof without a challenge; begin with auth")
            signature = exchange.prove(request.message)
            proof = self._identities.proved(exchange)
            self._welcome(connection, proof)
            return api.Welcome(request.rid, signature, api.Rights(**proof.identity.rights))
        if connection.refused == 1:
            self.refused(connection, None, f"{type(request).__name__} without an identity")
        return api.Failed(request.rid, UNAUTHENTICATED, _certificate_text(connection) + _WHO)

    def refused(self, connection: Connection, claimed: str | None, reason: str) -> None:
        """Note that a stranger did not prove an identity."""
        self.refused_logins += 1
        self._note(
            "authenticate",
            identity=claimed,
            address=connection.peer,
            outcome="refused",
            reason=reason,
        )

    def _welcome(self, connection: Connection, proof: Proof) -> None:
        self.logins += 1
        connection.earlier_proof = connection.proof
        connection.proof = proof
        connection.guard = self._guard(proof.identity)
        connection.meter = self.quotas.meter(proof.identity)

    def _guard(self, identity: Identity) -> Guard:
        """Return what says why an identity may not put a record into a topic; None: it may."""
        own = own_prefix(identity.name).encode()
        keeps = identity.quota is not None and identity.quota.topics is not None
        quotas = self.quotas

        def why_not(topic: bytes, producer: bytes | None) -> str | None:
            name = topic.decode("utf-8", "replace")
            if not identity.may_produce(name):
                return no_right(identity, "produce", name)
            if producer is not None and is_anothers(producer, own):
                return anothers_producer(identity, producer.decode("utf-8", "replace"))
            return quotas.why_no_topic(identity, name) if keeps else None

        return why_not

    # -- known clients

    def over_quota(
        self, connection: Connection, request: api.Request, size: int, now_ms: float
    ) -> str | None:
        """Return why a request is too much for a quota; count it otherwise."""
        meter = connection.meter
        if meter is None or connection.proof is None or type(request) in _FREE:
            return None
        if isinstance(request, api.AskTopics) and request.topic is not None:
            return None
        if meter.ask(size, now_ms, 0.0) is not None:
            return None
        return meter.why(connection.proof.identity.name)

    def refusal(self, connection: Connection, request: api.Question | api.Proving) -> str | None:
        """Return why a request is forbidden, None if it is allowed. Puts are checked later."""
        assert connection.proof is not None
        identity = connection.proof.identity
        why = _refusal(identity, request)
        if why is None and isinstance(request, api.Administer) and not _is_safe(connection):
            why = _NO_TLS
        if why is None and isinstance(request, api.Commit):
            why = self.quotas.why_no_position(identity, request.group, request.topic)
        if why is None and isinstance(request, api.SendBack):
            why = self.quotas.why_no_retries(identity, request.group, is_last=request.level < 0)
        if why is not None:
            self.forbidden(type(request).__name__, connection, why)
        return why

    def may_produce(self, connection: Connection, topic: str) -> bool:
        """Whether a connection's identity may produce to a topic."""
        proof = connection.proof
        return proof is not None and proof.identity.may_produce(topic)

    def forbidden(self, action: str, connection: Connection, reason: str) -> None:
        """Note that a request, or a record of a put, was forbidden."""
        assert connection.proof is not None
        self._note(
            action,
            identity=connection.proof.identity.name,
            address=connection.peer,
            outcome="forbidden",
            reason=reason,
        )

    def administered(
        self, name: str, address: str, action: str, outcome: str, reason: str
    ) -> None:
        """Note what came of a change that the administrator `name` has asked for; any thread."""
        self._note(
            action,
            identity=name,
            address=address,
            outcome=outcome,
            reason=reason,
            whole=outcome in _CHANGED and action != POSITIONS_MOVED,
        )

    def sees(
        self, connection: Connection, request: api.AskTopics | api.AskConfigs
    ) -> Callable[[str], bool]:
        """Return what says which topics a question for all of them may list.

        Those that the identity may produce to or consume; all, to an admin's question for
        configurations. There may be 50,000 topics, and 256 patterns of each right: another thread
        than the API's is to ask.
        """
        assert connection.proof is not None
        identity = connection.proof.identity
        if isinstance(request, api.AskConfigs) and identity.is_admin:
            return lambda _topic: True
        return partial(_may_see, identity)

    # -- revocation

    @property
    def has_changed(self) -> bool:
        """Whether identities have changed, or a certificate has expired, since `changed`; cheap."""
        if self._clock.wall_ms() >= self._next_expiry_ms:
            return True
        return self._identities.refresh() != self._version

    def changed(
        self, connections: list[Connection], end: Callable[[Connection, str], None]
    ) -> None:
        """End the connections whose identity was revoked, has other rights, or has expired."""
        self._version = self._identities.version
        self._next_expiry_ms = _NEVER
        now_ms = self._clock.wall_ms()
        for connection in connections:
            for proof in (connection.proof, connection.earlier_proof):
                if proof is None or connection.ended:
                    continue
                reason = self._reason_to_end(connection, proof, now_ms)
                if reason is None:
                    continue
                self._note(
                    "connection",
                    identity=proof.identity.name,
                    address=connection.peer,
                    outcome="ended",
                    reason=reason,
                )
                end(connection, reason)

    def _reason_to_end(self, connection: Connection, proof: Proof, now_ms: float) -> str | None:
        """Return why a proof counts no longer, or not as it did; None if it does."""
        name = proof.identity.name
        now = self._identities.still(proof)
        if now is None:
            return f"identity {name} was revoked, or this key, secret or certificate of it"
        changed = now.identity.quota != proof.identity.quota
        if changed or now.identity.rights != proof.identity.rights:
            return f"the rights of identity {name} have changed; connect again"
        if proof.by_certificate and proof is connection.proof:
            expiry_ms = _expiry_ms(connection)
            if now_ms >= expiry_ms:
                return (
                    f"the certificate of identity {name} has expired; make it a new one with "
                    "`hastore keys cert ... --renew`"
                )
            self._next_expiry_ms = min(self._next_expiry_ms, expiry_ms)
        return None


def _certificate_text(connection: Connection) -> str:
    """Return that a client's certificate is no identity; "" if it has shown none."""
    tls = connection.tls
    if tls is None or tls.peer is None:
        return ""
    if tls.peer.client_name is None and tls.peer.common_name is not None:
        return "the certificate is a node's, and that is no identity; "
    name = "without one name" if tls.peer.common_name is None else short(tls.peer.common_name)
    return f"the certificate {name} is no identity with `certificate: true` here; "


def _is_safe(connection: Connection) -> bool:
    """Whether nobody on the way can send requests on a connection."""
    return connection.tls is not None or is_loopback(connection.address[0])


def _expiry_ms(connection: Connection) -> float:
    """Return the wall time at which a client's certificate expires."""
    assert connection.tls is not None and connection.tls.peer is not None
    return connection.tls.peer.not_after_s * 1000.0


def _refusal(identity: Identity, request: api.Question | api.Proving) -> str | None:
    if isinstance(request, _Sharing):
        return _why_no_member(identity, request)
    if isinstance(request, _Topical):
        of_group = isinstance(request, api.Fetch | api.Commit)
        readable = not of_group and _is_for_admins(identity, request.topic)
        if not readable and not may_read(identity, request.topic):
            return no_right(identity, "consume", request.topic)
        if isinstance(request, api.Fetch | api.Commit) and not identity.may_move(request.group):
            return no_right(identity, "groups", request.group)
        return None
    if isinstance(request, api.AskMap | api.AskStatus):
        return None
    if isinstance(request, api.TopicChange):
        if identity.is_admin:
            return None
        return f"identity {identity.name} is no admin, so it may not change topics"
    if isinstance(request, api.Administer):
        if identity.is_admin:
            return None
        return (
            f"identity {identity.name} is no admin, so it may not change a node; whoever keeps the "
            "node's file of identities can set its `admin`"
        )
    if isinstance(request, api.AskTopics | api.AskConfigs):
        topic = request.topic
        if topic is None or _may_see(identity, topic):
            return None
        if not isinstance(request, api.AskConfigs):
            return no_right(identity, "consume", topic)
        if identity.is_admin:
            return None
        return (  # who asks for the settings of one topic is about to change them
            f"identity {identity.name} is no admin, so it may not change topics, and has no right "
            f"to consume {short(topic)}, so it may not see its settings; whoever keeps the node's "
            "file of identities can set its `admin`"
        )
    if isinstance(request, api.AskProducer):
        if is_anothers(request.producer.encode(), own_prefix(identity.name).encode()):
            return anothers_producer(identity, request.producer)
        if identity.produce:
            return None
        return f"identity {identity.name} may produce to no topic, so it has no producers"
    if isinstance(request, api.Transactional):  # the half message's own topic is asked later
        if identity.produce:
            return None
        return f"identity {identity.name} may produce to no topic, so it has no transactions"
    if isinstance(request, api.Auth | api.Prove):
        return f"this connection is {identity.name}'s already; open another one"
    if identity.is_admin or _ALL_TOPICS in identity.consume:  # it may read records of any topic
        return None
    return no_right(identity, "consume", _ALL_TOPICS)


def _is_for_admins(identity: Identity, topic: str) -> bool:
    """Whether an admin may read a topic without `consume`: that of all groups' positions.

    An admin may read any record by its offset.
    """
    return identity.is_admin and topic == POSITIONS_TOPIC


def _may_see(identity: Identity, topic: str) -> bool:
    """Whether an identity may know of a topic and its queues."""
    return (
        identity.may_consume(topic)
        or identity.may_produce(topic)
        or _is_for_admins(identity, topic)
    )


def may_see_readers(identity: Identity, topic: str) -> bool:
    """Whether an identity may know who reads a topic's queues, and so that there is the topic."""
    return identity.is_admin or may_read(identity, topic) or _may_see(identity, topic)


def may_read(identity: Identity, topic: str) -> bool:
    """Whether an identity may read a topic; a group's retries may be read by who may be in it."""
    return identity.may_consume(topic) or is_own_retry(identity, topic)


def is_own_retry(identity: Identity, topic: str) -> bool:
    """Whether a topic has the retries of a group in which an identity may be."""
    return topic.startswith(RETRY_PREFIX) and identity.may_join(topic[len(RETRY_PREFIX) :])


def _why_no_member(identity: Identity, request: api.Sharing) -> str | None:
    if isinstance(request, api.AskMembers) and identity.is_admin:
        return None
    if not identity.may_move(request.group):
        return no_right(identity, "groups", request.group)
    asks = isinstance(request, api.Join | api.AskMembers)  # of the others: Leave, Lock and Unlock
    if asks and identity.groups is None and not identity.consume:
        return (
            f"identity {identity.name} may consume no topic, so it is in no group; whoever keeps "
            "the node's file of identities can add a pattern to its `consume`"
        )
    if isinstance(request, api.Lock | api.Unlock):
        for topic in request.queues:
            if not may_read(identity, topic):
                return no_right(identity, "consume", topic)
    if isinstance(request, api.SendBack):
        return _why_not_back(identity, request)
    return None  # a Join is answered without the topics that it may not read


def _why_not_back(identity: Identity, request: api.SendBack) -> str | None:
    """Return why a message is not taken back: whoever may not read the copy would never get it."""
    if not may_read(identity, request.topic):
        return no_right(identity, "consume", request.topic)
    retries = RETRY_PREFIX + request.group
    if request.level >= 0 and not may_read(identity, retries):
        return (
            f"identity {identity.name} would not get the message again, as it has no right to read "
            f"{short(retries)}; whoever keeps the node's file of identities can add the group to "
            "its `groups`"
        )
    return None


def anothers_producer(identity: Identity, producer: str) -> str:
    """Return that a producer's id is another identity's."""
    return (
        f"the HS_PID {short(producer)} belongs to another identity than {identity.name}; each "
        "producer needs an id of its own (docs/client-protocol.md, Idempotence)"
    )


def no_right(identity: Identity, right: str, what: str) -> str:
    """Return that an identity lacks a right for a topic, or for a group."""
    does = "be in the group" if right == "groups" else right
    return (
        f"identity {identity.name} has no right to {does} {short(what)}; whoever keeps the "
        f"node's file of identities can add a pattern to its `{right}`"
    )
