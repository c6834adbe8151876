"""Readers of what users write for heads, positions, sites and so on; they import nothing slow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from circuits.model.components import COMPONENTS, PARTS
from circuits.model.sites import Site
from interp_tasks.errors import UserError
from interp_tasks.settings import SEED_END
from interp_tasks.texts import did_you_mean

SPLITS = ("train", "validation", "test")
#: One past the most examples or draws: beyond it the sizes of tensors overflow (``tasks.base`` has the same).
MAX_COUNT = 2**40
#: More draws than any interval or p-value of ours is worth.
MAX_DRAWS = 100_000
#: So many names are all listed in a refusal.
FEW_NAMES = 8
#: The word for one row per head.
EACH = "each"
#: The word for one row per layer, of all its heads.
EACH_LAYER = "each-layer"

LAYER = re.compile(r"\d{1,6}", re.ASCII)
POSITION = re.compile(r"-?\d{1,9}", re.ASCII)
WORD = re.compile(r"[A-Za-z_]\w*")


def check_choice(option: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        close = did_you_mean(value, choices)
        raise UserError(f"{option} {value!r}: {close}choose {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def unknown(option: str, value: str, known: Sequence[str], what: str) -> UserError:
    """Returns what to say of a name that there is not: the closest, and of few which there are."""
    from difflib import get_close_matches

    if len(known) <= FEW_NAMES:
        return UserError(
            f"{option} {value!r}: {did_you_mean(value, known)}the {what} are {', '.join(known)}; or write all"
        )
    close = get_close_matches(value, known, 3, 0) or known[:3]
    return UserError(
        f"{option} {value!r}: of {len(known)} {what} the closest are {', '.join(close)}; or write all"
    )


def united(spec: str) -> list[str]:
    """Returns the parts that commas and ``+`` unite into one row."""
    return re.split(r"[,+]", re.sub(r"\s+", "", spec))


def check_groups(groups: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    """Parses ``NAME=SPEC`` texts, or a mapping, into named groups of heads."""
    pairs = groups.items() if isinstance(groups, Mapping) else (spec.partition("=")[::2] for spec in groups)
    by_name: dict[str, str] = {}
    for name, heads in ((name.strip(), heads) for name, heads in pairs):
        if not name or not heads:
            raise UserError(f"--group {name + heads!r}: write NAME=HEADS, such as copying=0.1+2.3-5")
        if name in by_name or name in ("all", EACH) or re.match(r"layer \d+$|\d+\.\d", name):
            raise UserError(f"--group {name}={heads}: there is a row of that name already; choose another")
        by_name[name] = heads
    return by_name


def check_components(spec: str) -> str:
    """Normalises components of a model: no blanks, ``+`` between them; or ``each``."""
    if spec.strip().lower() == EACH:
        return EACH
    parts = united(spec)
    for part in parts:
        if part not in COMPONENTS:
            raise UserError(
                f"--components {spec!r}: no component {part!r}; choose from {', '.join(COMPONENTS)}, or {EACH}"
            )
    return "+".join(dict.fromkeys(parts))


def check_layers(
    layers: str | Iterable[int] | None, components: Sequence[str] = ()
) -> tuple[int, ...] | None:
    """Parses layers such as ``0,1``; ``None`` for all.

    Raises:
        UserError: in one line; also where none of the parts of a row in ``components`` belongs to a layer.
    """
    if layers is None:
        return None
    for row in components:
        parts = [part for name in row.split("+") if name != EACH for part in COMPONENTS[name]]
        if parts and not any(PARTS[part][0] for part in parts):
            raise UserError(f"--layers with --components {row}: it belongs to no layer; leave --layers out")
    if not isinstance(layers, str):
        return tuple(layers)
    parts = united(layers)
    if not all(LAYER.fullmatch(part) for part in parts):
        raise UserError(f"--layers {layers!r}: write layers counted from 0, such as 0,1")
    return tuple(dict.fromkeys(map(int, parts)))


def has_heads(site: str) -> bool:
    return Site.parse(site).kind.head_axis is not None


def check_draws(draws: int, option: str = "--draws") -> None:
    if draws < 1:
        raise UserError(f"{option} {draws}: at least one draw is needed")
    if draws > MAX_DRAWS:
        raise UserError(f"{option} {draws}: at most {MAX_DRAWS}")


def check_positions(option: str, spec: str) -> tuple[int, ...]:
    """Parses positions such as ``0,3`` or ``-1`` (the last), each once."""
    parts = [part.strip() for part in spec.split(",")]
    if not all(POSITION.fullmatch(part) for part in parts):
        raise UserError(f"{option} {spec!r}: write positions counted from 0, such as 0,1, or -1 for the last")
    return tuple(dict.fromkeys(map(int, parts)))


def parse_positions(spec: str | Iterable[int]) -> str | tuple[int, ...] | None:
    """Returns ``None`` for all, positions, or the name of a mask of the task's examples (``hidden``)."""
    if not isinstance(spec, str):
        return tuple(spec)
    if spec.strip().lower() == "all":
        return None
    if WORD.fullmatch(spec.strip()):
        return spec.strip()
    return check_positions("--positions", spec)


def check_keys(spec: Any, mode: str) -> tuple[int, ...] | None:
    """Parses key positions; only uniform attention is uniform *over* something."""
    if spec is None:
        return None
    if mode != "uniform":
        raise UserError(f"--keys goes with --mode uniform only, not with {mode}")
    return check_positions("--keys", spec) if isinstance(spec, str) else tuple(spec)


def check_kinds(kinds: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Returns the kinds that are asked for, in the order of those there are; all where none is."""
    for kind in kinds:
        check_choice("--kind", kind, known)
    return tuple(kind for kind in known if not kinds or kind in kinds)


def check_level(level: float) -> None:
    if not 0 < level <= 1:
        raise UserError(f"--level {level:g}: an accuracy above 0, at most 1")


def check_samples(samples: int | None) -> None:
    if samples is not None and samples < 1:
        raise UserError(f"--samples {samples}: at least one example is needed")
    if samples is not None and samples >= MAX_COUNT:
        raise UserError(f"--samples {samples}: more than memory can hold")


def check_seed(seed: int) -> None:
    if not 0 <= seed < SEED_END:
        raise UserError(f"--seed {seed}: a seed is a whole number from 0 to {SEED_END - 1}")


def called(name: str, limits: Mapping[str, Any]) -> str:
    """Returns the name of an edit for the table: ``uniform(keys=0,1)``, ``z(source=negated; positions=hidden)``."""
    parts = [
        f"{limit}={given if isinstance(given, (str, int, float)) else ','.join(map(str, given))}"
        for limit, given in limits.items()
        if given is not None
    ]
    return f"{name}({'; '.join(parts)})" if parts else name


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
