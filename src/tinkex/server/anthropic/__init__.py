"""Anthropic-compatible endpoints under /v1/messages."""
