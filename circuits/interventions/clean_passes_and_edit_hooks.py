"""Calls of the model: one under interventions, with what is computed along the way, and the clean passes it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import Span
from circuits.interventions.base import (
    ActivationEdit,
    EdgePatch,
    HookContext,
    ModelRun,
    PassRequest,
    Step,
    WeightEdit,
)
from circuits.interventions.replacements import FromFunction
from circuits.model.activation_recording import attach_to_hooks, hold_eval_mode, record_activations
from circuits.model.batch_size import choose_batch_size
from circuits.model.edit_state import EditState, assert_weights_unchanged, edits_suspended
from circuits.model.generation_positions import (
    DecodeStep,
    GenerationTracker,
    find_key_value_cache,
    generation_id,
    past_length,
)
from circuits.model.hooked_model import HookedModel, is_text_input
from circuits.model.prompt_parsing import mask_of_model, mask_of_tokenizer
from circuits.model.prompts_with_mask import Prompts, positions_from_mask

CACHED = "a key-value cache"
PADDING = "padding"


def find_nontoken_argument(kwargs: Mapping[str, Any], real: Tensor | None = None) -> str | None:
    """Names the argument of a call, if any, that makes the model depend on more than its tokens and their mask `real`,
    as `call_padding_mask` returns it.
    """
    mask, places = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if real is None and mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        return PADDING
    if isinstance(places, Tensor):
        start = past_length(kwargs)
        kept = torch.ones(1, start + places.shape[-1], dtype=torch.bool) if real is None else real
        here, own = (x[:, start:].to(places.device) for x in (kept, positions_from_mask(kept)))
        if bool(((places != own) & here).any()):
            return "position_ids"
    return None if find_key_value_cache(kwargs) is None else CACHED


def call_padding_mask(hooked: HookedModel, kwargs: Mapping[str, Any], inputs: Tensor | None) -> Tensor | None:
    """Returns the mask of padding in a call, of the positions before it too, bool [batch pos], true at tokens; None
    where there is none, or where its arguments say more than that (a mask of queries and keys).

    Args:
        kwargs: the arguments of the model, or of its first block.
        inputs: what it was called with: tokens, or the stream at the first block; None if unknown.
    """
    mask = kwargs.get("attention_mask")
    cache, start = find_key_value_cache(kwargs), past_length(kwargs)
    # A cache of transformer-lens holds the mask of its keys, and the call has that of its own tokens.
    before = getattr(cache, "previous_attention_mask", None)
    if mask is None and inputs is not None and not inputs.is_floating_point():
        if is_text_input(kwargs.get("input")):
            mask = mask_of_tokenizer(hooked, inputs, kwargs.get("padding_side"))
        else:
            mask = mask_of_model(hooked, inputs) if before is None else mask_of_tokenizer(hooked, inputs)
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


#: The results of clean passes.
PassResults = dict[PassRequest, Tensor]


def needed_clean_passes(plan: Iterable[Step]) -> Iterator[PassRequest]:
    """Yields the clean passes that a plan needs."""
    for step in plan:
        if not isinstance(step, WeightEdit):
            write = step.sender if isinstance(step, EdgePatch) else step
            yield from write.replacement.clean_passes(write).values()


def run_clean_passes(
    hooked: HookedModel, wanted: Iterable[PassRequest], results: PassResults, batch_size: int | None = None
) -> PassResults:
    """Adds the passes that are missing to the results, and returns these; prompts under the same edits run once."""
    missing = [request for request in dict.fromkeys(wanted) if request not in results]
    for prompts, before in dict.fromkeys((each.prompts, each.before) for each in missing):
        edit, layer = before or (None, 0)
        steps = () if edit is None else edit.plan(hooked)
        writes = [step for step in steps if step.layer is not None and step.layer < layer]
        run_clean_passes(hooked, needed_clean_passes(writes), results, batch_size)
        together = [each for each in missing if (each.prompts, each.before) == (prompts, before)]
        if left := [each for each in together if each not in results]:
            _run_prompts(hooked, prompts, writes, left, results, batch_size)
    return results


def _run_prompts(
    hooked: HookedModel,
    prompts: Prompts,
    writes: Sequence[ActivationEdit],
    wanted: list[PassRequest],
    results: PassResults,
    batch_size: int | None,
) -> None:
    """Runs prompts, clean or under edits, a chunk at a time; keeps the activations or sums that are wanted."""
    hooked.check_prompts(prompts, "reference or source tokens")
    step = choose_batch_size(hooked, prompts.shape[1], batch_size, "reference")
    found: dict[PassRequest, list[Tensor]] = {request: [] for request in wanted}
    with edits_suspended(hooked.model), hold_eval_mode(hooked.model), torch.no_grad():
        for start in range(0, len(prompts), step):
            chunk = prompts[start : start + step]
            # A state of its own, so that the edits of the blocks around this pass do nothing.
            state = EditState(rows=slice(start, start + len(chunk)), total=len(prompts))
            call = EditedRuns(hooked, results, state)
            if prompts.padded:
                call.run.decode_step = DecodeStep(real=chunk.real.to(hooked.device))
            edited = [(write.hook, make_edit_hook(write, call)) for write in writes]
            with (
                attach_to_hooks(hooked, edited),
                record_activations(hooked, {one.hook for one in wanted}) as seen,
                assert_functions_keep_weights(hooked, writes),
            ):
                hooked.run_forward(chunk)
            for one, kept in found.items():
                if one.hook not in seen:
                    raise CircuitsError(f"{one.hook} never fired in a clean pass: nothing to take")
                activation = seen[one.hook].detach()
                if one.reduction is not None:
                    # One running sum, as it is there to save memory.
                    activation = sum(
                        (kept.pop() for _ in kept[:]),
                        one.reduction.reduce_chunk(activation, chunk, one.kind),
                    )
                kept.append(activation)
    for one, kept in found.items():
        whole = kept[0] if one.reduction is not None else torch.cat(kept)
        kept.clear()
        results[one] = whole if one.reduction is None else one.reduction.from_sum(whole, prompts, one.kind)


@dataclass
class EditedRuns:
    """The runs of the model under some edits, one after the other; clean passes are not among them."""

    hooked: HookedModel
    references: Mapping[PassRequest, Tensor]
    state: EditState
    writes: Sequence[ActivationEdit] = ()
    edges: Sequence[EdgePatch] = ()
    #: The number of runs so far.
    count: int = 0
    #: What is to be checked when the run ends.
    checks: ExitStack = field(default_factory=ExitStack)
    generation: GenerationTracker = field(default_factory=GenerationTracker)
    #: The edits, by id, that some run passed without a position of theirs.
    missed: set[int] = field(default_factory=set)
    #: The senders of edges, by id, that some run reached at a position of theirs.
    reached: set[int] = field(default_factory=set)
    #: The hooks at which something was received.
    received: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Between runs, a part of the model may be called alone.
        self.run = self._of_part = ModelRun(self.references, self.state, self.hooked.causal)

    @property
    def is_model_running(self) -> bool:
        """Whether the model itself runs, and not a part of it that was called alone."""
        return self.run is not self._of_part

    def start_run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Starts a run of the model on these inputs, and checks that the edits can act in it."""
        if self.state.suspended:
            return
        # First: `end` follows whatever is raised here.
        self.run = replace(self._of_part, given=kwargs, reads={}, known={})
        tokens = self.run.tokens = self.hooked.tokens_of_call(args, kwargs)
        real, length = (
            call_padding_mask(self.hooked, kwargs, tokens),
            None if tokens is None else tokens.shape[1],
        )
        self.run.decode_step = self.generation.next_step(self.hooked.model, kwargs, length, real)
        self.count += 1
        generates, odd = self.run.decode_step.open, find_nontoken_argument(kwargs, real)
        for write in [*self.writes, *(edge.sender for edge in self.edges)]:
            if generates and not write.replacement.cache_safe:
                raise CircuitsError(
                    f"{write.label}: not supported while the model generates, or with {CACHED}; "
                    "edit runs on whole prompts"
                )
            references = write.replacement.clean_passes(write).values() if odd not in (None, CACHED) else ()
            if any(odd not in one.prompts.extra for one in references):
                raise CircuitsError(
                    f"{write.label}: this call has {odd}, which a clean pass on the tokens given would not have; patch "
                    "from activations cached with it, or run without"
                )
        if self.edges and generates:
            raise CircuitsError(
                f"{self.edges[0].label}: paths are not supported while the model generates, or with {CACHED}"
            )
        self.checks.enter_context(assert_functions_keep_weights(self.hooked, self.writes))

    def end_run(self) -> None:
        if self.is_model_running and not self.state.suspended:
            self.run = self._of_part
            self.checks.close()


