"""The experiment ``primes``."""
