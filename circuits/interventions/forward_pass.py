"""One call of the model under interventions, with its inputs and what is computed along the way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, EdgePatch, HookContext
from circuits.interventions.clean_passes import References
from circuits.interventions.replacements import Computed
from circuits.model.edit_state import State, assert_weights_unchanged
from circuits.model.generation import WHOLE, DecodeStep, GenerationState, cache_of, past_length, under_way
from circuits.model.hooked_model import HookedModel, is_text
from circuits.model.inputs import mask_of_model, mask_of_tokenizer
from circuits.model.prompts import own_positions
from circuits.tensors import Span

CACHED = "a key-value cache"
PADDING = "padding"


def extra_argument(kwargs: Mapping[str, Any], real: Tensor | None = None) -> str | None:
    """Names the argument of a call, if any, that makes the model depend on more than its tokens and their mask `real`,
    as `mask_of` returns it.
    """
    mask, places = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if real is None and mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        return PADDING
    if isinstance(places, Tensor):
        start = past_length(kwargs)
        own = (
            torch.arange(start, start + places.shape[-1]) if real is None else own_positions(real)[:, start:]
        )
        differs = places != own.to(places.device)
        if bool((differs if real is None else differs & real[:, start:].to(places.device)).any()):
            return "position_ids"
    return None if cache_of(kwargs) is None else CACHED


def mask_of(surface: HookedModel, kwargs: Mapping[str, Any], inputs: Tensor | None) -> Tensor | None:
    """Returns the mask of padding in a call, of the positions before it too, bool [batch pos], true at tokens; None
    where there is none, or where its arguments say more than that (a mask of queries and keys).

    Args:
        kwargs: the arguments of the model, or of its first block.
        inputs: what it was called with: tokens, or the stream at the first block; None if unknown.
    """
    mask = kwargs.get("attention_mask")
    cache, start = cache_of(kwargs), past_length(kwargs)
    # A cache of transformer-lens holds the mask of its keys, and the call has that of its own tokens.
    before = getattr(cache, "previous_attention_mask", None)
    if mask is None and inputs is not None and not inputs.is_floating_point():
        if is_text(kwargs.get("input")):
            mask = mask_of_tokenizer(surface, inputs, kwargs.get("padding_side"))
        else:
            mask = mask_of_model(surface, inputs) if before is None else mask_of_tokenizer(surface, inputs)
        if before is not None and mask is None:
            mask = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    mask = mask.bool()
    if start and before is not None and inputs is not None and mask.shape[1] == inputs.shape[1]:
        mask = torch.cat([before.to(mask.device).bool(), mask], 1)
    if bool(mask.all()) or (inputs is not None and mask.shape != (len(inputs), start + inputs.shape[1])):
        return None
    return mask


@dataclass
class RunState:
    """One run of the model: its arguments, and the values computed during it."""

    given: Mapping[str, Any] = field(default_factory=dict)  # by the argument's name
    tokens: Tensor | None = None
    whole: bool = False  # whether the whole model was called
    decode_step: DecodeStep = WHOLE
    prepared: dict[int, Any] = field(default_factory=dict)  # by id of the write
    reads: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by id of the write
    known: dict[Hashable, Any] = field(default_factory=dict)


@dataclass
class ForwardPass:
    """The runs of the model under some edits: the current one, and those from within which it was called.

    Clean passes are not among them.
    """

    surface: HookedModel
    references: References
    state: State
    writes: Sequence[ActivationEdit] = ()
    edges: Sequence[EdgePatch] = ()
    #: The number of runs so far.
    count: int = 0
    # The first one stands for a part of the model that was called alone.
    frames: list[RunState] = field(default_factory=lambda: [RunState()])
    generation: GenerationState = field(default_factory=GenerationState)
    #: The edits, by id, that some run passed without a position of theirs.
    missed: set[int] = field(default_factory=set)
    #: The senders of edges, by id, that some run reached at a position of theirs.
    reached: set[int] = field(default_factory=set)

    @property
    def frame(self) -> RunState:
        return self.frames[-1]

    @property
    def given(self) -> Mapping[str, Any]:
        return self.frame.given

    @property
    def tokens(self) -> Tensor | None:
        return self.frame.tokens

    @property
    def mask(self) -> Tensor | None:
        return self.frame.decode_step.mask

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Starts a run of the model on these inputs."""
        if self.state.suspended:
            return
        tokens = self.surface.tokens_of(args, kwargs)
        self.frames.append(RunState(kwargs, tokens, whole=True))
        # A run within a run, which a hook starts, is none of those that generate.
        self._follow(kwargs, tokens, len(self.frames) == 2)
        self._prepare()

    def end(self) -> None:
        if len(self.frames) > 1 and not self.state.suspended:
            self.frames.pop()

    def begin_unseen(self, kwargs: Mapping[str, Any]) -> None:
        """Starts a run whose inputs are unknown, but for these arguments of its first block."""
        if self.state.suspended:
            return
        self.frames[:] = [RunState(kwargs)]
        self._follow(kwargs, kwargs.get("resid_pre"))
        if self.frame.decode_step.real is not None:
            for write in self.writes:
                if write.layer is None and _depends_on_positions(write):
                    raise CircuitsError(
                        f"{write.label}: {self.surface.family}.run_with_hooks embeds before the padding of its call is "
                        "known; call the model itself, or edit resid_pre.0"
                    )
        self._prepare()

    def _follow(self, kwargs: Mapping[str, Any], inputs: Tensor | None, outermost: bool = True) -> None:
        real = mask_of(self.surface, kwargs, inputs)
        if not outermost:
            self.frame.decode_step = replace(WHOLE, real=real)
            return
        length = None if inputs is None else inputs.shape[1]
        self.frame.decode_step = self.generation.next(
            self.surface.model, kwargs, length, self.frame.whole, real
        )

    def _prepare(self) -> None:
        """Checks that the edits can act in the run, and makes the passes on its tokens that they need first."""
        self.count += 1
        writes = [*self.writes, *(edge.sender for edge in self.edges)]
        odd = extra_argument(self.frame.given, self.frame.decode_step.real)
        for write in writes:
            if self.frame.decode_step.open and not write.replacement.cache_safe:
                raise CircuitsError(
                    f"{write.label}: not supported while the model generates, or with {CACHED}; "
                    "edit runs on whole prompts"
                )
            references = write.replacement.references(write).values()
            known = odd in (None, CACHED) or all(odd in one.prompts.extra for one in references)
            if references and not known:
                raise CircuitsError(
                    f"{write.label}: this call has {odd}, which a clean pass on the tokens given would not have; patch "
                    "from activations cached with it, or run without"
                )
        self.frame.prepared = {id(write): write.replacement.prepare(self) for write in writes}
        if self.edges and self.frame.decode_step.open:
            raise CircuitsError(
                f"{self.edges[0].label}: paths are not supported while the model generates, or with {CACHED}"
            )

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
    _check_embedding(write, call)
    new, selected = replacement_for(write, call, current)
    # While the model generates, positions that are named may come in a later run, as a stretch may in any longer one.
    late = call.frame.decode_step.open or (isinstance(write.positions, Span) and call.state.rows is None)
    if late and not bool(selected.any()):
        call.missed.add(id(write))
    elif fired is not None:
        fired()
    return torch.where(selected, new, current)


