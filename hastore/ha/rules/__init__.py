"""The rules of replication, pure: counting acknowledgements, epochs, promotion."""
