"""The experiment ``embeddings``."""
