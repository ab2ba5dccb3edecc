"""The rules of replication as pure functions: acknowledging, epochs, promotion, following."""
