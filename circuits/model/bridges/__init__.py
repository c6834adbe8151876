"""Hooks of TransformerLens bridges: native ones, and those around the models of Hugging Face."""
