"""What users write for heads, positions and modes, checked before anything slow is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from interp_tasks.errors import UserError

MODES = ("uniform", "mean_pattern", "zero", "mean", "resample")
SPLITS = ("train", "validation", "test")
#: One past the largest seed: generators and the integer column of a table hold no more.
SEED_END = 2**63
#: The word for one row per head.
EACH = "each"

# The same grammar as circuits.heads, which cannot be asked without importing torch; a test compares the two.
HEAD = re.compile(r"\d{1,6}\.\d{1,6}(-\d{1,6})?|[Ll]\d{1,6}[Hh]\d{1,6}")
POSITION = re.compile(r"-?\d{1,9}")
WORD = re.compile(r"[A-Za-z_]\w*")


def check_choice(option: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise UserError(f"{option} {value!r}: choose {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def check_heads(spec: str) -> str:
    """A head spec, or ``each``, normalised: no blanks, ``+`` between its parts.

    Raises:
        UserError: for text that cannot name heads of any model.
    """
    text = re.sub(r"\s+", "", spec)
    if text.lower() in ("all", EACH):
        return text.lower()
    parts = re.split(r"[,+]", text)
    for part in parts:
        if not HEAD.fullmatch(part):
            raise UserError(
                f"--heads {spec!r}: cannot read {part!r}; write all, each, layer.head as in 0.1, a range as "
                "in 2.3-5, or several joined by + (counted from 0)"
            )
    return "+".join(parts)


def check_positions(option: str, spec: str) -> tuple[int, ...]:
    """Positions such as ``0,3`` or ``-1`` (the last)."""
    parts = [part.strip() for part in spec.split(",")]
    if not all(POSITION.fullmatch(part) for part in parts):
        raise UserError(f"{option} {spec!r}: write positions counted from 0, such as 0,1, or -1 for the last")
    return tuple(map(int, parts))


def check_queries(spec: str) -> str | tuple[int, ...] | None:
    """``None`` for all, positions, or the name of a mask that the task's examples carry (``hidden``)."""
    if spec.strip().lower() == "all":
        return None
    if WORD.fullmatch(spec.strip()):
        return spec.strip()
    return check_positions("--queries", spec)


def check_keys(spec: Any, mode: str) -> tuple[int, ...] | None:
    """Key positions; only uniform attention is uniform *over* something."""
    if spec is None:
        return None
    if mode != "uniform":
        raise UserError(f"--keys goes with --mode uniform only, not with {mode}")
    return check_positions("--keys", spec) if isinstance(spec, str) else tuple(spec)


def check_samples(samples: int | None) -> None:
    if samples is not None and samples < 1:
        raise UserError(f"--samples {samples}: at least one example is needed")


def check_seed(seed: int) -> None:
    if not 0 <= seed < SEED_END:
        raise UserError(f"--seed {seed}: a seed is a whole number from 0 to {SEED_END - 1}")


def intervention_name(mode: str, keys: Sequence[int] | None, queries: str | Sequence[int] | None) -> str:
    """What was done, for the table: ``uniform``, ``uniform(keys=0,1)``, ``zero(queries=hidden)``."""
    limits = []
    if keys is not None:
        limits.append(f"keys={','.join(map(str, keys))}")
    if queries is not None:
        limits.append(f"queries={queries if isinstance(queries, str) else ','.join(map(str, queries))}")
    return f"{mode}({'; '.join(limits)})" if limits else mode
