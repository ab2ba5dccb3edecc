"""A headless Chromium, driven over two pipes: one page, as a phone or a desktop shows it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any, Self

import pytest

from tests.process.harness import wait_until

LIMIT_S = 120.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
# It reads requests from descriptor 3 and writes to 4, which may be taken here.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
for number, one in zip((3, 4), ends):
    os.dup2(one, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A browser process with one page; a context manager that ends it.

    `problems` are what its console has said: exceptions, and what the page's policy forbade.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        program = next(filter(None, map(shutil.which, _NAMES)), None)
        if program is None:
            if os.environ.get("CI") == "true":
                pytest.fail("Chromium is missing, and CI must run these tests", pytrace=False)
            pytest.skip("no Chromium: apt-get install chromium")
        self.problems: list[str] = []
        self._ids = itertools.count(1)
        self._unread = b""
        said, self._to = os.pipe()
        self._from, answers = os.pipe()
        flags = (
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-proxy-server", f"--user-data-dir={folder / 'profile'}",
            "--remote-debugging-pipe", "about:blank",
        )  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(said), str(answers), program, *flags],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(said, answers),
            start_new_session=True,
        )  # fmt: skip
        os.close(said)
        os.close(answers)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        os.close(self._to)
        os.close(self._from)
        os.killpg(self._process.pid, signal.SIGKILL)  # its helpers, too
        self._process.wait()

    def look_as(self, width: int, height: int, *, dark: bool, scale: float = 1.0) -> None:
        """Have a window of that size, in points, and the system's colours."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        self._call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page."""
        self._call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self) -> str:
        """Return the text that is seen."""
        return str(self.value("document.body ? document.body.innerText : ''"))

    def wait_text(self, text: str) -> None:
        """Wait until the page shows a text."""
        wait_until(lambda: text in self.text(), LIMIT_S, lambda: f"{text!r} in:\n{self.text()}")

    def picture(self, path: pathlib.Path) -> None:
        """Write the whole page as PNG."""
        height = int(self.value("document.documentElement.scrollHeight"))
        width = int(self.value("document.documentElement.clientWidth"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        request: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._to, json.dumps(request).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            entry = event["params"]["entry"]
            if entry["source"] != "network":  # a node that is down is no problem of the page
                self.problems.append(entry["text"])
