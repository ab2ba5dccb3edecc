"""Say HELLO to another node on behalf of this one, without any effect on either."""

import json
import pathlib
import secrets

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, Mode
from hastore.errors import StoreError
from hastore.ha.hello.peer import call
from hastore.protocol.ha_link import BODY_BYTES_MAX
from hastore.protocol.hello import NONCE_BYTES, Answer, Hello, Purpose
from hastore.security.node_tls import NodeTls


def ask_peer(config: Config, address: str, timeout_ms: float) -> tuple[Hello, Answer]:
    """Return the HELLO of the node at `address`, and its answer to a survey.

    The survey has no epoch and no history, so the node does not act on it. In mode dledger it is
    the question of a new node, whether its number is known with another store: it changes nothing
    either. Raises OSError when the node does not answer, and AuthenticationError, ClassicPeerError
    or ProtocolError as `peer.call` does. A peer with another secret closes the connection, which
    raises ProtocolError.
    """
    path = config.ha.secret_file
    secret = None if path is None else pathlib.Path(path).read_bytes().strip()
    elects = config.mode is Mode.DLEDGER
    hello = Hello(
        purpose=Purpose.DLEDGER if elects else Purpose.SURVEY,
        mode=config.mode.value,
        new_store=elects,
        cluster=config.cluster,
        group=config.group,
        node=config.node,
        store_id=_store_id(config.store.root),
        role="" if config.role is None else config.role.value,
        open_epoch=0,
        promised_epoch=0,
        history=(),
        min_offset=0,
        max_offset=0,
        confirmed_offset=0,
        ack_point=config.ha.ack_point.value,
        unclean=False,
        largest_frame=BODY_BYTES_MAX,
        file_size=config.store.commitlog_file_size,
        nonce=secrets.token_bytes(NONCE_BYTES),
    )
    opened = call(address, hello, secret, SYSTEM_CLOCK, timeout_ms, NodeTls(config).ha)
    opened.close()
    return opened.hello, opened.answer


def _store_id(root: str) -> str:
    """Return the id of this node's store; a random one when the store does not exist yet."""
    path = pathlib.Path(root) / "hastore" / "node.json"
    try:
        return str(json.loads(path.read_bytes())["store_id"])
    except FileNotFoundError:
        return secrets.token_hex(16)
    except (OSError, ValueError, LookupError, TypeError) as failure:
        raise StoreError(f"{path} is not the state of a node: {failure}") from failure
