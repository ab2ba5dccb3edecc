"""The parts of a record that are text: properties and topics.

Properties are stored as `name 0x01 value 0x02`, repeated; RocketMQ 4.9 omits the final 0x02.

A record that has both HS_PID and HS_SEQ is stored once, however often its producer sends it
(docs/client-protocol.md, "Idempotence"). The master reads them from every record that it appends,
and replay from every record of the log. To save time, `producer_of` first tries two fast ways to
read the usual forms.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from hastore.errors import MessageIllegalError
from hastore.record.hashes import java_hash_code
from hastore.record.layout import FLAG_INNER_BATCH, MAX_PROPERTIES_BYTES

# In a record that a client puts; each is an entry of the key index. A message of the trace of
# RocketMQ's clients has the ids and the keys of all messages that it is about: of up to 1,000.
MAX_KEYS = 2_048
FEW_KEYS = 64  # most records have fewer
NAME_END = "\x01"
VALUE_END = "\x02"
MAX_CREATED_TOPIC = 127  # characters in the name of a topic that a client creates
MAX_GROUP_TOPIC = 255  # the same, of a group's retries and of its dead letters
# Names that hastore sets in a message besides the user's own: its producers, and the master that
# delivers a delayed message.
PRODUCER_PROPERTIES = frozenset(("KEYS", "TAGS", "HS_PID", "HS_SEQ", "HS_DELAYED", "HS_NULL"))
# Of a message with an empty body: its value is null, as Kafka's tombstones, and not empty.
NULL = "HS_NULL"
# Names that RocketMQ's clients and brokers use: those that RocketMQ 5.3.3 refuses in a user's
# properties (MessageConst.STRING_HASH_SET), and those that it sets all the same.
ROCKETMQ_PROPERTIES = frozenset(
    (
        "1ST_POP_TIME ARRIVE_TIME BORN_TIMESTAMP BUYER_ID CLUSTER CONSUME_START_TIME "
        "CORRECTION_FLAG CORRELATION_ID DELAY DLQ_ORIGIN_MESSAGE_ID DLQ_ORIGIN_TOPIC DUP_INFO "
        "EXTEND_UNIQ_INFO INNER_MULTI_QUEUE_OFFSET INSTANCE_ID KEYS MAX_OFFSET "
        "MAX_RECONSUME_TIMES MIN_OFFSET MQ2_FLAG MSG_REGION MSG_TYPE ORIGIN_MESSAGE_ID PGROUP "
        "POP_CK POP_CK_OFFSET PUSH_REPLY_TIME REAL_QID REAL_TOPIC RECONSUME_TIME REPLY_TO_CLIENT "
        "RETRY_TOPIC TAGS TIMER_DELAY_LEVEL TIMER_DELAY_MS TIMER_DELAY_SEC TIMER_DELIVER_MS "
        "TIMER_DEL_UNIQKEY TIMER_DEQUEUE_MS TIMER_ENQUEUE_MS TIMER_OUT_MS TIMER_ROLL_TIMES "
        "TRACE_ON TRANSFER_FLAG TRAN_MSG TRAN_PREPARED_QUEUE_OFFSET TTL UNIQ_KEY WAIT __BORNHOST "
        "__CRC32# CHECK_IMMUNITY_TIME_IN_SECONDS INNER_BASE INNER_MULTI_DISPATCH INNER_NUM "
        "PROPERTY_FORWARD_QUEUE_ID REDIRECT TRACE_CONTEXT TRANSACTION_CHECK_TIMES __SHARDINGKEY "
        "__transactionId__"
    ).split()
)
# Of these: what nodes add to a message that is delayed or sent back, of whatever producer
# (record/delays.py). Such a message has one of the marks.
NODE_PROPERTIES = frozenset(
    ("DELAY", "ORIGIN_MESSAGE_ID", "REAL_QID", "REAL_TOPIC", "RETRY_TOPIC", "WAIT")
)
NODE_MARKS = frozenset(("HS_DELAYED", "ORIGIN_MESSAGE_ID"))
_BUCKETS = 128  # of RocketMQ's maps of properties
_CACHED_NAMES = 32  # the order of more names is not remembered
_TOPIC = re.compile(r"[A-Za-z0-9_%|-]{1,127}|%(RETRY|DLQ)%[A-Za-z0-9_%|-]{1,248}", re.ASCII)


def encode_properties(pairs: Sequence[tuple[str, str]], *, as_stored: bool = False) -> bytes:
    """Join pairs of name and value as RocketMQ 5.3 does, with a final 0x02.

    `as_stored`: of a message of RocketMQ's clients, whose values may hold 0x01: a name ends at the
    first one. Raises MessageIllegalError if another name or value holds a separator, or the result
    is too long.
    """
    raw = "".join([f"{name}\x01{value}\x02" for name, value in pairs]).encode(
        "utf-8", "surrogateescape"
    )
    if as_stored:
        is_split = any(NAME_END in name for name, _ in pairs)
    else:
        is_split = raw.count(b"\x01") != len(pairs)
    if is_split or raw.count(b"\x02") != len(pairs):
        raise MessageIllegalError("a property's name or value holds a separator (0x01 or 0x02)")
    if len(raw) > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(f"{len(raw)} bytes of properties; at most {MAX_PROPERTIES_BYTES}")
    return raw


def is_well_formed(raw: bytes) -> bool:
    """Whether raw properties, of which there are some, can be `name 0x01 value 0x02` pairs.

    As in RocketMQ, a value may hold 0x01.
    """
    return raw[-1:] == b"\x02" and raw.count(b"\x01") >= raw.count(b"\x02")


def decode_properties(raw: bytes) -> list[tuple[str, str]]:
    """Return pairs of name and value in the stored order; the final 0x02 may be missing.

    A piece without 0x01 is no property, and is omitted. Empty values are kept.
    """
    text = raw.decode("utf-8", "surrogateescape")
    pairs = []
    for piece in text.split(VALUE_END):
        name, separator, value = piece.partition(NAME_END)
        if separator:
            pairs.append((name, value))
    return pairs


def in_java_order(properties: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the properties in the order in which RocketMQ's broker writes them.

    That is the order of a Java HashMap with 128 buckets, into which they were put in this order.
    """
    pairs = list(properties.items())
    places = _java_places if len(pairs) <= _CACHED_NAMES else _java_places.__wrapped__
    return [pairs[place] for place in places(tuple(properties))]


