"""The experiment ``data``."""
