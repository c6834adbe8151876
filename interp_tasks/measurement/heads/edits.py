"""Reads which heads to edit, and how: shared by the experiments that edit attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import typer

from circuits.model.heads import Head, HeadSpec, parse_heads
from interp_tasks.errors import UserError
from interp_tasks.measurement.options import (
    EACH,
    EACH_LAYER,
    called,
    check_choice,
    check_groups,
    check_keys,
    parse_positions,
    united,
)
from interp_tasks.measurement.subjects import LoadedCheckpoint, PendingCheckpoint

if TYPE_CHECKING:
    from circuits import Intervention

#: Mode -> its edit of some heads: called with ``circuits.ablate``, the heads, the edit, the positions and the subject.
ABLATIONS: dict[str, Callable[[Any, tuple[Head, ...], HeadEdit, Any, LoadedCheckpoint], Intervention]] = {
    "uniform": lambda ablate, heads, edit, at, subject: ablate.uniform(heads, keys=edit.keys, positions=at),
    "mean_pattern": lambda ablate, heads, edit, at, subject: ablate.mean_pattern(
        heads, reference=subject.tokens, positions=at
    ),
    "edited_mean_pattern": lambda ablate, heads, edit, at, subject: ablate.mean_pattern(
        heads, subject.tokens, of="edited", positions=at
    ),
    "zero": lambda ablate, heads, edit, at, subject: ablate.zero(heads, positions=at),
    "mean": lambda ablate, heads, edit, at, subject: ablate.mean(
        heads, reference=subject.tokens, positions=at
    ),
    "resample": lambda ablate, heads, edit, at, subject: ablate.resample(
        heads, subject.tokens, subject.seed, positions=at
    ),
    "noise": lambda ablate, heads, edit, at, subject: ablate.noise(
        heads, edit.scale, subject.seed, positions=at
    ),
}
HEADS_HELP = "all, each (a row per head), each-layer, or heads such as 0.1+2.3-5. Repeat for rows."
#: Choices that need a model to say which heads they are.
WORDS = ("all", EACH, EACH_LAYER)
#: Options of the experiments that edit heads.
MODE = typer.Option("--mode", help=", ".join(ABLATIONS) + ".")
KEYS = typer.Option("--keys", metavar="0,1", help="With uniform: attend to these positions only.")
SCALE = typer.Option("--scale", metavar="SD", help="With noise: its standard deviation.")
POSITIONS = typer.Option(
    "--positions", metavar="WHERE", help="Edit at: all, hidden, observed, or positions such as 0,3."
)


@dataclass(frozen=True)
class HeadEdit:
    """One kind of edit, applicable to any heads.

    Attributes:
        mode: ``uniform`` attention, the ``mean_pattern`` (of the unedited model, or within the edited pass:
            ``edited_mean_pattern``), or the heads' output ``zero``, its ``mean``, that of another example
            (``resample``) or with Gaussian ``noise`` added. Means and resamples are over the examples evaluated.
        keys: with ``uniform``, attend uniformly to these positions only.
        positions: edit only here: positions, or a mask of the task's examples by name; ``None``: everywhere.
        scale: with ``noise``, its standard deviation.
    """

    mode: str
    keys: tuple[int, ...] | None
    positions: str | tuple[int, ...] | None
    scale: float | None = None

    @classmethod
    def read(cls, mode: str, keys: Any, positions: Any, scale: float | None = None) -> HeadEdit:
        """Reads an edit from the options that users give.

        Raises:
            UserError: in one line.
        """
        mode = check_choice("--mode", mode, tuple(ABLATIONS))
        if (scale is None) == (mode == "noise"):
            raise UserError(
                "--mode noise needs --scale, the noise's standard deviation, such as 0.1"
                if scale is None
                else f"--scale goes with --mode noise only, not with {mode}"
            )
        if scale is not None and not 0 < scale < float("inf"):
            raise UserError(f"--scale {scale:g}: a standard deviation, above 0")
        return cls(mode, check_keys(keys, mode), parse_positions(positions), scale)

    @property
    def name(self) -> str:
        return called(self.mode, {"keys": self.keys, "positions": self.positions, "scale": self.scale})

    def describe(self) -> dict[str, Any]:
        scale = {} if self.scale is None else {"scale": self.scale}
        return {"mode": self.mode, "keys": self.keys, "positions": self.positions or "all", **scale}

    @property
    def notes(self) -> tuple[str, ...]:
        if self.mode in ("uniform", "zero", "noise"):
            return ()
        name, within = self.mode.removeprefix("edited_").replace("_", " "), self.mode.startswith("edited_")
        return (
            f"The {name} is taken over the examples evaluated{', in the edited pass itself' if within else ''}.",
        )

    @property
    def positions_by_option(self) -> dict[str, str | tuple[int, ...] | None]:
        """Returns the positions of each option that names some."""
        return {"--positions": self.positions, "--keys": self.keys}

    def check(self, planned: PendingCheckpoint) -> None:
        """Refuses positions that a checkpoint's examples do not have.

        Raises:
            UserError: in one line.
        """
        select_positions(planned, self.positions)
        for option, given in self.positions_by_option.items():
            check_within(planned, option, given)

    def on(self, subject: LoadedCheckpoint, chosen: dict[str, tuple[Head, ...]]) -> dict[str, Intervention]:
        """Returns the edit of each choice of heads, by its label."""
        from circuits import ablate

        make, at = ABLATIONS[self.mode], select_positions(subject, self.positions)
        return {label: make(ablate, heads, self, at, subject) for label, heads in chosen.items()}


@dataclass(frozen=True)
class HeadChoice:
    """One row's heads, as they were written and as they were read.

    Attributes:
        text: what was written; its ``str``.
        label: of the row.
        spec: as ``circuits`` takes it; ``None`` for ``each`` and ``each-layer``, which are several rows.
    """

    text: str
    label: str
    spec: HeadSpec | None

    def __str__(self) -> str:
        return self.text

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads that are named; none where only a model says which there are."""
        given = () if self.spec is None else self.spec.heads or ()
        return tuple(head for head in given if isinstance(head, Head))

    def resolve(self, sizes: Any) -> tuple[Head, ...]:
        """Returns the heads in a model of these sizes; ``circuits`` refuses those that there are not."""
        assert self.spec is not None
        return tuple(head for head in self.spec.resolve(sizes) if isinstance(head, Head))

    @classmethod
    def read(cls, spec: Any, option: str = "--heads", words: Sequence[str] = WORDS) -> HeadChoice:
        """Reads a spec, or a list of (layer, head).

        Raises:
            UserError, CircuitsError: in one line.
        """
        if isinstance(spec, str) and (word := re.sub(r"\s+", "", spec).lower()) in words:
            return cls(word, word, parse_heads(word) if word == "all" else None)
        parsed = parse_heads(spec)
        given = parsed.heads or ()
        if not given or not all(isinstance(head, Head) for head in given):
            raise UserError(f"{option} {spec!r}: write {', '.join(words)}, or heads such as 0.1 (layer.head)")
        text = "+".join(united(spec)) if isinstance(spec, str) else "+".join(map(str, given))
        written = (
            text if isinstance(spec, str) else str([tuple(head) for head in given if isinstance(head, Head)])
        )
        return cls(written, text, HeadSpec(repr(written), given))


