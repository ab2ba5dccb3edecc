"""The parts of `hastore demo` (`make run`): requirements, data, nodes, producer, proofs, Spark."""
