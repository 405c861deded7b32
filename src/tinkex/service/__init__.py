"""The control plane: sessions, runs, futures, checkpoints and scheduling. Knows no HTTP and no torch."""
