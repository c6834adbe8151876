"""The experiment ``curve``."""
