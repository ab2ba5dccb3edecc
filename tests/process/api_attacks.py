"""Attacks of untrusted clients on a node's client API, each run in a process of its own.

    python -m tests.process.api_attacks KIND HOST PORT SEED SECONDS

The last line of the output is JSON: the number of connections and of bytes sent. The same seed
makes the same choices; their timing depends on the machine.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hastore.errors import ProtocolError
from hastore.protocol import api, remoting
from hastore.protocol.zmtp import encode_front

MIB = 1024 * 1024
RESET = struct.pack("ii", 1, 0)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
SIZES = (
    *(0, 1, 2, 254, 255, 256, 257, 511, 512, 513, 65_535, 65_536, 65_537, 4 * MIB),
    *(4 * MIB + 131_072, 4 * MIB + 131_073, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
)


def command(name: bytes, data: bytes = b"") -> bytes:
    """Return a command's frame."""
    body = bytes((len(name),)) + name + data
    return b"\x06" + struct.pack(">Q", len(body)) + body


def property_of(name: bytes, value: bytes) -> bytes:
    """Return one property of a READY command."""
    return bytes((len(name),)) + name + struct.pack(">I", len(value)) + value


SHAKEN = GREETING + command(b"READY", property_of(b"Socket-Type", b"DEALER"))
PING = command(b"PING", b"\0\0")


def message(request: Any, payload: bytes | None = None) -> bytes:
    """Return the bytes of a whole request."""
    front = encode_front(api.encode(request), None if payload is None else len(payload))
    return front + (payload or b"")


class Attack:
    """One attacking client with a seed, a target and an end time."""

    def __init__(self, host: str, port: int, seed: int, seconds: float) -> None:
        self.target = host, port
        self.chance = random.Random(seed)
        self.end = time.monotonic() + seconds
        self.connections = 0
        self.sent = 0

    def going(self) -> bool:
        """Return whether there is time left."""
        return time.monotonic() < self.end

    def connect(self) -> socket.socket:
        """Return a new connection; its calls block for 0.2 s at most."""
        while True:
            sock = socket.socket()
            sock.settimeout(5.0)
            try:
                sock.connect(self.target)
            except OSError:
                sock.close()
                if not self.going():
                    raise
                time.sleep(0.01)
                continue
            sock.settimeout(0.2)
            self.connections += 1
            return sock

    def send(self, sock: socket.socket, data: bytes) -> bool:
        """Send the data; return False if the connection has ended or is full."""
        view = memoryview(data)
        while view:
            try:
                sent = sock.send(view)
            except OSError:
                return False
            self.sent += sent
            view = view[sent:]
        return True

    def close(self, sock: socket.socket, *, reset: bool = True) -> None:
        """Close the connection, by default with a reset."""
        if reset and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        sock.close()

    def crowd(self, count: int, first: bytes = b"") -> list[socket.socket]:
        """Return `count` connections that do not block, on which `first` has been sent."""
        made = []
        while len(made) < count and self.going():
            made.append(self.connect())
            self.send(made[-1], first)
            made[-1].setblocking(False)
        return made

    def pour(self, crowd: list[socket.socket], words: Callable[[], bytes], *, most: int) -> None:
        """Send on all connections, up to `most` bytes each; replace a connection that ends."""
        left: dict[socket.socket, list[Any]] = {sock: [b"", most] for sock in crowd}
        while self.going() and left:
            _, writable, _ = select.select([], list(left), [], 0.05)
            for sock in writable:
                state = left[sock]
                data = (state[0] or words())[: state[1]]
                try:
                    sent = sock.send(data)
                except BlockingIOError:
                    continue
                except OSError:
                    del left[sock]
                    sock.close()
                    if self.going():
                        (another,) = self.crowd(1, SHAKEN) or [None]
                        if another is not None:
                            crowd[crowd.index(sock)] = another
                            left[another] = [b"", most]
                    continue
                self.sent += sent
                state[0] = data[sent:]
                state[1] -= sent
                if not state[1]:
                    del left[sock]

    def rest(self) -> None:
        """Wait until the time is up."""
        time.sleep(max(0.0, self.end - time.monotonic()))


# -- the bytes


