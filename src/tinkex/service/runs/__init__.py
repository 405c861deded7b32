"""A run's life: accepted requests, their order and execution, what survives a crash."""
