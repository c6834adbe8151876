"""The experiment ``probe``."""