def _check_embedding(write: ActivationEdit, call: ForwardPass) -> None:
    """Refuses what depends on the position where the model adds position embeddings outside of its forward pass."""
    if write.layer is not None or call.frame.whole:
        return
    if under_way(call.surface.model) is None:
        # It comes before the call is seen, and what is known is of the last one.
        call.frame.decode_step = WHOLE
        return
    if _depends_on_positions(write):
        raise CircuitsError(
            f"{write.label}: {call.surface.family}.generate embeds outside of the forward pass, where positions are "
            "unknown; edit resid_pre.0"
        )


def _depends_on_positions(write: ActivationEdit) -> bool:
    return write.positions is not None or bool(write.replacement.references(write))


def replacement_for(write: ActivationEdit, call: ForwardPass, current: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the replacement of an activation and the boolean mask of replaced entries; both broadcast to it."""
    state = call.state
    decode_step = call.frame.decode_step
    selected = write.selected(current, state.rows, state.total, decode_step)
    references = write.replacement.references(write)
    context = HookContext(
        write,
        selected,
        {name: call.references[reference] for name, reference in references.items()},
        call.reads(write),
        call.frame.prepared.get(id(write)),
        call.tokens,
        state.rows,
        state.total,
        decode_step,
        call.surface.causal,
    )
    if not isinstance(write.replacement, Computed):
        return write.replacement.value(current, context), selected
    with assert_weights_unchanged(call.surface.model, f"{write.label}, the function"):
        return write.replacement.value(current, context), selected
