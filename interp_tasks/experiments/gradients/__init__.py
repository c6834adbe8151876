"""The experiment ``gradients``."""
