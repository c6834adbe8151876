"""Finds the heads that matter, alone and together.

It makes one edit of each head, each layer, all heads, and groups by name or class.

``plot()`` shows effects as a map, layer by head, and groups as points. By class, the notes say which heads each class
has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.head_classes import head_classes_held_out
from interp_tasks.measurement.head_edits import (
    KEYS,
    MODE,
    POSITIONS,
    SCALE,
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

    from circuits import Head, Intervention
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
    scale: Annotated[float | None, SCALE] = None,
    groups: Annotated[Mapping[str, str] | Sequence[str], GROUPS, list[str]] = (),
    by_class: Annotated[bool, BY_CLASS] = False,
    least: Annotated[int, LEAST] = 0,
    random: Annotated[int, RANDOM] = 0,
    random_size: Annotated[int | None, RANDOM_SIZE] = None,
    **options: Unpack[Options],
) -> Result:
    """Ablate every head alone, each layer's heads together, all heads, and groups of your own.

    The figure is a map of effects, layer by head, with the groups as points.

    Args:
        refs: one or several REFs; all see the same examples.
        mode: what is done to the heads, as in :func:`ablation`.
        keys: of the mode, as in :func:`ablation`.
        positions: likewise.
        scale: likewise.
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
    edit, named = HeadEdit.parse(mode, keys, positions, scale), parse_groups(groups)
    edits = GroupEdits(edit, named, by_class, least, random, random_size)
    checks: dict[str, Any] = {"check_sizes": edits.check_sizes, "check": edit.check}
    result = measure("heads", refs, options, edits.measured, config=edits.describe(), **checks)
    found = [f"Classes of {ref}, found on other examples: {listed(of)}." for ref, of in edits.classes.items()]
    notes = ["ratio: the metric with the edit over that without.", *found] if by_class else []
    return replace(result, notes=(*result.notes, *notes))


@dataclass
class GroupEdits:
    """Which heads are edited together, and what is drawn beside them; ``classes``: REF -> the heads of each class."""

    edit: HeadEdit
    named: Mapping[str, HeadSpec]
    by_class: bool
    least: int
    random: int
    random_size: int | None
    classes: dict[str, Mapping[str, tuple[Head, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses numbers of heads and draws that mean nothing.

        Raises:
            UserError: in one line.
        """
        if self.least and (self.least < 0 or not self.by_class):
            raise UserError(
                f"--least {self.least}: a number of heads, which --by-class scores against templates"
            )
        if self.random:
            check_draws(self.random, "--random")
            if not (self.named or self.by_class or self.random_size):
                raise UserError(
                    f"--random {self.random} draws as many heads as a group has: give --group or --by-class, or "
                    "--random-size"
                )
        if self.random_size is not None and (self.random_size < 1 or not self.random):
            raise UserError(
                f"--random-size {self.random_size}: at least 1 head, and goes with --random, the draws"
            )

    def describe(self) -> dict[str, Any]:
        groups = {name: str(spec).replace(",", "+") for name, spec in self.named.items()}
        asked = {name: getattr(self, name) for name in ("by_class", "least", "random", "random_size")}
        return {**self.edit.describe(), "groups": groups, **asked}

    def check_sizes(self, sizes: Any, name: str) -> None:
        """Refuses heads and positions that a model of these sizes lacks."""
        for spec in self.named.values():
            resolve_heads(spec, sizes)
        every = sizes.n_layers * sizes.n_heads
        for option, number in (("least", self.least), ("random-size", self.random_size or 0)):
            if number >= every:
                raise UserError(f"--{option} {number}: {name} has {every} heads; fewer than that")
        self.edit.check_length(sizes.n_ctx, f"{name} has")

    def measured(self, subject: LoadedCheckpoint) -> Measured:
        """Measures one checkpoint: each head, each layer, all heads and groups edited, or classes of heads."""
        from circuits import draws

        every = tuple(every_head(subject.sizes))
        own = {name: resolve_heads(group, subject.sizes) for name, group in self.named.items()}
        rows = (
            self.classes_of(subject)
            if self.by_class
            else {str(head): (head,) for head in every} | by_layer(every)
        )
        if taken := own.keys() & rows.keys():
            raise UserError(f"--group {taken.pop()}: there is a class of that name; choose another")
        variants: dict[str, Any] = {**self.edit.on(subject, {**rows, "all": every, **own})}
        groups = [*(rows.values() if self.by_class else ()), *own.values()]
        sizes = (
            {len(group) for group in groups} - {len(every)}
            if self.random_size is None
            else {self.random_size}
        )
        for size in sorted(sizes) if self.random else ():

            def at_random(seed: int, size: int = size) -> Intervention:
                return self.edit.on(subject, {"": drawn(every, size, seed)})[""]

            variants[f"random {size}"] = draws(at_random, self.random, subject.seed)
        return run_sweep(subject, variants, self.edit.name, ratios=self.by_class)

    def classes_of(self, subject: LoadedCheckpoint) -> Mapping[str, tuple[Head, ...]]:
        """Returns the heads of each class, found on other examples, and of the least patterned."""
        found = head_classes_held_out(subject)
        least = {f"least patterned {self.least}": found.least(self.least)} if self.least else {}
        self.classes[str(subject.labels["ref"])] = classes = found.groups() | least
        return classes


def drawn(every: Sequence[Head], size: int, seed: int) -> tuple[Head, ...]:
    """Draws heads at random, without repeats."""
    import numpy as np

    chosen = np.random.default_rng(seed).choice(len(every), size, replace=False)
    return tuple(every[at] for at in sorted(chosen))


def listed(groups: Mapping[str, tuple[Head, ...]]) -> str:
    """Lists groups as ``row 0.0+0.3, mask_ignore 1.2``."""
    return ", ".join(f"{name} {'+'.join(map(str, heads))}" for name, heads in groups.items())