def any_request(chance: random.Random) -> api.Request:
    """Return a request with unusual field values that are valid for their types."""
    rid = chance.choice([0, 1, 2**31, 2**63 - 1])
    name = chance.choice(
        ["T", "work", "", "../../x", "a\0b", "ü", "x" * 127, "x" * 128, "y" * 32_767, "\x01\x02",
         api.POSITIONS_TOPIC]
    ) or "-"  # fmt: skip
    number = chance.choice([0, 1, 2, 3, 2**31 - 1])
    offset = chance.choice([0, 1, 91, 2**31, 2**32, 2**63 - 1])
    epoch = chance.choice([None, 0, 1, 65_537, 2**63 - 1])
    place = api.Position(offset, epoch, chance.choice([None, offset]))
    made: list[Callable[[], api.Request]] = [
        lambda: api.Put(rid, chance.choice([None, 1]), chance.random() < 0.5, 1, offset, number),
        lambda: api.Pull(
            rid, name, number, place, chance.choice([1, 10_000]),
            chance.choice([1, api.MAX_FRAME_BYTES]), chance.choice([0, 1, 60_000]),
            chance.random() < 0.2, chance.choice([None, None, any_filter(chance)]),
        ),
        lambda: api.FindKey(rid, name, chance.choice(["k", name]), 1_000, offset, 2**63 - 1),
        lambda: api.FindOffset(rid, offset),
        lambda: api.FindTime(rid, name, number, offset),
        lambda: api.AskDigest(
            rid, offset, min(offset + chance.choice([0, 1, 2**24, 2**62]), 2**63 - 1),
            chance.choice(["xxh3-128", "sha256", name[:32]]),
        ),
        lambda: api.AskBytes(
            rid, offset, min(offset + chance.choice([0, 1, 2**20, 2**62]), 2**63 - 1)
        ),
        lambda: api.AskMap(rid),
        lambda: api.AskStatus(rid),
        lambda: api.AskTopics(rid, chance.choice([None, name])),
        lambda: api.AskProducer(rid, name[:64]),
        lambda: api.Commit(rid, name[:255], chance.choice(["T", "a\x01b"]), {number: place}, 1),
        lambda: api.Fetch(rid, name[:255], name),
        lambda: api.Join(rid, name[:255], name[:255], offset, [
            api.Subscription(name, chance.choice(["*", "a || b", ""]), chance.choice(["TAG", name]))
        ] * chance.choice([0, 1, 2])),
        lambda: api.AskMembers(rid, name[:255]),
        lambda: api.SendBack(
            rid, name[:255], name, number, offset, offset, chance.choice([None, 0, 65_537]),
            chance.choice([-1, 0, 1, 99]), chance.choice([None, 0, 16]), 1,
        ),
        lambda: api.EndTransaction(
            rid, chance.random() < 0.5, offset, number, name[:255], name[:255],
            chance.choice([None, 0, 1, -1]), chance.random() < 0.5, 1,
        ),
        lambda: api.AskChecks(rid, name[:255], chance.choice([0, 1, 60_000])),
        lambda: api.Administer(
            rid, name[:255], name[:255], chance.choice([1, 2, 65_535]),
            chance.choice([
                api.NodesChange(1, 2, api.NodePlaces(name[:512], name[:512], name[:512])),
                api.RoleChange("x" * 8, name[:32], api.OnceOptions(name[:32], offset)),
                api.MembersChange("x" * 8, name[:32], 1, offset, [1] * api.MAX_MEMBERS, 2),
            ]),
            chance.choice([None, "0" * 64]),
        ),
        lambda: api.Leave(rid, name[:255], name[:255]),
        lambda: api.Lock(rid, name[:255], name[:255], {name: [number] * chance.choice([0, 1, 9])},
                         chance.random() < 0.5),
        lambda: api.Unlock(rid, name[:255], name[:255], {name: [number]}),
        lambda: api.Commit(rid, name[:255], "T", {number: place}, 1, [], name[:255]),
    ]  # fmt: skip
    return chance.choice(made)()


def any_filter(chance: random.Random) -> api.Filter:
    """Return a filter that matches all, some or no messages, is wrong, or costs much to compile."""
    texts = [
        *("*", "", "||", "a || b", "\0", "ü", "t" * 8_192, " || ".join("ab" * 999)),
        *("TAGS IS NULL", "HS_SEQ > 5", "a >", "'" * 99, "(" * 2_000, "NOT " * 2_000 + "a = 1"),
        *("HS_SEQ > 1" + " OR HS_SEQ > 1" * 240, "a = 1 OR " * 900, "a IN ('" + "','" * 2_000),
        "-" * 8_000 + "1",
    ]
    return api.Filter(chance.choice(["tags", "sql", "sql", "x"]), chance.choice(texts))


