"""The experiment ``algorithm``."""
