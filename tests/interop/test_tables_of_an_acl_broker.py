"""A RocketMQ 4.9.7 broker that asks who its clients are gives its tables to who signs for them."""

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.classic_key import read_credentials
from hastore.fs.filesystem import REAL
from hastore.server.broker_tables import TABLES, read_groups, read_topics
from hastore.server.broker_tables_service import BrokerTables
from hastore.service import raise_failure
from tests.interop.compare import rocketmq_sizes
from tests.interop.rocketmq_clients import broker_port

pytestmark = pytest.mark.full
ACCOUNTS = """\
accounts:
- {accessKey: hastore, secretKey: a-secret-of-hastore, admin: true}
"""


@pytest.mark.slow("a whole broker starts")
def test_who_signs_gets_the_tables(make_old_broker, ports, tmp_path):
    conf = tmp_path / "rocketmq_4_broker0.home" / "conf"
    conf.mkdir(parents=True)
    (conf / "plain_acl.yml").write_text(ACCOUNTS)
    peer, listen, name_server = make_old_broker(), broker_port(ports), ports.take()
    peer.call("namesrv.start", port=name_server)
    peer.call(
        "broker.start",
        store={**rocketmq_sizes(tmp_path / "rocketmq"), "haListenPort": ports.take()},
        broker={
            "namesrvAddr": f"127.0.0.1:{name_server}", "listenPort": listen, "aclEnable": True,
        },
    )  # fmt: skip
    key = tmp_path / "key.yml"
    service = BrokerTables(
        REAL, str(tmp_path / "store"), f"127.0.0.1:{listen}",
        lambda: read_credentials(str(key)) if key.exists() else None, SYSTEM_CLOCK,
        group="g0", follows=lambda: True, own_log=lambda: None, file_size=1 << 20,
        on_failure=raise_failure,
    )  # fmt: skip
    service.turn()
    assert "refuses request 21" in service.problem and not (tmp_path / "store").exists()
    for secret in ("another-secret-here", "a-secret-of-hastore"):
        key.write_text(f"accessKey: hastore\nsecretKey: {secret}\n")
        key.chmod(0o600)
        service.turn()
        assert (service.problem is None) == (secret == "a-secret-of-hastore"), service.problem
    raw = {table.file: (tmp_path / "store" / table.file).read_bytes() for table in TABLES}
    topics, left_out = read_topics(raw["config/topics.json"])
    assert "rocketmq" in {one.name for one in topics} and not left_out  # the broker's own topic
    assert not read_groups(raw["config/subscriptionGroup.json"]).left_out
