"""The HTTP server of a node that serves."""

from hastore.server.http_server import HttpServer
from hastore.service import raise_failure


def serve(address, status, metrics, **given):
    """Return a server; the page of metrics is the same for every identity."""
    options = {
        "not_ready": lambda: None, "not_master": lambda: None, "on_failure": raise_failure
    }  # fmt: skip
    return HttpServer(address, status, lambda _whose: metrics(), **{**options, **given})
