"""The job `stats`: messages, bytes, latency and replication lag per topic and minute."""
