"""The producer: queue messages, send them in batches, settle their Futures."""
