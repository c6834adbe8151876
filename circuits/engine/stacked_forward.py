"""Runs many variants in one forward of the model's own blocks, each from the first block that it edits.

One clean pass keeps the residual stream before the blocks where variants start. Variants are stacked on the batch axis,
each with its edits in its own rows, and join the stack at their first block:

    block 0   clean pass only
    block 1   variants 0, 1              (rows of the clean stream, repeated)
    block 2   variants 0, 1, 2, 3
    ...       unembedding of all of them, at the positions that are read
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from circuits.interventions.base import (
    ActivationEdit,
    Intervention,
    ModelRun,
    Reference,
    Step,
    WeightEdit,
)
from circuits.interventions.model_runs import replacement_for
from circuits.model.decode_steps import DecodeStep
from circuits.model.edit_state import State, get_edit_state, mark_running_rows, modules_of
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import hooks_on
from circuits.model.prompts import Prompts

#: A user's class says by this attribute, in its body, that its blocks read nothing but the stream and what the model
#: hands to every block, and treat examples independently.
DECLARED = "tokens_enter_by_embeddings_alone"
# Packages whose modules are known to.
_KNOWN = ("torch", "transformer_lens", "abc", "typing", "collections", "builtins")
#: Where a variant starts that edits the embeddings.
_EMBEDDING, _EMBEDDINGS = -1, ("hook_embed", "hook_pos_embed")


class NotStacked(Exception):
    """Why variants that began in one forward run each by itself with plain hooks, in one line."""


def reason_not_to_stack(surface: HookedModel, prompts: Prompts) -> str | None:
    """Says why every variant runs by itself with plain hooks: the blocks of the model are not known to run on other
    rows and from a later block on. None where they are.
    """
    model = surface.model
    if surface.bridged:
        return "a bridge cannot start at a block"
    if surface.spliced:
        return "an autoencoder is spliced in"
    if getattr(model.cfg, "positional_embedding_type", None) == "shortformer":
        return "positions enter every block"
    if prompts.extra:
        return f"its inputs have {', '.join(prompts.extra)}"
    if get_edit_state(model).suspended:
        return "a clean pass is under way"
    names = ("_global_forward_hooks", "_global_forward_pre_hooks")
    everywhere = chain.from_iterable(getattr(nn.modules.module, name).values() for name in names)
    # torch's own, such as the FLOP counter's, only look on.
    if not all(str(getattr(hook, "__module__", "")).startswith("torch.utils.") for hook in everywhere):
        return "there are hooks on all modules"
    classes: set[type] = set()
    for module in modules_of(model):
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            name = next(name for name, one in model.named_modules() if one is module)
            what = "a forward of its own" if "forward" in vars(module) else "a hook"
            return f"there is {what} on {name or 'the model'}"
        classes.add(type(module))
    for base in chain.from_iterable(one.__mro__ for one in classes):
        known = base.__module__.partition(".")[0] in _KNOWN
        if not known and vars(base).get(DECLARED) is not True:
            return f"its class {base.__name__} is not the library's"
    return None


@dataclass
class Variant:
    """One variant of a sweep, or one draw of it, planned on a model.

    Attributes:
        alone: why it runs by itself, with plain hooks; None: it shares forwards.
        start: the first block that it runs then; −1: it edits the embeddings.
        hooks: those that it edits or reads.
        edits: its steps, where all are edits of activations.
        changed: whether an edit changed an activation in the latest run: otherwise its output is the clean one, bit for
            bit.
        unseen: hooks of its edits that have not fired in the latest run.
    """

    name: str
    draw: int | None
    interventions: tuple[Intervention, ...]
    plan: tuple[Step, ...]
    alone: str | None = None
    start: int = 0
    hooks: set[str] = field(default_factory=set)
    edits: list[ActivationEdit] = field(default_factory=list)
    changed: bool = False
    unseen: set[str] = field(default_factory=set)

    def stack(self, surface: HookedModel) -> None:
        """Finds the block from which it runs with others; `alone` says why it cannot, as it acts on more than its own
        rows.
        """
        for step in self.plan:
            if not isinstance(step, ActivationEdit):
                self.alone = "it edits weights" if isinstance(step, WeightEdit) else "it cuts paths"
                return
            self.edits.append(step)
            self.hooks.update((step.hook, *step.replacement.reads(step).values()))
        blocks = []
        for hook in self.hooks:
            if inside := re.match(r"blocks\.(\d+)\.", hook):
                blocks.append(int(inside[1]))
            elif hook in _EMBEDDINGS:
                blocks.append(_EMBEDDING)
            elif not hook.startswith("ln_final."):
                self.alone = f"{hook} is in no block"
        self.start = min(blocks, default=surface.n_layers - 1)


@dataclass(kw_only=True)
class CleanPass(ModelRun):
    """A run of the model without edits, from which variants go on.

    Attributes:
        streams: what enters the blocks where variants start.
        block_arguments: what every block gets with the stream: padding masks.
    """

    prompts: Prompts
    output: Any = None
    streams: dict[int, Tensor] = field(default_factory=dict)
    block_arguments: dict[str, Tensor] = field(default_factory=dict)


def clean_pass(
    surface: HookedModel,
    prompts: Prompts,
    rows: slice,
    starts: set[int],
    references: Mapping[Reference, Tensor],
) -> CleanPass:
    """Runs the model itself on some rows, and keeps the streams that enter the blocks `starts`, if any.

    Args:
        references: the results of the clean passes that the variants need, which may come after this one.
    """
    chunk, total = prompts[rows], len(prompts)
    tokens, given = surface.inputs(chunk)
    step = DecodeStep(real=given["attention_mask"].bool() if chunk.padded else None)
    state = State(rows=rows, total=total)
    clean = CleanPass(references, state, surface.causal, given, tokens, step, prompts=chunk)

    def enter(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        clean.streams[layer] = args[0]
        clean.block_arguments.update({name: one for name, one in kwargs.items() if isinstance(one, Tensor)})

    layers = {0, *starts} - {_EMBEDDING} if starts else set()
    handles = (
        surface.block_modules[layer].register_forward_pre_hook(partial(enter, layer), with_kwargs=True)
        for layer in layers
    )
    with hooks_on(surface.model, handles), mark_running_rows(surface.model, rows, total):
        clean.output = surface.call(chunk)
    return clean


def run_stacked(
    surface: HookedModel, clean: CleanPass, variants: Sequence[Variant], columns: Tensor | None = None
) -> Tensor:
    """Runs variants together, which come in the order in which they start.

    Returns their outputs, one after the other, [variant * example pos out]; at `columns` only, where these are given.
    Raises `NotStacked` for the function of an edit that runs the model.
    """
    model, size, busy = surface.model, len(clean.prompts), False
    starts = [variant.start for variant in variants]
    embedded = starts.count(_EMBEDDING)

    def edited(hook: str, stack: Tensor) -> Tensor:
        """Returns an activation of the stack, with the edits of each variant in its own rows."""
        nonlocal busy
        if busy:
            raise NotStacked("an edit runs the model inside its run")
        if hook in _EMBEDDINGS:
            # Position embeddings may have one row for all examples.
            stack = stack.expand(size * embedded, *stack.shape[1:])
        pieces = list(stack.split(size))
        busy = True
        for number, variant in enumerate(variants):
            if hook in variant.hooks:
                pieces[number] = _edited_piece(surface, clean, variant, hook, pieces[number])
        busy = False
        return torch.cat(pieces)

    for variant in variants:
        variant.changed, variant.unseen = False, {step.hook for step in variant.edits}
    hooks = dict.fromkeys(chain.from_iterable(variant.hooks for variant in variants))
    with hooks_on(model, (surface.on_forward(hook, partial(edited, hook)) for hook in hooks)):
        stream: Tensor | None = None
        if embedded:
            tokens, given = surface.inputs(clean.prompts.repeated(embedded))
            stream = model(tokens, stop_at_layer=0, **given)
        for start, stop in pairwise([*sorted({max(0, start) for start in starts}), surface.n_layers]):
            joining = [clean.streams[start]] * starts.count(start)
            stream = torch.cat(joining if stream is None else [stream, *joining])
            copies = len(stream) // size
            arguments = {name: torch.cat([one] * copies) for name, one in clean.block_arguments.items()}
            stream = model(stream, start_at_layer=start, stop_at_layer=stop, **arguments)
        assert stream is not None
        if columns is None:
            output: Tensor = model(stream, start_at_layer=surface.n_layers)
        elif any(hook.startswith("ln_final.") for hook in hooks):  # whose edits count positions
            output = model(stream, start_at_layer=surface.n_layers)[:, columns]
        else:
            output = model(stream[:, columns], start_at_layer=surface.n_layers)
    return output


def _edited_piece(
    surface: HookedModel, clean: CleanPass, variant: Variant, hook: str, before: Tensor
) -> Tensor:
    """Returns an activation in a variant's own rows after its edits there, in their order."""
    variant.unseen.discard(hook)
    current = before
    for write in variant.edits:
        if write.hook == hook:
            new, selected = replacement_for(write, clean, surface, current)
            current = torch.where(selected, new, current)
    variant.changed = variant.changed or (current is not before and not torch.equal(current, before))
    for write in variant.edits:
        for name, read in write.replacement.reads(write).items():
            if read == hook:
                clean.reads[id(write), name] = current
    return current
