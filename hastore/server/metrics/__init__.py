"""What /metrics shows, in the text format of Prometheus."""
