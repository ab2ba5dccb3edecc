"""Texts of others that hastore passes on: labels of metrics, trace contexts, lines of a log."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from prometheus_client.parser import text_string_to_metric_families

from hastore.otel import context_of
from hastore.protocol.registration import second_address, shown
from hastore.record.properties import decode_properties
from hastore.server.metrics import page
from hastore.server.metrics.page import Page
from tests.fuzz import kit

REACHES = (Page.add, Page.render, page._escaped, context_of, shown)
LEAST = kit.Least(0.9, 0)
TOKENS = (
    b"traceparent\x01",
    b"tracestate\x01a=b\x02",
    b"00-",
    b"-01",
    b'"',
    b"\\",
    b"\\n",
    b"} 1\n# HELP",
)


def seeds() -> list[bytes]:
    """Return names of groups and topics, and properties of messages."""
    parent = b"traceparent\x0100-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\x02"
    return [
        b"lgroup",
        b'l"} 1\nfake 2',
        b'l\\\\"\\n',
        b"l\r\n\t\0",
        "lé漢😀\u2028".encode(),
        b"l\xff\xfe",
        b"c" + parent + b"tracestate\x01a=b,c=d\x02",
        b"c" + parent[:-5],
        b"ctraceparent\x0199-0-0-0\x02",
        b"cbaggage\x01a=b;c,d=%FF\x02" + parent,
    ]


def one(data: bytes) -> None:
    """Write a page with a label, and read it as Prometheus does; read a message's context."""
    kind, raw = data[:1], data[1:]
    if kind == b"c":
        message: Any = type("Message", (), {"properties": dict(decode_properties(raw))})
        found = trace.get_current_span(context_of(message)).get_span_context()
        assert found.is_valid in (True, False)
        return
    text = kit.text_of(raw)
    assert "\n" not in shown(text) and len(shown(text)) <= 2_500
    second_address(text)
    written = Page(text, "group", "1")
    written.add("hastore_consumer_lag_messages", 5, text, "topic")
    (family,) = text_string_to_metric_families(written.render().decode())
    (sample,) = family.samples
    assert sample.value == 5 and sample.labels["cluster"] == text
