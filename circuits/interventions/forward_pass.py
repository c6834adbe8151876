"""One call of the model under interventions: what it was given, and what is known of it on the way."""

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
from circuits.model.state import State
from circuits.model.surface import Surface

CACHED = "a key-value cache"


def unusual(kwargs: Mapping[str, Any]) -> str | None:
    """What, of a call's arguments, makes the model do something else than on its tokens alone, if anything does."""
    mask, places = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        return "padding"
    if places is not None and bool((places != torch.arange(places.shape[-1], device=places.device)).any()):
        return "position_ids"
    names = ("past_kv_cache", "past_key_values", "past_kv_cache_entry")
    return CACHED if any(kwargs.get(name) is not None for name in names) else None


@dataclass
class RunState:
    """One run of the model: what it was called with, and what was found in it."""

    given: Mapping[str, Any] = field(default_factory=dict)  # by the argument's name
    tokens: Tensor | None = None
    whole: bool = False  # whether it is the whole model's, which was called
    prepared: dict[int, Any] = field(default_factory=dict)  # by id of the write
    reads: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by id of the write
    known: dict[Hashable, Any] = field(default_factory=dict)


@dataclass
class ForwardPass:
    """The runs of the model under some writes: the one under way, and those that it was called from."""

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

    def begin(
        self, writes: Sequence[ActivationEdit], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """The model is about to run on these inputs."""
        self._frames.append(RunState(kwargs, self.surface.tokens_of(args, kwargs), whole=True))
        self._prepare(writes)

    def end(self) -> None:
        if len(self._frames) > 1:
            self._frames.pop()

    def begin_unseen(self, writes: Sequence[ActivationEdit], kwargs: Mapping[str, Any]) -> None:
        """The model runs on inputs that are not known, but for these arguments of its first block."""
        self._frames[:] = [RunState(kwargs)]
        self._prepare(writes)

    def _prepare(self, writes: Sequence[ActivationEdit]) -> None:
        odd = unusual(self.frame.given)
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
        """What the write has read elsewhere in the run under way, by name."""
        return self.frame.reads.setdefault(id(write), {})

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What several writes of one intervention share is computed once in a run."""
        known = self.frame.known
        if key not in known:
            known[key] = compute()
        return known[key]


def writer(
    write: ActivationEdit, call: ForwardPass, fired: Callable[[], None] | None = None
) -> Callable[[Tensor], Tensor | None]:
    """The hook function that carries out one write."""
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
    """What takes the activation's place, and the boolean mask of where; both broadcast to it.

    Args:
        value_of: a smaller tensor that broadcasts to `current`, for a replacement that does not look at its entries.
    """
    state = call.state
    selected = write.selected(current, state.rows, state.total)
    references = write.replacement.references(write)
    firing = HookContext(
        write,
        selected,
        {name: call.references[reference] for name, reference in references.items()},
        call.reads(write),
        call.prepared(write),
        call.tokens,
        state.rows,
        state.total,
    )
    return write.replacement.value(current if value_of is None else value_of, firing), selected
