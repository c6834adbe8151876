"""One call of the model under interventions, with its inputs and what is computed along the way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, HookContext
from circuits.interventions.reference_runs import References
from circuits.model.padding import mask_of_model
from circuits.model.prompts import own_positions
from circuits.model.state import State
from circuits.model.surface import Surface

CACHED = "a key-value cache"
PADDING = "padding"
CACHES = ("past_kv_cache", "past_key_values", "past_kv_cache_entry")


def unusual(kwargs: Mapping[str, Any]) -> str | None:
    """Names the argument of a call, if any, that makes the model depend on more than its tokens."""
    mask, places = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        return PADDING
    if places is not None and bool((places != torch.arange(places.shape[-1], device=places.device)).any()):
        return "position_ids"
    return CACHED if any(kwargs.get(name) is not None for name in CACHES) else None


def mask_of(kwargs: Mapping[str, Any], tokens: Tensor | None) -> Tensor | None:
    """Returns the mask of padding in a call's arguments, bool [batch pos], true at tokens; None where there is none, or
    where it says more than that (a mask of queries and keys, or of cached tokens too).
    """
    mask, places = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or any(kwargs.get(name) is not None for name in CACHES):
        return None
    mask = mask.bool()
    if bool(mask.all()) or (tokens is not None and mask.shape != tokens.shape[:2]):
        return None
    if isinstance(places, Tensor) and bool((places != own_positions(mask))[mask].any()):
        return None
    return mask


@dataclass
class RunState:
    """One run of the model: its arguments, and the values computed during it."""

    given: Mapping[str, Any] = field(default_factory=dict)  # by the argument's name
    tokens: Tensor | None = None
    whole: bool = False  # whether the whole model was called
    mask: Tensor | None = None  # of its padding, bool [batch pos]
    prepared: dict[int, Any] = field(default_factory=dict)  # by id of the write
    reads: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by id of the write
    known: dict[Hashable, Any] = field(default_factory=dict)


@dataclass
class ForwardPass:
    """The runs of the model under some edits: the current one, and those from within which it was called."""

    surface: Surface
    references: References
    state: State
    # The first one stands for a part of the model that was called alone.
    _frames: list[RunState] = field(default_factory=lambda: [RunState()])

    @property
    def frame(self) -> RunState:
        return self._frames[-1]

    @property
    def given(self) -> Mapping[str, Any]:
        return self.frame.given

    @property
    def tokens(self) -> Tensor | None:
        return self.frame.tokens

    @property
    def mask(self) -> Tensor | None:
        return self.frame.mask

    def begin(
        self, writes: Sequence[ActivationEdit], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Starts a run of the model on these inputs."""
        tokens = self.surface.tokens_of(args, kwargs)
        mask = mask_of(kwargs, tokens)
        if tokens is not None and kwargs.get("attention_mask") is None:
            mask = mask_of_model(self.surface, tokens)
        self._frames.append(RunState(kwargs, tokens, whole=True, mask=mask))
        self._prepare(writes)

    def end(self) -> None:
        if len(self._frames) > 1:
            self._frames.pop()

    def begin_unseen(self, writes: Sequence[ActivationEdit], kwargs: Mapping[str, Any]) -> None:
        """Starts a run whose inputs are unknown, but for these arguments of its first block."""
        self._frames[:] = [RunState(kwargs, mask=mask_of(kwargs, None))]
        self._prepare(writes)

    def _prepare(self, writes: Sequence[ActivationEdit]) -> None:
        odd = unusual(self.frame.given) if self.frame.mask is None else None
        for write in writes:
            if odd is not None and write.replacement.references(write):
                raise CircuitsError(
                    f"{write.label}: this call has {odd}, which a clean pass on the tokens given would not have; patch "
                    "from activations cached with it, or run without"
                )
            if odd == CACHED and write.positions is not None:
                raise CircuitsError(
                    f"{write.label}: with {odd} positions are counted anew in every call; edit all of them, or run "
                    "without"
                )
        self.frame.prepared = {id(write): write.replacement.prepare(self) for write in writes}

    def prepared(self, write: ActivationEdit) -> Any:
        return self.frame.prepared.get(id(write))

    def reads(self, write: ActivationEdit) -> dict[str, Tensor]:
        """Returns the activations, by name, that the edit has read elsewhere in the current run."""
        return self.frame.reads.setdefault(id(write), {})

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Returns `compute()`, computed once in a run for all edits that share `key`."""
        known = self.frame.known
        if key not in known:
            known[key] = compute()
        return known[key]


def writer(
    write: ActivationEdit, call: ForwardPass, fired: Callable[[], None] | None = None
) -> Callable[[Tensor], Tensor | None]:
    """Returns the hook function that carries out one edit."""
    return partial(_replace, write, call, fired)


def _replace(
    write: ActivationEdit, call: ForwardPass, fired: Callable[[], None] | None, current: Tensor
) -> Tensor | None:
    if call.state.suspended:
        return None
    new, selected = replacement_for(write, call, current)
    if fired is not None:
        fired()
    return torch.where(selected, new, current)


def replacement_for(
    write: ActivationEdit, call: ForwardPass, current: Tensor, value_of: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the replacement of an activation and the boolean mask of replaced entries; both broadcast to it.

    Args:
        value_of: a smaller tensor that broadcasts to `current`, for a replacement that does not look at its entries.
    """
    state = call.state
    selected = write.selected(current, state.rows, state.total, call.mask)
    references = write.replacement.references(write)
    context = HookContext(
        write,
        selected,
        {name: call.references[reference] for name, reference in references.items()},
        call.reads(write),
        call.prepared(write),
        call.tokens,
        state.rows,
        state.total,
        call.mask,
        call.surface.causal,
    )
    return write.replacement.value(current if value_of is None else value_of, context), selected
