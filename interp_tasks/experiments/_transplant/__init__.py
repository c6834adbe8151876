"""The experiment ``transplant``."""
