"""A node of a DLedger group as its HELLOs show it, and whom it takes for a member.

Whether a disk was lost. A vote or an acknowledgement that a node has forgotten may cost
acknowledged entries, so a node must know whether its store is new or replaces one that was lost:

- Each node keeps, durably, which store belongs to which number (`known_stores` in node.json).
- A node whose store has never been started (`joined` is False) first asks the others. If one of
  them knows its number with another store, the disk was lost: the node says so in every HELLO, and
  its core starts with `remembers=False`, that is without a vote that counts.
- It asks until so many have answered that every majority with its number has one of them
  (`answers_needed`): in a group of three both others, in a group of five three. So the first start
  of a group of three needs all three nodes.
- A node that comes with another store and does not say that it lost its disk is refused.
"""

import secrets
from collections.abc import Callable, Mapping

from hastore.config.model import Config
from hastore.ha.node.node_state import NodeState
from hastore.ha.rules.following import check_identity
from hastore.protocol.dledger_link import DATA_BYTES_MAX
from hastore.protocol.hello import NONCE_BYTES, Hello, Purpose
from hastore.security.tls_contexts import TlsContexts

MODE = "dledger"


class PeerMember:
    """This node's identity and addresses; any thread may call the methods.

    `log_range()` returns the log's first offset and end, which a HELLO shows.
    """

    def __init__(
        self,
        config: Config,
        state: NodeState,
        secret: bytes | None,
        log_range: Callable[[], tuple[int, int]],
        tls: TlsContexts | None = None,
    ) -> None:
        self.config = config
        self.state = state
        self.secret = secret
        # Told of each caller that is not a member: its address, and why.
        self.on_refused: Callable[[str, str], None] = lambda _address, _why: None
        self.tls = tls
        self._log_range = log_range
        self._addresses = {node: one.ha for node, one in config.nodes.items()}

    @property
    def node(self) -> int:
        """This node's number."""
        return self.config.node

    @property
    def addresses(self) -> Mapping[int, str]:
        """The HA addresses of the configured nodes, this one's too."""
        return self._addresses

    def set_addresses(self, addresses: Mapping[int, str]) -> None:
        """Take the addresses of a changed configuration."""
        self._addresses = dict(addresses)

    @property
    def answers_needed(self) -> int:
        """How many other nodes must say whether they know this node's number with another store."""
        nodes = len(self._addresses)
        quorum = nodes // 2 + 1
        return min(nodes - 1, nodes - quorum + 1)

    def hello(self, purpose: Purpose = Purpose.DLEDGER, *, new_store: bool = False) -> Hello:
        """Describe this node. The fields of the classic mode's epochs say nothing here."""
        config, data = self.config, self.state.data
        low, high = self._log_range()
        return Hello(
            purpose=purpose,
            cluster=config.cluster,
            group=config.group,
            node=config.node,
            store_id=data.store_id,
            role="DLEDGER",
            open_epoch=0,
            promised_epoch=0,
            history=(),
            min_offset=min(low, high),
            max_offset=high,
            confirmed_offset=0,
            ack_point="flushed",
            unclean=False,
            largest_frame=DATA_BYTES_MAX,
            file_size=config.store.commitlog_file_size,
            nonce=secrets.token_bytes(NONCE_BYTES),
            mode=MODE,
            new_store=new_store,
            lost_disk=data.lost_disk,
        )

    def problem(self, hello: Hello) -> str | None:
        """Return why the other end is no member of this group; None when it is."""
        config = self.config
        known = dict(self.state.data.known_stores)
        if hello.lost_disk or hello.new_store:  # the other node knows it, or asks
            known.pop(hello.node, None)
        problem = check_identity(
            hello, config.cluster, config.group, config.node, tuple(self._addresses), known, MODE
        )
        if problem is None and hello.file_size != config.store.commitlog_file_size:
            problem = (
                f"node {hello.node} has log files of {hello.file_size} bytes, node {config.node} "
                f"of {config.store.commitlog_file_size}; set store.commitlog_file_size to the same "
                "on every node (with an empty store)"
            )
        return problem

    def knows_other_store(self, hello: Hello) -> bool:
        """Whether the other node's number is known with another store."""
        known = self.state.data.known_stores.get(hello.node)
        return known is not None and known != hello.store_id

    def learn(self, hello: Hello) -> None:
        """Record, durably, which store the other node has."""
        self.state.learn_store(hello.node, hello.store_id)