def any_frame(chance: random.Random) -> bytes:
    """Return a frame with random flags and size, whose body may not match them."""
    flags = chance.choice([0, 1, 2, 3, 4, 6, chance.randrange(256)])
    size = chance.choice(SIZES)
    if flags & 4 and chance.random() < 0.8:
        name = chance.choice([b"READY", b"PING", b"PONG", b"ERROR", b"SUBSCRIBE", b"HELLO", b""])
        body = bytes((chance.choice([len(name), 0, 255]),)) + name
        body += chance.randbytes(chance.randrange(40))
        size = len(body)
    else:
        body = chance.randbytes(min(size, 300))
    head = struct.pack(">Q", size) if flags & 2 else bytes((size % 256,))
    return bytes((flags,)) + head + body


def any_begin(chance: random.Random) -> bytes:
    """Return the first bytes of a connection, such that every state of the handshake is reached."""
    greeting = bytearray(GREETING)
    if chance.random() < 0.2:
        greeting[chance.randrange(64)] = chance.randrange(256)
    kind = chance.choice([b"DEALER", b"DEALER", b"ROUTER", b"REQ", b"", b"X" * 400])
    ready = command(b"READY", property_of(b"Socket-Type", kind))
    return chance.choice([b"", bytes(greeting), bytes(greeting) + ready, SHAKEN, SHAKEN, SHAKEN])


