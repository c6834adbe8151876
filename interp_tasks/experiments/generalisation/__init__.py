"""The experiment ``generalisation``."""
