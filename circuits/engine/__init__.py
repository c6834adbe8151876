"""The fast path of a sweep, which computes once what its variants share."""
