"""A name server of real sockets, which keeps what RocketMQ's keeps, and misbehaves if told so.

It knows a broker's life by the text of its address, as RocketMQ's does: when a connection ends, the
first address that was registered over it goes, from the first broker name that has it.
"""

from __future__ import annotations

import json
import socketserver
import struct
import threading
import time
import zlib
from collections import Counter
from typing import Any

from hastore.protocol.remoting import Frame, answer_to, decode_frame, encode_frame

REGISTER, UNREGISTER, ROUTE, FORGET, TOPICS = 103, 104, 105, 216, 224


def read_body(frame: Frame) -> dict[str, Any]:
    """Return the registration's version and topics, whichever form its body has."""
    if frame.fields["compressed"] != "true":
        found: dict[str, Any] = json.loads(frame.body)["topicConfigSerializeWrapper"]
        return found
    data, at = zlib.decompress(frame.body), 0

    def number() -> int:
        nonlocal at
        at += 4
        return int(struct.unpack_from(">i", data, at - 4)[0])

    def piece() -> bytes:
        nonlocal at
        size = number()
        at += size
        return data[at - size : at]

    version = json.loads(piece())
    table = {}
    for _ in range(number()):
        name, read, write, perm, _ = piece().decode().split(" ")
        table[name] = {"readQueueNums": int(read), "writeQueueNums": int(write), "perm": int(perm)}
    assert json.loads(piece()) == [] and number() == 0 and at == len(data)
    return {"dataVersion": version, "topicConfigTable": table}


