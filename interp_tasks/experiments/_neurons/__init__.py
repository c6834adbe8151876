"""The experiment ``neurons``."""
