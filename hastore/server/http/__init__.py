"""The HTTP port: /status, /metrics and /healthz."""
