"""What a job reads: a store's directory or running nodes, and which of the topics."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hastore.client.security import named_file
from hastore.errors import UsageError
from hastore.spark.options.names import BOOTSTRAP, NAMES, Names
from hastore.spark.options.source_options import SECURITY, SourceOptions, parse_options
from hastore.spark.read.planning import is_internal as is_internal
from hastore.spark.read.planning import open_backend, select, without_internal


@dataclass(frozen=True)
class Where:
    """Where a job reads: exactly one of a store's directory and the addresses of running nodes.

    It reads the given topics, or those whose whole name matches the pattern, or, without both, all
    topics but hastore's own; with `exclude_internal` not those in which messages wait or are
    repeated (see `is_internal`).
    """

    path: str | None = None
    servers: str | None = None
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    exclude_internal: bool = False

    def options(
        self, more: Mapping[str, str] | None = None, names: Names = Names.COMMAND
    ) -> dict[str, str]:
        """Return the options of the source "hastore", for spark.read. Raises UsageError.

        `names` are what the source's errors call them.
        """
        if (self.path is None) == (self.servers is None):
            raise UsageError("give either --path (a store's directory) or --servers (nodes)")
        if self.topics and self.pattern is not None:
            raise UsageError("give either --topic or --pattern")
        if self.topics and self.exclude_internal:
            raise UsageError("--exclude-internal is for --pattern and for all topics; leave it out")
        given = {NAMES: names.value, **(more or {})}
        if self.path is not None:
            # The options of Spark's source take a URI.
            as_it_is = self.path.lower().startswith("file:/") or not self.path.strip()
            given["path"] = self.path if as_it_is else os.path.abspath(self.path)
        else:
            given |= servers_option(self.servers or "")
        if self.topics:
            given["subscribe"] = ",".join(self.topics)
        else:
            pattern = ".*" if self.pattern is None else self.pattern
            given["subscribePattern"] = (
                without_internal(pattern) if self.exclude_internal and pattern.strip() else pattern
            )
        return given

    def parsed(
        self, more: Mapping[str, str] | None = None, names: Names = Names.COMMAND
    ) -> SourceOptions:
        """Return the checked options. Raises UsageError."""
        return parse_options(self.options(more, names), "UTC")

    def check(self, more: Mapping[str, str] | None = None) -> None:
        """Look whether the place can be read and has the topics; needs no Spark.

        Raises UsageError, StoreError, UnreachableError.
        """
        parsed = self.parsed({**(more or {}), "failOnDataLoss": "false"})
        assert parsed.strategy is not None
        with open_backend(parsed) as backend:
            select(parsed.strategy, backend)


def servers_option(servers: str) -> dict[str, str]:
    """Return the options for running nodes: their addresses, and the client's security file.

    The file is named because Spark's workers need not have this process's HASTORE_SECURITY.
    """
    security = named_file()
    return {BOOTSTRAP: servers} | ({} if security is None else {SECURITY: security})


def as_option(value: bool) -> str:
    """Return the value of an option of the source "hastore"."""
    return str(value).lower()