@lru_cache(512)
def _java_places(names: tuple[str, ...]) -> list[int]:
    buckets = _BUCKETS
    while len(names) > buckets * 3 // 4:
        buckets *= 2

    def bucket(place: int) -> int:
        code = java_hash_code(names[place]) & 0xFFFFFFFF
        return (code ^ code >> 16) & (buckets - 1)

    return sorted(range(len(names)), key=bucket)


def find_property(raw: bytes, name: bytes) -> bytes | None:
    """Return the value of the first property with this name, without decoding the others."""
    wanted = name + b"\x01"
    at = raw.find(wanted)
    while at > 0 and raw[at - 1] != 2:  # found only the end of a longer name
        at = raw.find(wanted, at + 1)
    if at < 0:
        return None
    start = at + len(wanted)
    stop = raw.find(b"\x02", start)
    return raw[start:] if stop < 0 else raw[start:stop]


def stored_tags(properties: bytes) -> bytes | None:
    """Return the value of TAGS, None without it; of several the last that is not empty counts.

    So RocketMQ reads them. A batch's own properties come behind those of each of its messages.
    """
    found = find_property(properties, b"TAGS")
    if properties.count(b"TAGS\x01") > 1:
        for piece in properties.split(b"\x02"):
            if piece.startswith(b"TAGS\x01"):
                found = piece[5:] or found
    return found


def keys_of(properties: bytes) -> list[bytes]:
    """Return the keys of a record for the key index: UNIQ_KEY, then each word of KEYS.

    If a name occurs twice, its last value that is not empty counts, as in RocketMQ.
    """
    unique: bytes | None = None
    keys: bytes | None = None
    for piece in properties.split(b"\x02"):
        if piece.startswith(b"KEYS\x01"):
            keys = piece[5:] or keys
        elif piece.startswith(b"UNIQ_KEY\x01"):
            unique = piece[9:] or unique
    found = [unique] if unique else []
    if keys:
        found += [key for key in keys.split(b" ") if key]
    return found


def words_of_keys(properties: bytes) -> int:
    """Return the number of words of a KEYS property if there are more than MAX_KEYS, else 0.

    Each space counts, also one beside another: words are found by reading all of them.
    """
    if properties.count(b" ") < MAX_KEYS:
        return 0
    pieces = [piece for piece in properties.split(b"\x02") if piece.startswith(b"KEYS\x01")]
    words = max((piece.count(b" ") + 1 for piece in pieces), default=0)
    return words if words > MAX_KEYS else 0


