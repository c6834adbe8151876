"""Finds the heads that matter, alone and together.

It makes one edit of each head, each layer, all heads, and groups by name or class.

``plot()`` shows effects as a map, layer by head, and groups as points. By class, the notes say which heads each class
has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.head_classes import head_classes_held_out
from interp_tasks.measurement.head_edits import (
    KEYS,
    MODE,
    POSITIONS,
    HeadEdit,
    by_layer,
    every_head,
    parse_groups,
    resolve_heads,
)
from interp_tasks.measurement.options import check_draws
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure, run_sweep
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, Refs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from circuits import Head
    from circuits.model.heads import HeadSpec


GROUPS = typer.Option(
    "--group", metavar="NAME=HEADS", help="Some heads together, as in copying=0.1+2.3-5. Repeat."
)
BY_CLASS = typer.Option(
    "--by-class", help="Groups are classes by what heads attend to on other examples; with ratios."
)
LEAST = typer.Option("--least", help="With --by-class: the N heads closest to no template, as a group.")
RANDOM = typer.Option("--random", help="Beside groups N draws of as many heads at random.")
RANDOM_SIZE = typer.Option(
    "--random-size", metavar="K", help="Random draws of K heads alone.", show_default="as each group"
)


@experiment(
    "Intervene",
    says={
        "mode": None,
        "keys": None,
        "positions": "all",
        "by_class": False,
        "least": 0,
        "random": 0,
        "random_size": None,
    },
    judged_by_task=True,
)
def heads(
    refs: Refs,
    mode: Annotated[str, MODE] = "uniform",
    keys: Annotated[str | Sequence[int] | None, KEYS, str | None] = None,
    positions: Annotated[str | Sequence[int], POSITIONS, str] = "all",
    groups: Annotated[Mapping[str, str] | Sequence[str], GROUPS, list[str]] = (),
    by_class: Annotated[bool, BY_CLASS] = False,
    least: Annotated[int, LEAST] = 0,
    random: Annotated[int, RANDOM] = 0,
    random_size: Annotated[int | None, RANDOM_SIZE] = None,
    **options: Unpack[Options],
) -> Result:
    """Ablate every head alone, each layer's heads together, all heads, and groups of your own.

    Args:
        refs: one or several REFs; all see the same examples.
        mode: what is done to the heads, as in :func:`ablation`.
        keys: of the mode, as in :func:`ablation`.
        positions: likewise.
        groups: name -> heads (``{"copying": "0.1+2.3-5"}``), or texts ``"copying=0.1+2.3-5"``.
        by_class: a table of groups instead: the heads of each class that :func:`attention` finds on as many other
            examples, those without one together as ``"uninterpretable"``, all heads, and groups of your own. After each
            metric, ``"mse_masked ratio"`` and so on: the metric with the edit over that without.
        least: with ``by_class``, a group more, ``"least patterned 5"``: so many heads, those that come least close to
            any template. No threshold decides who they are.
        random: beside the groups as many heads drawn at random, ``"random 5"`` for every size of a group (but that of
            all heads): so many draws from the seed, each a row with its ``draw``, after one that pools them.
        random_size: with ``random``, draws of so many heads alone.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    edit, named = HeadEdit.parse(mode, keys, positions), parse_groups(groups)
    check_numbers(least, random, random_size, by_class=by_class, grouped=by_class or bool(named))
    config = {
        **edit.describe(),
        "groups": {name: str(spec).replace(",", "+") for name, spec in named.items()},
        "by_class": by_class,
        "least": least,
        "random": random,
        "random_size": random_size,
    }
    found: dict[str, Mapping[str, tuple[Head, ...]]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        rows, own = groups_of(subject, named, by_class=by_class, least=least)
        found[str(subject.labels["ref"])] = rows
        drawn_for = [*(rows.values() if by_class else ()), *own.values()]
        every = tuple(every_head(subject.sizes))
        sizes = {random_size} if random_size else {len(group) for group in drawn_for} - {len(every)}
        variants: dict[str, Any] = {**edit.on(subject, {**rows, "all": every, **own})}
        for size in sorted(sizes) if random else ():
            variants[f"random {size}"] = at_random(subject, edit, every, size, random)
        return run_sweep(subject, variants, edit.name, ratios=by_class)

    checks: Any = {"check_sizes": partial(check_groups, named, least, random_size), "check": edit.check}
    result = measure("heads", refs, options, measure_checkpoint, config=config, **checks)
    return replace(result, notes=(*result.notes, *(class_notes(found) if by_class else ())))


def class_notes(found: Mapping[str, Mapping[str, tuple[Head, ...]]]) -> list[str]:
    """Returns what a ratio is, and the heads of each class by REF: ``row 0.0+0.3, mask_ignore 1.2``."""
    notes = ["ratio: the metric with the edit over that without."]
    for ref, groups in found.items():
        listed = ", ".join(f"{name} {'+'.join(map(str, heads))}" for name, heads in groups.items())
        notes.append(f"Classes of {ref}, found on other examples: {listed}.")
    return notes


def groups_of(
    subject: LoadedCheckpoint, named: Mapping[str, HeadSpec], *, by_class: bool, least: int
) -> tuple[dict[str, tuple[Head, ...]], dict[str, tuple[Head, ...]]]:
    """Returns each head and each layer, or classes found on other examples with the least patterned; and own groups.

    Raises:
        UserError: for a group of the name of a class.
    """
    every = every_head(subject.sizes)
    rows = {str(head): (head,) for head in every} | by_layer(every)
    if by_class:
        classes = head_classes_held_out(subject)
        rows = classes.groups() | ({f"least patterned {least}": classes.least(least)} if least else {})
    own = {name: resolve_heads(group, subject.sizes) for name, group in named.items()}
    if taken := own.keys() & rows.keys():
        raise UserError(f"--group {taken.pop()}: there is a class of that name; choose another")
    return rows, own


def at_random(subject: LoadedCheckpoint, edit: HeadEdit, every: Sequence[Head], size: int, count: int) -> Any:
    """Returns the edit of so many heads at random, drawn anew so many times."""
    from circuits import draws

    return draws(lambda seed: edit.on(subject, {"": drawn(every, size, seed)})[""], count, subject.seed)


def check_groups(
    named: Mapping[str, HeadSpec], least: int, random_size: int | None, sizes: Any, name: str
) -> None:
    """Refuses heads that a model of these sizes lacks, and as many as it has."""
    every = sizes.n_layers * sizes.n_heads
    for spec in named.values():
        resolve_heads(spec, sizes)
    for option, number in (("least", least), ("random-size", random_size or 0)):
        if number >= every:
            raise UserError(f"--{option} {number}: {name} has {every} heads; fewer than that")


def check_numbers(least: int, random: int, random_size: int | None, *, by_class: bool, grouped: bool) -> None:
    """Refuses numbers of heads and draws that mean nothing.

    Raises:
        UserError: in one line.
    """
    if least and (least < 0 or not by_class):
        raise UserError(f"--least {least}: a number of heads, which --by-class scores against templates")
    if random:
        check_draws(random, "--random")
    if random and not (grouped or random_size):
        raise UserError(
            f"--random {random} draws as many heads as a group has: give --group or --by-class, or --random-size"
        )
    if random_size is not None and (random_size < 1 or not random):
        raise UserError(f"--random-size {random_size}: at least 1 head, and goes with --random, the draws")


def drawn(every: Sequence[Head], size: int, seed: int) -> tuple[Head, ...]:
    """Draws heads at random, without repeats."""
    import numpy as np

    chosen = np.random.default_rng(seed).choice(len(every), size, replace=False)
    return tuple(every[at] for at in sorted(chosen))
