"""The slave's side of replication: follow a master, check and append what it sends."""
