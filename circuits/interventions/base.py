"""Defines interventions: frozen values that name places and replacements, without a model.

When a model is at hand, `Intervention.plan` turns it into `ActivationEdit`s, `WeightEdit`s and `EdgePatch`es, which
`circuits.interventions.intervene_run_cache` carries out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import Positions, Snapshot, Span
from circuits.model.edit_state import EditState
from circuits.model.generation_positions import WHOLE, DecodeStep
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts_with_mask import Prompts, broadcast_mask
from circuits.model.sites import SiteKind


@dataclass
class ModelRun:
    """One run of the model: its arguments by name, its inputs, and what was computed in it.

    Attributes:
        references: the results of the clean passes that edits need.
        state: of the model: which rows of the whole batch run.
        causal: whether queries see no keys behind them.
        tokens: the model's inputs; None where only a part of it is called.
        reads: the activations that an edit (its id) has read elsewhere, by their name there.
    """

    references: Mapping[PassRequest, Tensor]
    state: EditState
    causal: bool
    given: Mapping[str, Any] = field(default_factory=dict)
    tokens: Tensor | None = None
    decode_step: DecodeStep = WHOLE
    reads: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    known: dict[Hashable, Any] = field(default_factory=dict)

    def compute_once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Returns `compute()`, computed once in this run for all edits that share `key`."""
        if key not in self.known:
            self.known[key] = compute()
        return self.known[key]


@dataclass(frozen=True)
class HookContext:
    """The context of one hook call, which a replacement gets."""

    write: ActivationEdit
    selected: Tensor  # boolean, broadcasts to the activation; true where it will be replaced
    references: Mapping[str, Tensor]
    run: ModelRun

    @property
    def decode_step(self) -> DecodeStep:
        return self.run.decode_step

    @property
    def token_mask(self) -> Tensor | None:
        """The mask of this call's padding, bool [batch pos], true at tokens; None where there is none."""
        return self.decode_step.own_mask

    def mask_with_past(self, current: Tensor) -> Tensor:
        """Returns the mask of the run and of what came before it, [batch pos], all true where it has no padding."""
        if self.decode_step.real is not None:
            return self.decode_step.real.to(current.device)
        length = self.decode_step.start + current.shape[self.write.kind.query_axis]
        return torch.ones(len(current), length, dtype=torch.bool, device=current.device)

    def index_in_batch(self, row: int) -> int:
        """Returns the number in the whole batch of a row of this call."""
        rows = self.run.state.rows
        if rows is None:
            return row
        return row + (rows.start or 0) if isinstance(rows, slice) else int(rows[row])

    def clean_pass_result(self, name: str, current: Tensor) -> Tensor:
        """Returns the result of a clean pass, on the device and in the dtype of the activation."""
        return self.references[name].to(device=current.device, dtype=current.dtype)

    def rows_of_this_call(self, whole: Tensor, size: int, what: str) -> Tensor:
        """Returns the rows of a whole-batch tensor that belong to this call."""
        state = self.run.state
        total = size if state.total is None else state.total
        if whole.shape[0] != total:
            raise CircuitsError(
                f"{self.write.label}: {what} has a batch of {whole.shape[0]}, the run a batch of {total}"
            )
        return whole if state.rows is None else whole[state.rows]