class NameServer:
    """One name server; `mood` says how it behaves: "good", or one of those in `_answer`."""

    def __init__(self, port: int = 0) -> None:
        self.mood = "good"
        self.busy: list[int] = []  # codes of requests that are refused once for each place here
        self.seen: Counter[int] = Counter()  # requests by code
        self.tries = 0  # requests of all kinds
        self.versions: list[dict[str, int]] = []
        self.topics: dict[str, dict[str, dict[str, int]]] = {}  # by topic and broker name
        self.brokers: dict[str, dict[str, str]] = {}  # by name and id
        self.clusters: dict[str, str] = {}  # by broker name
        self._live: dict[str, tuple[object, Any]] = {}  # by address: connection, version
        self._lock = threading.RLock()
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    while True:
                        head = self.rfile.read(4)
                        if len(head) < 4:
                            return
                        frame = decode_frame(self.rfile.read(struct.unpack(">I", head)[0]))
                        for piece in outer._answer(self, frame):
                            self.wfile.write(piece)
                except OSError:
                    return
                finally:
                    outer._forget(self)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                return

        self._server = Server(("127.0.0.1", port), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def stop(self) -> None:
        """End the server; open connections go when their peers end."""
        self.mood = "ends"
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def holders(self, name: str) -> dict[str, str]:
        """Return the addresses of a broker by id."""
        with self._lock:
            return dict(self.brokers.get(name, {}))

    def topic(self, name: str) -> dict[str, dict[str, int]]:
        """Return a topic's queues by broker name."""
        with self._lock:
            return dict(self.topics.get(name, {}))

    def put_foreign(self, name: str, broker_id: int, address: str, cluster: str) -> None:
        """Let another broker have a name and a number, and the topic of that name."""
        with self._lock:
            self.brokers.setdefault(name, {})[str(broker_id)] = address
            self.clusters.setdefault(name, cluster)
            queues = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 1}
            self.topics.setdefault(name, {})[name] = queues

    def remove(self, name: str, broker_id: int) -> None:
        """Forget a broker's number, and its topics if it was the last one."""
        with self._lock:
            self._remove(name, str(broker_id))

    def _answer(self, connection: object, frame: Frame) -> list[bytes]:
        """Return the pieces of an answer: bytes; a wait is done here."""
        self.seen[frame.code] += 1
        self.tries += 1
        mood = self.mood
        if mood == "ends":
            raise OSError("ends")
        if mood == "silent":
            time.sleep(2)  # longer than anybody waits
            raise OSError("silent")
        if mood == "garbage":
            return [struct.pack(">I", 12) + b"\x00\x00\x00\x08notjson!"]
        if mood == "huge":
            return [struct.pack(">I", 0x7FFFFFFF) + b"\0" * 64]
        if mood == "refuses":
            return [encode_frame(answer_to(frame, 1, remark="no\nroom " + "x" * 9000))]
        if mood == "another answer":
            frame.opaque += 7
            return [encode_frame(answer_to(frame, 0))]
        if mood == "no route" and frame.code == ROUTE:
            return [encode_frame(answer_to(frame, 0, body=b'{"brokerDatas": 7}'))]
        if mood == "nested" and frame.code == ROUTE:
            return [encode_frame(answer_to(frame, 0, body=b'{"x":' + b"[" * 200_000))]
        if mood == "no text" and frame.code == ROUTE:
            body = b'{"brokerDatas":[{"brokerName":"\xff"}]}'
            return [encode_frame(answer_to(frame, 0, body=body))]
        if mood == "forgets" and frame.code == REGISTER:
            return [encode_frame(answer_to(frame, 0))]
        with self._lock:
            if frame.code in self.busy:
                self.busy.remove(frame.code)
                return [encode_frame(answer_to(frame, 2, remark="[REJECTREQUEST]system busy"))]
            code, body = self._carry_out(connection, frame)
        return [encode_frame(answer_to(frame, code, body=body))]

    def _carry_out(self, connection: object, frame: Frame) -> tuple[int, bytes]:
        fields = frame.fields
        if frame.code == REGISTER:
            return self._register(connection, frame)
        if frame.code == UNREGISTER:
            self._live.pop(fields["brokerAddr"], None)
            self._remove(fields["brokerName"], fields["brokerId"])
        elif frame.code == ROUTE:
            return self._route(fields["topic"])
        elif frame.code == TOPICS:
            return 0, json.dumps({"topicList": sorted(self.topics)}).encode()
        elif frame.code == FORGET:
            self.topics.pop(fields["topic"], None)
        else:
            return 3, b""
        return 0, b""

    def _register(self, connection: object, frame: Frame) -> tuple[int, bytes]:
        fields = frame.fields
        assert int(fields["bodyCrc32"]) == zlib.crc32(frame.body) & 0x7FFFFFFF
        found = read_body(frame)
        self.versions.append(found["dataVersion"])
        name, number, address = fields["brokerName"], fields["brokerId"], fields["brokerAddr"]
        known = self.brokers.setdefault(name, {})
        self.clusters.setdefault(name, fields["clusterName"])
        for other, at in list(known.items()):
            if at == address and other != number:
                del known[other]
        if number not in known and len(found["topicConfigTable"]) == 1:
            return 1, b""
        is_first = number not in known
        known[number] = address
        before = self._live.get(address)
        if number == "0" and (is_first or before is None or before[1] != found["dataVersion"]):
            for topic, one in found["topicConfigTable"].items():
                kept = {key: one[key] for key in ("readQueueNums", "writeQueueNums", "perm")}
                self.topics.setdefault(topic, {})[name] = kept
        self._live[address] = (connection, found["dataVersion"])
        return 0, b""

    def _route(self, topic: str) -> tuple[int, bytes]:
        queues = self.topics.get(topic)
        if not queues:
            return 17, b""
        # RocketMQ 4 before 4.9.4 writes the numbers of brokers so.
        brokers = ",".join(
            f'{{"brokerName":"{name}","cluster":"{self.clusters[name]}","brokerAddrs":{{'
            + ",".join(f'{number}:"{at}"' for number, at in self.brokers[name].items())
            + "}}"
            for name in queues
            if name in self.brokers
        )
        listed = json.dumps([{"brokerName": name, **one} for name, one in queues.items()])
        return 0, f'{{"brokerDatas":[{brokers}],"queueDatas":{listed}}}'.encode()

    def _forget(self, connection: object) -> None:
        with self._lock:
            mine = [at for at, (one, _) in self._live.items() if one is connection]
            if not mine:
                return
            address = mine[0]
            del self._live[address]
            for name, known in list(self.brokers.items()):
                for number, at in list(known.items()):
                    if at == address:
                        self._remove(name, number)
                        return

    def _remove(self, name: str, number: str) -> None:
        known = self.brokers.get(name, {})
        known.pop(number, None)
        if not known:
            self.brokers.pop(name, None)
            self.clusters.pop(name, None)
            for topic in list(self.topics):
                self.topics[topic].pop(name, None)
                if not self.topics[topic]:
                    del self.topics[topic]
