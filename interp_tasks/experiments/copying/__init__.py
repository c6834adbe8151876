"""The experiment ``copying``."""
