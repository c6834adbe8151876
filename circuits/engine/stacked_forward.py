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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from circuits.interventions.base import ActivationEdit, Intervention, ModelRun, Step, WeightEdit
from circuits.interventions.model_runs import CleanPassResults, EditedRuns, replacement_for
from circuits.model.decode_steps import DecodeStep
from circuits.model.edit_state import State, get_edit_state, modules_of
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Handle, hooks_on
from circuits.model.prompts import Prompts

#: A user's class says by this attribute, in its body, that its blocks read nothing but the stream and what the model
#: hands to every block, and treat examples independently.
DECLARED = "tokens_enter_by_embeddings_alone"
# Packages whose modules are known to.
_KNOWN = ("torch", "transformer_lens", "abc", "typing", "collections", "builtins")
#: Where a variant starts that edits the embeddings.
_EMBEDDING, _EMBEDDINGS = -1, ("hook_embed", "hook_pos_embed")


class NotStacked(Exception):
    """Why a variant, or every variant of a model, runs by itself with plain hooks, in one line."""


def check_model(surface: HookedModel, prompts: Prompts) -> None:
    """Raises `NotStacked` for a model whose blocks are not known to run on other rows and from a later block on."""
    model = surface.model
    if surface.bridged:
        raise NotStacked("a bridge cannot start at a block")
    if surface.spliced:
        raise NotStacked("an autoencoder is spliced in")
    if getattr(model.cfg, "positional_embedding_type", None) == "shortformer":
        raise NotStacked("positions enter every block")
    if prompts.extra:
        raise NotStacked(f"its inputs have {', '.join(prompts.extra)}")
    if get_edit_state(model).suspended:
        raise NotStacked("a clean pass is under way")
    names = ("_global_forward_hooks", "_global_forward_pre_hooks")
    everywhere = chain.from_iterable(getattr(nn.modules.module, name).values() for name in names)
    # torch's own, such as the FLOP counter's, only look on.
    if not all(str(getattr(hook, "__module__", "")).startswith("torch.utils.") for hook in everywhere):
        raise NotStacked("there are hooks on all modules")
    classes: set[type] = set()
    for module in modules_of(model):
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            name = next(name for name, one in model.named_modules() if one is module)
            what = "a forward of its own" if "forward" in vars(module) else "a hook"
            raise NotStacked(f"there is {what} on {name or 'the model'}")
        classes.add(type(module))
    for base in chain.from_iterable(one.__mro__ for one in classes):
        known = base.__module__.partition(".")[0] in _KNOWN
        if not known and vars(base).get(DECLARED) is not True:
            raise NotStacked(f"its class {base.__name__} is not the library's")


