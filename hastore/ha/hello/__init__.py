"""The HELLO exchange between nodes: call a node, answer a call, survey the group."""
