"""Modular arithmetic: one modulus (Nanda et al. 2023), or many primes at once (Syrkis & Søgaard 2024)."""

from tasks.modular_arithmetic.one_modulus import ModularAddition, ModularMultiplication
from tasks.modular_arithmetic.remainders import Miiii
from tasks.modular_arithmetic.table import ArithmeticModelSettings, ModularTask, is_prime, primes_below

__all__ = ["ArithmeticModelSettings", "Miiii", "ModularAddition", "ModularMultiplication", "ModularTask"]
__all__ += ["is_prime", "primes_below"]
