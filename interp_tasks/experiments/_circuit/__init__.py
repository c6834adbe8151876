"""The experiment ``circuit``."""
