"""Which heads to edit, and how: parsed from the words of a command, shared by the experiments that edit attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import typer

from circuits.model.heads import Head, parse_heads
from interp_tasks.errors import UserError
from interp_tasks.measurement.options import (
    called,
    check_choice,
    check_positions,
    parse_parts,
    parse_positions,
)
from interp_tasks.measurement.subjects import LoadedCheckpoint

if TYPE_CHECKING:
    from circuits import Intervention

#: What can be done to heads.
MODES = ("uniform", "mean_pattern", "edited_mean_pattern", "zero", "mean", "resample", "noise")
#: The words for all heads in one row, for one row per head, and for one row per layer, of all its heads.
ALL, EACH, EACH_LAYER = "all", "each", "each-layer"
#: Options of the experiments that edit heads.
HEADS_HELP = "all, each (a row per head), each-layer, or heads such as 0.1+2.3-5. Repeat for rows."
HEADS = typer.Option("--heads", metavar="SPEC", help=HEADS_HELP)
MODE = typer.Option("--mode", help=", ".join(MODES) + ".")
KEYS = typer.Option("--keys", metavar="0,1", help="With uniform: attend to these positions only.")
SCALE = typer.Option("--scale", metavar="SD", help="With noise: its standard deviation.")
POSITIONS = typer.Option(
    "--positions", metavar="WHERE", help="Edit at: all, hidden, observed, or positions such as 0,3."
)
#: Heads by the label of their row.
HeadGroups = Mapping[str, tuple[Head, ...]]


@dataclass(frozen=True)
class HeadEdit:
    """One kind of edit, applicable to any heads; its fields are options of ``ablation``."""

    mode: str
    keys: tuple[int, ...] | None = None
    positions: str | tuple[int, ...] | None = None
    scale: float | None = None

    @classmethod
    def parse(cls, mode: str, keys: Any = None, positions: Any = ALL, scale: float | None = None) -> HeadEdit:
        """Returns the edit that the options of a user ask for."""
        check_choice("--mode", mode, MODES)
        if (scale is None) == (mode == "noise") or not 0 < (scale or 1) < float("inf"):
            raise UserError("--mode noise and --scale, its standard deviation above 0, go together")
        if keys is not None and mode != "uniform":
            raise UserError(f"--keys goes with --mode uniform only, not with {mode}")
        keys = None if keys is None else check_positions("--keys", keys)
        return cls(mode, keys, parse_positions(positions), scale)

    @property
    def name(self) -> str:
        return called(self.mode, {"keys": self.keys, "positions": self.positions, "scale": self.scale})

    def describe(self) -> dict[str, Any]:
        scale = {} if self.scale is None else {"scale": self.scale}
        return {"mode": self.mode, "keys": self.keys, "positions": self.positions or ALL, **scale}

    def check(self, subject: LoadedCheckpoint) -> None:
        """Refuses positions and keys that a checkpoint's examples do not have."""
        select_positions(subject, self.positions)
        select_positions(subject, self.keys, "--keys")

    def on(self, subject: LoadedCheckpoint, chosen: HeadGroups) -> dict[str, Intervention]:
        """Returns the edit of each choice of heads, by its label."""
        from circuits import ablate

        tokens, seed = subject.tokens, subject.seed
        make: Mapping[str, Any] = {
            "uniform": partial(ablate.uniform, keys=self.keys),
            "mean_pattern": partial(ablate.mean_pattern, reference=tokens),
            "edited_mean_pattern": partial(ablate.mean_pattern, reference=tokens, of="edited"),
            "zero": ablate.zero,
            "mean": partial(ablate.mean, reference=tokens),
            "resample": partial(ablate.resample, source=tokens, seed=seed),
            "noise": partial(ablate.noise, scale=self.scale or 0.0, seed=seed),
        }
        at = select_positions(subject, self.positions)
        return {label: make[self.mode](heads, positions=at) for label, heads in chosen.items()}


