"""The section `security` of the configuration: what is read, and each refusal with its line."""

import os

import pytest

from hastore.config.checks import config_notes, remoting_refusal
from hastore.config.file import parse_config
from hastore.config.model import SecurityConfig, Wire
from hastore.errors import ConfigError

PAIR = """\
cluster: demo   # line 1
group: g0
node: 1
role: SYNC_MASTER
nodes:
  1: {api: "tcp://127.0.0.1:10911", ha: "127.0.0.1:10912", http: "127.0.0.1:10913"}
  2: {api: "tcp://127.0.0.1:10921", ha: "127.0.0.1:10922", http: "127.0.0.1:10923"}
store:
  root: data
security:   # line 10
"""


@pytest.fixture
def files(tmp_path):
    """The lines of the three files, from line 11 on."""
    for name, mode in (("ca.pem", 0o644), ("node.pem", 0o644), ("node.key", 0o600)):
        (tmp_path / name).write_text("PEM")
        (tmp_path / name).chmod(mode)
    return (
        f"  ca: {tmp_path}/ca.pem\n  certificate: {tmp_path}/node.pem\n  key: {tmp_path}/node.key\n"
    )


def parse(text):
    return parse_config(text, "x.yaml")


def refusal(text):
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert "\n" not in str(error.value)
    return str(error.value)


def beyond(name, text=PAIR):
    port = {"api": 10911, "ha": 10912, "http": 10913}[name]
    assert f"127.0.0.1:{port}" in text
    return text.replace(f"127.0.0.1:{port}", f"10.0.0.1:{port}")


def test_the_defaults_are_plain():
    assert parse(PAIR).security == SecurityConfig()
    assert not parse(PAIR).security.uses_tls


def test_every_key_is_read(files, tmp_path):
    text = f"  api: tls\n  ha: tls\n  http: tls\n  identities: {tmp_path}/who\n  audit_log: a.log\n"
    found = parse(PAIR + files + text + "  allow_plain_keys: true\n").security
    assert (found.api, found.ha, found.http) == (Wire.TLS,) * 3 and found.uses_tls
    assert found.key == f"{tmp_path}/node.key" and found.audit_log == "a.log"


def test_the_three_files_belong_together(files):
    lines = files.splitlines(keepends=True)
    text = refusal(PAIR + lines[0])
    assert text.startswith("x.yaml:11: security.ca: is given without certificate and key; give")
    assert "security.ca: is given without key" in refusal(PAIR + lines[0] + lines[1])
    assert "security.certificate: is given without ca" in refusal(PAIR + lines[1] + lines[2])


@pytest.mark.parametrize("name", ["api", "ha", "http"])
def test_tls_needs_a_certificate(name):
    text = refusal(PAIR + f"  {name}: tls\n")
    assert text.startswith(f"x.yaml:11: security.{name}: is tls, but there is no certificate")
    assert "hastore keys ca" in text


def test_the_files_are_readable_and_the_key_is_closed(files, tmp_path):
    os.chmod(tmp_path / "node.key", 0o640)
    text = refusal(PAIR + files)
    assert text == (
        f"x.yaml:13: security.key: {tmp_path}/node.key is open to other users; run chmod 600 "
        f"{tmp_path}/node.key"
    )
    os.chmod(tmp_path / "node.key", 0o600)
    parse(PAIR + files)
    os.remove(tmp_path / "node.pem")
    assert "x.yaml:12: security.certificate: " in refusal(PAIR + files)


@pytest.mark.parametrize("bad", ["api: TLS", "ha: 1", "htpp: tls", "ca: []", "key: ''"])
def test_wrong_values_are_named(bad):
    assert refusal(PAIR + f"  {bad}\n").startswith("x.yaml:11: security.")


def test_plain_keys_need_identities():
    text = refusal(PAIR + "  allow_plain_keys: true\n")
    assert text.startswith("x.yaml:11: security.allow_plain_keys: is true, but")


def test_ha_beyond_loopback(files):
    text = refusal(beyond("ha"))
    assert text.startswith("x.yaml:6: nodes.1.ha: 10.0.0.1 is beyond loopback and open to anyone")
    assert "security.ha: tls" in text and "ha.secret_file" in text
    parse(beyond("ha") + files + "  ha: tls\n")
    assert "beyond loopback" in refusal(beyond("ha") + files + "  api: tls\n")


def test_links_that_are_not_tamper_proof_are_named_at_the_start(files, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes or more")
    secret.chmod(0o600)
    assert config_notes(parse(beyond("ha") + f"ha: {{secret_file: {secret}}}\n")) == []
    assert config_notes(parse(beyond("ha") + files + "  ha: tls\n")) == []
    (note,) = config_notes(parse(beyond("ha") + "ha: {allow_unauthenticated: true}\n"))
    assert "not tamper-proof" in note and "set ha.secret_file, or security.ha: tls" in note


@pytest.mark.parametrize("name", ["api", "http"])
def test_what_is_open_to_strangers_is_named_at_the_start(files, name):
    """The flags were taken without a word, though the documents said that they are loud."""
    opened = "api: {allow_unauthenticated: true}\n"
    (note,) = config_notes(parse(beyond(name) + opened))
    assert note.startswith("api.allow_unauthenticated: true: whoever reaches this node can read")
    assert config_notes(parse(PAIR + opened)) == [], "on loopback"
    tls = files + f"  {name}: tls\n  identities: who\n"
    assert config_notes(parse(beyond(name) + tls + opened)) == []


def test_keys_without_tls_are_named_at_the_start():
    text = "  identities: who\n  allow_plain_keys: true\n"
    (note,) = config_notes(parse(beyond("api") + text))
    assert note.startswith("security.api is plain beyond loopback: ")
    assert config_notes(parse(PAIR + text)) == []


@pytest.mark.parametrize("name", ["api", "http"])
def test_clients_beyond_loopback_need_identities_and_tls(files, name):
    text = refusal(beyond(name) + files + f"  {name}: tls\n")
    assert f"nodes.1.{name}: 10.0.0.1 is beyond loopback and open to anyone" in text
    assert "security.identities" in text and "api.allow_unauthenticated: true" in text
    text = refusal(beyond(name) + files + "  ha: tls\n  identities: who\n")
    assert "10.0.0.1 is beyond loopback, but speaks without TLS" in text
    assert ("allow_plain_keys" in text) == (name == "api")
    parse(beyond(name) + files + f"  {name}: tls\n  identities: who\n")
    parse(beyond(name) + "api: {allow_unauthenticated: true}\n")


def test_plain_keys_allow_only_the_api():
    text = "  identities: who\n  allow_plain_keys: true\n"
    parse(beyond("api") + text)
    assert "nodes.1.http" in refusal(beyond("http") + text)


def test_rocketmqs_clients_beside_identities(files):
    """They must sign; beyond loopback they are subject to the same rules as all others."""
    identities = "  identities: who\n"
    assert remoting_refusal(parse(PAIR + identities)) is None
    enabled = "remoting: {enabled: true}\n"
    assert remoting_refusal(parse(PAIR + identities + enabled)) is None
    secured = beyond("api") + files + identities + "  api: tls\n"
    assert "remoting.enabled: true" in remoting_refusal(parse(secured))
    assert remoting_refusal(parse(secured + enabled)) is None
    plain = beyond("api") + identities
    assert "speaks without TLS" in refusal(plain + enabled)
    assert remoting_refusal(parse(plain + "  allow_plain_keys: true\n" + enabled)) is None
