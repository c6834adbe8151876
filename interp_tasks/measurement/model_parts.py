"""Refuses heads, layers, positions and neurons that a model lacks, by its configuration alone; imports nothing slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.heads.edits import HeadChoice, check_positions_below
from interp_tasks.measurement.options import has_heads
from interp_tasks.measurement.subjects import ResolvedRefs, named_if_several


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model that the options of a command name.

    Attributes:
        heads: choices of heads, at each of ``sites`` that has heads.
        sites: such as ``z`` or, in one layer, ``z.1``.
        layers: of ``--layers``.
        positions: option -> positions; the name of a mask, or ``None``, names none.
        neurons: of ``--neurons``, at each of ``sites``.
        fewer_heads: option -> a number; the model must have more heads than that.
    """

    heads: Sequence[HeadChoice] = ()
    sites: Sequence[str] = ()
    layers: Sequence[int] = ()
    positions: Mapping[str, str | Sequence[int] | None] = field(default_factory=dict)
    neurons: Sequence[int] = ()
    fewer_heads: Mapping[str, int] = field(default_factory=dict)

    def check(self, sizes: Any, name: str) -> None:
        """Refuses what a model of these sizes, called ``name``, does not have.

        Raises:
            UserError, CircuitsError: in one line.
        """
        has_layers = f"{name} has layers 0-{sizes.n_layers - 1}"
        for layer in self.layers:
            if layer >= sizes.n_layers:
                raise UserError(f"--layers {layer}: {has_layers}")
        for site in self.sites:
            if (layer_of(site) or 0) >= sizes.n_layers:
                raise UserError(f"--site {site}: {has_layers}")
        for choice in self.heads:
            if choice.heads:
                choice.resolve(sizes)
                self.check_one_layer(choice)
        heads = sizes.n_layers * sizes.n_heads
        for option, number in self.fewer_heads.items():
            if number >= heads:
                raise UserError(f"--{option} {number}: {name} has {heads} heads; fewer than that")
        for option, positions in self.positions.items():
            check_positions_below(sizes.n_ctx, option, positions, f"{name} has")
        for site in self.sites if self.neurons else ():
            kind = site.partition(".")[0]
            neurons = sizes.d_model if kind == "mlp_out" else sizes.d_mlp
            if max(self.neurons) >= neurons:
                raise UserError(
                    f"--neurons {max(self.neurons)}: {kind} of {name} has neurons 0-{neurons - 1}"
                )

    def check_one_layer(self, choice: HeadChoice) -> None:
        """Refuses heads of other layers than the one that a site is named in."""
        for site in self.sites:
            layer = layer_of(site)
            if layer is None or not has_heads(site):
                continue
            elsewhere = [f"{one}.{head}" for one, head in choice.heads if one != layer]
            if elsewhere:
                raise UserError(
                    f"--site {site} with --heads {choice}: {elsewhere[0]} is not in layer {layer}; leave the layer out"
                )


def layer_of(site: str) -> int | None:
    """Returns the layer that a site is named in: 1 of ``z.1``, ``None`` of ``z``."""
    layer = site.partition(".")[2]
    return int(layer) if layer else None


def check_parts(refs: ResolvedRefs, parts: ModelParts) -> None:
    """Refuses parts that the model of any of these checkpoints lacks; of several checkpoints the first is named.

    Raises:
        UserError, CircuitsError: in one line.
    """
    for each in refs.named:
        sizes = SimpleNamespace(**each.resolved.meta["model"])
        with named_if_several(each.label, len(refs.named)):
            parts.check(sizes, each.resolved.ref)
