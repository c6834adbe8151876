"""Modular arithmetic: one modulus (Nanda et al. 2023), or many primes at once (Syrkis & Søgaard 2024)."""

from tasks.modular_arithmetic.modular_task_base import (
    ArithmeticModelSettings,
    ModularTask,
    is_prime,
    primes_below,
)
from tasks.modular_arithmetic.one_modulus import ModularAddition, ModularMultiplication
from tasks.modular_arithmetic.prime_remainders import Miiii

__all__ = ["ArithmeticModelSettings", "Miiii", "ModularAddition", "ModularMultiplication", "ModularTask"]
__all__ += ["is_prime", "primes_below"]
