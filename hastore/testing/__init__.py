"""Real groups of hastore in the tests of an application; see docs/testing.md.

    def test_orders_survive_a_crash(hastore_group):
        with Producer(hastore_group.bootstrap) as producer:
            producer.send("orders", b"1").result()
        hastore_group.master.kill()
        hastore_group.promote(2)
"""

from hastore.testing.groups import Group, Node, group

__all__ = ["Group", "Node", "group"]