@dataclass
class Variant:
    """One variant of a sweep, or one draw of it, planned on a model.

    Attributes:
        alone: why it runs by itself, with plain hooks; None: it shares forwards.
        start: the first block that it runs then; −1: it edits the embeddings.
        hooks: those that it edits or reads.
        edits: its steps, where all are edits of activations.
        changed: whether an edit changed an activation: otherwise its output is the clean one, bit for bit.
        unseen: hooks of its edits that have not fired.
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
    call: EditedRuns | None = None

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

    def begin(
        self, surface: HookedModel, prompts: Prompts, references: CleanPassResults, state: State
    ) -> None:
        """Starts its run on some examples."""
        self.changed, self.unseen = False, {step.hook for step in self.edits}
        tokens, given = surface.inputs(prompts)
        real = given["attention_mask"].bool() if prompts.padded else None
        run = ModelRun(given, tokens, DecodeStep(real=real))
        self.call = EditedRuns(surface, references, state, self.edits, runs=[ModelRun(), run])

    def value(self, hook: str, current: Tensor) -> Tensor:
        """Returns an activation of its rows after its edits there, in their order."""
        assert self.call is not None
        self.unseen.discard(hook)
        before = current
        for write in self.call.writes:
            if write.hook == hook:
                new, selected = replacement_for(write, self.call, current)
                current = torch.where(selected, new, current)
        self.changed = self.changed or (current is not before and not torch.equal(current, before))
        for write in self.call.writes:
            for name, read in write.replacement.reads(write).items():
                if read == hook:
                    self.call.reads(write)[name] = current
        return current


@dataclass
class CleanPass:
    """A run of the model without edits: its inputs, its output, and what enters the blocks where variants start."""

    prompts: Prompts
    output: Tensor
    streams: Mapping[int, Tensor]
    block_arguments: Mapping[str, Tensor]  # what every block gets beside the stream: padding masks


def clean_pass(surface: HookedModel, prompts: Prompts, starts: set[int]) -> CleanPass:
    """Runs the model itself on some examples, and keeps the streams that enter the blocks `starts`, if any."""
    streams: dict[int, Tensor] = {}
    arguments: dict[str, Tensor] = {}

    def enter(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        streams[layer] = args[0]
        arguments.update({name: one for name, one in kwargs.items() if isinstance(one, Tensor)})

    layers = {0, *starts} - {_EMBEDDING} if starts else set()
    handles = (
        surface.block_module(layer).register_forward_pre_hook(partial(enter, layer), with_kwargs=True)
        for layer in layers
    )
    with hooks_on(surface.model, handles):
        output = surface.call(prompts)
    return CleanPass(prompts, output, streams, arguments)


def run_stacked(
    surface: HookedModel, clean: CleanPass, variants: Sequence[Variant], columns: Tensor | None = None
) -> Tensor:
    """Runs variants together, which have begun and come in the order in which they start.

    Returns their outputs, one after the other, [variant * example pos out]; at `columns` only, where these are given.
    Raises `NotStacked` for the function of an edit that runs the model.
    """
    model, size, busy = surface.model, len(clean.prompts), False
    starts = [variant.start for variant in variants]
    embedded = starts.count(_EMBEDDING)

    def edited(hook: str, activation: Tensor) -> Tensor:
        """Returns an activation of the stack, with the edits of each variant in its own rows."""
        nonlocal busy
        if busy:
            raise NotStacked("an edit runs the model inside its run")
        if hook in _EMBEDDINGS:
            # Position embeddings may have one row for all examples.
            activation = activation.expand(size * embedded, *activation.shape[1:])
        new = activation.clone(memory_format=torch.contiguous_format)
        busy = True
        for number, variant in enumerate(variants):
            if hook in variant.hooks:
                rows = slice(number * size, (number + 1) * size)
                new[rows] = variant.value(hook, new[rows])
        busy = False
        return new

    def hooks() -> Iterator[Handle]:
        for hook in dict.fromkeys(chain.from_iterable(variant.hooks for variant in variants)):
            yield surface.on_forward(hook, partial(edited, hook))
        if columns is not None:
            unembed: Any = model.get_submodule("unembed")
            yield unembed.register_forward_pre_hook(lambda module, args: (args[0][:, columns],))

    with hooks_on(model, hooks()):
        stream: Tensor | None = None
        if embedded:
            tokens, given = surface.inputs(clean.prompts.repeated(embedded))
            stream = model(tokens, stop_at_layer=0, **given)
        for start, stop in pairwise([*sorted({max(0, start) for start in starts}), None]):
            assert start is not None
            if joining := starts.count(start):
                joined = _repeated(clean.streams[start], joining)
                stream = joined if stream is None else torch.cat([stream, joined])
            assert stream is not None
            arguments = {
                name: _repeated(one, len(stream) // size) for name, one in clean.block_arguments.items()
            }
            stream = model(stream, start_at_layer=start, stop_at_layer=stop, **arguments)
    assert stream is not None
    return stream


def _repeated(x: Tensor, count: int) -> Tensor:
    return x if count == 1 else x.repeat(count, *(1,) * (x.ndim - 1))
