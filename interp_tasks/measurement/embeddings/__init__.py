"""Embeddings as tables, and how they are arranged."""
