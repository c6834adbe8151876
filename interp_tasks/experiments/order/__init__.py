"""The experiment ``order``."""
