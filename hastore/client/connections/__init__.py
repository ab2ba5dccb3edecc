"""A client's connections to the nodes: over plain sockets, or through libzmq."""
