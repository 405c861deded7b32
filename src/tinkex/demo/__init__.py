"""Two demos that train a real model on a laptop's CPU, and check by program that it learned.

`fine_tune` teaches it to talk like a pirate (supervised), `reinforce` to tell five-word stories (RL). Both
are meant to be read: what they call is the public API, and nothing else.
"""
