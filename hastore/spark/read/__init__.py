"""Read ranges of a store or of running nodes, and plan which."""