def read_specs(heads: str | Sequence[Any]) -> list[HeadChoice]:
    """Parses head specs, one row each.

    Raises:
        UserError, CircuitsError: in one line.
    """
    specs = [heads] if isinstance(heads, str) or is_pairs(heads) else list(heads)
    if not specs:
        raise UserError("--heads: no heads given; write all, each, each-layer, or heads such as 0.1")
    return [HeadChoice.read(spec) for spec in specs]


def is_pairs(heads: Any) -> bool:
    """Returns whether a list is one choice of heads, ``[(0, 1), (0, 2)]``, rather than a list of specs."""
    return bool(heads) and all(
        isinstance(head, (list, tuple))
        and len(head) == 2
        and all(isinstance(part, Integral) for part in head)
        for head in heads
    )


def choices(specs: Sequence[HeadChoice], sizes: Any, layer: int | None = None) -> dict[str, tuple[Head, ...]]:
    """Returns the heads of each row by its label, in the order asked for; ``all``, ``each`` and ``each-layer`` are
    within ``layer`` where that is given.

    Args:
        sizes: of the model, as its configuration has them.

    Raises:
        UserError, CircuitsError: for a layer or a head that there is not.
    """
    every = [head for head in every_head(sizes) if layer is None or head.layer == layer]
    if not every:
        raise UserError(f"no layer {layer}: the model has layers 0-{sizes.n_layers - 1}")
    chosen: dict[str, tuple[Head, ...]] = {}
    for spec in specs:
        if spec.label == EACH:
            chosen |= {str(head): (head,) for head in every}
        elif spec.label == EACH_LAYER:
            chosen |= by_layer(every)
        else:
            chosen[spec.label] = tuple(every) if spec.label == "all" else spec.resolve(sizes)
    return chosen


