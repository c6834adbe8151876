"""The experiment ``drops``."""
