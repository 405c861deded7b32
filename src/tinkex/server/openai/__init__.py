"""OpenAI-compatible endpoints under /v1."""
