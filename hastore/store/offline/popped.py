"""What POP consumers of a RocketMQ broker have taken and not acknowledged, as its log has it.

A broker moves a group's position at the pop. It writes a checkpoint of what it gave, and a record
for each acknowledgement, to rmq_sys_REVIVE_LOG_<cluster>; both wait as delayed messages until the
messages are due again. Then it gives those again that were not acknowledged. hastore does not. So
they are listed before a broker is left. Sources: PopMessageProcessor, PopReviveService.

    tag ck     {"t": topic, "q": queue, "c": group, "so": first queue offset, "pt": time of the pop,
                "it": invisible time, "n": messages, "d": their distances to the first one}
    tag ack    the same t, q, c, so, pt; "ao": the queue offset; tag bAck: "aol", a list of them
"""

from typing import NamedTuple

import msgspec

from hastore.record.codec import Record
from hastore.record.properties import find_property

REVIVE_PREFIX = "rmq_sys_REVIVE_LOG_"
_MOST = 32  # messages of a checkpoint, whose bits are those of a number


class _Body(msgspec.Struct):
    t: str
    q: int
    c: str
    so: int
    pt: int
    it: int = 0
    n: int = 0
    d: list[int] | None = None
    ao: int | None = None
    aol: list[int] | None = None


_decoder = msgspec.json.Decoder(_Body)
_Pop = tuple[str, int, str, int, int]  # topic, queue, group, first queue offset, time


class Popped(NamedTuple):
    """A checkpoint; `left` is changed by later acknowledgements."""

    topic: str
    queue_id: int
    group: str
    due_ms: int  # when the broker gives again what is left
    left: set[int]  # queue offsets


class Pops:
    """The checkpoints that wait; `take` sees the records of a log in their order."""

    def __init__(self) -> None:
        self._open: dict[_Pop, Popped] = {}

    def take(self, record: Record, *, waits: bool) -> Popped | None:
        """Return the checkpoint that a record is; None for an acknowledgement, and what is neither.

        `waits`: the record waits for its time. Else the broker handles the checkpoint now.
        """
        try:
            body = _decoder.decode(record.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        pop = body.t, body.q, body.c, body.so, body.pt
        tag = find_property(record.properties, b"TAGS")
        if tag == b"ck":
            if not waits:
                return self._open.pop(pop, None)
            given = range(body.n) if body.d is None else body.d
            left = {body.so + distance for distance in given[:_MOST]}
            # A message that waits for long is written more than once.
            one = Popped(body.t, body.q, body.c, body.pt + body.it, left)
            return self._open.setdefault(pop, one)
        known = self._open.get(pop)
        if known is not None and tag in (b"ack", b"bAck"):
            known.left.difference_update(body.aol or [], [] if body.ao is None else [body.ao])
        return None
