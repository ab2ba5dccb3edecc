"""Frame and parse hastore's wire protocols: pure, bytes in, events out."""
