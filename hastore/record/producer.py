"""The properties HS_PID and HS_SEQ, by which a producer numbers its messages.

A record that has both is stored once, however often its producer sends it (docs/client-protocol.md,
"Idempotence"). The master reads them from every record that it appends, and replay from every
record of the log. To save time, `producer_of` first tries two fast ways to read the usual forms.
"""

import re

from hastore.record.properties import find_property

PID = b"HS_PID"
SEQ = b"HS_SEQ"
PID_MARK = PID + b"\x01"  # a record without these bytes has no producer
MAX_PID_BYTES = 64
MAX_SEQ_DIGITS = 18
_THEN_SEQ = b"\x02" + SEQ + b"\x01"
_USUAL = re.compile(rb"(?:^|\x02)HS_PID\x01([^\x02]{1,64})\x02HS_SEQ\x01([0-9]{1,18})(?:\x02|$)")


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
    if usual is not None and properties.find(PID_MARK) == usual.start(1) - len(PID_MARK):
        return usual[1], int(usual[2])
    producer, number = find_property(properties, PID), find_property(properties, SEQ)
    if producer is None:
        return None
    if number is None or not number.isdigit() or len(number) > MAX_SEQ_DIGITS:
        raise ValueError("HS_SEQ is not a decimal number of 1 to 18 digits")
    if not 0 < len(producer) <= MAX_PID_BYTES:
        raise ValueError(f"HS_PID has {len(producer)} bytes; 1 to {MAX_PID_BYTES} are allowed")
    return producer, int(number)


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
