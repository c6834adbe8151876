"""Parses the sites that probes read: one vector per example and position, from any site."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from einops import rearrange
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.arguments import read_place
from circuits.model.prompts import Prompts
from circuits.model.sites import Site
from circuits.model.surface import Surface


@dataclass(frozen=True)
class ProbeSite:
    """A site in one layer: one head, or all (None), and one position, or all pooled (None)."""

    site: Site
    hook: str
    head: int | None = None
    position: int | None = None

    @property
    def label(self) -> str:
        """Returns the label, such as `resid_post.2`; `z.1.3` for head 3 of `z.1`; `resid_post.2@4` for position 4."""
        head = "" if self.head is None else f".{self.head}"
        return f"{self.site}{head}" + ("" if self.position is None else f"@{self.position}")

    @property
    def positions(self) -> slice:
        return slice(None) if self.position is None else slice(self.position, self.position + 1)

    def vectors(self, activation: Tensor, prompts: Prompts) -> Tensor:
        """Returns vectors [batch pos d] of an activation, each prompt's own tokens first: with heads concatenated; for
        patterns, the query's row.
        """
        kind = self.site.kind
        if activation.ndim < 3:
            raise CircuitsError(
                f"probe: {self.hook} is {list(activation.shape)}; a probe reads [batch pos ...]"
            )
        activation = prompts.in_order(activation, kind.position_axes, lowest=True)
        if kind.head_axis == 1:
            activation = rearrange(activation, "batch head query key -> batch query head key")
        if self.head is not None:
            activation = activation[:, :, self.head]
        # In some models position embeddings have a batch of 1, shared by all examples.
        vectors = activation.flatten(2).expand(len(prompts), -1, -1)
        return vectors[:, self.positions]


def parse_sites(
    surface: Surface, sites: Any, heads: Any, positions: Iterable[int] | None
) -> tuple[ProbeSite, ...]:
    """Returns each (site, layer), head and position at which a probe is fitted, in this order.

    Args:
        heads: None concatenates the heads of a site; else each chosen head has a probe of its own.
    """
    sites = [sites] if isinstance(sites, str | Site) else sites
    if not isinstance(sites, Iterable):
        raise CircuitsError(f'probe: sites are "resid_post", "z.2", ... or a list of them, got {sites!r}')
    position_choices = (None,) if positions is None else tuple(positions)
    probe_sites: list[ProbeSite] = []
    for site in sites:
        parsed = read_place(site, heads, "probe")
        for layer, hook, chosen in parsed.on(surface):
            layer_site = Site(parsed.site.name, layer)
            for head in (None,) if chosen is None else chosen:
                probe_sites += [ProbeSite(layer_site, hook, head, position) for position in position_choices]
    if not probe_sites:
        raise CircuitsError("probe: no site given")
    return tuple(dict.fromkeys(probe_sites))
