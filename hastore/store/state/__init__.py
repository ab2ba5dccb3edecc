"""The store's small files: limits, replay's progress, RocketMQ's checkpoint, abort and lock."""
