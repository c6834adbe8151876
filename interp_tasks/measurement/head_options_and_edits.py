"""Options of a command that edit attention heads: which, where and how, parsed, and the edits that they ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import typer

from circuits.model.heads import Head, parse_heads
from interp_tasks.errors import UserError
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint
from interp_tasks.measurement.option_parsing import check_choice, parse_position_list, parse_positions_or_mask

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


def parse_edit_options(
    mode: str, keys: Any = None, positions: Any = ALL, scale: float | None = None
) -> dict[str, Any]:
    """Returns where and how an edit of heads acts, as results record it: ``keys``, ``positions``, and ``scale`` of
    noise.
    """
    check_choice("--mode", mode, MODES)
    if (scale is None) == (mode == "noise") or not 0 < (1 if scale is None else scale) < float("inf"):
        raise UserError("--mode noise and --scale, its standard deviation above 0, go together")
    if keys is not None and mode != "uniform":
        raise UserError(f"--keys goes with --mode uniform only, not with {mode}")
    keys = None if keys is None else parse_position_list("--keys", keys)
    limits = {"keys": keys, "positions": parse_positions_or_mask(positions)}
    return limits if scale is None else {**limits, "scale": scale}


def make_head_edits(
    subject: LoadedCheckpoint, mode: str, edit_options: Mapping[str, Any], chosen: HeadGroups
) -> dict[str, Intervention]:
    """Returns the edit of each choice of heads, by its label; positions and keys that the examples lack are refused.

    Args:
        edit_options: as :func:`parse_edit_options` returns them.
    """
    from circuits import ablate

    tokens, seed = subject.tokens, subject.seed
    keys = resolve_positions_or_mask(subject, edit_options["keys"], "--keys")
    make: Mapping[str, Any] = {
        "uniform": partial(ablate.uniform, keys=keys),
        "mean_pattern": partial(ablate.mean_pattern, reference=tokens),
        "edited_mean_pattern": partial(ablate.mean_pattern, reference=tokens, of="edited"),
        "zero": ablate.zero,
        "mean": partial(ablate.mean, reference=tokens),
        "resample": partial(ablate.resample, source=tokens, seed=seed),
        "noise": partial(ablate.noise, scale=edit_options.get("scale", 0.0), seed=seed),
    }
    at = resolve_positions_or_mask(subject, edit_options["positions"])
    return {label: make[mode](heads, positions=at) for label, heads in chosen.items()}


def head_specs_to_labels(heads: Any) -> list[str]:
    """Returns head specs as the labels of their rows, each once; a list of (layer, head) is one spec."""
    if not len(heads):
        raise UserError("--heads: no heads given; write all, each, each-layer, or heads such as 0.1")
    is_one = isinstance(heads, str) or all(
        not isinstance(each, str) and all(isinstance(number, Integral) for number in each) for each in heads
    )
    labels = []
    for spec in [heads] if is_one else heads:
        text = spec if isinstance(spec, str) else "+".join(map(str, parse_heads(spec).heads or ()))
        labels.append(re.sub(r"\s+", "", text.lower()).replace(",", "+"))
    return list(dict.fromkeys(labels))


def head_groups_by_label(
    labels: Sequence[str], sizes: Any, layer: int | None = None
) -> dict[str, tuple[Head, ...]]:
    """Returns the heads of each row by its label, in the order asked for.

    Args:
        labels: as :func:`head_specs_to_labels` returns them.
        sizes: of the model, as its configuration has them.
        layer: where given, ``all``, ``each`` and ``each-layer`` are within it.
    """
    every = [Head(row, head) for row in range(sizes.n_layers) for head in range(sizes.n_heads)]
    every = [head for head in every if layer in (None, head.layer)]
    layers = dict.fromkeys(head.layer for head in every)
    rows: dict[str, dict[str, tuple[Head, ...]]] = {
        ALL: {ALL: tuple(every)},
        EACH: {str(head): (head,) for head in every},
        EACH_LAYER: {f"layer {row}": tuple(head for head in every if head.layer == row) for row in layers},
    }
    chosen: dict[str, tuple[Head, ...]] = {}
    for label in labels:
        chosen |= rows.get(label) or {label: parse_attention_heads(label, sizes)}
    return chosen


def parse_attention_heads(spec: str, sizes: Any, option: str = "--heads") -> tuple[Head, ...]:
    """Returns the heads that are named; ``circuits`` refuses those that a model of these sizes does not have."""
    found = parse_heads(spec).resolve(sizes)
    heads = tuple(head for head in found if isinstance(head, Head))
    if len(heads) < len(found):
        raise UserError(f"{option} {spec!r}: write all, or heads such as 0.1 (layer.head)")
    return heads


def resolve_positions_or_mask(
    subject: LoadedCheckpoint, positions: str | tuple[int, ...] | None, option: str = "--positions"
) -> Any:
    """Returns the positions to edit: as given, or for a name the boolean mask ``[batch pos]`` that the examples carry;
    ``None`` for all. ``observed`` is the complement of ``hidden``.
    """
    import torch

    shape = subject.tokens.shape
    if positions == ALL:
        return None
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
