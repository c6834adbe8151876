"""The experiment ``detector``."""
