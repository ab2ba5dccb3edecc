"""The rules of replication. Pure: acknowledgements, epochs, promotion, following."""
