"""What the arguments of `circuits` may be, for type checkers and completions; each function reads what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from circuits.model.heads import Head, KeyValueGroup
    from circuits.model.prompts import Prompts
    from circuits.model.sites import Site

    #: Ids [batch pos], texts, lists of ids of unequal length, what a tokenizer returns, `Prompts`.
    TokensLike = (
        Tensor | np.ndarray | Prompts | str | Sequence[str] | Sequence[Sequence[int]] | Mapping[str, Any]
    )
    #: "z.1", "resid_post", a full hook name, a `Site`.
    SiteLike = str | Site
    SitesLike = SiteLike | Iterable[SiteLike]
    #: "all", "0.1", "2.3-5, L0H1", a `Head`, pairs (layer, head), a list of them.
    HeadsLike = str | Head | KeyValueGroup | Iterable[str | Head | KeyValueGroup | tuple[int, int]] | None
    #: One, a list or a slice, negative ones from the end; or a boolean mask [pos] or [batch pos]. None: all.
    PositionsLike = int | slice | Sequence[int] | range | Tensor | np.ndarray | None
    #: Of an output, and of the rows of `batch` if given: a value per example [n], a pair (sum, count), a dict of these.
    MetricLike = Callable[..., Tensor | tuple[Tensor, Tensor] | Mapping[str, Any]] | None
else:
    TokensLike = SiteLike = SitesLike = HeadsLike = PositionsLike = MetricLike = Any
