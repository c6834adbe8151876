"""Parsers and checks of what users write for positions, sites, draws and so on; they import nothing slow."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from circuits.model.sites import Site
from interp_tasks.devices import check_device_name
from interp_tasks.errors import UserError
from tasks.errors import did_you_mean

DEVICE = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...", callback=check_device_name)]
SEED = Annotated[int, typer.Option("--seed", help="Draws the examples, resamples and intervals.")]
SPLITS = ("train", "validation", "test")
#: Metrics of a file of prompts: the answer's logit minus the wrong one's, and whether that is above 0.
PROMPT_METRICS = ("logit_difference", "accuracy")
#: More draws than any interval or p-value of ours is worth.
MAX_DRAWS = 100_000
#: So many names are all listed in a refusal.
FEW_NAMES = 8
#: Rules of key frequencies by name, with their usual number (a test holds them to those of ``circuits.fourier``).
RULES = {"noise": 0.05, "of-largest": 0.25, "above-mean": 1.0, "preferred": 0.0}
LEVEL = typer.Option("--level", help="Of an accuracy, above 0, at most 1.")
#: A neuron follows the frequency that explains more than this share of its variance.
THRESHOLD = 0.85

POSITION = re.compile(r"-?\d{1,9}", re.ASCII)
WORD = re.compile(r"[A-Za-z_]\w*")


def check_choice(option: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        close = did_you_mean(value, choices)
        raise UserError(f"{option} {value!r}: {close}choose {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def as_list(given: str | Iterable[str]) -> list[str]:
    """Returns one name, or several, as a list."""
    return [given] if isinstance(given, str) else list(given)


def unknown_name_error(option: str, value: str, known: Iterable[str], has: str) -> UserError:
    """Returns what to say of a name that there is not: the closest, and after ``has`` the first that there are."""
    names = list(known)
    few = names if len(names) <= FEW_NAMES else [*names[:FEW_NAMES], "..."]
    return UserError(f"{option} {value!r}: {did_you_mean(value, names)}{has} {', '.join(few)}")


def chosen_names(known: Collection[str], names: Collection[str], option: str, owner: Any) -> list[str]:
    """Returns the names chosen of a task's or a checkpoint's, each known to it and once; all where none is chosen."""
    for name in names:
        if name not in known:
            raise unknown_name_error(option, name, known, f"of {owner.name} there are")
    return list(dict.fromkeys(names or known))


def split_at_commas_or_plus(spec: str) -> list[str]:
    """Returns the parts that commas and ``+`` unite into one row."""
    return re.split(r"[,+]", re.sub(r"\s+", "", spec))


def site_has_heads(site: str) -> bool:
    return Site.parse(site).kind.head_axis is not None


def layer_of_site(site: str) -> int | None:
    """Returns the layer that a site is named in: 1 of ``z.1``, ``None`` of ``z``."""
    return Site.parse(site).layer


def check_layer(option_text: str, layer: int | None, sizes: Any, name: str) -> None:
    """Refuses a layer, ``option_text`` as an option with its value, that a model of these sizes does not have."""
    if layer is not None and layer >= sizes.n_layers:
        raise UserError(f"{option_text}: {name} has layers 0-{sizes.n_layers - 1}")


def check_draws(draws: int, option: str = "--draws") -> None:
    if not 1 <= draws <= MAX_DRAWS:
        raise UserError(f"{option} {draws}: at least one draw is needed, and at most {MAX_DRAWS}")


def parse_position_list(option: str, spec: str | int | Iterable[int]) -> tuple[int, ...]:
    """Parses positions such as ``0,3`` or ``-1`` (the last), each once; numbers are taken as they are."""
    if not isinstance(spec, str):
        return (spec,) if isinstance(spec, int) else tuple(spec)
    parts = [part.strip() for part in spec.split(",")]
    if not all(POSITION.fullmatch(part) for part in parts):
        raise UserError(f"{option} {spec!r}: write positions counted from 0, such as 0,1, or -1 for the last")
    return tuple(dict.fromkeys(map(int, parts)))


def parse_named_positions(spec: str | Mapping[str, Iterable[int]] | None) -> dict[str, tuple[int, ...]]:
    """Returns positions by name, of ``noun=6,7;verb=8``; numbers are taken as they are."""
    given: Any = spec or {}
    if isinstance(spec, str):
        parts = [part.partition("=") for part in spec.split(";")]
        given = {name.strip(): where for name, _, where in parts}
        if "" in given or len(given) < len(parts):
            raise UserError(f"--spans {spec!r}: each span has a name of its own, as in noun=6,7;verb=8")
    return {name: parse_position_list(f"--spans {name}", where) for name, where in given.items()}


def parse_positions_or_mask(spec: str | int | Iterable[int]) -> str | tuple[int, ...]:
    """Returns ``"all"``, positions, or the name of a mask of the task's examples (``hidden``)."""
    word = spec.strip() if isinstance(spec, str) else ""
    if word.lower() == "all":
        return "all"
    return word if WORD.fullmatch(word) else parse_position_list("--positions", spec)


def select_kinds(kinds: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Returns the kinds that are asked for, in the order of those there are; all where none is."""
    for kind in kinds:
        check_choice("--kind", kind, known)
    return tuple(kind for kind in known if not kinds or kind in kinds)


def check_accuracy_level(level: float) -> None:
    if not 0 < level <= 1:
        raise UserError(f"--level {level:g}: an accuracy above 0, at most 1")


def edit_name(name: str, edit_options: Mapping[str, Any]) -> str:
    """Returns the name of an edit for the table: ``uniform(keys=0,1)``, ``z(source=negated; positions=hidden)``."""
    parts = [
        f"{limit}={given if isinstance(given, (str, int, float)) else ','.join(map(str, given))}"
        for limit, given in edit_options.items()
        if given not in (None, "all")
    ]
    return f"{name}({'; '.join(parts)})" if parts else name


def parse_frequency_rule(rule: str, rules: Mapping[str, float] = RULES) -> tuple[str, float]:
    """Returns a rule's name and number, from ``NAME`` or ``NAME=NUMBER``, of rules with their usual numbers."""
    name, equals, text = rule.partition("=")
    check_choice("--rule", name, tuple(rules))
    try:
        number = float(text) if equals else rules[name]
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise UserError(f"--rule {rule}: after = comes a number from 0, such as {name}={rules[name]:g}")
    return name, number