def head_labels(heads: Any) -> list[str]:
    """Returns head specs as the labels of their rows, each once; a list of (layer, head) is one spec."""

    def is_pair(each: Any) -> bool:
        return not isinstance(each, str) and all(isinstance(number, Integral) for number in each)

    one = isinstance(heads, str) or (len(heads) and all(map(is_pair, heads)))
    labels = []
    for spec in [heads] if one else heads:
        text = spec if isinstance(spec, str) else "+".join(map(str, parse_heads(spec).heads or ()))
        labels.append("+".join(parse_parts(text.lower())))
        if labels[-1] not in (EACH, EACH_LAYER):
            check_named(text)
    if not labels:
        raise UserError("--heads: no heads given; write all, each, each-layer, or heads such as 0.1")
    return list(dict.fromkeys(labels))


def check_named(spec: str, option: str = "--heads") -> None:
    """Refuses what is neither ``all`` nor heads by their numbers."""
    if not all(isinstance(head, Head) for head in parse_heads(spec).heads or ()):
        raise UserError(f"{option} {spec!r}: write all, or heads such as 0.1 (layer.head)")


def chosen_heads(labels: Sequence[str], sizes: Any, layer: int | None = None) -> dict[str, tuple[Head, ...]]:
    """Returns the heads of each row by its label, in the order asked for.

    Args:
        labels: as :func:`head_labels` returns them.
        sizes: of the model, as its configuration has them.
        layer: where given, ``all``, ``each`` and ``each-layer`` are within it.
    """
    every = [head for head in every_head(sizes) if layer in (None, head.layer)]
    rows: dict[str, dict[str, tuple[Head, ...]]] = {
        ALL: {ALL: tuple(every)},
        EACH: {str(head): (head,) for head in every},
        EACH_LAYER: by_layer(every),
    }
    chosen: dict[str, tuple[Head, ...]] = {}
    for label in labels:
        chosen |= rows.get(label) or {label: named_heads(label, sizes)}
    return chosen


def named_heads(spec: str, sizes: Any) -> tuple[Head, ...]:
    """Returns the heads that are named; ``circuits`` refuses those that a model of these sizes does not have."""
    return tuple(head for head in parse_heads(spec).resolve(sizes) if isinstance(head, Head))


def every_head(sizes: Any) -> list[Head]:
    return [Head(layer, head) for layer in range(sizes.n_layers) for head in range(sizes.n_heads)]


def by_layer(every: Sequence[Head]) -> dict[str, tuple[Head, ...]]:
    """Returns the heads of each layer as ``layer 0`` and so on."""
    layers = dict.fromkeys(head.layer for head in every)
    return {f"layer {layer}": tuple(head for head in every if head.layer == layer) for layer in layers}


def select_positions(
    subject: LoadedCheckpoint, positions: str | tuple[int, ...] | None, option: str = "--positions"
) -> Any:
    """Returns the positions to edit: as given, or for a name the boolean mask ``[batch pos]`` that the examples carry.

    ``observed`` is the complement of ``hidden``.
    """
    import torch

    shape = subject.tokens.shape
    if not isinstance(positions, str):
        if beyond := [at for at in positions or () if not -shape[1] <= at < shape[1]]:
            has = f"the examples of {subject.name} have positions 0-{shape[1] - 1}"
            raise UserError(f"{option}: no position {beyond[0]}: {has}")
        return positions
    extras = {} if subject.batch is None else subject.batch.extras
    masks = {key: mask for key, mask in extras.items() if mask.dtype == torch.bool and mask.shape == shape}
    if "hidden" in masks:
        masks.setdefault("observed", ~masks["hidden"])
    if positions not in masks:
        known = ", ".join(["all", *masks])
        raise UserError(
            f"{option} {positions!r}: the examples of {subject.name} have no such mask; write {known}, or positions "
            "such as 0,3"
        )
    return masks[positions]
