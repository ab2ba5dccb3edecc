"""`hastore flip` in mode dledger, and how it finds a file: what it refuses, and says then."""

import pytest
import yaml

from hastore.cli import group_files, planned_flip
from hastore.client.messages import NodeInfo
from hastore.errors import HastoreError, NotAuthenticatedError, UsageError
from tests.cli.kit import hastore


class Trio:
    """Three nodes as their statuses tell, of which node 1 leads; `asked` are the transfers."""

    def __init__(self, folder):
        addresses = {
            n: {"api": f"tcp://127.0.0.1:{7000 + n}", "ha": f"127.0.0.1:{7100 + n}",
                "http": f"127.0.0.1:{7200 + n}"}
            for n in (1, 2, 3)
        }  # fmt: skip
        self.files, self.leader, self.members, self.asked = {}, 1, [1, 2, 3], []
        self.alive, self.in_sync, self.hidden = {1, 2, 3}, True, set()
        self.failure, self.full = None, False
        for number in addresses:
            path = self.files[number] = folder / f"node{number}.yaml"
            settings = {
                "cluster": "c", "group": "g", "node": number, "mode": "dledger",
                "nodes": addresses, "store": {"root": str(folder / f"store{number}")},
            }  # fmt: skip
            path.write_text(yaml.safe_dump(settings))

    def status(self, config, number, timeout_s):
        if number not in self.alive:
            return None
        leads, near = number == self.leader, self.in_sync
        slaves = [
            {"node": n, "in_sync": self.in_sync, "full": self.full, "lag_entries": 0 if near else 5}
            for n in (1, 2, 3)
            if leads and n != number and n in self.alive
        ]
        hidden = number in self.hidden
        return {
            "node": number, "cluster": "c", "group": "g", "mode": "dledger", "term": 4, "epoch": 4,
            "leader": self.leader if self.leader in self.alive else None, "members": self.members,
            "role": "LEADER" if leads else "FOLLOWER", "writable": leads, "max_offset": 9,
            "slaves": slaves,
            "config": f"/elsewhere/node{number}.yaml" if hidden else str(self.files[number]),
        }  # fmt: skip

    def request(self, path, command, node, patience_s):
        self.asked.append((path, command, node))
        if self.failure is not None:
            raise HastoreError(self.failure)
        self.leader = node


@pytest.fixture
def trio(tmp_path, monkeypatch):
    made = Trio(tmp_path)
    monkeypatch.setattr(group_files, "ask_own_status", made.status)
    monkeypatch.setattr(planned_flip, "request", made.request)
    monkeypatch.setattr(group_files, "POLL_S", 0.0)
    return made


def flip(trio, to, file=2):
    done = hastore("flip", "-c", str(trio.files[file]), "--to", str(to), "--timeout", "0.05")
    return done.returncode, done.stdout, done.stderr


def test_the_leaders_file_gets_the_request(trio):
    code, text, problems = flip(trio, 3)
    assert code == 0, problems
    assert trio.asked == [(str(trio.files[1]), "transfer", 3)] and trio.leader == 3
    assert "node 3 leads term 4" in text
    assert flip(trio, 3)[0] == 0 and len(trio.asked) == 1, "already"


@pytest.mark.parametrize(("preferred", "to", "said"), [(1, 3, True), (3, 3, False)])
def test_it_says_that_a_preferred_leader_leads_again(trio, preferred, to, said):
    """Who takes the line "node 3 leads" for the end of it stops the leader, some seconds later."""
    for path in trio.files.values():
        settings = yaml.safe_load(path.read_text())
        settings["dledger"] = {"preferred_leader": preferred}
        path.write_text(yaml.safe_dump(settings))
    code, text, problems = flip(trio, to)
    assert code == 0, problems
    assert ("node 1 is the preferred leader" in text) is said
    assert trio.leader == 3


def no_member(trio):
    trio.members = [1, 2]


def gone(trio):
    trio.alive.discard(3)


def headless(trio):
    trio.alive.discard(1)


def behind(trio):
    trio.in_sync = False


def full(trio):
    trio.in_sync, trio.full = False, True


def elsewhere(trio):
    trio.hidden = {1}


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [(no_member, 2, "the members are 1, 2"), (gone, 1, "start it first"),
     (headless, 1, "no node that answers leads"), (behind, 1, "5 entries behind"),
     (full, 1, "node 3 has a full disk"),
     (elsewhere, 2, "run `hastore flip -c /elsewhere/node1.yaml --to 3` there")],
)  # fmt: skip
def test_what_is_refused_before_anything_is_asked(trio, fault, code, text):
    fault(trio)
    found, _, problems = flip(trio, 3)
    assert found == code and text in problems and problems.count("\n") == 1
    assert "nothing was changed" in problems or code == 2
    assert trio.asked == []


def test_a_refused_transfer_says_who_leads(trio):
    trio.failure = "REFUSED: node 3 lacks too much"
    code, _, problems = flip(trio, 3)
    assert code == 1 and "node 3 lacks too much; node 1 leads now; nothing is lost" in problems


@pytest.mark.parametrize("kind", [NotAuthenticatedError, UsageError])
def test_a_node_that_refuses_after_the_request_leaves_no_doubt_of_the_state(
    trio, monkeypatch, kind
):
    def status(config, number, timeout_s):
        if trio.leader == 3:
            raise kind("node 3 does not know `ops`")
        return trio.status(config, number, timeout_s)

    monkeypatch.setattr(group_files, "ask_own_status", status)
    code, _, problems = flip(trio, 3)
    assert code == 1 and "node 3 does not know `ops`; who leads now is not known" in problems
    assert "nothing is lost: run `hastore flip" in problems


class Asked:
    """An Admin that says these statuses."""

    def __init__(self, *statuses):
        self._statuses = statuses

    def __call__(self, _addresses):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def nodes(self):
        return [NodeInfo(f"tcp://h:{n}", one) for n, one in enumerate(self._statuses)]


def test_without_a_file_the_nodes_name_theirs(trio, monkeypatch):
    def node(number, file, group="g"):
        return {"node": number, "cluster": "c", "group": group, "config": file}

    def found(*statuses):
        monkeypatch.setattr(planned_flip, "Admin", Asked(*statuses))
        done = hastore("flip", "--bootstrap", "127.0.0.1:1", "--to", "3", "--timeout", "5")
        return done.returncode, done.stderr

    one, three = str(trio.files[1]), str(trio.files[3])
    code, problems = found(node(1, "/elsewhere"), node(2, None))
    assert code == 2 and "no node's file is on this machine" in problems
    code, problems = found(node(1, one), node(3, three, "other"))
    assert code == 2 and "several groups" in problems
    assert found(node(1, one), node(3, "/elsewhere"))[0] == 0 and trio.leader == 3
    assert planned_flip.find_file("127.0.0.1:1", 1) == one
