"""hastore's own consumers as members of a group that shares its queues.

    Join      a heartbeat, as HEART_BEAT (34): the same membership, and the same list of client ids
    Lock      LOCK_BATCH_MQ (41), with where the group is in each queue
    Unlock    UNLOCK_BATCH_MQ (42); all members are told, since one of them waits for it
    Commit    of a member: refused as FENCED unless it has the lock of each queue
    SendBack  CONSUMER_SEND_MSG_BACK (36): retries.py
    AskMembers  of an operator: who is there, and who has which lock

So a group may have RocketMQ's consumers, too. A lock is asked for by the member that the list gives
the queue to; the lock alone decides whose queue it is. A member that does not say Join for
SESSION_MS is taken out of the list, also if its connection is up: it does not poll any more.
Everything runs in the API's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import msgspec

from hastore.protocol import api
from hastore.protocol.allocation import in_order, share_of
from hastore.protocol.remoting import VERSION, Answer, Code, Frame
from hastore.server.api.access import may_read, may_see_readers
from hastore.server.api.connections import Connection
from hastore.server.remoting.door import Door, RemotingRefusal, RemotingRequest
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.group_requests import SCAN_MS, GroupRequests
from hastore.server.remoting.lock_requests import LockRequests
from hastore.server.remoting.queue_locks import LOCK_MS
from hastore.server.remoting.retries import Retries
from hastore.server.remoting.routes import READ, RETRY, TopicView

SESSION_MS = 60_000.0  # without a Join
LEFT_MAX = 20_000  # members times topics; of more it is not looked who does not read what
MEMBERS_MAX = 50_000  # whose last commits are known
OWN = "hastore"  # what AskMembers says of hastore's own members
_LANGUAGE = "PYTHON"
_STATUS = {
    Answer.SYSTEM_BUSY: "BUSY",
    Answer.SERVICE_NOT_AVAILABLE: "SERVICE_NOT_AVAILABLE",
}
Commit = Callable[[api.Commit], None]


class _Lockable(msgspec.Struct):
    topic: str
    queueId: int


class _Locks(msgspec.Struct):
    consumerGroup: str
    clientId: str
    mqSet: list[_Lockable]


class _Granted(msgspec.Struct):
    lockOKMQSet: list[_Lockable] = []


class _Offset(msgspec.Struct):
    queueId: int
    offset: int = 0


class _Moved(msgspec.Struct):
    offsetTable: list[_Offset]


_granted = msgspec.json.Decoder(_Granted)
_moved = msgspec.json.Decoder(_Moved)


@dataclass(slots=True)
class _Own:
    """A connection's membership."""

    rid: int  # of its last Join
    group: str
    member: str
    token: int
    seen_ms: float


