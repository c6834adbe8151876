"""The experiment ``lens``."""
