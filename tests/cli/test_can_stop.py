"""`hastore can-stop` beside what happens when the node is stopped all the same."""

import json

from hastore.testing import group
from tests.cli.kit import hastore


def ask(node):
    done = hastore("can-stop", "-c", str(node.config), "--json")
    found = json.loads(done.stdout)
    assert found["node"] == node.number
    assert done.returncode == {True: 0, False: 4, None: 1}[found["may_stop"]], done.stderr
    return found["may_stop"], found["why"]


def test_three_nodes_of_mode_classic():
    with group(nodes=3) as made:
        may, why = ask(made[1])
        assert may is False and f"hastore flip -c {made[2].config} --to 2` on node 2" in why
        may, why = ask(made[3])
        assert may is True and "needs 1 slaves in sync, and has 1 without node 3" in why
        made[3].stop()
        assert made.wait_master() is made[1], "what was promised"
        assert ask(made[3])[0] is True
        may, why = ask(made[2])
        assert may is False and "has 0 without node 2" in why
        made[1].kill()
        may, why = ask(made[2])
        assert may is None and "no master answers" in why


def test_a_master_alone_and_one_that_waits_for_nobody():
    with group(nodes=1) as made:
        may, why = ask(made[1])
        assert may is False and "no slave is in sync" in why
    with group() as pair:
        assert hastore("promote", "--async", "-c", str(pair[2].config)).returncode == 0
        pair.wait_in_sync()
        may, why = ask(pair[1])
        assert may is True and "waits for no slave" in why


def test_three_nodes_of_mode_dledger():
    with group("dledger") as made:
        leader = made.master
        one, other = (node for node in made if node is not leader)
        may, why = ask(leader)
        assert may is False and "hastore dledger transfer" in why
        assert ask(one)[0] is True
        one.stop()
        assert made.wait_master() is leader
        may, why = ask(other)
        assert may is False and "needs 2 of 3 members, and 1 are in sync" in why


def test_the_answer_for_people(tmp_path):
    with group(nodes=1) as made:
        done = hastore("can-stop", "-c", str(made[1].config))
        assert done.returncode == 4 and done.stdout.startswith("no: node 1 is the master")
    assert hastore("can-stop", "-c", str(tmp_path / "gone.yaml")).returncode == 2
