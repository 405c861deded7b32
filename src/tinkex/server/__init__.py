"""The HTTP server in front of a service."""
