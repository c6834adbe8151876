"""The rules that say which frequencies are key, by name, and the share that makes a neuron follow one."""

from __future__ import annotations

from collections.abc import Mapping

from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice

#: Rules by name, with their usual number (a test holds them to those of ``circuits.fourier``).
RULES = {"noise": 0.05, "of-largest": 0.25, "above-mean": 1.0, "preferred": 0.0}
#: A neuron follows the frequency that explains more than this share of its variance.
THRESHOLD = 0.85


def read_rule(rule: str, rules: Mapping[str, float] = RULES) -> tuple[str, float]:
    """Returns a rule's name and number, from ``NAME`` or ``NAME=NUMBER``.

    Args:
        rules: those there are, with their usual numbers.

    Raises:
        UserError: for a rule there is not, for no number.
    """
    name, equals, text = rule.partition("=")
    check_choice("--rule", name, tuple(rules))
    try:
        number = float(text) if equals else rules[name]
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise UserError(f"--rule {rule}: after = comes a number from 0, such as {name}={rules[name]:g}")
    return name, number


def check_threshold(threshold: float) -> None:
    if not 0 <= threshold <= 1:
        raise UserError(f"--threshold {threshold:g}: give a share of the variance, from 0 to 1")
