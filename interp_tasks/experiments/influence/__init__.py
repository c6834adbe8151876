"""The experiment ``influence``."""
