"""The HTTP server of a node that serves."""

from functools import partial

from hastore.server.http_server import HttpServer
from hastore.service import raise_failure

serve = partial(
    HttpServer, not_ready=lambda: None, not_master=lambda: None, on_failure=raise_failure
)
