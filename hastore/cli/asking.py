"""Ask one node for its status."""

from typing import Any

from hastore.client.admin import Admin
from hastore.errors import ClientError


def ask_status(address: str, timeout_s: float) -> dict[str, Any] | None:
    """Return the object of `hastore status --json` of the node at `address`; None: no answer."""
    try:
        with Admin([address], timeout_s=timeout_s) as admin:
            infos = admin.status()  # of the whole group
    except ClientError:
        return None
    return next((info.status for info in infos if info.address == address), None)
