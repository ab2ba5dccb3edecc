"""The consumer: fetch from replicas, keep positions."""