class Reduction(ABC):
    """A sum over examples that is kept of a clean pass, a run without any of our edits, instead of every example's
    activation.
    """

    @abstractmethod
    def reduce_chunk(self, activation: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        """Returns the sum over the examples of one piece, in float64."""

    @abstractmethod
    def from_sum(self, total: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        """Returns the result from the sum over all pieces."""


@dataclass(frozen=True)
class MeanOverExamples(Reduction):
    """The mean over examples, for each position of their own tokens over those that have it; or (`pooled`) over the
    tokens at `positions` (None: all) of all examples. Both axes keep extent 1.
    """

    pooled: bool = False
    positions: Positions | Span | None = None

    def positions_in_mean(self, prompts: Prompts) -> Tensor:
        """Returns which of its own positions of each example are in the mean, bool [batch pos], tokens first."""
        return replace(WHOLE, real=prompts.reached).position_mask(self.positions, prompts.shape[1], "a mean")

    def reduce_chunk(self, activation: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        activation, axis = activation.double(), kind.query_axis
        if prompts.padded:
            activation = prompts.in_order(activation, kind.position_axes, lowest=True)
        if prompts.padded or self.positions is not None:
            chosen = broadcast_mask(
                self.positions_in_mean(prompts).to(activation.device), axis, activation.ndim
            )
            # Not multiplied by the mask, as there may be anything at padding.
            activation = torch.where(chosen, activation, torch.zeros_like(activation))
        if self.pooled:
            activation = activation.sum(axis, keepdim=True)
        # In some models position embeddings have a batch of 1, shared by all examples.
        return activation.sum(0, keepdim=True) * (len(prompts) / len(activation))

    def from_sum(self, total: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        if self.pooled:
            return total / int(self.positions_in_mean(prompts).sum())
        if not prompts.padded:
            return total / len(prompts)
        counts = prompts.reached.sum(0, keepdim=True).clamp(min=1).to(total.device)
        return total / broadcast_mask(counts, kind.query_axis, total.ndim)


@dataclass(frozen=True)
class PassRequest:
    """The activation at one hook in a pass on `prompts`, or only a reduction of it.

    Attributes:
        before: an edit and a layer, where the pass runs under that edit in all earlier layers; None, nearly always: no
            edits of ours.
    """

    prompts: Prompts
    hook: str
    kind: SiteKind
    reduction: Reduction | None = None
    before: tuple[Any, int] | None = None


class Replacement(ABC):
    """A replacement for an activation."""

    def clean_passes(self, write: ActivationEdit) -> dict[str, PassRequest]:
        """Returns the clean passes it needs; their results arrive under the same names in `HookContext.references`."""
        return {}

    def resolve(self, hooked: HookedModel, owner: Intervention) -> Replacement:
        """Returns the replacement for one model, with texts as its tokens; refuses a model in which it would have
        another meaning. Messages name its owner.
        """
        return self

    def hooks_read(self, write: ActivationEdit) -> dict[str, str]:
        """Returns the other hooks of the same pass whose activations it needs, by their name in `ModelRun.reads`."""
        return {}

    #: Whether it does what it says in runs that go on from earlier ones, with a key-value cache too.
    cache_safe: ClassVar[bool] = False

    #: The direction of a patch, for tables.
    direction: ClassVar[str | None] = None

    @abstractmethod
    def value(self, current: Tensor, context: HookContext) -> Tensor:
        """Returns a tensor that broadcasts to `current`; only the selected entries of it are used."""

    @abstractmethod
    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ActivationEdit:
    """One hook of one model, the part of its activation that is replaced, and the replacement."""

    owner: Intervention
    hook: str
    kind: SiteKind
    layer: int | None
    replacement: Replacement
    heads: tuple[int, ...] | None = None
    groups: bool = False  # whether `heads` are numbers of key-value groups
    neurons: tuple[int, ...] | None = None
    positions: Positions | Span | Snapshot | None = None

    @property
    def label(self) -> str:
        """The intervention, for messages."""
        return self.owner.label

    def selection_mask(self, current: Tensor, run: ModelRun) -> Tensor:
        """Returns the boolean mask of the entries to replace; it broadcasts to `current`. Padding stays."""
        mask = torch.ones((1,) * current.ndim, dtype=torch.bool, device=current.device)
        for chosen, axis in ((self.heads, self.kind.head_axis), (self.neurons, current.ndim - 1)):
            if chosen is not None and axis is not None:
                along = torch.zeros(current.shape[axis], dtype=torch.bool, device=current.device)
                along[list(chosen)] = True
                mask = mask & broadcast_mask(along, axis, current.ndim)
        if self.positions is None and run.decode_step.real is None:
            return mask
        axis, (rows, total) = self.kind.query_axis, (run.state.rows, run.state.total)
        batch = current.shape[0] if total is None else total
        here = run.decode_step.position_mask(self.positions, current.shape[axis], self.label, rows, batch)
        here = here.to(current.device)
        return mask & broadcast_mask(here, axis, current.ndim)


@dataclass(frozen=True)
class WeightEdit:
    """One parameter of one model, and its new values."""

    label: str
    component: str
    layer: int | None
    name: str
    parameter: nn.Parameter = field(repr=False)
    value: Snapshot


@dataclass(frozen=True)
class Receiver:
    """A component that reads from the residual stream: heads at q, k or v, an MLP (mlp_pre), or the whole stream
    (resid_post).
    """

    hook: str
    kind: SiteKind
    layer: int
    heads: tuple[int, ...] | None
    groups: bool = False  # whether `heads` are numbers of key-value groups


@dataclass(frozen=True)
class EdgePatch:
    """Edges from one sender to some receivers, which read the sender's replacement instead of its output in the run.

    All of a run act together (`circuits.interventions.edge_hooks`).
    """

    label: str
    sender: ActivationEdit
    receiver: Receiver
    through: str | None = None


#: One step of a planned intervention.
Step = ActivationEdit | WeightEdit | EdgePatch


class Intervention(ABC):
    """A change to a forward pass: a frozen value without a model, compared by content."""

    @abstractmethod
    def plan(self, hooked: HookedModel) -> tuple[Step, ...]:
        """Returns the steps of the intervention on this model, without changing it; `CircuitsError` where it does not
        fit.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns a description as JSON-able data; tensors by shape, dtype and sha256."""

    @property
    @abstractmethod
    def label(self) -> str:
        """One short line for messages."""

    @property
    def title(self) -> str:
        """The name in tables, without the places, which have their own columns."""
        return self.label
