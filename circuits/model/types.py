"""What the arguments of `circuits` may be, for type checkers and completions; each function reads what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

    import numpy as np
    from numpy.typing import ArrayLike as ArrayLike
    from torch import Tensor

    from circuits.figures.panel_grid import Figure as Figure
    from circuits.model.heads import HeadsLike
    from circuits.model.prompts_with_mask import Prompts
    from circuits.model.sites import SiteLike

    #: Ids [batch pos], texts, lists of ids of unequal length, what a tokenizer returns, `Prompts`.
    TokensLike = (
        Tensor | np.ndarray | Prompts | str | Sequence[str] | Sequence[Sequence[int]] | Mapping[str, Any]
    )
    SitesLike = SiteLike | Iterable[SiteLike]
    #: Heads; a site, such as "mlp_out.1"; or a layer number.
    PlacesLike = HeadsLike | SiteLike | int
    #: Whole numbers from 0: one, or a list.
    IndicesLike = int | Sequence[int] | Tensor | np.ndarray | None
    #: One, a list or a slice, negative ones from the end; or a boolean mask [pos] or [batch pos]. None: all.
    PositionsLike = IndicesLike | slice | Literal["prompt", "new"]
    #: An id or a text for all examples, or a list with one (or a list of several) for each.
    AnswersLike = int | str | Sequence[int | str | Sequence[int | str]] | Tensor
    #: Of an output, and of the rows of `batch` if given: a value per example [n], a pair (sum, count), a dict of these;
    #: or several such functions by name.
    MetricLike = Callable[..., Any] | Mapping[str, Callable[..., Any]] | None
    #: Something of each example, such as its labels: it has len() and takes a slice of rows.
    BatchLike = Tensor | np.ndarray | Sized | None
    #: What `patch.screen` or `patch.edges` returned, or names of nodes or edges, the largest first.
    RankingLike = Sequence[str] | Any
    #: A template bool [query key] or [batch query key], or a function of the tokens (or of `batch`) that returns one.
    TemplateLike = Tensor | np.ndarray | Callable[..., Tensor]
else:
    TokensLike = SiteLike = SitesLike = HeadsLike = PlacesLike = IndicesLike = PositionsLike = Any
    AnswersLike = ArrayLike = BatchLike = Figure = MetricLike = RankingLike = TemplateLike = Any
