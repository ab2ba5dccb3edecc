"""What a node is in its group: its state, its write gate, its log as replication sees it."""
