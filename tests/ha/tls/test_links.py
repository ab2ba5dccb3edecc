"""HA links under TLS, on real sockets: what goes through, and how certificates are replaced."""

import os
import pathlib

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import AckPoint, Role
from hastore.errors import AuthenticationError
from hastore.ha.hello.peer import call
from hastore.ha.master.group_transfer import Need
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_socket import TlsSocket
from tests.ha.nodes import wait_for
from tests.protocol.test_hello import make_hello
from tests.security.pki import Pki

SECRET = b"sixteen bytes or more"


def follow(master, slave):
    slave.follow()
    wait_for(lambda: slave.linked and slave.store.max_offset == master.store.max_offset, "the copy")


def over_tls(master):
    """Whether every stream of the master's slaves is under TLS."""
    streams = [c for c in master.ha.accepted.all() if c.streaming]
    return bool(streams) and all(isinstance(one.sock, TlsSocket) for one in streams)


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("ack_point", list(AckPoint))
def test_a_group_replicates_catches_up_and_flips(make_group, pki, secret, ack_point):
    group = make_group(3, ha={"ack_point": ack_point}, store={"commitlog_file_size": 4 << 20})
    one, two, three = (
        group.start(n, secret=secret, tls=pki.contexts(n), role=Role.SYNC_MASTER) for n in (1, 2, 3)
    )
    one.promote()
    for _ in range(9):  # frames of up to 1 MiB, over the end of a file
        one.put(os.urandom(700_000))
    for slave in (two, three):
        follow(one, slave)
    assert over_tls(one)
    for size in (1, 1_000, 100_000, 200_000, 1_000_000):
        outcome, level = one.put_confirmed(os.urandom(size))
        assert outcome == "PUT_OK" and level.startswith("SYNC_")
    assert one.put_confirmed(*[os.urandom(300)] * 500)[0] == "PUT_OK"
    wait_for(lambda: two.bytes() == three.bytes() == one.bytes(), "equal logs")

    three.unfollow()
    one.put_confirmed(*[os.urandom(90_000)] * 30)  # node 3 lacks 2.7 MB, which a COPY brings
    two.unfollow()
    three.promote()
    assert one.superseded and three.bytes() == two.bytes()
    for slave in (one, two):
        follow(three, slave)
    assert three.put_confirmed(b"last", need=Need.SLAVES)[0] == "PUT_OK"
    wait_for(lambda: two.bytes() == one.bytes() == three.bytes(), "equal logs")


def test_a_slave_that_reads_slowly_gets_every_byte(make_group, pki, monkeypatch):
    """The kernel takes only a part of what is pushed; the rest goes first, and nothing is lost."""
    group = make_group(2, store={"commitlog_file_size": 16 << 20})
    one, two = (group.start(n, tls=pki.contexts(n), role=Role.ASYNC_MASTER) for n in (1, 2))
    short = []
    send = TlsSocket.sendmsg

    def sendmsg(self, parts, *options):
        sent = send(self, parts, *options)
        short.append(sent < sum(map(len, parts)))
        return sent

    monkeypatch.setattr(TlsSocket, "sendmsg", sendmsg)
    one.promote()
    one.put(b"a")
    follow(one, two)
    with two.member.gate.lock:  # the slave cannot append
        while not any(short):
            one.put(os.urandom(100_000))
            assert one.store.max_offset < 200 << 20
        for _ in range(30):
            one.put(os.urandom(100_000))
    wait_for(lambda: two.bytes() == one.bytes(), "equal logs")
    for _ in range(100):
        one.put(os.urandom(3_000))
    wait_for(lambda: two.bytes() == one.bytes(), "equal logs")


def test_the_ca_is_replaced_without_a_stop(make_group, pki, tmp_path, monkeypatch):
    """Both CAs in ca.pem, new certificates, then the new CA alone, as docs/security.md says."""
    monkeypatch.setattr("hastore.security.tls_contexts.CHECK_MS", 0.0)
    group = make_group(2)
    one, two = (group.start(n, tls=pki.contexts(n), role=Role.SYNC_MASTER) for n in (1, 2))
    one.promote()
    one.put(b"a")
    follow(one, two)
    new = Pki(tmp_path / "new", "new CA")
    files = {number: new.node(pki.name(number)) for number in (1, 2)}

    def works():
        before = one.ha.accepted.all()
        two.client.drop_link()
        wait_for(lambda: one.ha.accepted.all() not in ([], before) and two.linked, "a new link")
        assert one.put_confirmed(b"goes on")[0] == "PUT_OK"

    old_ca, new_ca = pathlib.Path(pki.ca).read_bytes(), pathlib.Path(new.ca).read_bytes()
    pathlib.Path(pki.ca).write_bytes(old_ca + new_ca)
    works()
    for number in (2, 1):
        in_force = (one, two)[number - 1].member.tls.files
        os.replace(files[number].key, in_force.key)
        os.replace(files[number].certificate, in_force.certificate)
        works()
    pathlib.Path(pki.ca).write_bytes(new_ca)
    works()
    for node in (one, two):
        assert node.member.tls.problems() == []
    late = pki.node(pki.name(2), stem="late")  # signed by the old CA
    stolen = TlsContexts(TlsFiles(pki.ca, late.certificate, late.key))
    with pytest.raises(AuthenticationError, match="another CA has signed it"):
        call(one.address, make_hello(), None, SYSTEM_CLOCK, 20_000, stolen)


def test_certificates_are_replaced_while_links_live(make_group, pki, monkeypatch):
    monkeypatch.setattr("hastore.security.tls_contexts.CHECK_MS", 0.0)
    group = make_group(2)
    tls = {n: pki.contexts(n, days=30) for n in (1, 2)}
    one, two = (group.start(n, tls=tls[n], role=Role.SYNC_MASTER) for n in (1, 2))
    one.promote()
    one.put(b"a")
    follow(one, two)
    link = one.ha.accepted.all()
    ends = []
    for days in (60, 90):
        for n in (1, 2):
            pki.node(pki.name(n), days=days)
        assert one.put_confirmed(b"during")[0] == "PUT_OK"
        assert one.ha.accepted.all() == link  # the link goes on
        two.client.drop_link()
        wait_for(lambda old=link: one.ha.accepted.all() not in ([], old), "a new link")
        wait_for(lambda: two.linked)
        link = one.ha.accepted.all()
        assert one.put_confirmed(b"after")[0] == "PUT_OK"
        streams = [c for c in one.ha.accepted.all() if c.streaming]
        ends.append(streams[0].sock.peer.not_after_s)
    assert ends[1] - ends[0] == pytest.approx(30 * 86_400, abs=600)
    wait_for(lambda: two.bytes() == one.bytes(), "equal logs")
