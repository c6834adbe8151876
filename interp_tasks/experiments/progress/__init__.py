"""The experiment ``progress``."""
