"""Where a probe reads: one vector per example and position, taken from any site."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from einops import rearrange
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.arguments import read_place
from circuits.model.sites import Site
from circuits.model.surface import Surface


@dataclass(frozen=True)
class ProbeSite:
    """A site in one layer, of it one head or all, and one position or (None) all of them pooled."""

    site: Site
    hook: str
    head: int | None = None
    position: int | None = None

    @property
    def label(self) -> str:
        """`resid_post.2`; head 3 of `z.1` is `z.1.3`; position 4 is `resid_post.2@4`."""
        head = "" if self.head is None else f".{self.head}"
        return f"{self.site}{head}" + ("" if self.position is None else f"@{self.position}")

    @property
    def positions(self) -> slice:
        return slice(None) if self.position is None else slice(self.position, self.position + 1)

    def vectors(self, activation: Tensor, examples: int) -> Tensor:
        """[batch pos d] from the activation at the hook: heads side by side, a pattern's row as its query's vector."""
        kind = self.site.kind
        if activation.ndim < 3:
            raise CircuitsError(
                f"probe: {self.hook} is {list(activation.shape)}; a probe reads [batch pos ...]"
            )
        if kind.head_axis == 1:
            activation = rearrange(activation, "batch head query key -> batch query head key")
        if self.head is not None:
            activation = activation[:, :, self.head]
        # Some models hold one row of position embeddings for all examples.
        vectors = activation.flatten(2).expand(examples, -1, -1)
        return vectors[:, self.positions]


def parse_sites(
    surface: Surface, sites: Any, heads: Any, positions: Iterable[int] | None
) -> tuple[ProbeSite, ...]:
    """Each (site, layer), head and position that is probed on its own, in this order.

    Args:
        heads: None takes the heads of a site together; else each head chosen is one spot.
    """
    sites = [sites] if isinstance(sites, str | Site) else sites
    if not isinstance(sites, Iterable):
        raise CircuitsError(f'probe: sites are "resid_post", "z.2", ... or a list of them, got {sites!r}')
    places = (None,) if positions is None else tuple(positions)
    found: list[ProbeSite] = []
    for site in sites:
        place = read_place(site, heads, "probe")
        for layer, hook, chosen in place.on(surface):
            at = Site(place.site.name, layer)
            for head in (None,) if chosen is None else chosen:
                found += [ProbeSite(at, hook, head, position) for position in places]
    if not found:
        raise CircuitsError("probe: no site given")
    return tuple(dict.fromkeys(found))