def inner_count(raw: bytes) -> int:
    """Return the number of messages in an inner batch, by its properties; 1 without that number."""
    count = find_property(raw, b"INNER_NUM") or b""
    return max(1, int(count)) if count.isdigit() and len(count) <= 5 else 1  # an int16


def offsets_taken(sys_flag: int, raw: bytes) -> int:
    """Return how many queue offsets a record takes: an inner batch has one for each message."""
    return inner_count(raw) if sys_flag & FLAG_INNER_BATCH else 1


def check_topic(topic: str) -> None:
    """Raise MessageIllegalError, which states the rule, if a client may not create this topic.

    Groups of RocketMQ have longer names than topics, and so have the topics of their retries.
    """
    if not _TOPIC.fullmatch(topic):
        dots = ", and no dots as in Kafka's: write - or _ for a dot" if "." in topic else ""
        shown = topic if len(topic) <= 40 else topic[:40] + "..."
        raise MessageIllegalError(
            f"topic {shown!r}: 1 to {MAX_CREATED_TOPIC} characters of A-Za-z0-9_%|- are allowed"
            + dots
        )


def without_properties(properties: bytes, names: Collection[bytes]) -> bytes:
    """Return a record's raw properties without those of these names."""
    pieces = properties.split(b"\x02")
    return b"\x02".join([one for one in pieces if one.partition(b"\x01")[0] not in names])


PROPERTIES_CRC = "__CRC32#"  # of brokers with `enabledAppendPropCRC`, over all of a record
_CRC = PROPERTIES_CRC.encode()


def without_crc(properties: bytes) -> bytes:
    """Return the raw properties of another record than the one that they were made for."""
    return without_properties(properties, (_CRC,)) if _CRC in properties else properties


PID = b"HS_PID"
SEQ = b"HS_SEQ"
PID_MARK = PID + b"\x01"  # a record without these bytes has no producer
MAX_PID_BYTES = 64
MAX_SEQ_DIGITS = 18
_SEQ_MARK = SEQ + b"\x01"
_THEN_SEQ = b"\x02" + _SEQ_MARK
_USUAL = re.compile(rb"(?:^|\x02)HS_PID\x01([^\x02]{1,64})\x02HS_SEQ\x01([0-9]{1,18})(?:\x02|\Z)")


def producer_of(properties: bytes) -> tuple[bytes, int] | None:
    """Return (HS_PID, HS_SEQ) of a record's raw properties; None if it has no HS_PID.

    Raises ValueError unless HS_PID has 1 to 64 bytes and HS_SEQ is a decimal number of 1 to 18
    digits.
    """
    sole = sole_producer(properties)
    if sole is not None:
        return sole[0], int(sole[1])
    if PID_MARK not in properties:
        return None
    usual = _USUAL.search(properties)
    if (
        usual is not None
        and properties.find(PID_MARK) == usual.start(1) - len(PID_MARK)
        and properties.find(_SEQ_MARK) == usual.start(2) - len(_SEQ_MARK)
    ):
        return usual[1], int(usual[2])
    producer, number = find_property(properties, PID), find_property(properties, SEQ)
    if producer is None:
        return None
    if number is None or not number.isdigit() or len(number) > MAX_SEQ_DIGITS:
        raise ValueError("HS_SEQ is not a decimal number of 1 to 18 digits")
    if not 0 < len(producer) <= MAX_PID_BYTES:
        raise ValueError(f"HS_PID has {len(producer)} bytes; 1 to {MAX_PID_BYTES} are allowed")
    return producer, int(number)


# The HS_PIDs of an identity begin so, as in protocol/api.py (`own_prefix`); its digits are its own.
_OWNED = re.compile(rb"own[0-9a-f]{12}")


def owner_of(producer: bytes) -> bytes:
    """Return the beginning of an HS_PID that belongs to one identity; b"" if it is anybody's."""
    found = _OWNED.match(producer)
    return b"" if found is None else found.group()


def sole_producer(properties: bytes) -> tuple[bytes, bytes] | None:
    """Return HS_PID and the digits of HS_SEQ if they are the only properties, in the usual form.

    None does not mean that there is no producer: `producer_of` reads every form.
    """
    if not properties.startswith(PID_MARK) or properties[-1] != 2:
        return None
    at = properties.find(_THEN_SEQ)
    producer, digits = properties[len(PID_MARK) : at], properties[at + len(_THEN_SEQ) : -1]
    if (
        at > 0
        and producer.isalnum()
        and len(producer) <= MAX_PID_BYTES
        and digits.isdigit()
        and len(digits) <= MAX_SEQ_DIGITS
    ):
        return producer, digits
    return None
