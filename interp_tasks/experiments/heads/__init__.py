"""The experiment ``heads``."""
