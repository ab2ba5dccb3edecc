"""The master's side of replication: accept slaves, stream to them, count their reports."""
