"""The door: HTTP in front of a service."""
