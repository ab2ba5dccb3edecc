"""A real Prometheus that scrapes the nodes of a test, with the shipped rules.

    with Prometheus(tmp_path, group) as prometheus:
        group[2].kill()
        prometheus.wait_firing("HastoreNodeDown", instance=group[2].http)

Its scrape job is the one of docs/metrics.md. Its rules are those of deploy/prometheus with shorter
durations (shortened.py). It is a child process that ends with its test.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from typing import Any, Self

import pytest
import yaml

from tests.deploy.shortened import ROOT, shipped, shortened
from tests.process.harness import Node, Ports, wait_until

Labels = dict[str, str]
WAIT_S = 180.0  # a limit that only a hang exceeds
SCRAPE = "1s"
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
# Ignores the proxies that the environment may set.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; without it skip the test, in CI fail."""
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{name} is missing, and CI must run this: apt-get install prometheus")
        pytest.skip(f"no {name}: apt-get install prometheus")
    return found


def documented_job() -> dict[str, Any]:
    """Return the scrape job of docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    (block,) = re.findall(r"^```yaml\n(scrape_configs:.*?)^```", text, re.DOTALL | re.MULTILINE)
    (job,) = yaml.safe_load(block)["scrape_configs"]
    return dict(job)


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Prometheus:
    """A running Prometheus; a context manager.

    With `ca` it scrapes by TLS, and with `key`, the file of the identity "prometheus", it says who
    it is.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        nodes: Iterable[Node],
        *,
        ca: pathlib.Path | None = None,
        key: pathlib.Path | None = None,
    ) -> None:
        self._folder = folder / "prometheus"
        self._folder.mkdir()
        self._program = program("prometheus")
        self._ports = Ports()
        self._address = f"127.0.0.1:{self._ports.take()}"
        self._log = self._folder / "log"
        self.targets = [node.http for node in nodes]
        job = documented_job()
        job["static_configs"] = [{"targets": self.targets}]
        if ca is None:
            del job["scheme"], job["tls_config"]
        else:
            job["tls_config"]["ca_file"] = str(ca)
        if key is None:
            del job["basic_auth"]
        else:
            job["basic_auth"]["password_file"] = str(key)
        every = {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE}
        config = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": [job]}
        (self._folder / "rules.yml").write_text(shortened())
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(config, sort_keys=False))

    def __enter__(self) -> Self:
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [self._program, f"--config.file={self._folder / 'prometheus.yml'}",
                 f"--storage.tsdb.path={self._folder / 'data'}",
                 f"--web.listen-address={self._address}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=_end_with_parent,
            )  # fmt: skip
        try:
            self.wait_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._ports.close()

    # ---- its API

    def ask(self, path: str, **arguments: str) -> Any:
        """Return the `data` of an answer of Prometheus' API."""
        asked = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with _DIRECT.open(asked, timeout=60) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            raise AssertionError(f"{arguments}: {refused.read().decode()}") from refused
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[tuple[Labels, float]]:
        """Return the samples of an expression now, with their labels."""
        rows = self.ask("query", query=expression)["result"]
        return [(dict(row["metric"]), float(row["value"][1])) for row in rows]

    def series(self) -> set[frozenset[tuple[str, str]]]:
        """Return the labels, with the name, of the series that the nodes have from their start."""
        # An event, or a refusal, is counted from the first one on.
        later = "hastore_audit_events_total|hastore_refusals_total"
        found = self.query(f'{{__name__=~"(hastore|process)_.*",__name__!~"{later}"}}')
        return {frozenset(labels.items()) for labels, _ in found}

    def wait_up(self) -> None:
        """Wait until all targets are up."""

        def look() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            try:
                with _DIRECT.open(f"http://{self._address}/-/ready", timeout=60):
                    pass
            except OSError:  # it does not listen yet, or reads its files
                return False
            found = self.ask("targets", state="active")["activeTargets"]
            urls = [one["scrapeUrl"] for one in found if one["health"] == "up"]
            return sorted(url.split("/")[2] for url in urls) == sorted(self.targets)

        wait_until(look, WAIT_S, lambda: f"not all up: {self.ask('targets')['activeTargets']}")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression has a sample."""
        wait_until(lambda: self.query(expression), WAIT_S, f"never: {expression}")

    # ---- alerts

    def active(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the alerts that are pending or firing, all or those of a name."""
        found = self.ask("alerts")["alerts"]
        return [one for one in found if name is None or one["labels"]["alertname"] == name]

    def wait_firing(self, name: str, **labels: str) -> dict[str, Any]:
        """Wait until an alert fires with these labels; check its text, and return it."""

        def look() -> dict[str, Any] | None:
            for one in self.active(name):
                if one["state"] == "firing" and labels.items() <= one["labels"].items():
                    return dict(one)
            return None

        begin = time.monotonic()
        alert: dict[str, Any] = wait_until(
            look, WAIT_S, lambda: f"{name} {labels} does not fire, but {self._active_text()}"
        )
        summary = alert["annotations"]["summary"]
        print(f"firing after {time.monotonic() - begin:.0f} s: {name}: {summary}")
        (rule,) = (rule for rule in shipped() if rule["alert"] == name)
        assert alert["labels"]["severity"] == rule["labels"]["severity"]
        named = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        assert all(alert["labels"].get(label) for label in named), summary  # else an empty word
        return alert

    def wait_gone(self, *names: str) -> None:
        """Wait until no alert of these names is pending or firing; without names, none at all."""

        def look() -> bool:
            found = {one["labels"]["alertname"] for one in self.active()}
            return not (found & set(names) if names else found)

        wait_until(look, WAIT_S, lambda: f"{names or 'alerts'} stay: {self._active_text()}")

    def fired(self) -> set[str]:
        """Return the names of all alerts that have fired so far."""
        found = self.query('count by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1h]))')
        return {labels["alertname"] for labels, _ in found}

    def check_only(self, *names: str, also: Iterable[str] = ()) -> None:
        """Check that these alerts have fired, and beside them at most those of `also`."""
        fired = self.fired()
        assert set(names) <= fired <= {*names, *also}, sorted(fired ^ set(names))

    def _active_text(self) -> str:
        return "; ".join(
            f"{one['state']} {one['labels']} {one['annotations']['summary']!r}"
            for one in self.active()
        )
