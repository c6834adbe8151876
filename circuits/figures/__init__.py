"""Figures of frames and arrays. Nothing here knows a result."""
