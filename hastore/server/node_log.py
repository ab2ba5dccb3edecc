"""NodeLog: where a node's log lines go, and how they look: `log.format` and `log.file`.

    text    2026-11-22T18:30:00.123Z WARNING the disk is full: ...
    json    {"time": "2026-11-22T18:30:00.123Z", "level": "WARNING", "logger": "hastore.store.log",
             "thread": "RetentionService", "cluster": "demo", "group": "g0", "node": 1,
             "message": "...", "exception": "Traceback ..."}

Times are UTC. Until the configuration is read, and without `log.file`, lines go to stderr.
"""

import contextlib
import json
import logging
import logging.handlers
import sys
from typing import TextIO

from hastore.bounded_log import LineFormatter, one_line, utc_time
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

    No failure of the file leaves this class, because any thread of the node may log: stderr says
    now and then what was lost, and the next line opens the file again.
    """

    def __init__(self, path: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Open the file. Raises OSError if that fails; later nothing is raised."""
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._clock = clock
        self._told_ms = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or say on stderr that it was lost."""
        try:
            stream = self._open_if_needed()
            stream.write(self.format(record) + self.terminator)
            stream.flush()
        except Exception:  # whatever it is, the caller has work to do
            self._drop_stream()
            self.handleError(record)

    def reopen(self) -> None:
        """Open the file if it was moved away or could not be opened so far."""
        self.acquire()
        try:
            self._open_if_needed()
        except Exception as failure:  # as for a line
            self._drop_stream()
            self._tell(str(failure))
        finally:
            self.release()

    def close(self) -> None:
        """Close the file; what it could not take is lost."""
        with contextlib.suppress(OSError, ValueError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Say that a line was lost, and why."""
        failure = sys.exc_info()[1]
        try:
            lost = record.getMessage()
        except Exception:  # the arguments do not fit: that is why it was lost
            lost = str(record.msg)
        self._tell(f"{failure}; lost: {lost}")

    def _open_if_needed(self) -> TextIO:
        self.reopenIfNeeded()
        if self.stream is None:
            self.stream = self._open()
            self._statstream()
        return self.stream

    def _drop_stream(self) -> None:
        """Forget the stream, with what it holds: the next line opens the file again."""
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.close()

    def _tell(self, what: str) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._told_ms < TOLD_MS or sys.stderr is None:
            return
        self._told_ms = now_ms
        with contextlib.suppress(OSError, ValueError):  # then there is nobody left to tell
            print(one_line(f"{self.baseFilename} cannot be written: {what}"), file=sys.stderr)


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
        """Open the file anew if it was moved away; after SIGHUP. Raises nothing."""
        if isinstance(self._handler, LogFile):
            self._handler.reopen()
