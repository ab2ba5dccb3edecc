"""What `hastore status` shows of a linked slave."""

from dataclasses import dataclass

from hastore.ha.master.ha_connection import HAConnection


@dataclass(frozen=True, slots=True)
class SlaveStatus:
    """One linked slave as `hastore status` shows it; offsets and lag in bytes."""

    node: int | None
    address: str
    state: str
    ack_offset: int | None
    lag_bytes: int | None
    in_sync: bool
    classic: bool

    @property
    def name(self) -> str:
        """How messages name it."""
        return _name(self.node, self.address)


def slave_name(connection: HAConnection) -> str:
    """Name a slave in messages; a node keeps its name over a new connection."""
    return _name(connection.node, connection.address)


def slave_status(connection: HAConnection, end: int, gap_max: int) -> SlaveStatus:
    """Describe a slave whose master's log ends at `end`; beyond `gap_max` bytes it is not in
    sync.
    """
    ack = connection.ack_offset
    lag = None if ack is None else max(0, end - ack)
    return SlaveStatus(
        connection.node,
        connection.address,
        "starting" if ack is None else "streaming",
        ack,
        lag,
        lag is not None and lag <= gap_max,
        connection.classic,
    )


def _name(node: int | None, address: str) -> str:
    return f"RocketMQ slave {address}" if node is None else f"node {node}"
