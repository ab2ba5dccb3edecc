"""Consume queues: the records of each queue, in its order."""
