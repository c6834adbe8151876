"""Analyses of Syrkis and Søgaard 2024 (MIIII), remainders modulo many primes."""
