"""The experiment ``weights``."""
