"""Carries out interventions: plans them against the model, runs clean passes, hooks the model and undoes it all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError, format_value
from circuits.interventions.base import (
    ActivationEdit,
    EdgePatch,
    Intervention,
    Receiver,
    Step,
    WeightEdit,
)
from circuits.interventions.clean_passes_and_edit_hooks import (
    EditedRuns,
    PassResults,
    make_edit_hook,
    needed_clean_passes,
    run_clean_passes,
)
from circuits.interventions.edge_hooks import EdgeHooks
from circuits.interventions.paths import check_no_overlapping_edges
from circuits.model.activation_recording import hold_eval_mode, record_activations
from circuits.model.edit_state import (
    contextmanager_entered_once,
    get_edit_state,
    hold_model_exclusively,
    parameters_replaced,
)
from circuits.model.generation_positions import watch_generations
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Handle, keep_hooks_last
from circuits.model.prompt_parsing import parse_prompts
from circuits.model.prompts_with_mask import Prompts
from circuits.model.sites import Site, closest_sites
from circuits.model.types import SitesLike, TokensLike

Plan = tuple[Step, ...]
_MADE = "make one with ablate, patch, transplant, permute or edit"


def plan_steps(interventions: Iterable[Any], hooked: HookedModel) -> Plan:
    """Returns all steps of all interventions, in argument order; every error that shows without a run is raised
    here.
    """
    plan: list[Step] = []
    for intervention in interventions:
        if not isinstance(intervention, Intervention):
            is_circuit = hasattr(intervention, "keep") and hasattr(intervention, "cut")
            made = "give .keep(source) or .cut(source) of it" if is_circuit else _MADE
            if isinstance(intervention, list | tuple):
                made = "give each by itself, as in run(model, tokens, *interventions)"
            raise CircuitsError(f"not an intervention: {format_value(intervention)}; {made}")
        plan += intervention.plan(hooked)
    if edges := [step for step in plan if isinstance(step, EdgePatch)]:
        if hooked.spliced:
            raise CircuitsError(f"{edges[0].label}: no paths while an autoencoder is spliced in")
        check_no_overlapping_edges(edges, hooked)
    return tuple(plan)


@contextmanager_entered_once
def intervene(model: nn.Module, *interventions: Intervention) -> Generator[nn.Module, None, None]:
    """Runs the model with some edits inside a block.

        with intervene(model, ablate.uniform("all"), ablate.zero("mlp_out.1")):
            output = model(tokens)

    Weights are edited first, then activations in argument order. A later edit sees what an earlier one left, and
    what the user's earlier hooks left. Blocks may be nested, and an inner block adds to the outer one. Paths
    (`patch.path`) act together, wherever they stand: the run that they change is the one with all other edits. Clean
    passes that an intervention needs (`reference=`, `source=`) are run on the model as it was before our outermost
    block, in eval mode and without gradients. Modes and gradients of the block itself are left alone. On any exit only
    what was added here is removed, and weights are what they were, bit for bit.

    The block has the model for its thread alone: in another a call of it is an error until the block ends.

    Raises `CircuitsError` on entry if an intervention does not fit the model, and on a normal exit if one
    of them never took effect because its hook did not fire.
    """
    hooked = HookedModel(model)
    with hold_model_exclusively(hooked.model):
        # Not before: another thread may have put something in the place of the parameters.
        plan = plan_steps(interventions, hooked)
        with attach_plan(hooked, plan, run_clean_passes(hooked, needed_clean_passes(plan), {})):
            yield model


@contextmanager
def attach_plan(hooked: HookedModel, plan: Plan, references: PassResults) -> Iterator[None]:
    """Puts a plan onto the model inside the block. Its clean passes must have been fetched."""
    writes = [step for step in plan if isinstance(step, ActivationEdit)]
    weight_edits = [step for step in plan if isinstance(step, WeightEdit)]
    edges = [step for step in plan if isinstance(step, EdgePatch)]
    state = get_edit_state(hooked.model)
    if edges and any(isinstance(step, EdgePatch) for other in state.plans.values() for step in other):
        raise CircuitsError(f"{edges[0].label}: a block around it has paths; give all to one block")
    call = EditedRuns(hooked, references, state, writes, edges)
    fired: set[int] = set()
    with ExitStack() as stack:
        if plan:
            state.plans[id(plan)] = plan
            stack.callback(state.plans.pop, id(plan))
            stack.callback(watch_generations(hooked.model).remove)
        stack.enter_context(
            parameters_replaced(hooked.model, [(one.parameter, one.value.tensor) for one in weight_edits])
        )
        stack.callback(hooked.on_run(call.start_run, call.end_run).remove)
        for index, write in enumerate(writes):
            hook_function = make_edit_hook(write, call, partial(fired.add, index))
            stack.callback(hooked.on_forward(write.hook, hook_function).remove)
        last: list[Callable[[], Handle]] = [
            partial(hooked.on_forward, hook, partial(_store_read_activation, call, write, name))
            for write in writes
            for name, hook in write.replacement.hooks_read(write).items()
        ]
        if edges:
            # Behind every edit, so that they see what the edits leave.
            last += EdgeHooks(hooked, call).hook_installers()
        stack.enter_context(keep_hooks_last(hooked.model, last))
        yield
    # Only reached when the body raised nothing, and with every hook already off.
    missed, end = call.missed - call.reached, call.generation.end
    places: list[tuple[str, ActivationEdit | Receiver]] = [
        *((write.label, write) for index, write in enumerate(writes) if index not in fired),
        *((edge.label, edge.receiver) for edge in edges if edge.receiver.hook not in call.received),
        *((edge.label, edge.sender) for edge in edges if id(edge.sender) in missed),
    ]
    for label, place in places:
        raise CircuitsError(f"{label}: {_explain_unused_edit(hooked, place, call)}")
    for write in writes:
        numbers = write.positions if end and isinstance(write.positions, tuple) else ()
        for late in (number for number in numbers if number >= end):
            raise CircuitsError(f"{write.label}: no position {late}: the model generated up to {end - 1}")


def _explain_unused_edit(hooked: HookedModel, place: ActivationEdit | Receiver, runs: EditedRuns) -> str:
    """Says why an edit never acted: no run, no such position, or a hook that never fired."""
    if runs.count == 0:
        return "the model was not run inside the block"
    if id(place) in runs.missed:
        end = f" up to position {runs.generation.end - 1}," if runs.generation.end else ""
        return f"none of its positions came in {runs.count} run(s),{end} so nothing was edited"
    closest = closest_sites(place.hook, [name for name in hooked.site_names() if name != place.kind.name])
    return (
        f"{place.hook} never fired in {runs.count} run(s), so nothing was edited; the model has it switched off, or "
        f"the run stopped before it; closest sites: {', '.join(closest)}"
    )


def _store_read_activation(runs: EditedRuns, write: ActivationEdit, name: str, activation: Tensor) -> None:
    if not runs.state.suspended:
        runs.run.reads[id(write), name] = activation.detach()


class Activations(Mapping[str, Tensor]):
    """Activations by full hook name, which `activations["z.2"]` and `activations[Site("z", 2)]` find as well."""

    def __init__(self, activations: Mapping[str, Tensor], mask: Tensor | None = None) -> None:
        self._activations = dict(activations)
        #: Of the run, bool [batch pos], true at tokens; None: it had no padding.
        self.mask = mask

    def __getitem__(self, key: Any) -> Tensor:
        try:
            hook = key if isinstance(key, str) and key in self._activations else Site.parse(key).hook()
        except CircuitsError as error:
            raise KeyError(str(error)) from None
        if hook not in self._activations:
            raise KeyError(f"{key}: not cached; cached: {', '.join(self._activations)}")
        return self._activations[hook]

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    def __repr__(self) -> str:
        return (
            f"Activations({', '.join(f'{hook}: {list(x.shape)}' for hook, x in self._activations.items())})"
        )


@overload
def run(model: nn.Module, tokens: TokensLike, *interventions: Intervention) -> Tensor: ...
@overload
def run(
    model: nn.Module, tokens: TokensLike, *interventions: Intervention, cache: SitesLike
) -> tuple[Tensor, Activations]: ...
def run(
    model: nn.Module, tokens: TokensLike, *interventions: Intervention, cache: SitesLike | None = None
) -> Tensor | tuple[Tensor, Activations]:
    """Returns the model's output on `tokens` under the interventions, in eval mode and without gradients.

    `tokens` are ids [batch pos], or anything that `prompts` takes: texts, lists of unequal length, a tokenizer's
    result, `Prompts`. At each prompt's own tokens the output is what the prompt alone gives; at padding it is NaN, and
    `prompts.last(output)` is that of each prompt's last token. `cache` lists sites whose activations, after the edits,
    are returned as well; then the result is (output, `Activations`), which are NaN at padding too (of scores and
    pattern the queries). Mode, hooks and gradients are as before when it returns or raises.
    """
    prompts = parse_prompts(HookedModel(model), tokens, "run")
    output, seen = run_keeping_padding(model, prompts, *interventions, cache=cache)
    output = prompts.nan_at_padding(output)
    if cache is None or not prompts.padded:
        return output if cache is None else (output, seen)
    shown = {hook: prompts.nan_at_padding(x, Site.parse(hook).kind.query_axis) for hook, x in seen.items()}
    return output, Activations(shown, seen.mask)


def run_keeping_padding(
    model: Any, prompts: Prompts, *interventions: Intervention, cache: SitesLike | None = None
) -> tuple[Any, Activations]:
    """Returns what `run` does, and whatever the model computes at padding."""
    hooked = HookedModel(model)
    if cache is not None and (not isinstance(cache, str | Site | Iterable) or isinstance(cache, Tensor)):
        raise CircuitsError(f'cache: give sites such as "z" or a list of them, got {cache!r}')
    sites = [] if cache is None else [cache] if isinstance(cache, str | Site) else list(cache)
    hooks = list(dict.fromkeys(hook for site in sites for _, hook in hooked.hooks_at(Site.parse(site))))
    with (
        hold_eval_mode(model),
        torch.no_grad(),
        intervene(model, *interventions),
        record_activations(hooked, hooks) as seen,
    ):
        output = hooked.run_forward(prompts)
    for hook in (hook for hook in hooks if hook not in seen):
        raise CircuitsError(f"cache: {hook} never fired; this model has it switched off")
    return output, Activations({hook: seen[hook] for hook in hooks}, prompts.mask if prompts.padded else None)


def cache(model: nn.Module, tokens: TokensLike, sites: SitesLike) -> Activations:
    """Returns the activations at `sites` ("z", "resid_post.1", full hook names) on `tokens`, in eval mode, without
    gradients; NaN at padding, whose `mask` comes with them.
    """
    if sites is None:
        raise CircuitsError('cache: give sites such as "z" or a list of them, got None')
    _, activations = run(model, tokens, cache=sites)
    return activations