class OwnMembers:
    """Serves hastore's own members of groups, at one node."""

    def __init__(
        self,
        door: Door,
        groups: GroupRequests,
        locks: LockRequests,
        positions: GroupPositions,
        topics: TopicView,
        retries: Retries,
        refusal: Callable[[str], str | None] = lambda _group: None,
    ) -> None:
        """Prepare, and serve the door's members from now on.

        `refusal`: why the settings of a group do not let it consume; None if they do.
        """
        self._door = door
        self._parts = door.parts
        self._groups = groups
        self._locks = locks
        self._positions = positions
        self._topics = topics
        self._retries = retries
        self._refusal = refusal
        self._own: dict[Connection, _Own] = {}
        # The request number of each member's last commit: one that comes later, from a connection
        # that was cut off for a while, must not move the group back.
        self._committed: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._scans = False
        door.members = self
        door.on_ended(self._ended)
        door.parts.commits.fence = self.fence

    # -- requests

    def take(
        self,
        connection: Connection,
        request: api.Sharing | api.Commit,
        now_ms: float,
        commit: Commit,
    ) -> None:
        """Take a request of a member; `commit` takes a commit once the locks are known."""
        try:
            if isinstance(request, api.Join):
                self._join(connection, request, now_ms)
            elif isinstance(request, api.Leave):
                self._leave(connection, request)
            elif isinstance(request, api.SendBack):
                self._retries.take_own(connection, request, now_ms)
            elif isinstance(request, api.AskMembers):
                self._ask_members(connection, request, now_ms)
            elif isinstance(request, api.Commit):
                self._commit(connection, request, now_ms, commit)
            else:
                self._lock(connection, request, now_ms)
        except RemotingRefusal as refusal:
            self._refuse(connection, request.rid, refusal.code, refusal.remark)
        except Exception as failure:
            what = f"a member's request ({type(request).__name__})"
            self._fail(connection, request.rid, *self._parts.failures.note(what, failure))

    def tell(self, connection: Connection, code: int, fields: dict[str, str], body: bytes) -> None:
        """Tell a member what one of RocketMQ's would be told by this request."""
        own = self._own.get(connection)
        if own is None:
            return
        notice = api.Notice(own.rid, own.group)
        if code == Code.RESET_CONSUMER_CLIENT_OFFSET:
            offsets = _offsets(body)
            notice = api.Notice(own.rid, own.group, fields["topic"], offsets)
        elif code != Code.NOTIFY_CONSUMER_IDS_CHANGED:
            return
        self._parts.replies.send(connection, notice, is_answer=False)

    def _refuse(self, connection: Connection, rid: int, code: int, reason: str) -> None:
        status = _STATUS.get(Answer(code), "UsageError")
        self._fail(connection, rid, status, reason)

    def _fail(self, connection: Connection, rid: int, status: str, reason: str) -> None:
        master = None
        if status == "SERVICE_NOT_AVAILABLE":
            master = self._parts.backend.master_map().master_api
        self._parts.replies.send(connection, api.Failed(rid, status, reason, master))

    # -- who is there

    def _join(self, connection: Connection, request: api.Join, now_ms: float) -> None:
        for other in self._groups.members.consumers(request.group):
            own = self._own.get(other.key)
            if own is None or other.client_id != request.member:
                continue
            if own.token != request.token and not other.key.ended:
                text = (
                    f"the group {request.group!r} has a member {request.member!r} already, at "
                    f"{other.address}; each needs an id of its own"
                )
                self._fail(connection, request.rid, api.MEMBER_EXISTS, text)
                return
        identity = None if connection.proof is None else connection.proof.identity
        wanted = request.topics
        if identity is not None:  # the group's other members would be told what is wanted of them
            wanted = [one for one in wanted if may_read(identity, one.topic)]
            if request.topics and not wanted and identity.groups is None:
                self._end_membership(connection)  # nothing here says that the group is its own
                self._answer_join(connection, request, frozenset())
                return
        connection.joined = True
        self._groups.hear(
            connection, _heartbeat(request, wanted), now_ms, language=_LANGUAGE, version=VERSION
        )
        self._own[connection] = _Own(
            request.rid, request.group, request.member, request.token, now_ms
        )
        self._scan_later(now_ms)
        if not self._door.is_master or not self._groups.is_young(request.group, now_ms):
            self._answer_join(connection, request, frozenset())
            return

        def then(ids: frozenset[str] | None) -> None:
            self._answer_join(connection, request, ids or frozenset())

        self._groups.ask_elsewhere(request.group, then)

    def _answer_join(self, connection: Connection, request: api.Join, more: frozenset[str]) -> None:
        counts: dict[str, int] = {}
        missing, forbidden = [], []
        identity = None if connection.proof is None else connection.proof.identity
        for one in request.topics:
            if identity is not None and not may_read(identity, one.topic):
                forbidden.append(one.topic)
                continue
            shape = self._topics.find(one.topic)
            if shape is None:
                missing.append(one.topic)
                shape = self._topics.to_be(one.topic)
            if shape is None:
                counts[one.topic] = self._topics.default_queues
            else:
                counts[one.topic] = shape.read if shape.perm & READ else 0
        retries = RETRY + request.group
        shape = self._topics.find(retries)
        if shape is not None and (identity is None or may_read(identity, retries)):
            counts[retries] = shape.read if shape.perm & READ else 0
        elif shape is not None:
            forbidden.append(retries)
        refused = None
        if self._refusal(request.group) is not None:
            # Its members give their queues back, and commit before that.
            counts = dict.fromkeys(counts, 0)
            refused = "consumeEnable of its settings is false; until it is true nobody gets queues"
        members = self._groups.members
        ids = sorted(more.union(members.client_ids(request.group)))
        joined = api.Joined(
            request.rid, members.generation(request.group), ids, counts, missing, int(SESSION_MS),
            forbidden, refused, self._left_to(request, ids, counts),
        )  # fmt: skip
        self._parts.replies.send(connection, joined)

    def _left_to(
        self, request: api.Join, ids: list[str], counts: dict[str, int]
    ) -> dict[str, list[int]]:
        """Return queues that are this member's, since they fall to those that do not read them.

        RocketMQ's consumers count every member in the shares of every topic, and so must all
        others. What falls to a member that reads other topics, or has no right, would be read by
        nobody: hastore's members that read the topic share it. Of a member that this node has not
        heard nothing is known: it counts as one that reads.
        """
        group, known = request.group, self._groups.members.subscriptions(request.group)
        members = self._groups.members.consumers(group)
        if len(members) * len(counts) > LEFT_MAX:
            return {}
        retries = RETRY + group
        topics = len(known) - (retries in known)
        idle: dict[str, set[str]] = {}  # by member what it does not read
        for one in members:
            said = one.consumers[group].subscriptions
            own = one.key in self._own
            lacks: set[str] = set()
            # With as many as all members together it reads all of these.
            if len(said) != (topics if own else len(known)) and (own or said):
                lacks = counts.keys() - {retries} - {each.topic for each in said}
            if own and retries in counts and not _may_read(one.key, retries):
                lacks.add(retries)
            idle[one.client_id] = idle.get(one.client_id, lacks) & lacks  # of all its connections
        found = {}
        order = in_order(ids)
        for topic in set[str]().union(*idle.values()):
            left = [
                queue for one, lacks in idle.items() if topic in lacks
                for queue in share_of(counts[topic], order, one)
            ]  # fmt: skip
            heirs = in_order(
                one.client_id for one in members
                if one.key in self._own and topic not in idle[one.client_id]
            )
            mine = share_of(len(left), heirs, request.member)
            if mine:
                found[topic] = sorted(left)[mine.start : mine.stop]
        return found

    def _leave(self, connection: Connection, request: api.Leave) -> None:
        own = self._own.get(connection)
        if own is not None and (own.group, own.member) == (request.group, request.member):
            self._end_membership(connection)
        self._parts.replies.send(connection, api.Left(request.rid))

    def _end_membership(self, connection: Connection) -> None:
        own = self._own.pop(connection, None)
        if own is not None:
            self._groups.members.leave(connection, own.member, None, own.group)
            self._groups.tell_changes()

    def _ask_members(self, connection: Connection, request: api.AskMembers, now_ms: float) -> None:
        """Answer who is there; the master learns the locks of its epoch first, as for a commit.

        Only with them it says that it is the master, and whoever asks may rely on its list.
        """
        if self._parts.backend.writable_reason() is not None or self._knows_locks:
            self._list_members(connection, request, now_ms)
            return

        def then(_answer: Frame) -> None:  # without the locks the members are told all the same
            self._list_members(connection, request, self._parts.clock.monotonic_ms())

        group = request.group  # stands for a member, too: no queue is asked for
        self._ask_locks(connection, Code.LOCK_BATCH_MQ, group, group, [], now_ms, then)

    def _list_members(self, connection: Connection, request: api.AskMembers, now_ms: float) -> None:
        most = api.MAX_MEMBERS_LISTED
        members = [
            api.MemberInfo(
                one.client_id, one.address, OWN if one.key in self._own else one.language
            )
            for one in islice(self._groups.members.consumers(request.group), most + 1)
        ]
        owners: dict[str, dict[int, str]] | None = None
        cut = len(members) > most
        if self._parts.backend.writable_reason() is None and self._knows_locks:
            identity = None if connection.proof is None else connection.proof.identity
            found = {
                place: holder
                for place, holder in self._locks.locks.owners(request.group, now_ms).items()
                if identity is None or may_see_readers(identity, place[0])
            }
            cut |= len(found) > api.MAX_OWNERS_LISTED
            owners = {}
            for (topic, queue), holder in islice(found.items(), api.MAX_OWNERS_LISTED):
                owners.setdefault(topic, {})[queue] = holder
        self._parts.replies.send(
            connection, api.MembersListed(request.rid, members[:most], owners, cut)
        )

    def _ended(self, connection: Connection) -> None:
        self._own.pop(connection, None)

    def _scan_later(self, now_ms: float) -> None:
        if self._own and not self._scans:
            self._scans = True
            self._door.at(now_ms + SCAN_MS, self._scan)

    def _scan(self) -> None:
        """Take those that are silent out of the list."""
        self._scans = False
        now = self._parts.clock.monotonic_ms()
        for connection, own in list(self._own.items()):
            if own.seen_ms + SESSION_MS <= now:
                del self._own[connection]
                self._groups.members.end(connection)
        self._groups.tell_changes()
        self._scan_later(now)

    # -- locks

    def _lock(self, connection: Connection, request: api.Lock | api.Unlock, now_ms: float) -> None:
        queues = [_Lockable(topic, queue) for topic, ids in request.queues.items() for queue in ids]
        if len(queues) > api.MAX_LOCK_QUEUES:
            text = f"a request for the locks of {len(queues)} queues; at most {api.MAX_LOCK_QUEUES}"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
        code = Code.LOCK_BATCH_MQ if isinstance(request, api.Lock) else Code.UNLOCK_BATCH_MQ

        def then(answer: Frame) -> None:
            if answer.code != Answer.SUCCESS:
                self._refuse(connection, request.rid, answer.code, answer.remark or "")
            elif isinstance(request, api.Unlock):
                self._parts.replies.send(connection, api.Locked(request.rid))
                self._groups.notifier.changed([request.group])
            else:
                granted: dict[str, list[int]] = {}
                for one in _granted.decode(answer.body).lockOKMQSet:
                    granted.setdefault(one.topic, []).append(one.queueId)
                self._answer_lock(connection, request, granted)

        self._ask_locks(connection, code, request.group, request.member, queues, now_ms, then)

    def _ask_locks(
        self,
        connection: Connection,
        code: Code,
        group: str,
        member: str,
        queues: list[_Lockable],
        now_ms: float,
        then: Callable[[Frame], None],
    ) -> None:
        """Let the handler of RocketMQ's locks decide."""

        def reply(_request: RemotingRequest, answer: Frame | bytes | None) -> None:
            assert isinstance(answer, Frame)
            then(answer)

        body = msgspec.json.encode(_Locks(group, member, queues))
        frame = Frame(code, 0, 0, {}, body)
        request = RemotingRequest(frame, now_ms, connection, connection.address, reply)
        self._door.handle_inside(request)

    def _answer_lock(
        self, connection: Connection, request: api.Lock, granted: dict[str, list[int]]
    ) -> None:
        def answer(failure: Exception | None) -> None:
            if failure is not None:
                what = self._parts.failures.note("a lock's place", failure)
                self._fail(connection, request.rid, *what)
                return
            places = {}
            if request.places:
                places = {topic: self._places(request.group, topic, ids)
                          for topic, ids in granted.items()}  # fmt: skip
            locked = api.Locked(request.rid, int(LOCK_MS), granted, places)
            self._parts.replies.send(connection, locked)

        if not request.places or not granted:
            answer(None)
            return
        try:
            self._positions.when_read(answer)
        except RemotingRefusal as refusal:
            self._refuse(connection, request.rid, refusal.code, refusal.remark)

    def _places(self, group: str, topic: str, queues: list[int]) -> dict[int, api.Place]:
        known = self._positions.places(group, topic)
        ranges = self._parts.backend.store.queues
        found = {}
        for queue in queues:
            first, end = ranges.queue_range(topic, queue) or (0, 0)
            found[queue] = api.Place(known.get(queue), first, end)
        return found

    # -- commits

    def _commit(
        self, connection: Connection, request: api.Commit, now_ms: float, commit: Commit
    ) -> None:
        """Take a commit once the locks of this epoch are known; another node refuses it itself."""
        backend = self._parts.backend
        if backend.writable_reason() is not None or self._knows_locks:
            commit(request)
            return

        def then(answer: Frame) -> None:
            if answer.code in (Answer.SUCCESS, Answer.SERVICE_NOT_AVAILABLE):
                commit(request)
            else:
                self._refuse(connection, request.rid, answer.code, answer.remark or "")

        group, member = request.group, request.member or ""
        self._ask_locks(connection, Code.LOCK_BATCH_MQ, group, member, [], now_ms, then)

    @property
    def _knows_locks(self) -> bool:
        epoch = self._locks.locks.epoch
        return epoch is not None and epoch == self._parts.backend.epoch()

    def fence(self, commit: api.Commit) -> tuple[str, str] | None:
        """Return why a member may not commit now, a status and a reason; None if it may.

        What others have said of these queues before, and is not written yet, does not count then.
        """
        if not self._knows_locks:
            return "BUSY", "the locks of this epoch are not known yet"
        now = self._parts.clock.monotonic_ms()
        for queue in commit.positions:
            holder = self._locks.locks.holder(commit.group, (commit.topic, queue), now)
            if holder != commit.member:
                owner = "nobody" if holder is None else repr(holder)
                return api.FENCED, (
                    f"in the group {commit.group!r} queue {queue} of topic {commit.topic!r} "
                    f"belongs to {owner} now, not to {commit.member!r}"
                )
        member = commit.group, commit.member or ""
        if commit.rid < self._committed.get(member, -1):
            return api.FENCED, f"{commit.member!r} has made a later commit already"
        self._committed[member] = commit.rid
        self._committed.move_to_end(member)
        if len(self._committed) > MEMBERS_MAX:
            self._committed.popitem(last=False)
        self._positions.supersede(commit.group, commit.topic, commit.positions)
        return None


def _may_read(connection: Connection, topic: str) -> bool:
    return connection.proof is None or may_read(connection.proof.identity, topic)


def _heartbeat(request: api.Join, wanted: list[api.Subscription]) -> bytes:
    """Return a Join as RocketMQ's heartbeat, with those of its topics that count."""
    subscriptions = [
        {
            "topic": one.topic,
            "subString": one.expression,
            "expressionType": one.kind,
            "subVersion": one.version,
        }
        for one in wanted
    ]
    group = {
        "groupName": request.group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "subscriptionDataSet": subscriptions,
    }
    return msgspec.json.encode({"clientID": request.member, "consumerDataSet": [group]})


def _offsets(body: bytes) -> dict[int, int]:
    """Return the offsets of RESET_CONSUMER_CLIENT_OFFSET, as a list has them."""
    return {one.queueId: one.offset for one in _moved.decode(body).offsetTable}
