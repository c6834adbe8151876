"""The experiment ``ablation``."""
