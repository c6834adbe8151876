"""The experiment ``fourier``."""