NAMES = (
    *("topic", "consumerGroup", "queueId", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset"),
    *("suspendTimeoutMillis", "subscription", "subVersion", "expressionType", "key", "maxNum"),
    *("beginTimestamp", "endTimestamp", "offset", "timestamp", "clientID", "group", "properties"),
    *("readQueueNums", "writeQueueNums", "perm", "originTopic", "delayLevel", *"abcdefghijklmn"),
)


def any_field(chance: random.Random) -> str:
    """Return a value of a field: a number, a name, properties, or none of them."""
    return chance.choice([
        str(chance.choice(SIZES)), "-1", "0", "1", "T", "", "%RETRY%g", "true", "*", "a || b",
        "x" * chance.choice([127, 128, 32_768]), "KEYS\x01k\x02DELAY\x011\x02", "\x01\x02" * 50,
        "é🚀", "1e5", "NaN", "HASTORE_POSITIONS", "SCHEDULE_TOPIC_XXXX",
    ])  # fmt: skip


def any_send(chance: random.Random) -> dict[str, str]:
    """Return the fields of a send that may be valid."""
    valid = dict(zip("abcdefghijkm", (
        *("g", "T", "TBW102", "4", "1", "0", "5", "0", "KEYS\x01k\x02", "0", "false", "false"),
    ), strict=True))  # fmt: skip
    for _ in range(chance.randrange(3)):
        valid[chance.choice("abcdefghijkm")] = any_field(chance)
    return valid


def any_body(chance: random.Random) -> bytes:
    """Return a body: bytes, a batch, or JSON that is deep, long or a heartbeat."""
    batch = remoting.encode_batch([remoting.BatchMessage(0, b"b", b"KEYS\x01k\x02")] * 20)
    deep = b'{"clientID":' + b"[" * chance.choice([10, 50_000])
    subscription = {"topic": "T", "subString": any_field(chance), "expressionType": "TAG"}
    groups = [
        {"groupName": f"g{number}", "subscriptionDataSet": [subscription]}
        for number in range(chance.choice([1, 50, 2_000]))
    ]
    beat = remoting.encode_body(
        {"clientID": any_field(chance), "producerDataSet": [], "consumerDataSet": groups}
    )
    locks = remoting.encode_body(
        {"consumerGroup": "g", "clientId": "c", "mqSet": [{"topic": "T", "queueId": 0}] * 50}
    )
    return chance.choice([b"", b"x", batch, batch[:-1], deep, beat, locks, chance.randbytes(5_000)])


def any_remoting(chance: random.Random) -> bytes:
    """Return a request of RocketMQ's clients with usual and unusual values."""
    # The numbers of requests that are sent to clients are among them.
    code = chance.choice([*map(int, remoting.Code), 0, -1, 4_242])
    kind = chance.choice([remoting.JSON, remoting.ROCKETMQ])
    if not -(2**15) <= code < 2**15:
        kind = remoting.JSON
    if code in (310, 320) or chance.random() < 0.3:
        code, fields = chance.choice([310, 320]), any_send(chance)
    else:
        chosen = chance.sample(NAMES, chance.randrange(len(NAMES)))
        fields = {name: any_field(chance) for name in chosen}
    flag = chance.choice([0, 0, 0, 1, 2, 3, -1])
    frame = remoting.Frame(code, chance.getrandbits(20), flag, fields, any_body(chance), kind=kind)
    try:
        return remoting.encode_frame(frame)
    except ProtocolError:  # too long for a header
        return remoting.encode_frame(remoting.Frame(code, 1))


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Return bytes of which some were changed, added or left out."""
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(min(len(changed), chance.choice([8, 60, 10**9])))
        changed[at : at + chance.randrange(5)] = chance.randbytes(chance.randrange(5))
        changed += b"\0"
    return b"\0" + bytes(changed[1:])  # what speaks RocketMQ's protocol


def read_some(sock: socket.socket) -> bool:
    """Read something; return False at the end of the connection."""
    try:
        return bool(sock.recv(MIB))
    except OSError:
        return False


# -- the attacks


def frames(attack: Attack) -> None:
    """Send every flag, command, size and truncation in every state, then reset."""
    chance = attack.chance
    while attack.going():
        sock = attack.connect()
        data = any_begin(chance)
        for _ in range(chance.randrange(6)):
            data += chance.choice(
                [any_frame(chance), message(any_request(chance)), PING, message(api.AskMap(1))]
            )
        data = data[: chance.choice([len(data), chance.randrange(len(data) + 1)])]
        at = chance.randrange(len(data) + 1)
        if attack.send(sock, data[:at]) and chance.random() < 0.3:
            with contextlib.suppress(OSError):
                sock.recv(100)
        attack.send(sock, data[at:])
        attack.close(sock, reset=chance.random() < 0.9)


def pings(attack: Attack) -> None:
    """Send 40 requests and a PING, 50 times, then reset, repeatedly; read nothing."""
    turn = message(api.AskMap(1)) * 40 + PING
    while attack.going():
        socks = [attack.connect() for _ in range(attack.chance.randrange(1, 5))]
        for sock in socks:
            attack.send(sock, SHAKEN)
        for _ in range(50):
            for sock in socks:
                attack.send(sock, turn)
        for sock in socks:
            attack.close(sock)


def pipelines(attack: Attack) -> None:
    """Send requests on 30 connections without reading the answers."""
    chance = attack.chance

    def words() -> bytes:
        request = chance.choice([
            api.AskMap(1), api.AskStatus(1), api.FindOffset(1, 0), api.AskTopics(1),
            api.Pull(1, "work", 0, api.Position(0), 10_000, api.MAX_FRAME_BYTES),
            api.Pull(1, "large", 0, api.Position(0), 10_000, api.MAX_FRAME_BYTES),
            api.FindKey(1, "work", "k", 1_000), api.Fetch(1, "g", "T"), api.AskProducer(1, "p"),
            api.AskDigest(1, 0, api.MAX_DIGEST_BYTES), api.AskDigest(1, 0, 4_096, "sha256"),
            api.AskBytes(1, 0, 100_000), api.Join(1, "g", "m", 1, [api.Subscription("work")]),
            api.Lock(1, "g", "m", {"work": [0, 1, 2, 3]}, True),
            api.Unlock(1, "g", "m", {"work": [0]}),
        ])  # fmt: skip
        return message(request) * 200 + PING

    attack.pour(attack.crowd(30, SHAKEN), words, most=64 * MIB)


def empty_puts(attack: Attack) -> None:
    """Send puts of 15 bytes without a payload, on 100 connections."""
    words = message(api.Put(1, 0)) * 1_000
    attack.pour(attack.crowd(100, SHAKEN), lambda: words, most=64 * MIB)


def parked(attack: Attack) -> None:
    """Send pulls that wait a minute for topics with long names, then reset."""
    chance = attack.chance
    while attack.going():
        sock = attack.connect()
        attack.send(sock, SHAKEN)
        size = chance.choice([5, 127, 128, 32_000])
        for n in range(chance.choice([10, 1_100])):
            name = f"{n}".rjust(size, "n")
            if not attack.send(sock, message(
                api.Pull(n, name, 0, api.Position(0), 1, 1, api.MAX_WAIT_MS)
            )):  # fmt: skip
                break
        attack.close(sock)


def requests(attack: Attack) -> None:
    """Send requests of all kinds with extreme values, and read the answers."""
    chance = attack.chance
    while attack.going():
        sock = attack.connect()
        attack.send(sock, SHAKEN)
        for _ in range(chance.randrange(1, 100)):
            request = any_request(chance)
            payload = None
            if isinstance(request, api.Put) or chance.random() < 0.1:
                payload = chance.randbytes(chance.choice([0, 1, 90, 91, 1_000, 70_000]))
            if not attack.send(sock, message(request, payload)):
                break
            if select.select([sock], [], [], 0)[0] and not read_some(sock):
                break
        attack.close(sock, reset=chance.random() < 0.5)


def trickle(attack: Attack) -> None:
    """Send one byte a second on 200 connections, of the greeting or of a message."""
    chance = attack.chance
    crowd = attack.crowd(100) + attack.crowd(100, SHAKEN)
    words = SHAKEN + message(api.Put(1), bytes(1_000))
    places = [chance.choice([0, len(SHAKEN)]) for _ in crowd]
    while attack.going():
        for number, sock in enumerate(crowd):
            attack.send(sock, words[places[number] : places[number] + 1])
            places[number] += 1
        time.sleep(max(0.0, min(1.0, attack.end - time.monotonic())))
    for sock in crowd:
        attack.close(sock)


def idle(attack: Attack) -> None:
    """Open 2,000 connections that stay idle, most of them after the handshake."""
    crowd = attack.crowd(500) + attack.crowd(1_500, SHAKEN)
    attack.rest()
    for sock in crowd:
        attack.close(sock, reset=attack.chance.random() < 0.5)


def noise(attack: Attack) -> None:
    """Send random bytes, alone or after a handshake."""
    chance = attack.chance
    while attack.going():
        sock = attack.connect()
        attack.send(sock, chance.choice([b"", b"", GREETING, SHAKEN]))
        attack.send(sock, chance.randbytes(chance.choice([1, 10, 64, 1_000, 100_000])))
        attack.close(sock, reset=chance.random() < 0.5)


def strange_greetings(attack: Attack) -> None:
    """Begin with ZMTP 1 and 2, other mechanisms, and other protocols."""
    chance = attack.chance
    begins = [
        b"\x01\x00", b"\x06\x00hello", b"\xff" + bytes(7) + b"\x01\x00",
        b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00", b"\xff" + bytes(8) + b"\x7f\x02\x05\x00\x00",
        *(GREETING[:12] + name.ljust(20, b"\0") + bytes(32) for name in (b"PLAIN", b"CURVE", b"")),
        b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        GREETING + command(b"READY", property_of(b"Socket-Type", b"SUB")),
    ]  # fmt: skip
    while attack.going():
        sock = attack.connect()
        data = chance.choice(begins)
        attack.send(sock, data[: chance.choice([len(data), chance.randrange(1, len(data) + 1)])])
        with contextlib.suppress(OSError):
            if chance.random() < 0.5:
                sock.settimeout(0.05)
                while sock.recv(1_000):
                    attack.send(sock, message(api.AskMap(1), bytes(chance.randrange(3_000))))
        attack.close(sock, reset=chance.random() < 0.5)


def huge_sizes(attack: Attack) -> None:
    """Announce frames of forbidden sizes, and send bytes for them."""
    chance = attack.chance
    while attack.going():
        sock = attack.connect()
        attack.send(sock, SHAKEN if chance.random() < 0.8 else GREETING)
        size = chance.choice([*SIZES[12:], -1 % 2**64, -(2**31) % 2**64, chance.randrange(2**64)])
        attack.send(sock, chance.choice([b"", b"\x01\x00", b"\x01\x05hello"]))
        attack.send(sock, bytes((chance.choice([2, 3, 6]),)) + struct.pack(">Q", size))
        attack.send(sock, bytes(chance.choice([0, 1_000, MIB])))
        attack.close(sock, reset=chance.random() < 0.5)


def endless(attack: Attack) -> None:
    """Send messages with more and more frames, and a frame that never ends."""
    crowd = attack.crowd(20, SHAKEN)
    kinds = [b"\x01\x01x" * 5_000, b"\x01\x00" * 5_000, PING * 2_000, bytes(4_000)]
    begun: set[socket.socket] = set()
    while attack.going():
        for number, sock in enumerate(crowd):
            words = kinds[number % len(kinds)]
            if number % len(kinds) == 3 and sock not in begun:
                words = encode_front(api.encode(api.Put(1)), 4 * MIB)
                begun.add(sock)
            if not attack.send(sock, words):
                with contextlib.suppress(OSError):
                    if sock.recv(65_536):
                        continue
                sock.close()
                (crowd[number],) = attack.crowd(1, SHAKEN) or [sock]
        time.sleep(0.01)


def unfinished(attack: Attack) -> None:
    """Send messages of 4 MiB without their last byte, on 200 connections."""
    front = encode_front(api.encode(api.Put(1)), 4 * MIB)
    crowd = attack.crowd(200, SHAKEN + front)
    piece = bytes(256 * 1024)
    attack.pour(crowd, lambda: piece, most=4 * MIB - 1)
    attack.rest()
    for sock in crowd:
        attack.close(sock)


def lazy_reader(attack: Attack) -> None:
    """Send large pulls, and read the answers a little at a time."""
    crowd = attack.crowd(40, SHAKEN)
    pull = message(api.Pull(1, "large", 0, api.Position(0), 10_000, api.MAX_FRAME_BYTES))
    while attack.going():
        for number, sock in enumerate(crowd):
            sent = attack.send(sock, pull)
            with contextlib.suppress(OSError):
                if sent or sock.recv(attack.chance.choice([1, 1_000, 100_000])):
                    continue
            if not sent:
                continue
            sock.close()
            (crowd[number],) = attack.crowd(1, SHAKEN) or [sock]
        time.sleep(0.005)


def remoting_frames(attack: Attack) -> None:
    """Send damaged frames of RocketMQ's clients, split anywhere, and reset."""
    chance = attack.chance
    while attack.going():
        sock = attack.connect()
        data = b"".join(any_remoting(chance) for _ in range(chance.randrange(4)))
        data += damaged(chance, any_remoting(chance))
        at = chance.randrange(len(data) + 1)
        attack.send(sock, data[:at])
        if chance.random() < 0.2:
            read_some(sock)
        attack.send(sock, data[at:])
        attack.close(sock, reset=chance.random() < 0.9)


def remoting_requests(attack: Attack) -> None:
    """Send requests of RocketMQ's clients with extreme values, and read the answers."""
    chance = attack.chance
    while attack.going():
        sock = attack.connect()
        for _ in range(chance.randrange(1, 100)):
            if not attack.send(sock, any_remoting(chance)):
                break
            if select.select([sock], [], [], 0)[0] and not read_some(sock):
                break
        attack.close(sock, reset=chance.random() < 0.5)


def remoting_pipelines(attack: Attack) -> None:
    """Send requests of RocketMQ's clients on 30 connections without reading the answers."""
    chance = attack.chance
    words = [
        remoting.encode_frame(remoting.Frame(code, 1, 0, fields)) * 200
        for code, fields in (
            (105, {"topic": "T"}), (106, {}), (206, {}), (30, {"topic": "work", "queueId": "0"}),
            (310, any_send(random.Random(1))), (4_242, {}),
            (11, {"consumerGroup": "g", "topic": "large", "queueId": "0", "queueOffset": "0",
                  "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0", "subscription": "*",
                  "suspendTimeoutMillis": "1", "subVersion": "0"}),
        )
    ]  # fmt: skip
    attack.pour(attack.crowd(30, words[0]), lambda: chance.choice(words), most=64 * MIB)


KINDS: dict[str, Callable[[Attack], None]] = {
    each.__name__: each
    for each in (
        frames, pings, pipelines, empty_puts, parked, requests, trickle, idle, noise,
        strange_greetings, huge_sizes, endless, unfinished, lazy_reader,
        remoting_frames, remoting_requests, remoting_pipelines,
    )
}  # fmt: skip


def schedule(seed: int, seconds: float, extra: tuple[str, ...]) -> Iterator[tuple[str, int, float]]:
    """Yield (kind, seed, seconds) until `seconds` are used: each kind once per round, shuffled."""
    chance = random.Random(seed)
    names = [*KINDS, *extra]
    each_s = min(8.0, seconds / len(names))
    for _ in range(max(1, round(seconds / (each_s * len(names))))):
        chance.shuffle(names)
        for name in names:
            yield name, chance.getrandbits(32), each_s


def main(kind: str, host: str, port: str, seed: str, seconds: str) -> None:
    """Attack until the time is up."""
    attack = Attack(host, int(port), int(seed), float(seconds))
    KINDS[kind](attack)
    print(json.dumps({"connections": attack.connections, "bytes": attack.sent}))


if __name__ == "__main__":
    main(*sys.argv[1:])
