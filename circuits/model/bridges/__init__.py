"""Reads and writes the activations of TransformerLens bridges: `native` ones, and those around `huggingface` models."""