def assert_functions_keep_weights(
    hooked: HookedModel, writes: Iterable[ActivationEdit]
) -> AbstractContextManager[None]:
    """Refuses, at the end of a run, that the functions of its edits have written to the parameters."""
    labels = (write.label for write in writes if isinstance(write.replacement, FromFunction))
    names = " or ".join(dict.fromkeys(labels))
    return assert_weights_unchanged(hooked.model, f"{names}, the function") if names else nullcontext()


def make_edit_hook(
    write: ActivationEdit, runs: EditedRuns, fired: Callable[[], None] | None = None
) -> Callable[[Tensor], Tensor | None]:
    """Returns the hook function that carries out one edit."""

    def replace_activation(current: Tensor) -> Tensor | None:
        if runs.state.suspended:
            return None
        # The model adds position embeddings outside of its forward pass where it generates without a cache.
        outside = (
            write.layer is None and not runs.is_model_running and generation_id(runs.hooked.model) is not None
        )
        if outside and (write.positions is not None or write.replacement.clean_passes(write)):
            raise CircuitsError(
                f"{write.label}: {runs.hooked.family}.generate embeds outside of the forward pass, where positions "
                "are unknown; edit resid_pre.0"
            )
        new, selected = replacement_and_mask(write, runs.run, current)
        # While the model generates, positions that are named may come in a later run, as a stretch may in any longer.
        late = runs.run.decode_step.open or (isinstance(write.positions, Span) and runs.state.rows is None)
        if late and not bool(selected.any()):
            runs.missed.add(id(write))
        elif fired is not None:
            fired()
        return torch.where(selected, new, current)

    return replace_activation


def replacement_and_mask(write: ActivationEdit, run: ModelRun, current: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the replacement of an activation and the boolean mask of replaced entries; both broadcast to it."""
    selected = write.selection_mask(current, run)
    found = {name: run.references[one] for name, one in write.replacement.clean_passes(write).items()}
    return write.replacement.value(current, HookContext(write, selected, found, run)), selected
