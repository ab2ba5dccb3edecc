"""The producer: queue what is sent, send it in batches, settle the Futures."""
