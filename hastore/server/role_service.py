"""RoleService: follows the operator's file and changes the node's role (docs/failover.md,
"Promotion").

    mode        ends when
    FOLLOWING   the file changes from SLAVE to a master's role -> PROMOTING
    RESUMING    a survey finds no epoch above this node's own -> MASTER
                a survey finds a higher epoch -> FOLLOWING
                a survey finds a node with more of this node's own epoch -> PROMOTING
    PROMOTING   the new epoch is open -> MASTER
                the promotion is refused for good, or superseded -> FOLLOWING
    MASTER      a higher epoch is seen -> FOLLOWING
                a slave has more of this node's own epoch -> PROMOTING
    any mode    the file changes to SLAVE -> FOLLOWING
                the file says master, and `hastore promote` wrote once.json -> PROMOTING

While answers are missing or replay is blocked, a node in mode PROMOTING tries again every second.
It goes on following, or serving if it is the master and shall begin a new epoch, until just before
it makes its own promise. A promotion that waits for replay ends as soon as the operator changes the
role.

Only RoleService's thread changes the mode. Another thread that sees a higher epoch ends the waiting
puts itself, and leaves the rest to RoleService's thread.
"""

import logging
import math
import threading
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

from hastore.config.model import Config, Role
from hastore.errors import HastoreError, PromotionRefused, StoreBrokenError
from hastore.ha.hello.peer import SurveyReply, ask_all
from hastore.ha.master.ha_service import HAService
from hastore.ha.node.member import Member
from hastore.ha.promoter import Flags, Promoter, surveyed_answers
from hastore.ha.rules.epochs import EpochEntry, epoch_node, last_epoch
from hastore.ha.rules.promotion import has_more, may_resume
from hastore.ha.slave.classic_client import ClassicHAClient
from hastore.ha.slave.ha_client import HAClient
from hastore.protocol.hello import Purpose
from hastore.service import Service

log = logging.getLogger(__name__)

TICK_S = 0.2
RETRY_MS = 1_000.0
LATE_MS = 5_000.0  # what is first seen after a longer pause of this thread may be as old as that
_WHILE_DOWN = "the role was changed while the node was down"
_GOES_ON = "an order that a restart has interrupted goes on"


class RoleMode(Enum):
    """The state of the node's role."""

    FOLLOWING = "following"
    RESUMING = "resuming"
    PROMOTING = "promoting"
    MASTER = "master"


class OneShot(Protocol):
    """The options of one `hastore promote` or `hastore demote`, and what an order meant."""

    def take_flags(
        self, command: str, epoch: int, keep: Callable[[Flags], None] = ...,
        *, new_role: bool = False,
    ) -> Flags | None:  # fmt: skip
        """Return the options for `command`, and never again; None if there are none.

        `keep` gets them first; if it raises OSError, they are not used. With a `new_role`, which
        they came with, late ones keep the condition of a flip.
        """

    def meant_epoch(self) -> int | None:
        """Return the greatest epoch that the last change of the role can have meant; None if the
        change is of this moment.
        """


class _Moment(NamedTuple):
    """What options of a command can have meant: the greatest epoch, None for all that the first
    survey finds, and the epoch of the last master that the node had met.
    """

    epoch: int | None
    met: int


