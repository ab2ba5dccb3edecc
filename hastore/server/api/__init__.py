"""The client API: connections, requests and replies."""
