"""Two demos that train a real model on a CPU, and check by program that it learned.

`fine_tune` teaches it to talk like a pirate (supervised), `reinforce` to tell stories of five words (RL).
Both are meant to be read and copied: they call the public API alone.
"""