class RoleService(Service):
    """Decide at every tick whether this node is master or follows.

    `read_config` returns the configuration once after each change of the file, else None.
    `on_change(action, outcome, reason)` is called for each change of the role, for the audit log.
    `refused_ms` returns since when a file was refused as it is, before it was followed; see
    ConfigWatch. This thread calls all of them, without a lock.
    """

    def __init__(
        self,
        member: Member,
        ha: HAService,
        one_shot: OneShot,
        read_config: Callable[[], Config | None],
        *,
        on_change: Callable[[str, str, str], None],
        refused_ms: Callable[[], float | None] = lambda: None,
    ) -> None:
        super().__init__("RoleService", on_failure=member.on_failure)
        self.mode = RoleMode.FOLLOWING
        self._reason: str | None = "starting"
        self.client: HAClient | ClassicHAClient | None = None
        # By node, as this master's last survey found it: its address, and why it did not answer.
        self.unlinked: dict[int, tuple[str, str | None]] = {}
        self.settled = threading.Event()  # the node serves, or has logged what it waits for
        self._on_change = on_change
        self._member = member
        self._ha = ha
        self._one_shot = one_shot
        self._read_config = read_config
        self._config = member.config  # from the latest valid file; `member.config`: at the start
        self._changed: Config | None = None  # read, but not followed yet
        # When the configuration was last looked at: `member.config` a moment before this, while the
        # store may take a minute to open; and the greatest epoch that this node knew then.
        self._looked_ms = member.clock.monotonic_ms()
        self._epoch_then = 0
        self._refused_ms = refused_ms
        self._refused: tuple[float, int] | None = None  # since when, and what it knew then
        self._late_epoch: int | None = None  # of a change that was seen, or followed, late
        # When options were looked for last, and what those of that moment could have meant.
        self._took_ms, self._took = self._looked_ms, _Moment(0, 0)
        self._promoter = Promoter(member, self._open_ha, self._set_reason, self._called_off)
        self._flags = Flags()
        self._self_promotion = False
        self._options_due = False  # those of a role that came while the node was down
        self._unsaved_role: Role | None = None  # followed, but not in node.json yet
        self._problem: str | None = None  # why the last tick failed
        self._wakeup = threading.Event()
        self._superseded: tuple[int, str] | None = None
        self._lost_end = False
        self._next_try_ms = 0.0
        self._no_new_epoch: str | None = None  # see `new_epoch_problem`

    def wake(self) -> None:
        """Let the next tick run now. Called after SIGHUP, and by `stop`."""
        self._wakeup.set()

    def begin_with(self, config: Config) -> None:
        """Begin with this configuration instead of `member.config`. Called before `start`."""
        self._config, self._looked_ms = config, self._member.clock.monotonic_ms()

    @property
    def reason(self) -> str | None:
        """Why this node is no master, or why what it is cannot be saved; None: all is as told."""
        return self._problem or self._reason

    @property
    def waits_for(self) -> str:
        """What keeps this node, whose file says master, from being one while it does not follow."""
        superseded, reason = self._superseded, self.reason
        if self.mode is RoleMode.MASTER and superseded is not None:  # until the next tick
            return _superseded_text(superseded[0])
        return f"waiting to be master: {reason or 'its role changes in this moment'}"

    @property
    def latest_config(self) -> Config:
        """The configuration in the latest valid file; some of its keys may not be in force."""
        return self._config

    @property
    def configured_role(self) -> Role:
        """The role in the latest valid file."""
        return self._config.assigned_role

    @property
    def role(self) -> str:
        """The role in the file while the node is master or is becoming master; else SLAVE."""
        follows = self.mode is RoleMode.FOLLOWING
        return Role.SLAVE.value if follows else self._config.assigned_role.value

    def note_superseded(self, epoch: int, source: str) -> None:
        """End the waiting puts, because `source` has the higher `epoch`; any thread calls this.

        They do not wait for the next tick, because none of them may be answered with PUT_OK now.
        """
        self._superseded = (epoch, source)
        self._ha.close_epoch(f"epoch {epoch} of {source} supersedes it")
        self._wakeup.set()

    def note_lost_end(self) -> None:
        """End the waiting puts, because a slave has more of this master's epoch than itself; any
        thread calls this. The next tick begins a new epoch with what that slave has.
        """
        self._lost_end = True
        self._ha.close_epoch("a slave has more of the epoch than this node")
        self._wakeup.set()

    def note_promise(self) -> None:
        """End the link to the master of a lower epoch; the thread that promised calls this."""
        client = self.client
        if client is not None:
            client.drop_link()

    def _set_reason(self, text: str) -> None:
        self._reason, self._problem = text, None  # a promotion goes on: it can save what it needs

    def run(self) -> None:
        """Resume the role in which the node stopped, then follow the file and the group."""
        self._note_epoch()
        self._took = _Moment(self._epoch_then, self._met())
        self._begin()
        while not self.stopping.is_set():
            try:
                self._tick()
            except (OSError, StoreBrokenError) as error:
                # A full disk refuses node.json, say; or a dead one, which has closed the store, the
                # limits of an epoch that is over. The node goes on without puts, and says so.
                self._tick_failed(f"the node's state cannot be saved: {error}")
            self._wakeup.wait(TICK_S)
            self._wakeup.clear()
        self._stop_client()

    def _tick_failed(self, problem: str) -> None:
        """Show and log why a tick failed; the next one does again what this one has not done.

        A master that was superseded meanwhile takes no puts any more, and follows in the next tick.
        """
        if problem != self._problem:
            log.error("%s; trying again", problem)
        self._problem = problem

    def _begin(self) -> None:
        data, role = self._member.state.data, self._config.assigned_role
        if not role.is_master:
            if data.role_followed.is_master or data.needed_node is not None:
                self._unsaved_role = role
            if data.role_followed.is_master:
                self._on_change("demote", "done", _WHILE_DOWN)
            self._follow(None)
            return
        if not data.role_followed.is_master:
            self._on_change("promote", "asked", _WHILE_DOWN if data.history else "the first start")
            # The role may be old. It was not meant for a master that this node does not know.
            flags, self._options_due = Flags(needed_node=data.needed_node), True
            self._promote(flags, known_epoch=max(data.promised_epoch, last_epoch(data.history)))
            return
        node = self._member.config.node
        if may_resume(data.history, data.promised_epoch, node, data.epoch_over) is not None:
            self.mode = RoleMode.RESUMING
            return
        last, promised = last_epoch(data.history), data.promised_epoch
        is_own = epoch_node(promised) == node
        if data.needed_node is not None or (data.promoting and is_own and promised > last):
            # Its role was a master's before that order too, so it does not show it.
            self._on_change("promote", "asked", _GOES_ON)
            self._promote(Flags(needed_node=data.needed_node), known_epoch=max(promised, last))
        elif data.epoch_over and epoch_node(last) == node and is_own:
            self._promote_itself()
        elif is_own and promised > last:
            self._note_unfinished(promised)
        else:
            self._yield_to(promised)

    def _tick(self) -> None:
        """Follow what has changed, go on with what waits, and save the role that is followed.

        Raises OSError if something cannot be saved, or the options of a command not be taken. Then
        nothing is forgotten: the next tick does the rest.
        """
        self._look_for_change()
        if self._superseded is not None:
            self._lose_role()
        if self._lost_end:
            self._lost_end = False
            if self.mode is RoleMode.MASTER and not self._member.open_epoch:
                self._promote_itself()
        if self._changed is not None:
            changed = self._changed
            self._flip(changed)
            if self._changed is changed:
                self._changed = None  # only now: nobody tells of it a second time
        self._forget_removed()
        self._take_command()
        now = self._member.clock.monotonic_ms()
        tries = self.mode is not RoleMode.FOLLOWING and now >= self._next_try_ms
        if tries:
            self._next_try_ms = now + RETRY_MS
            if self.mode is RoleMode.RESUMING:
                self._try_resume()
            elif self.mode is RoleMode.PROMOTING:
                self._try_promotion()
            else:
                self._watch_group()
        self._save_role()
        if tries or self.mode is RoleMode.FOLLOWING:  # what had failed was done
            self._problem = None

    def _take_command(self) -> None:
        """Take the options of `hastore promote` or `hastore demote`, if there are any.

        Those of a promotion whose role is new came with the change of it; see `_flip`.
        """
        now, moment = self._member.clock.monotonic_ms(), _Moment(None, self._met())
        if now - self._took_ms > LATE_MS:  # this process was stopped, or a promotion took so long
            promised = self._member.state.data.promised_epoch  # it knew all below its own one
            own = promised if epoch_node(promised) == self._member.config.node else 0
            moment = self._took._replace(epoch=max(self._took.epoch or 0, own))
        self._took_ms = -math.inf  # if the disk fails now, they are taken much later
        if self._config.assigned_role.is_master:
            flags = self._take_promotion(new_role=self._options_due)
            if flags is not None:
                self._on_change("promote", "asked", "hastore promote")
                meant = (flags.meant_epoch, self._one_shot.meant_epoch(), moment.epoch)
                self._promote(flags, next((one for one in meant if one is not None), None))
        else:
            flags = self._one_shot.take_flags("demote", self._member.state.last_epoch)
            if flags is not None and self.client is not None:
                self.client.accept_loss = False
                if flags.accept_loss:
                    self.client.accept(moment.met)
                if flags.accept_loss or not self.client.linked:
                    self.client.drop_link()
        self._options_due = False
        self._took_ms, self._took = now, _Moment(self._epoch_then, self._met())

    def _take_promotion(self, *, new_role: bool) -> Flags | None:
        epoch, keep = self._member.state.last_epoch, self._keep_condition
        return self._one_shot.take_flags("promote", epoch, keep, new_role=new_role)

    def _keep_condition(self, flags: Flags) -> None:
        """Keep whose answer the order needs: a restart goes on with it, without its options."""
        if self._member.state.data.needed_node != flags.needed_node:
            self._member.state.save(needed_node=flags.needed_node)

    def _look_for_change(self) -> None:
        """Read a changed configuration; `_tick` follows it."""
        if self._changed is not None and self._late_epoch is None:
            self._late_epoch = self._epoch_then  # it could not be followed when it was read
        changed = self._read_config()
        late = self._member.clock.monotonic_ms() - self._looked_ms > LATE_MS
        refused_ms = self._refused_ms()
        if refused_ms is None:
            self._refused = None
        elif self._refused is None or self._refused[0] != refused_ms:
            self._refused = refused_ms, self._epoch_then
        if changed is not None:
            self._changed = changed
            self._late_epoch = self._epoch_then if late else None
            if self._refused is not None:
                self._late_epoch = self._refused[1]
        self._note_look()

    def _note_look(self) -> None:
        """Note that the configuration was looked at now, and what this node knows."""
        self._looked_ms = self._member.clock.monotonic_ms()
        self._note_epoch()

    def _note_epoch(self) -> None:
        data = self._member.state.data
        self._epoch_then = max(data.promised_epoch, last_epoch(data.history))

    def _met(self) -> int:
        """Return the epoch of the last master that this node has met; before it has met one since
        its start, the greatest that it has promised.
        """
        met = None if self.client is None else self.client.met_epoch
        return self._member.state.data.promised_epoch if met is None else met

    def _meant_epoch(self) -> int | None:
        """Return the greatest epoch that the last order can have meant; None if it is of this
        moment: this process may have been stopped by a signal, or had no ZooKeeper, or the file
        have waited until another one that it names was mended.
        """
        meant = self._one_shot.meant_epoch()
        return self._late_epoch if meant is None else meant

    def _called_off(self) -> str | None:
        """Return why a promotion, or the return of a master, that waits must end; else None."""
        if self.stopping.is_set():
            return "the node stops"
        self._look_for_change()
        if self._changed is not None and not self._changed.assigned_role.is_master:
            return "the operator makes this node a slave"
        return None

    def _flip(self, config: Config) -> None:
        """Follow a changed configuration.

        Raises OSError if the options of a promotion cannot be taken durably. Nothing has changed
        then, so that the same order, with its options, is carried out in a later tick.
        """
        before, role = self._config.assigned_role, config.assigned_role
        flags = None
        if role.is_master and not before.is_master:
            flags = self._take_promotion(new_role=True)
            if flags is None:
                # They may be gone with the order: who calls it off changes the role before that.
                newer = self._read_config()
                if newer is not None:
                    self._changed, self._late_epoch = newer, None
                    return
                self._keep_condition(Flags())
        self._config = config
        self._member.learn_nodes(config.nodes)
        if role is before:
            return
        log.warning("the operator changes the role from %s to %s", before.value, role.value)
        turn = f"{before.value} to {role.value}"
        if role.is_master:
            self._on_change("role" if before.is_master else "promote", "asked", turn)
        else:
            self._on_change("demote", "asked", turn)
        if role.is_master and before.is_master:
            if self._member.open_epoch:  # also while a new epoch waits for nodes that do not answer
                self._ha.set_sync(role is Role.SYNC_MASTER)
                self._member.role = role.value
                if role is Role.ASYNC_MASTER:
                    log.warning("ASYNC_MASTER: puts that do not set acks wait for no slave")
            if self.mode is not RoleMode.PROMOTING:  # else a restart would take it for followed
                self._unsaved_role = role
        elif role.is_master:
            late = None if flags is None else flags.meant_epoch
            self._promote(flags or Flags(), self._meant_epoch() if late is None else late)
        else:
            self._demote()

    def _forget_removed(self) -> None:
        self._member.forget_removed()
        known = set(self._member.nodes)
        if not self.unlinked.keys() <= known:
            self.unlinked = {n: one for n, one in self.unlinked.items() if n in known}

    def _demote(self) -> None:
        if self._member.step_down():
            self._ha.close_epoch("the operator made this node a slave")
        self._unsaved_role = Role.SLAVE  # a disk that fails keeps no node from being demoted
        self._on_change("demote", "done", "")
        self._follow(None)

    def _follow(self, reason: str | None) -> None:
        """Become a follower. If the file asks for a master, `reason` says why the node follows."""
        self.mode, self._reason, self._no_new_epoch = RoleMode.FOLLOWING, reason, None
        self._member.role = Role.SLAVE.value
        self._self_promotion = False
        self._start_client()
        self.settled.set()

    def _note_unfinished(self, epoch: int) -> None:
        """Follow although the file asks for a master: the order before was refused for good, or is
        that of a node of the version before, which has not noted it.
        """
        text = (
            f"the promotion of this node to epoch {epoch} has not come to its end before a restart,"
            " and it follows now. To make it master run `hastore promote`, to make it a slave "
            "`hastore demote`"
        )
        log.warning("%s", text)
        self._on_change("promote", "refused", text)
        self._follow(text)

    def _yield_to(self, epoch: int) -> None:
        """Follow although the file asks for a master."""
        configured = self._config.assigned_role.value
        log.warning("the assigned role is %s, but %s", configured, _superseded_text(epoch))
        self._follow_superseded(epoch)

    def _follow_superseded(self, epoch: int) -> None:
        self._on_change("demote", "superseded", f"by node {epoch_node(epoch)}, epoch {epoch}")
        self._follow(_superseded_text(epoch))

    def _start_client(self) -> None:
        if self.client is not None:
            return
        classic = self._member.config.ha.classic_master
        if classic is not None and not self._config.assigned_role.is_master:
            self.client = ClassicHAClient(self._member, classic)
        elif self._member.peers:
            self.client = HAClient(self._member)
        else:
            return
        self.client.start()

    def _stop_client(self) -> None:
        client, self.client = self.client, None
        if client is not None and not client.stop():
            log.error("HAClient did not stop in time")

    def _lose_role(self) -> None:
        superseded, self._superseded = self._superseded, None
        assert superseded is not None
        if self.mode is RoleMode.MASTER and not self._member.open_epoch:
            self._follow_superseded(superseded[0])

    def _promote(self, flags: Flags, known_epoch: int | None = None) -> None:
        """Begin a promotion; `_tick` tries it now, then every second while answers are missing.

        `known_epoch` is the greatest epoch that the order to become master can have meant, None if
        the order is of this moment. It takes the place of a promotion that this node has begun
        itself, which would wait for every node.
        """
        self._self_promotion = False
        self.mode, self._reason, self._flags = RoleMode.PROMOTING, "a promotion begins", flags
        self._next_try_ms, self._no_new_epoch = 0.0, None
        self._promoter.begin(known_epoch)
        if not self._member.open_epoch:
            self._start_client()

    def _promote_itself(self) -> None:
        """Begin a promotion without an order: this node's epoch is over, and none is higher."""
        self._promote(Flags())
        self._self_promotion = True

    def _try_promotion(self) -> None:
        try:
            if self._self_promotion and not self._may_promote_itself():
                return
            if self._member.open_epoch:
                self._watch_group()
            entry = self._promoter.attempt(
                self._config, self._flags, before_promise=self._leave_role
            )
        except PromotionRefused as error:
            self._wait_or_give_up(str(error), final=error.final)
        except (HastoreError, OSError) as error:
            self._wait_or_give_up(f"the promotion failed: {error}", final=True)
        else:
            self._become_master(entry)

    def _leave_role(self) -> None:
        """Stop following, or end this master's epoch: a promotion asks for promises now.

        Raises OSError if it cannot be saved that an operator's order goes on after a restart.
        """
        data = self._member.state.data
        if data.role_followed.is_master and not (data.promoting or self._self_promotion):
            self._member.state.save(promoting=True)
        if self._member.open_epoch and self._member.step_down():
            self._ha.close_epoch("a new promotion of this node")
        self._stop_client()

    @property
    def new_epoch_problem(self) -> str | None:
        """Why this master has not begun the new epoch that it was told to begin; else None."""
        epoch, why = self._member.open_epoch, self._no_new_epoch
        if not epoch or why is None:
            return None
        return f"no new epoch has begun: {why}; the node goes on as master of epoch {epoch}"

    def _wait_or_give_up(self, reason: str, *, final: bool) -> None:
        if reason != self._reason:
            log.warning("not master yet: %s", reason)
        self._reason = reason
        self._no_new_epoch = reason if self._member.open_epoch else None
        self._promoter.grow_old()
        if final:
            self._on_change("promote", "refused", reason)
            self._unsaved_role = self._config.assigned_role
            if self._member.open_epoch:  # it was to begin a new epoch; the present one stays
                self.mode = RoleMode.MASTER
            else:
                self._follow(reason)
        self.settled.set()

    def _may_promote_itself(self) -> bool:
        """Whether, after the end of the log may have been lost, all nodes answer and none knows a
        rival's higher epoch.

        If a node knows such an epoch, this node follows. If nodes are silent, `reason` names them.
        """
        own = self._member.state.last_epoch
        replies = ask_all(self._member, Purpose.SURVEY)
        seen = max(_greatest_epoch(replies), self._member.state.data.promised_epoch)
        if seen > own and epoch_node(seen) != self._member.config.node:  # an epoch of another node
            self._yield_to(seen)
            return False
        silent = [str(reply.node) for reply in replies if reply.hello is None]
        if silent:
            self._wait_or_give_up(
                f"this node's epoch {own} is over, because this node may have lost the end of its "
                "log (a power loss, or a failure of its disk); every node must answer, "
                f"missing: node {', '.join(silent)} (or run `hastore promote`)",
                final=False,
            )
            return False
        return True

    def _try_resume(self) -> None:
        """Reopen this node's epoch after a restart, unless another node has a higher one."""
        member = self._member
        epoch = member.state.last_epoch
        replies = ask_all(member, Purpose.SURVEY)
        seen = _greatest_epoch(replies)
        if max(seen, member.state.data.promised_epoch) > epoch:
            member.state.promise(seen)
            member.state.save(superseded_by=seen)
            self._yield_to(member.state.data.promised_epoch)
            return
        end, unmet = member.store.max_offset, member.state.data.unmet
        more = has_more(epoch, end, surveyed_answers(replies), unmet)
        if more is not None:
            member.state.note_lost_end(end, more.node, more.log_end)
            self._promote_itself()
            return
        try:
            self._promoter.wait_replayed(epoch)
        except PromotionRefused as error:
            self._wait_or_give_up(str(error), final=False)
            return
        entry = member.state.history[-1]
        with member.gate.lock:
            if member.state.data.promised_epoch != epoch:
                return  # a promise was made meanwhile; the next attempt sees it
            others = [node for node, _ in member.peers]
            member.state.note_resumed(others, end, member.clock.wall_ms())
            self._open_ha(entry)
            member.open_epoch = epoch
            member.gate.open(epoch)
        self._become_master(entry)

    def _open_ha(self, entry: EpochEntry) -> None:
        self._ha.open_epoch(entry, sync=self._config.assigned_role is Role.SYNC_MASTER)

    def _become_master(self, entry: EpochEntry) -> None:
        self._stop_client()
        action = "resume" if self.mode is RoleMode.RESUMING else "promote"
        # The epoch is open: this node is the master even if the role cannot be saved now.
        self.mode, self._reason, self._self_promotion = RoleMode.MASTER, None, False
        self._no_new_epoch = None
        self.unlinked = {}
        role = self._config.assigned_role
        self._member.role = role.value
        self._unsaved_role = role
        log.info("%s in epoch %d from offset %d on", role.value, entry.epoch, entry.start)
        self._on_change(
            action, "done", f"{role.value} in epoch {entry.epoch} from {entry.start} on"
        )
        if role is Role.ASYNC_MASTER and self._member.peers:
            log.warning("ASYNC_MASTER: puts that do not set acks wait for no slave")
        self.settled.set()

    def _save_role(self) -> None:
        """Save the role that was followed last, durably. Raises OSError; the next tick tries again.

        It is saved after it was followed: what others rely on, promises and epochs, is durable by
        then, and node.json's role only tells the next start which change is still to be followed.
        A start that finds an older one follows the change once more: a demotion that is done
        changes nothing, and an order to become master supersedes no epoch that came after this
        node stopped. If the role were saved first, a crash in between would lose the change.
        """
        if self._unsaved_role is not None:
            self._member.state.save(
                role_followed=self._unsaved_role, needed_node=None, promoting=False
            )
            self._unsaved_role = None

    def _watch_group(self) -> None:
        """Survey the nodes that do not follow this master: they may know of a higher epoch."""
        linked = frozenset(self._ha.linked_nodes())
        replies = ask_all(self._member, Purpose.SURVEY, skip=linked)
        self.unlinked = {reply.node: (reply.address, reply.problem) for reply in replies}
        for reply in replies:
            if reply.hello is not None:
                self._member.observe_epoch(_greatest_epoch([reply]), f"node {reply.node}")


def _greatest_epoch(replies: list[SurveyReply]) -> int:
    """Return the greatest epoch that any node has promised, opened or has in its history."""
    seen = 0
    for reply in replies:
        hello = reply.hello
        if hello is not None:
            seen = max(seen, hello.promised_epoch, hello.open_epoch, last_epoch(hello.history))
    return seen


def _superseded_text(epoch: int) -> str:
    """Say which node superseded this master, and what the operator can do."""
    return (
        f"superseded by node {epoch_node(epoch)} (epoch {epoch}); this node follows. To make it "
        "master again run `hastore promote`, to make it a slave `hastore demote`"
    )
