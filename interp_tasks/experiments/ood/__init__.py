"""The experiment ``ood``."""
