"""The fast path of a sweep: what its variants share is computed once."""
