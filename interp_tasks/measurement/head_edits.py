"""Which heads to edit, and how: parsed from the words of a command, shared by the experiments that edit attention."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import typer

from circuits.model.heads import Head, HeadSpec, parse_heads
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
#: The words for one row per head, and for one row per layer, of all its heads.
EACH, EACH_LAYER = "each", "each-layer"
#: Options of the experiments that edit heads.
HEADS = typer.Option(
    "--heads",
    metavar="SPEC",
    help="all, each (a row per head), each-layer, or heads such as 0.1+2.3-5. Repeat for rows.",
)
MODE = typer.Option("--mode", help=", ".join(MODES) + ".")
KEYS = typer.Option("--keys", metavar="0,1", help="With uniform: attend to these positions only.")
SCALE = typer.Option("--scale", metavar="SD", help="With noise: its standard deviation.")
POSITIONS = typer.Option(
    "--positions", metavar="WHERE", help="Edit at: all, hidden, observed, or positions such as 0,3."
)
#: Labels of rows -> the heads that were named there; ``None``: a row per head, or per layer, of that label.
Choices = Mapping[str, HeadSpec | None]


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
    def parse(
        cls, mode: str, keys: Any = None, positions: Any = "all", scale: float | None = None
    ) -> HeadEdit:
        """Returns the edit that the options of a user ask for.

        Raises:
            UserError: in one line.
        """
        mode = check_choice("--mode", mode, MODES)
        if (scale is None) == (mode == "noise"):
            raise UserError("--mode noise and --scale, its standard deviation such as 0.1, go together")
        if scale is not None and not 0 < scale < float("inf"):
            raise UserError(f"--scale {scale:g}: a standard deviation, above 0")
        if keys is not None and mode != "uniform":
            raise UserError(f"--keys goes with --mode uniform only, not with {mode}")
        if keys is not None:
            keys = check_positions("--keys", keys) if isinstance(keys, str) else tuple(keys)
        return cls(mode, keys, parse_positions(positions), scale)

    @property
    def name(self) -> str:
        return called(self.mode, {"keys": self.keys, "positions": self.positions, "scale": self.scale})

    def describe(self) -> dict[str, Any]:
        scale = {} if self.scale is None else {"scale": self.scale}
        return {"mode": self.mode, "keys": self.keys, "positions": self.positions or "all", **scale}

    def check(self, subject: LoadedCheckpoint) -> None:
        """Refuses positions and keys that a checkpoint's examples do not have.

        Raises:
            UserError: in one line.
        """
        select_positions(subject, self.positions)
        select_positions(subject, self.keys, "--keys")

    def on(
        self, subject: LoadedCheckpoint, chosen: Mapping[str, tuple[Head, ...]]
    ) -> dict[str, Intervention]:
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


def parse_choices(heads: Any) -> Choices:
    """Parses head specs, one row each; a list of (layer, head) is one spec.

    Raises:
        UserError, CircuitsError: in one line.
    """
    pairs = not isinstance(heads, str) and all(
        isinstance(head, (list, tuple)) and all(isinstance(each, Integral) for each in head) for head in heads
    )
    chosen: dict[str, HeadSpec | None] = {}
    for spec in [heads] if isinstance(heads, str) or (heads and pairs) else heads:
        word = re.sub(r"\s+", "", spec).lower() if isinstance(spec, str) else ""
        if word in (EACH, EACH_LAYER):
            chosen[word] = None
            continue
        parsed = parse_named_heads(spec)
        text = "+".join(parse_parts(spec) if isinstance(spec, str) else map(str, parsed.heads or ()))
        chosen["all" if parsed.heads is None else text] = parsed
    if not chosen:
        raise UserError("--heads: no heads given; write all, each, each-layer, or heads such as 0.1")
    return chosen


def parse_named_heads(spec: Any, option: str = "--heads") -> HeadSpec:
    """Parses heads by their numbers, or ``all``.

    Raises:
        UserError, CircuitsError: in one line.
    """
    parsed = parse_heads(spec)
    if not all(isinstance(head, Head) for head in parsed.heads or ()):
        raise UserError(f"{option} {spec!r}: write all, or heads such as 0.1 (layer.head)")
    return parsed


def parse_groups(groups: Mapping[str, str] | Iterable[str]) -> dict[str, HeadSpec]:
    """Parses ``NAME=SPEC`` texts, or a mapping, into named groups of heads.

    Raises:
        UserError, CircuitsError: in one line.
    """
    pairs = groups.items() if isinstance(groups, Mapping) else (spec.partition("=")[::2] for spec in groups)
    by_name: dict[str, HeadSpec] = {}
    for name, heads in ((name.strip(), heads) for name, heads in pairs):
        if not name or not heads:
            raise UserError(f"--group {name + heads!r}: write NAME=HEADS, such as copying=0.1+2.3-5")
        if name in by_name or name in ("all", EACH) or re.match(r"(layer|random) \d+$|\d+\.\d", name):
            raise UserError(f"--group {name}={heads}: there is a row of that name already; choose another")
        by_name[name] = parse_named_heads(heads, "--group")
    return by_name


def resolve_heads(spec: HeadSpec, sizes: Any) -> tuple[Head, ...]:
    """Returns the heads that a spec names in a model of these sizes; ``circuits`` refuses those that there are not."""
    return tuple(head for head in spec.resolve(sizes) if isinstance(head, Head))


def resolve_choices(choices: Choices, sizes: Any, layer: int | None = None) -> dict[str, tuple[Head, ...]]:
    """Returns the heads of each row by its label, in the order asked for.

    Args:
        sizes: of the model, as its configuration has them.
        layer: where given, ``all``, ``each`` and ``each-layer`` are within it.

    Raises:
        UserError, CircuitsError: for a layer or a head that there is not.
    """
    every = [head for head in every_head(sizes) if layer in (None, head.layer)]
    if not every:
        raise UserError(f"no layer {layer}: the model has layers 0-{sizes.n_layers - 1}")
    chosen: dict[str, tuple[Head, ...]] = {}
    for label, spec in choices.items():
        if spec is None:
            chosen |= {str(head): (head,) for head in every} if label == EACH else by_layer(every)
        else:
            chosen[label] = tuple(every) if spec.heads is None else resolve_heads(spec, sizes)
    return chosen


def every_head(sizes: Any) -> list[Head]:
    """Returns all heads of a model of these sizes."""
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

    Raises:
        UserError: for a position, or the name of a mask, that the examples do not have.
    """
    import torch

    shape = subject.tokens.shape
    if not isinstance(positions, str):
        for position in positions or ():
            if not -shape[1] <= position < shape[1]:
                raise UserError(
                    f"{option}: no position {position}: the examples of {subject.name} have positions 0-{shape[1] - 1}"
                )
        return positions
    extras = {} if subject.batch is None else subject.batch.extras
    masks = {key: mask for key, mask in extras.items() if mask.dtype == torch.bool and mask.shape == shape}
    if "hidden" in masks:
        masks.setdefault("observed", ~masks["hidden"])
    if positions not in masks:
        named = "".join(f"{key}, " for key in masks)
        raise UserError(
            f"{option} {positions!r}: the examples of {subject.name} have no such mask; "
            f"write all, {named}or positions such as 0,3"
        )
    return masks[positions]
