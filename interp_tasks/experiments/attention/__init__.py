"""The experiment ``attention``."""
