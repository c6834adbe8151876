"""The experiment ``demo``."""
