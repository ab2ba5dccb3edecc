"""A client's connections to the nodes: by sockets of its own, or through libzmq."""
