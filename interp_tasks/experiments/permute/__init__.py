"""The experiment ``permute``."""
