"""The status page in a real browser: a flip seen live, on a phone; a node that is down."""

from __future__ import annotations

import pathlib

import pytest

from hastore import Consumer, Producer
from hastore.testing.groups import group
from tests.server.http.browser import Browser
from tests.server.http.test_status_page import secured

pytestmark = pytest.mark.full
GROUP = "<b>billing</b>"


def test_name_and_key_of_an_identity_open_the_page(tmp_path: pathlib.Path) -> None:
    with secured(tmp_path) as (server, key), Browser(tmp_path) as browser:
        browser.open(f"http://shop:{key}@{server.address}/")
        browser.wait_text("billing")
        assert "stock" not in browser.text()
        assert browser.problems == []


@pytest.mark.slow("a browser, a pair and a flip")
def test_a_flip_and_a_kill_are_seen_without_a_reload(tmp_path: pathlib.Path) -> None:
    with group() as pair, Browser(tmp_path) as browser:
        with Producer(pair.bootstrap) as producer:
            for number in range(10):
                producer.send("orders", b"%d" % number).result(60)
        with Consumer("orders", pair.bootstrap, group=GROUP) as consumer:
            left = 10
            while left:
                left -= len(consumer.poll(left, timeout_s=60))
            consumer.commit()
        browser.look_as(360, 740, dark=True)
        browser.open(f"http://{pair[1].http}/")
        browser.wait_text("This node is the master and takes puts.")
        browser.wait_text(GROUP)
        assert browser.value("document.querySelector('#lags b')") is None, "it is text"
        assert browser.value("document.documentElement.scrollWidth") <= 360
        browser.value("window.here = 1")
        back = "getComputedStyle(document.body).backgroundColor"
        dark = browser.value(back)
        browser.look_as(1200, 800, dark=False)
        assert browser.value(back) != dark
        for wide in ("epoch", "this node"):  # beside a long reason, no word of them is broken
            cell = f"document.querySelector('#changes td[data-label=\"{wide}\"]')"
            assert browser.value(f"getComputedStyle({cell}).whiteSpace") == "nowrap"
        pair.flip(2)
        browser.wait_text("Node 2 is the master; this node follows it.")
        assert browser.value("document.title").endswith("test/g0, node 1")
        pair[1].kill()
        browser.wait_text("This node does not answer: no connection.")
        assert browser.value("window.here") == 1, "it was not loaded again"
        browser.open(f"http://{pair[2].http}/")
        browser.wait_text("Start node 1")
        assert browser.problems == []
