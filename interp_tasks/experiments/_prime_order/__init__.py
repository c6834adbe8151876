"""The experiment ``prime_order``."""
