"""The experiment ``baseline``."""
