"""Roles and addresses in ZooKeeper (docs/operations.md, "Roles in ZooKeeper").

`/hastore/<cluster>/<group>/<node>` holds one JSON object for each node of a group. A node follows
the role in its own object (`node_registry.py`); clients learn the nodes' addresses from the objects
of the group (`group_watch.py`). Only `session.py` uses kazoo.
"""
