"""The consumer: fetch from replicas, commit positions."""
