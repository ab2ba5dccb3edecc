"""NodeLog: where a node's log lines go, and how they look: `log.format` and `log.file`.

    text    2026-11-22T18:30:00.123Z WARNING the disk is full: ...
    json    {"time": "2026-11-22T18:30:00.123Z", "level": "WARNING", "logger": "hastore.store.log",
             "thread": "RetentionService", "cluster": "demo", "group": "g0", "node": 1,
             "message": "...", "exception": "Traceback ..."}

Times are UTC. Until the configuration is read, and without `log.file`, lines go to stderr.
"""

import json
import logging
import logging.handlers
import sys

from hastore.bounded_log import LineFormatter, utc_time
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config, LogFormat
from hastore.errors import ConfigError

TEXT = "%(asctime)s %(levelname)s %(message)s"
TOLD_MS = 60_000.0  # between two lines on stderr that say that the file cannot be written


class JsonFormatter(logging.Formatter):
    """Write each record as one JSON object in a line."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._own = {"cluster": config.cluster, "group": config.group, "node": config.node}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what is not ASCII is escaped, so a message cannot end it."""
        found: dict[str, object] = {
            "time": utc_time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "thread": record.threadName,
            **self._own,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


class LogFile(logging.handlers.WatchedFileHandler):
    """A log file. One that was moved away, as logrotate does, is opened anew before the next line.

    A file that cannot be written is told on stderr, now and then; the node goes on.
    """

    def __init__(self, path: str, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(path, encoding="utf-8")
        self._clock = clock
        self._told_ms = float("-inf")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Say that a line was lost, and why."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._told_ms < TOLD_MS or sys.stderr is None:
            return
        self._told_ms = now_ms
        print(
            f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}; lost: {record.msg}",
            file=sys.stderr,
        )


class NodeLog:
    """The log of this process; made once, before anything logs."""

    def __init__(self, level: str) -> None:
        """Log to stderr, as text, from now on."""
        self._handler: logging.Handler = logging.StreamHandler(sys.stderr)
        self._handler.setFormatter(LineFormatter(TEXT))
        logging.basicConfig(level=level, handlers=[self._handler])

    def follow(self, config: Config) -> None:
        """Log as the configuration says. Raises ConfigError if the file cannot be opened."""
        settings, root = config.log, logging.getLogger()
        if settings.file is not None:
            try:
                handler = LogFile(settings.file)
            except OSError as failure:
                raise ConfigError(
                    f"log.file: {settings.file} cannot be opened: {failure.strerror}; name a file "
                    "that this user may write, in a folder that exists"
                ) from failure
            root.removeHandler(self._handler)
            root.addHandler(handler)
            self._handler = handler
        if settings.format is LogFormat.JSON:
            self._handler.setFormatter(JsonFormatter(config))
        else:
            self._handler.setFormatter(LineFormatter(TEXT))

    def reopen(self) -> None:
        """Open the file anew if it was moved away; after SIGHUP."""
        if isinstance(self._handler, LogFile):
            self._handler.acquire()
            try:
                self._handler.reopenIfNeeded()
            except OSError as failure:
                logging.getLogger(__name__).error("the log file cannot be opened: %s", failure)
            finally:
                self._handler.release()
