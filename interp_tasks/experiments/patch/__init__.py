"""The experiment ``patch``."""
