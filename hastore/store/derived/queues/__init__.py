"""Consume queues: the places of each queue's records in the log."""
