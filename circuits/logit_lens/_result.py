"""The results of `lens`: read-outs and contributions, computed when they are asked for, and shares of a metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.results import shares_figure
from circuits.logit_lens._stream import ReadOut
from circuits.model.prompts import Prompts
from circuits.statistics import LEVEL, summarise
from circuits.tables import short_table

#: Bootstrap draws of an interval.
_DRAWS = 1000


class Computed(Mapping[str, Tensor]):
    """Tensors by name, each computed from a part of the residual stream whenever it is asked for."""

    def __init__(self, streams: Mapping[str, Tensor], compute: Callable[[Tensor], Tensor]) -> None:
        self._streams, self._compute = streams, compute

    def __getitem__(self, name: str) -> Tensor:
        return self._compute(self._streams[name])

    def __contains__(self, name: object) -> bool:
        return name in self._streams

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)


@dataclass(frozen=True, repr=False)
class Lens:
    """The result of `lens` without a metric; every tensor is [batch pos out], as the model's output, unless stated.

    Attributes:
        output: the model's own output.
        readouts: "embed", "layer 0", "layer 1", ...: the read-out (final norm and unembedding) of the residual stream
            before the first layer and after each. The last is `output`. In a post-norm model it is the unembedding
            alone, applied to the normalised output of the embeddings and of each layer. Computed when asked for.
        contributions: "embed", "pos_embed", "0.0", ..., "b_O.0", "mlp_out.0", ..., in the order they are added: each
            component's direct contribution to the output, along the residual stream, with the scale of every norm on
            the way fixed at its value in this run: that of the final norm; of the norm that attention's output passes
            before it is added, where there is one (Gemma 2, OLMo 2), so that heads have a share of it; in a post-norm
            model also those after each sum, whose biases are "ln_embed", "ln1.0", "ln2.0", .... "edits" is the
            contribution of interventions on the residual stream itself. Computed when asked for.
        constant: [out], the biases of the read-out. Contributions and constant add up to `output`; where logits pass a
            soft cap, to what comes to the cap.
        soft_cap: the bound c of a soft cap, output = c·tanh(logits / c); None where there is none.
        prompts: the inputs; at their padding every tensor is NaN.
        positions: those that are kept, along the axis pos, in each prompt's own tokens; None: every column.
    """

    output: Tensor
    readouts: Mapping[str, Tensor]
    contributions: Mapping[str, Tensor]
    read_out: ReadOut = field(repr=False)
    prompts: Prompts
    positions: tuple[int, ...] | None = None

    @property
    def constant(self) -> Tensor:
        return self.read_out.constant

    @property
    def soft_cap(self) -> float | None:
        return self.read_out.soft_cap

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.output.shape))
        contributions, last = list(self.contributions), list(self.readouts)[-1]
        return (
            f"Lens of output [{shape}]: .readouts of embed to {last}, .contributions of {len(contributions)} "
            f"components, {contributions[0]} to {contributions[-1]}"
        )

    def without(self, name: str) -> Tensor:
        """Returns the output without one component's direct contribution."""
        if name not in self.contributions:
            raise CircuitsError(f"lens: no contribution {name!r}; there are {', '.join(self.contributions)}")
        if self.soft_cap is None:
            return self.output - self.contributions[name]
        others = (part for other, part in self.contributions.items() if other != name)
        return self.read_out.capped(sum(others, self.constant))


@dataclass(frozen=True, repr=False)
class DirectAttribution:
    """The result of `lens` with a metric: how much of it each component adds directly.

    Attributes:
        shares: by component, as in `Lens.contributions`, its share for each example, [example]; then "constant", that
            of the biases of the read-out, and, where the metric is not linear in the logits or these pass a soft cap,
            "nonlinear", which is the rest. They add up to `metric`.
        metric: the metric itself, [example]; of pairs (sum, count), the sum.
        counts: [example], what values and shares are divided by in a mean; 1 where the metric gives no pairs.
        name: the metric's.
        settings: `batch_size`, the examples in a forward.
    """

    shares: Mapping[str, Tensor]
    metric: Tensor
    counts: Tensor
    name: str
    settings: dict[str, Any]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each component: `layer`, `head`, its mean `share` with a 95% interval over examples, and `n`."""
        return self._table(self.shares)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """The same with one row for the attention and one for the MLP of each layer, biases included."""
        sums: dict[str, Tensor] = {}
        for name, share in self.shares.items():
            sums[_sublayer(name)] = sums.get(_sublayer(name), 0) + share
        return self._table(sums)

    def _table(self, shares: Mapping[str, Tensor]) -> pd.DataFrame:
        sums = np.stack([share.numpy() for share in shares.values()])
        found = summarise(sums, np.broadcast_to(self.counts.numpy(), sums.shape), 0, _DRAWS, 1, LEVEL)
        places = [_place(name) for name in shares]
        return pd.DataFrame(
            {
                "component": list(shares),
                "layer": pd.array([layer for layer, _ in places], dtype="Int64"),
                "head": pd.array([head for _, head in places], dtype="Int64"),
                "share": found.value,
                "share_ci_low": found.value_ci_low,
                "share_ci_high": found.value_ci_high,
                "n": len(self.metric),
            }
        )

    def __repr__(self) -> str:
        mean = float(self.metric.sum() / self.counts.sum())
        table = short_table(self.frame, ("component", "share", "share_ci_low", "share_ci_high"))
        return f"Direct shares of {self.name}, {mean:.4g} on average:\n{table}"

    def plot(self) -> Any:
        """Returns a plotly figure of the shares: of each layer's attention and MLP as bars, of each head as a map."""
        return shares_figure(self.layers, self.frame, self.name)


def _sublayer(name: str) -> str:
    """Returns "attention 0", "mlp 0" or, for what belongs to no layer, the name itself."""
    layer, head = _place(name)
    if layer is None:
        return name
    return f"{'mlp' if head is None and name.startswith(('mlp', 'ln2')) else 'attention'} {layer}"


def _place(name: str) -> tuple[int | None, int | None]:
    """Returns the layer and head of a component: of "0.1", "mlp_out.0", "attention 0", "embed"."""
    first, _, last = name.replace(" ", ".").partition(".")
    return (int(first), int(last)) if first.isdigit() else (int(last) if last else None, None)
