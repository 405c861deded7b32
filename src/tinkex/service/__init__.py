"""WHO ANSWERS: sessions, runs, futures, checkpoints, and what is done when. No HTTP, no torch."""
