"""What `hastore status` shows of a linked slave."""

from dataclasses import dataclass

from hastore.ha.ha_connection import HAConnection


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
