"""The parts of a node in its group: durable state, write gate, and the log's interface."""
