"""The experiment ``decoding``."""
