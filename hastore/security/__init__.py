"""TLS; who may do what: identities and their keys, the proof of a key, the audit log."""
