"""Which producer ids belong to an identity."""

import hashlib

from hastore.protocol.api import is_anothers, own_prefix
from hastore.record.properties import owner_of


def test_an_id_belongs_to_the_identity_whose_hash_it_begins_with():
    assert own_prefix("orders") == "own" + hashlib.sha256(b"orders").hexdigest()[:12]
    assert own_prefix("orders") != own_prefix("Orders")
    assert own_prefix("orders").isalnum()  # such ids are read fastest
    other = own_prefix("other").encode()
    for name in ("orders", "a", "n" * 64):
        own = own_prefix(name).encode()
        for producer_id in (own, own + b"0123456789abcdef"):
            assert is_anothers(producer_id, other)
            assert not is_anothers(producer_id, own)
            assert owner_of(producer_id) == own  # by which the window shares its room
    for anybodys in (b"", b"own", b"own0123456789a", b"OWN0123456789abc", b"0123456789abcdef",
                     b"owner-of-orders", b"sparkown0123456789ab", b"own0123456789AB"):  # fmt: skip
        assert not is_anothers(anybodys, other)
        assert owner_of(anybodys) == b""
