"""A node in its group: its durable state, its write gate, its log as replication sees it."""