def every_head(sizes: Any) -> list[Head]:
    """Returns all heads of a model of these sizes."""
    return [Head(layer, head) for layer in range(sizes.n_layers) for head in range(sizes.n_heads)]


def check_within(planned: PendingCheckpoint, option: str, given: Any) -> None:
    """Refuses positions beyond a checkpoint's examples.

    Raises:
        UserError: in one line.
    """
    check_positions_below(planned.tokens.shape[1], option, given, f"the examples of {planned.name} have")


def check_positions_below(length: int, option: str, given: Any, whose: str) -> None:
    """Refuses positions beyond a length; the name of a mask, or ``None``, is no position.

    Args:
        whose: what has so many positions, and its verb: ``the examples of run@40 have``.

    Raises:
        UserError: in one line.
    """
    for position in () if given is None or isinstance(given, str) else given:
        if not -length <= position < length:
            raise UserError(f"{option}: no position {position}: {whose} positions 0-{length - 1}")


def read_groups(groups: Mapping[str, str] | Iterable[str]) -> dict[str, HeadChoice]:
    """Returns groups of heads by the names that a user gives them.

    Raises:
        UserError, CircuitsError: in one line.
    """
    return {name: HeadChoice.read(spec, "--group", ("all",)) for name, spec in check_groups(groups).items()}


def by_layer(every: Sequence[Head]) -> dict[str, tuple[Head, ...]]:
    """Returns the heads of each layer as ``layer 0`` and so on."""
    layers = dict.fromkeys(head.layer for head in every)
    return {f"layer {layer}": tuple(head for head in every if head.layer == layer) for layer in layers}


def select_positions(
    subject: LoadedCheckpoint | PendingCheckpoint, positions: str | tuple[int, ...] | None
) -> Any:
    """Returns the positions to edit: as given, or for a name the boolean mask ``[batch pos]`` that the examples carry.

    ``observed`` is the complement of ``hidden``.
    """
    if not isinstance(positions, str):
        return positions
    extras = {} if subject.batch is None else subject.batch.extras
    masks = {key: mask for key, mask in extras.items() if is_mask(mask, subject)}
    if "hidden" in masks:
        masks.setdefault("observed", ~masks["hidden"])
    if positions not in masks:
        named = "".join(f"{key}, " for key in masks)
        raise UserError(
            f"--positions {positions!r}: the examples of {subject.name} have no such mask; "
            f"write all, {named}or positions such as 0,3"
        )
    return masks[positions]


def is_mask(mask: Any, subject: LoadedCheckpoint | PendingCheckpoint) -> bool:
    import torch

    return mask.dtype == torch.bool and mask.shape == subject.tokens.shape
