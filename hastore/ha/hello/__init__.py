"""The HELLO exchange between nodes: ask, answer, survey the group."""
